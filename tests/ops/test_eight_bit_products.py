"""compute_dtype: queries and weights rounded to 8 bits. The witness is numpy float64 with ml_dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn.device import Chip
from pallas_kernels.algebra import rounding

FP8 = "float8_e4m3fn"
SPEC = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, compute_dtype=FP8)
CACHE = jattn.KVCacheSpec(num_blocks=40, block_size=16, num_kv_heads=2, head_dim=32, dtype=FP8, quant="per_tensor")
LENGTHS = ([3, 1], [40, 300])


def eight_bits(x):
    return np.clip(np.asarray(x, np.float64), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded_row(q):
    """At the power of two that puts its largest element in 2 ** 7 .. 2 ** 8."""
    power = 2.0 ** (7 - np.floor(np.log2(abs(q).max())))
    return eight_bits(q * power) / power


def witness(q, k, v, scale):
    """float64 out and lse of one row over keys [n D], values [n V]."""
    x = k @ rounded_row(q) * scale * np.log2(np.e)
    shift = np.ceil(x.max()) - 8
    p = np.exp2(x - shift)
    return eight_bits(p) @ v / p.sum(), (np.log2(p.sum()) + shift) / np.log2(np.e)


def problem():
    rng = np.random.default_rng(0)
    meta = jattn.CommonAttentionMetadata.from_lengths(*LENGTHS, [[*range(3), *[0] * 16], [*range(3, 22)]], 16)
    k, v = (jnp.asarray(rng.normal(size=(640, 2, 32)) * 2, jnp.bfloat16) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(4, 4, 32)) * 3, jnp.bfloat16)
    params = jattn.AttentionParams(k_scale=0.5, v_scale=2.0)
    return q, jattn.write_kv(jattn.empty_cache(CACHE), k, v, jnp.arange(640), params), meta, params


@pytest.mark.parametrize("path", ["sdpa", "jit"])
def test_sdpa_rounds_as_the_definition_says(path):
    q, cache, meta, params = problem()
    attn = jattn.PagedAttention(SPEC, CACHE, "sdpa")
    call = lambda q, cache: attn.attend(q, cache, attn.build(meta), params)
    state = (jax.jit(call) if path == "jit" else call)(q, cache)
    pages = [np.asarray(x, np.float64) for x in cache.logical()]  # [N S K D]
    plain = jattn.PagedAttention(dataclasses.replace(SPEC, compute_dtype=None), CACHE, "sdpa")
    exact = plain.attend(q, cache, plain.build(meta), params)
    rows = [(0, i, 37 + i + 1, 0) for i in range(3)] + [(3, 0, 300, 3)]
    for token, (first, i, seen, block) in enumerate(rows):
        for head in range(4):
            k, v = (x[block : block + 19].reshape(-1, 2, 32)[:seen, head // 2] for x in pages)
            out, lse = witness(np.asarray(q[first + i, head], np.float64), k * 0.5, v * 2.0, SPEC.scale)
            np.testing.assert_allclose(np.asarray(state.out[token, head], np.float64), out, atol=0.03, rtol=0.02)
            np.testing.assert_allclose(float(state.lse[token, head]), lse, atol=2e-5, rtol=1e-5)
    assert 1e-3 < float(jnp.abs(state.lse - exact.lse).max()) < 1.0, "it rounds, and not more than that"


def test_rounding_does_not_depend_on_what_stands_beside_a_number():
    x = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    rounded = np.asarray(rounding.round_rows(jnp.asarray(x), FP8))
    np.testing.assert_array_equal(rounded, [rounded_row(row.astype(np.float64)) for row in x])
    np.testing.assert_array_equal(np.asarray(rounding.round_rows(jnp.asarray(x * 2.0**40), FP8)), rounded * 2.0**40)
    odd = jnp.asarray([[0.0] * 32, [1e-38] * 32, [3e38] * 32], jnp.float32)
    assert np.isfinite(np.asarray(rounding.round_rows(odd, FP8))).all()
    logits = jnp.asarray(x)
    m = jnp.max(logits, axis=-1, keepdims=True)
    weights = lambda m: rounding.round_weights(jnp.exp(logits - m), m, FP8) * jnp.exp(m)
    np.testing.assert_allclose(weights(m), weights(m + 20 * np.log(2.0) / 10), rtol=0.13)


def test_it_is_chosen_by_nobody_and_refused_with_reasons():
    gpu = Chip("gpu", "sm_90")
    cache = dataclasses.replace(CACHE, head_dim=128, v_head_dim=128)
    spec = dataclasses.replace(SPEC, head_dim=128, v_head_dim=128)
    served = lambda spec, cache, chip: {r.name for r in jattn.explain(spec, cache, chip) if not r.reasons}
    assert jattn.AttentionSpec(num_heads=4, head_dim=128).compute_dtype is None
    assert served(spec, cache, gpu) >= {"pallas_gpu", "sdpa"}
    assert jattn.PagedAttention(spec, cache, platform=gpu).backend_name == "pallas_gpu"
    assert served(spec, cache, Chip("gpu", "sm_80")) == {"sdpa"} or jax.__version_info__ < (0, 12)
    for chip in (Chip("cpu"), Chip("tpu", "v6e")):
        assert served(spec, cache, chip) == {"sdpa"}
        reasons = {r.name: r.reasons for r in jattn.explain(spec, cache, chip)}
        others = set(reasons) - {"sdpa", "pallas_gpu", "pallas_gpu_invariant"}
        assert all(any("products in 8 bits" in reason for reason in reasons[name]) for name in others)
    for other in (dict(dtype="bfloat16", quant="none"), dict(dtype="float8_e5m2")):
        with pytest.raises(jattn.UnsupportedError, match="products in 8 bits not supported with a"):
            jattn.PagedAttention(spec, dataclasses.replace(cache, **other))
    tokens = dataclasses.replace(cache, quant="per_token_head")
    assert served(spec, tokens, gpu) == {"sdpa"}
    with pytest.raises(ValueError, match="compute_dtype='int8' must be float8_e4m3fn"):
        dataclasses.replace(spec, compute_dtype="int8")
    assert dataclasses.replace(spec, compute_dtype=jnp.float8_e4m3fn) == spec


def test_a_gradient_is_refused():
    q, cache, meta, params = problem()
    attn = jattn.PagedAttention(SPEC, CACHE, "sdpa")
    with pytest.raises(jattn.UnsupportedError, match="compute_dtype='float8_e4m3fn' computes forward only"):
        jax.grad(lambda q: attn.attend(q, cache, attn.build(meta), params).lse.sum())(q.astype(jnp.float32))
