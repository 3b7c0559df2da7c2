"""The order of rows by experts: each choice has its row, and padding follows each expert's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.device import Chip
from jattn.ops import expert_rows
from jattn.ops.expert_rows import arrange, padded_count, take_rows


@pytest.mark.parametrize(
    ("count", "experts", "tile_rows"),
    [(1, 3, 8), (300, 5, 1), (1000, 7, 16), (129, 300, 8), (257, 4, 128), (128, 1, 1)],
)
def test_each_choice_has_its_row(count, experts, tile_rows):
    expert = np.random.default_rng(count).integers(0, experts + 1, count).astype(np.int32)  # experts: of none here
    found = jax.jit(arrange, static_argnums=(1, 2))(expert, experts, tile_rows)
    sizes = np.bincount(expert, minlength=experts + 1)[:experts]
    padded = -(-sizes // tile_rows) * tile_rows
    first, row, rows = np.cumsum(padded) - padded, np.asarray(found.row), len(found.choice)
    np.testing.assert_array_equal(found.sizes, padded)
    assert padded.sum() <= rows == (count if tile_rows == 1 else padded_count(count, experts, tile_rows))
    for e in range(experts):
        np.testing.assert_array_equal(row[expert == e], first[e] + np.arange(sizes[e]))  # in the order of the choices
        assert (np.asarray(found.expert)[first[e] : first[e] + sizes[e]] == e).all()
    used = expert < experts
    assert (row[~used] == rows).all()
    np.testing.assert_array_equal(np.asarray(found.choice)[row[used]], np.flatnonzero(used))
    assert (np.asarray(found.choice) < count).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("columns", [7, 8])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_are_taken_by_words_too(monkeypatch, platform, columns, dtype):
    monkeypatch.setattr(expert_rows.device, "detect", lambda: Chip(platform))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, columns)), dtype)
    index = jnp.array([4, 0, 0, 3])
    found = take_rows(x, index)
    np.testing.assert_array_equal(found, np.asarray(x)[index])
    assert found.dtype == x.dtype
    gradient = jax.grad(lambda x: (take_rows(x, index) * jnp.arange(4, dtype=dtype)[:, None]).astype("float32").sum())(
        x
    )
    np.testing.assert_array_equal(np.asarray(gradient, np.float64)[:, 0], [3, 0, 0, 3, 0])
    both = jax.vmap(take_rows, (None, 0))(x, jnp.stack([index, index[::-1]]))
    np.testing.assert_array_equal(both[1], np.asarray(x)[index[::-1]])
