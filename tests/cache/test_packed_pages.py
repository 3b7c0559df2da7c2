"""Packed keys laid out in pages: every token in its place, and zeros everywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.cache.write import PACKED_PAGE as PAGE
from jattn.cache.write import packed_as_pages

LENS = [(16, 1, 0, 33, 15), (0, 0), (5,), (PAGE * 3,)]


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("spare", [0, 7])
def test_every_key_stands_where_the_table_says_and_nothing_else_is_there(lens, spare):
    """Rows behind the last request are NaN, and stay where they are."""
    rng, total = np.random.default_rng(len(lens)), sum(lens)
    rows = [rng.normal(size=(total + spare, 2, dim)).astype(np.float32) for dim in (8, 4)]
    for x in rows:
        x[total:] = np.nan
    cache, table = jax.jit(packed_as_pages, static_argnums=3)(*rows, jnp.asarray(lens, jnp.int32), max(*lens, 1))
    table, start = np.asarray(table), np.cumsum(lens) - lens
    assert table.shape[1] * PAGE >= min(max(lens), (total + spare) // PAGE * PAGE)
    for pool, x in ((cache.k, rows[0]), (cache.v, rows[1])):
        pool, used = np.array(pool), 0
        for r, n in enumerate(lens):
            at = np.arange(n)
            np.testing.assert_array_equal(pool[table[r, at // PAGE], at % PAGE], x[start[r] : start[r] + n])
            pool[table[r, at // PAGE], at % PAGE] = 0
            used += n
        assert used == total and not pool.any()
