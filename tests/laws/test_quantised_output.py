"""A quantised result is the float result, rounded once: for each backend, and under jit and vmap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.metadata import cascade_levels
from pallas_kernels.algebra import quant

SPEC = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, has_sinks=True)
CACHE = jattn.KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
META = jattn.CommonAttentionMetadata.from_lengths([1, 3], [9, 11], [[0, 1, 2], [0, 3, 4]], 4, num_tokens=5)
KEYS = [
    jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(32, 2, 8), (32, 2, 8), (5, 4, 8), (4,)])
]
K, V, Q, SINKS = KEYS
FULL = jattn.write_kv(jattn.empty_cache(CACHE, fill=jnp.nan), K, V, jnp.arange(32))
SCALE = 1 / 127


def params(scale=None):
    return jattn.AttentionParams(sinks=SINKS, output_scale=scale)


def stored(dtype: str, out, scale) -> np.ndarray:
    """`out`, computed in float32, quantised as in a cache."""
    return np.asarray(quant.to_dtype(jnp.asarray(out, jnp.float32), dtype, scale), np.float32)


def close(got, wanted) -> None:
    """Equal, but for a neighbouring code where float32 noise decides a tie."""
    got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
    np.testing.assert_allclose(got, wanted, rtol=0.26, atol=1.01)
    assert (got == wanted).mean() > 0.99


@pytest.mark.parametrize("dtype", quant.QUANTISED)
def test_levels_of_keys_are_merged_before_they_are_rounded(dtype):
    spec, scale = dataclasses.replace(SPEC, output_dtype=dtype), np.float32(SCALE if dtype == "int8" else 1 / 64)
    real = jattn.paged_attention(Q, FULL, META, SPEC, params()).out
    shared = jattn.PagedAttention(spec, CACHE, "sdpa")
    levels = cascade_levels(META, [4], 4)
    for state in (
        shared.attend(Q, FULL, shared.build(META, common_prefix_len=4), params(scale)),
        jattn.cascade_attention(Q, FULL, levels, spec, params(scale)),
    ):
        assert state.out.dtype == dtype and state.lse.dtype == jnp.float32
        close(state.out, stored(dtype, real, scale))


def test_each_element_of_a_vmap_has_its_own_scale():
    spec, scales = dataclasses.replace(SPEC, output_dtype="int8"), jnp.asarray([SCALE, 3 * SCALE])
    real = jattn.paged_attention(Q, FULL, META, SPEC, params()).out
    attn = jattn.PagedAttention(spec, CACHE)
    assert attn.backend_name == "sdpa", "on a CPU the native kernels refuse it, and auto falls to the next"
    out = jax.jit(jax.vmap(lambda s: attn.attend(Q, FULL, attn.build(META), params(s)).out))(scales)
    for got, scale in zip(out, scales, strict=True):
        close(got, stored("int8", real, scale))


def test_packed_keys():
    meta = jattn.CommonAttentionMetadata.from_lengths([2, 3], [2, 3], None, 1)
    spec = dataclasses.replace(SPEC, output_dtype="int8")
    call = lambda spec, p: jattn.attention(Q, K[:5], V[:5], meta, spec, p).out
    close(call(spec, params(SCALE)), stored("int8", call(SPEC, params()), SCALE))
