"""Each backend of latent attention, on each feature, cache and size, gives the witness's result or refuses by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLASpec
from jattn.backends import registry
from tests import matrix
from tests.kernels.cpu.native_setup import needs_library
from tests.ops.latent import FEATURES, MQA, PLAIN, QUERIES, SIZES, SPEC, Case, S, check, normal, run
from tests.oracle import quant
from tests.oracle.mla import latent_attention
from tests.tolerances import rounded

BACKENDS = [name for name in jattn.list_backends() if registry.load(name).is_mla()]
REFUSED = {
    "mla_cpu_native": {
        "chunk, user": ("user mask_fn", "user score_fn"),
        "per_token_head, split": ("two scales",),
    }
}
"""Backend -> what it refuses -> words of its reasons."""

CACHES = {
    "NHD": dict(layout="NHD"),
    "wide": dict(wide=SPEC.kv_lora_rank),
    "whole rows": dict(wide=SPEC.head_dim, layout="NHD"),
    "float16": dict(dtype="float16"),
    "bfloat16": dict(dtype="bfloat16"),
    "e4m3, per_tensor": dict(dtype="float8_e4m3fn", quant="per_tensor"),
    "int8, per_tensor, wide": dict(dtype="int8", quant="per_tensor", wide=SPEC.kv_lora_rank),
    "e5m2, per_head": dict(dtype="float8_e5m2", quant="per_head"),
    "per_token_head, split": dict(dtype="int8", quant="per_token_head"),
    "per_token_head, wide": dict(dtype="float8_e4m3fn", quant="per_token_head", wide=SPEC.kv_lora_rank),
}


def must_refuse(backend: str, what: str, spec: MLASpec, cache_spec) -> bool:
    """Is this refused here? Then the refusal has been checked: its words, or that the platform is another."""
    report = next(r for r in jattn.explain(spec, cache_spec) if r.name == backend)
    if report.supported:
        assert what not in REFUSED.get(backend, {}), f"{backend} takes {what}: remove it from REFUSED"
        return False
    with pytest.raises(jattn.UnsupportedError) as refusal:
        MLAAttention(spec, cache_spec, backend)
    reasons = refusal.value.reasons[backend]
    words = REFUSED.get(backend, {}).get(what, ())
    elsewhere = jax.default_backend() not in registry.load(backend).platforms
    absent = "native" in backend and matrix.is_native_absent()
    assert (words and all(any(w in why for why in reasons) for w in words)) or elsewhere or absent, reasons
    return True


@pytest.mark.parametrize("name", ["plain", *FEATURES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_features_are_the_witness_or_refused(backend, name):
    case = Case(MLASpec(**SIZES, **FEATURES.get(name, {})), backend=backend)
    if must_refuse(backend, name, case.spec, jattn.mla_cache_spec(case.spec, 32, S, dtype="float32")):
        return
    for reading in (MQA, "attend"):
        state = run(case, reading)
        check(state, case.wanted())
        assert (np.asarray(state.out)[sum(QUERIES) :] == 0).all()


@pytest.mark.parametrize("causal", [False, (True, False, True, False, True)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_causality_is_that_of_the_batch(backend, causal):
    case = Case(backend=backend)
    if not must_refuse(backend, "causality", SPEC, PLAIN.mla.cache_spec):
        check(run(case, MQA, causal=causal), PLAIN.wanted(causal=causal))


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cache_is_attention_over_its_rounded_rows(backend, name):
    options = CACHES[name]
    plain = Case(options=tuple(options.items()))
    if must_refuse(backend, name, SPEC, plain.mla.cache_spec):
        return
    case = dataclasses.replace(plain, backend=backend)
    dtype, per, wide = options.get("dtype", "float32"), options.get("quant", "none"), "wide" in options
    scales = {} if per in ("none", "per_token_head") else dict(kv_c_scale=0.03, k_pe_scale=None if wide else 0.02)
    case.__dict__["params"] = dataclasses.replace(case.params, **scales)
    if per == "none":
        rows = tuple([np.asarray(jnp.asarray(x, dtype), np.float32) for x in part] for part in case.rows)
    else:
        rows = _quantised(case.rows, dtype, "per_token_head" if per == "per_token_head" else "per_tensor", wide, scales)
    check(run(case, MQA), case.wanted(rows), atol=1e-4)


def _quantised(rows, dtype, per, wide, scales):
    """(kv_c, k_pe) of each request as the cache has them; wide: with one scale for both."""
    cut = SPEC.kv_lora_rank
    parts = [[np.concatenate(x, axis=1) for x in zip(*rows, strict=True)]] if wide else rows
    given = (scales.get("kv_c_scale"), scales.get("k_pe_scale"))
    stored = [
        [quant.round_trip(x[:, None], dtype, per, scale)[:, 0] if len(x) else x for x in part]
        for part, scale in zip(parts, given, strict=False)
    ]
    return ([x[:, :cut] for x in stored[0]], [x[:, cut:] for x in stored[0]]) if wide else stored


@pytest.mark.parametrize(("page", "heads", "dtype"), [(16, 16, "bfloat16"), (128, 128, "bfloat16"), (3, 20, "float32")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sizes_of_deepseek(backend, page, heads, dtype):
    """Decodes, several new tokens, and a context of more than one split; queries and cache of one dtype."""
    spec = MLASpec(num_heads=heads, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    queries, totals = (1, 3, 1), (2100, 37, 1)
    cache_spec = jattn.mla_cache_spec(spec, 2200 // page + 4, page, dtype=dtype)
    if must_refuse(backend, "DeepSeek", spec, cache_spec):
        return
    mla = MLAAttention(spec, cache_spec, backend)
    pages = [-(-n // page) for n in totals]
    order, table = np.random.default_rng(0).permutation(cache_spec.num_blocks), np.full((3, max(pages)), 10**6)
    for r, n in enumerate(pages):
        table[r, :n], order = order[:n], order[n:]
    kv_c, k_pe = (
        [rounded(normal(seed + r, n, width), dtype) for r, n in enumerate(totals)]
        for seed, width in ((40, 512), (50, 64))
    )
    w = rounded(normal(2, 512, heads, 64) * 512**-0.5, dtype)
    params = mla.prepare_params(jattn.MLAParams(kv_b_proj=jnp.asarray(w, dtype)))
    q = rounded(normal(3, 5, heads, 96), dtype)
    build = lambda lens: mla.build(jattn.CommonAttentionMetadata.from_lengths(lens, totals, table, page))
    packed = (jnp.asarray(np.concatenate(x), dtype) for x in (kv_c, k_pe))
    cache = jax.jit(mla.write, donate_argnums=2)(*packed, mla.empty_cache(float("nan")), build(totals))
    state = jax.jit(mla.forward_mqa)(jnp.asarray(q, dtype), cache, build(queries), params)
    wanted = latent_attention(q, kv_c, k_pe, w, queries, nope=32)
    limit = 2e-5 if dtype == "float32" else 2 * np.abs(_in_bfloat16(q, kv_c, k_pe, w, queries) - wanted[0]).max()
    np.testing.assert_allclose(np.asarray(state.out, np.float32), wanted[0], rtol=0, atol=limit)
    np.testing.assert_allclose(state.lse, wanted[1], rtol=0, atol=2e-5 if dtype == "float32" else 0.03)


def _in_bfloat16(q, latents, ropes, w, query_lens):
    """The absorbed form in numpy, with queries, weights and results rounded to bfloat16."""
    bf16 = lambda x: rounded(np.asarray(x, np.float32), "bfloat16").astype(np.float64)
    out, first, nope = [], 0, 32
    for kv_c, k_pe, count in zip(latents, ropes, query_lens, strict=True):
        for i in range(count):
            seen = len(kv_c) - count + i + 1
            absorbed = bf16(np.einsum("hn,lhn->hl", q[first + i, :, :nope], w[:, :, :nope]))
            x = (absorbed @ kv_c[:seen].T + q[first + i, :, nope:] @ k_pe[:seen].T) * 96**-0.5
            p = np.exp(x - x.max(axis=1, keepdims=True))
            mean = bf16((bf16(p) @ kv_c[:seen]) / p.sum(axis=1, keepdims=True))
            out.append(bf16(np.einsum("hl,lhv->hv", mean, w[:, :, nope:])))
        first += count
    return np.stack(out)


@needs_library
@pytest.mark.parametrize("reading, given", [("forward_mqa", False), ("prefill_mha", False), ("prefill_mha", True)])
def test_the_native_gradient_is_that_of_the_plain_backend(reading, given):
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 4], [6, 9], PLAIN.table()[:2], S)
    cache_spec, q = PLAIN.mla.cache_spec, normal(34, 5, 3, 20)
    logical = (normal(31, 32, S, 1, 8), normal(32, 32, S, 1, 24))
    cache = jattn.PagedKV.from_logical(cache_spec, *logical, storage="native")
    new_rows = (normal(36, 5, 24), normal(37, 5, 8)) if given else ()
    grads = []
    for backend in ("mla_sdpa", "mla_cpu_native"):
        mla = MLAAttention(SPEC, cache_spec, backend)

        def loss(q, cache, params, new_rows, mla=mla):
            state = getattr(mla, reading)(q, cache, mla.build(meta), params, *new_rows)
            return jnp.sum(jnp.sin(state.out)) + jnp.sum(state.lse)

        grads.append(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, cache, PLAIN.params, new_rows))
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(a).max() > 1e-3


@needs_library
@pytest.mark.parametrize("reading", ["forward_mqa", "prefill_mha"])
def test_the_second_derivative_is_that_of_the_plain_backend(reading):
    """The first one's forward pass was the C++ call itself, which JAX cannot differentiate again."""
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 2], [6, 3], PLAIN.table()[:2], S)
    cache_spec, q, direction = PLAIN.mla.cache_spec, normal(34, 3, 3, 20), normal(35, 3, 3, 20)
    cache = jattn.PagedKV.from_logical(cache_spec, normal(31, 32, S, 1, 8), normal(32, 32, S, 1, 24))
    found = []
    for backend in ("mla_sdpa", "mla_cpu_native"):
        mla = MLAAttention(SPEC, cache_spec, backend)

        def slope(q, mla=mla):
            loss = lambda q: jnp.sum(jnp.sin(getattr(mla, reading)(q, cache, mla.build(meta), PLAIN.params).out))
            return jnp.sum(jax.grad(loss)(q) * direction)

        found.append(jax.jit(jax.grad(slope))(q))
    np.testing.assert_allclose(*found, atol=2e-5)
    assert np.abs(found[0]).max() > 1e-3


@needs_library
def test_auto_takes_the_native_kernel_on_a_cpu_and_the_plain_one_for_what_it_refuses():
    cache_spec = PLAIN.mla.cache_spec
    assert MLAAttention(SPEC, cache_spec, platform="cpu").backend_name == "mla_cpu_native"
    user = MLASpec(**SIZES, mask_fn=FEATURES["chunk, user"]["mask_fn"])
    assert MLAAttention(user, cache_spec, platform="cpu").backend_name == "mla_sdpa"
    large = MLASpec(**SIZES | dict(kv_lora_rank=520))
    reasons = {r.name: r.reasons for r in jattn.explain(large, jattn.mla_cache_spec(large, 8, S), "cpu")}
    assert any("kv_lora_rank=520" in why for why in reasons["mla_cpu_native"]) and not reasons["mla_sdpa"]
