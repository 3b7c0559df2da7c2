"""Whole blocks move together with their scales; overlapping pairs read the old values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.oracle import cache as witness

MODES = [("float32", "none"), ("bfloat16", "none"), ("int8", "per_token_head")]


def filled(dtype, quant, seed, **options):
    spec = jattn.KVCacheSpec(
        **(dict(num_blocks=5, block_size=3, num_kv_heads=2, head_dim=4) | options), dtype=dtype, quant=quant
    )
    rng = np.random.default_rng(seed)
    shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return jattn.PagedKV.from_logical(spec, rng.standard_normal(shape), rng.standard_normal(shape))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "quant"), MODES)
def test_r31_a_chain_of_copies_reads_old_values(dtype, quant, layout):
    cache = filled(dtype, quant, 0, layout=layout)
    pairs = np.array([[0, 1], [1, 2], [2, 0], [3, 3]], np.int32)
    after = jax.jit(jattn.copy_blocks)(cache, pairs)
    for old, new in zip(cache.logical(), after.logical(), strict=True):
        np.testing.assert_array_equal(new, witness.copy(np.asarray(old), pairs))


@pytest.mark.parametrize(("dtype", "quant"), MODES)
def test_blocks_move_between_caches_of_different_size(dtype, quant):
    source, target = filled(dtype, quant, 0), filled(dtype, quant, 1, num_blocks=7)
    after = jattn.swap_blocks(source, target, jnp.array([[4, 6], [0, 1]]))
    for s, old, new in zip(source.logical(), target.logical(), after.logical(), strict=True):
        expected = np.array(old)
        expected[[6, 1]] = np.asarray(s)[[4, 0]]
        np.testing.assert_array_equal(new, expected)


def test_a_pair_outside_the_pool_copies_nothing():
    cache = filled("float32", "none", 0)
    after = jattn.copy_blocks(cache, jnp.array([[-1, 0], [0, -1], [9, 1], [1, 9]]))
    np.testing.assert_array_equal(after.k, cache.k)


def test_blocks_only_move_between_twins():
    cache = filled("float32", "none", 0)
    with pytest.raises(ValueError, match="differ in block_size"):
        jattn.swap_blocks(cache, filled("float32", "none", 0, block_size=4), jnp.array([[0, 0]]))
    with pytest.raises(ValueError, match=r"must have 2 axes of integers"):
        jattn.copy_blocks(cache, jnp.array([0, 1]))


@pytest.mark.parametrize("none", [[], ()])
def test_a_step_without_copies_is_an_empty_list(none):
    spec = jattn.KVCacheSpec(num_blocks=2, block_size=2, num_kv_heads=1, head_dim=4, dtype="float32")
    cache = jattn.empty_cache(spec, 3.0)
    for moved in (jattn.copy_blocks(cache, none), jattn.swap_blocks(cache, cache, none)):
        np.testing.assert_array_equal(moved.k, cache.k)
