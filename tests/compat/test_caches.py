"""Conversion of vLLM's cache: each index, and import followed by export."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.compat.vllm import join_kv_cache, split_kv_cache

N, S, K = 3, 5, 2


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 8), ("bfloat16", 16), ("int8", 32)])
def test_every_number_stands_where_the_address_says(dtype, dim):
    """Keys at (((n K + h) D/x + d // x) S + s) x + d % x, values at ((n K + h) D + d) S + s."""
    size, x = S * K * dim, 16 // jnp.dtype(dtype).itemsize
    keys, values = (np.arange(N * size).reshape(N, size) % 251 - 120 + i for i in range(2))
    flat = jnp.asarray(np.stack([keys, values])).astype(dtype)
    k, v = jax.jit(split_kv_cache, static_argnums=(1, 2))(flat, K, dim)
    assert k.shape == v.shape == (N, S, K, dim) and k.dtype == v.dtype == dtype
    pools = [np.asarray(pool).astype(np.float64).ravel() for pool in flat]
    k, v = (np.asarray(a).astype(np.float64) for a in (k, v))
    for n, s, h, d in itertools.product(range(N), range(S), range(K), range(dim)):
        assert k[n, s, h, d] == pools[0][(((n * K + h) * (dim // x) + d // x) * S + s) * x + d % x]
        assert v[n, s, h, d] == pools[1][((n * K + h) * dim + d) * S + s]
    np.testing.assert_array_equal(join_kv_cache(*split_kv_cache(flat, K, dim)), flat)


def test_an_imported_cache_is_attended_to_as_it_is():
    rng = np.random.default_rng(0)
    spec = jattn.KVCacheSpec(num_blocks=N, block_size=S, num_kv_heads=K, head_dim=8, dtype="float32")
    k, v = (rng.standard_normal((N, S, K, 8)).astype(np.float32) for _ in range(2))
    own = jattn.PagedKV.from_logical(spec, k, v)
    imported = jattn.PagedKV.from_logical(spec, *split_kv_cache(join_kv_cache(*own.logical()), K, 8))
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(imported), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_no_such_cache_is_refused():
    with pytest.raises(ValueError, match="head_size=12 must be a multiple of 8, 16 bytes of bfloat16"):
        split_kv_cache(jnp.zeros((2, 3, 24), jnp.bfloat16), 2, 12)
    with pytest.raises(ValueError, match=r"kv_cache.shape=\(3, 2, 64\) must be \[2, N, a multiple of 2 x 8\]"):
        split_kv_cache(jnp.zeros((3, 2, 64)), 2, 8)
    with pytest.raises(ValueError, match=r"must both be \[N S K D\]: one array holds them"):
        join_kv_cache(jnp.zeros((3, 5, 2, 8)), jnp.zeros((3, 5, 2, 4)))
