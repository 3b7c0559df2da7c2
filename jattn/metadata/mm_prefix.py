"""Spans of a prompt, e.g. images, whose tokens see each other in both directions."""

import jax.numpy as jnp

from jattn.errors.arguments import integers, optional, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata


@takes(meta=BATCH, ranges=integers(3), position=optional(integers(1)))
def fill_mm_prefix_query_ranges(meta: CommonAttentionMetadata, ranges, position=None):
    """i32[T, 2] the inclusive range (first, last) that contains each token's position, or (-1, -1).

    ranges: i32[R n 2], see compute_mm_prefix_range_tensor. position: i32[T]; None: meta.positions(). A query in a range
    sees all of its cached keys, in spite of causality and the window. If a span is prefilled in pieces, the tokens of a
    piece see the span up to that piece.
    """
    position, live = meta.positions() if position is None else position, meta.token_is_live()
    if ranges.shape[1] == 0:
        return jnp.full((meta.num_tokens, 2), -1, jnp.int32)
    if position.shape != (meta.num_tokens,) or ranges.shape[0] != meta.max_num_reqs or ranges.shape[2] != 2:
        raise ValueError(
            f"position.shape={position.shape} must be [T] with T={meta.num_tokens}, and ranges.shape={ranges.shape} "
            f"[R, n, 2] with R={meta.max_num_reqs}"
        )
    mine = jnp.asarray(ranges, jnp.int32)[meta.token_to_req()]  # [T, max_ranges, 2]
    first, last = mine[..., 0], mine[..., 1]
    inside = (first < last) & (first <= position[:, None]) & (position[:, None] <= last) & live[:, None]
    chosen = jnp.take_along_axis(mine, jnp.argmax(inside, axis=1)[:, None, None], axis=1)[:, 0]
    return jnp.where(inside.any(axis=1)[:, None], chosen, -1)
