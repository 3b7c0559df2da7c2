"""What a kernel over pages checks of its arrays before it is launched, whatever the chip."""

import jax


def check_arrays(
    config,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    page: tuple[int, int],
    more: tuple[tuple[str, object, object], ...],
) -> None:
    """ValueError at the first difference from a chip's Config; page: kv heads and slots in the pool's order.

    more: (name, seen, wanted) of what only this kernel takes.
    """
    c = config
    table = (
        ("q", q.shape[1:], (c.num_heads, c.head_dim)),
        ("k_pages", k_pages.shape[1:], (*page, c.head_dim)),
        ("v_pages", v_pages.shape, (k_pages.shape[0], *page, c.v_head_dim)),
        ("q dtype", q.dtype.name, c.dtype),
        ("k_pages dtype", k_pages.dtype.name, c.kv_dtype),
        ("v_pages dtype", v_pages.dtype.name, c.kv_dtype),
        ("block_table dtype", block_table.dtype.name, "int32"),
        *more,
    )
    for name, seen, wanted in table:
        if seen != wanted:
            raise ValueError(f"{name} is {seen}; the config wants {wanted}")
