"""Latent attention: the absorbed and the materialised reading agree with each other and with the definition."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLAParams, MLASpec
from jattn.device import Chip
from jattn.ops import mla as mla_ops
from jattn.ops.state import AttentionState
from tests.kernels.cpu.native_setup import needs_library
from tests.ops.latent import (
    FEATURES,
    MHA,
    MQA,
    OWN,
    PADDED_REQS,
    PADDED_TOKENS,
    PLAIN,
    QUERIES,
    SIZES,
    SPEC,
    TOTALS,
    Case,
    S,
    check,
    normal,
    run,
)
from tests.oracle import quant

NATIVE = pytest.param("mla_cpu_native", marks=needs_library)


@pytest.mark.parametrize("backend", ["mla_sdpa", NATIVE])
@pytest.mark.parametrize("reading", [MQA, MHA, OWN, "attend"])
def test_every_reading_is_the_definition(reading, backend):
    state = run(Case(backend=backend), reading)
    check(state, PLAIN.wanted())
    assert (np.asarray(state.out)[sum(QUERIES) :] == 0).all()


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("reading", [MQA, OWN])
def test_features_mean_what_they_mean_in_any_attention(name, reading):
    case = Case(MLASpec(**SIZES, **FEATURES[name]))
    check(run(case, reading), case.wanted())


@needs_library
@pytest.mark.parametrize("sizes", [{}, dict(num_heads=2, kv_lora_rank=32, qk_nope_head_dim=64, v_head_dim=48)])
@pytest.mark.parametrize(
    "features",
    [
        FEATURES["window, scale"],
        FEATURES["cap, alibi, window, sinks"],
        dict(chunk_size=16),
        dict(sliding_window=(4, 2)),
    ],
    ids=["window", "cap, alibi, window, sinks", "chunk", "two sides"],
)
def test_mla_cpu_native_materialises_with_features(features, sizes, monkeypatch):
    """Also of keys that begin after the request's first: cached tokens in windows, and new tokens as given. By the C++
    call, but for chunks."""
    if features.get("has_alibi") and sizes:
        features = {name: x for name, x in features.items() if name not in ("has_alibi", "has_sinks")}  # of 3 heads
    monkeypatch.setattr("jattn.ops.mla.CONTEXT_TOKENS", 7)
    case = Case(MLASpec(**SIZES | sizes, **dict(scale=0.21) | features), backend="mla_cpu_native")
    for reading in (MHA, OWN):
        check(run(case, reading), case.wanted())
    m, params = case.mla.build(case.meta()), case.mla.prepare_params(case.params)
    traced = str(jax.make_jaxpr(lambda *args: case.mla.prefill_mha(*args))(case.q, case.cache, m, params))
    assert ("ffi_call" in traced) == ("chunk_size" not in features)


@needs_library
@pytest.mark.parametrize("sizes", [dict(qk_nope_head_dim=508), dict(v_head_dim=576)], ids=str)
@pytest.mark.parametrize("reading", [MHA, OWN])
def test_heads_too_wide_for_the_native_call_are_materialised_without_it(reading, sizes):
    case = Case(MLASpec(**SIZES | sizes, scale=0.05), backend="mla_cpu_native")
    check(run(case, reading), case.wanted())


@pytest.mark.parametrize("backend", ["mla_sdpa", NATIVE])
@pytest.mark.parametrize("reading", [MQA, MHA])
def test_causality_may_differ_from_request_to_request(reading, backend):
    causal = (True, False, True, False, True)
    check(run(Case(backend=backend), reading, causal=causal), PLAIN.wanted(causal=causal))


@needs_library
def test_mla_cpu_native_rounds_materialised_keys_to_bfloat16_where_the_queries_are():
    """The log-sum-exp, which is float32, shows it: that of float32 queries is exact."""
    case = in_bfloat16("mla_cpu_native")
    case.__dict__["q"] = np.asarray(jnp.asarray(case.q, "bfloat16"), np.float32)
    exact = in_bfloat16()
    exact.__dict__.update(q=case.q)
    exact.__dict__["params"] = dataclasses.replace(
        exact.params, kv_b_proj=np.asarray(exact.params.kv_b_proj, np.float32)
    )
    live, wanted = slice(sum(QUERIES)), exact.wanted()[1]
    error = lambda state: np.abs(np.asarray(state.lse)[live] - wanted[live]).max()
    assert error(run(case, MHA)) < 2e-5
    case.__dict__["q"] = jnp.asarray(case.q, "bfloat16")
    assert 1e-4 < error(run(case, MHA)) < 2e-2


@pytest.mark.parametrize(
    ("options", "reading"),
    [(("layout", "NHD"), MHA), (("wide", SPEC.kv_lora_rank), MHA), (("wide", SPEC.head_dim), MQA)],
)
def test_every_form_of_the_cache_holds_the_same_rows(options, reading):
    case = Case(options=(options,))
    check(run(case, reading), PLAIN.wanted())


@pytest.mark.parametrize(
    ("dtype", "per", "wide"),
    [
        ("float8_e4m3fn", "per_tensor", False),
        ("float8_e5m2", "per_head", True),
        ("int8", "per_token_head", False),
        ("int8", "per_token_head", True),
        ("bfloat16", "none", False),
    ],
)
def test_a_small_cache_is_attention_over_rounded_rows(dtype, per, wide):
    options = dict(dtype=dtype, quant=per) | (dict(wide=SPEC.kv_lora_rank) if wide else {})
    case = Case(options=tuple(options.items()))
    scales = dict(kv_c_scale=0.03, k_pe_scale=None if wide else 0.02) if per in ("per_tensor", "per_head") else {}
    case.__dict__["params"] = dataclasses.replace(case.params, **scales)

    def rounded(rows, scale):
        if dtype == "bfloat16":
            return [np.asarray(jnp.asarray(x, dtype), np.float32) for x in rows]
        per_row = "per_token_head" if per == "per_token_head" else "per_tensor"
        return [quant.round_trip(x[:, None], dtype, per_row, scale)[:, 0] if len(x) else x for x in rows]

    kv_c, k_pe = case.rows
    if wide:  # one scale for the whole row
        whole = rounded([np.concatenate(x, axis=1) for x in zip(kv_c, k_pe, strict=True)], scales.get("kv_c_scale"))
        rows = [x[:, : SPEC.kv_lora_rank] for x in whole], [x[:, SPEC.kv_lora_rank :] for x in whole]
    else:
        rows = rounded(kv_c, scales.get("kv_c_scale")), rounded(k_pe, scales.get("k_pe_scale"))
    for reading in (MQA, MHA) if dtype.startswith("float8") else (MHA,) if wide else (MQA,):
        check(run(case, reading), case.wanted(rows), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_zero_rows_give_exactly_zero(dtype):
    case = PLAIN if dtype == "float32" else Case(options=(("dtype", dtype), ("quant", "per_tensor")))
    if case is not PLAIN:
        case.__dict__["params"] = dataclasses.replace(case.params, kv_c_scale=0.5, k_pe_scale=0.25)
    for reading in (MQA, MHA):
        state = run(case, reading, cache=case.mla.empty_cache(storage="native"))
        assert (np.asarray(state.out) == 0).all()
        np.testing.assert_allclose(np.exp(state.lse[0]), 9, rtol=1e-5)  # nine keys of weight one


def test_the_door_reads_long_requests_materialised_and_short_ones_absorbed(monkeypatch):
    case = Case(MLASpec(**SIZES, scale=0.3))  # a layer of its own: what is patched is seen by fresh traces only
    long = np.repeat([n > 3 for n in QUERIES], QUERIES)[:, None, None]
    mha, mqa = (np.asarray(run(case, reading).out)[: sum(QUERIES)] for reading in (MHA, MQA))
    monkeypatch.setattr(MLASpec, "mha_threshold", property(lambda self: 3))
    state = run(case, "attend")
    check(state, case.wanted())
    np.testing.assert_array_equal(state.out[: sum(QUERIES)], np.where(long, mha, mqa))
    assert not np.array_equal(mha, mqa)


def kernels_always_called(jaxpr) -> int:
    """The C++ calls of a jaxpr that are in no branch of a cond, and in no loop, which may have no steps."""
    inner = (
        sub
        for eqn in jaxpr.eqns
        if eqn.primitive.name not in ("cond", "while")
        for sub in jax.extend.core.jaxprs_in_params(eqn.params)
    )
    return sum(eqn.primitive.name == "ffi_call" for eqn in jaxpr.eqns) + sum(map(kernels_always_called, inner))


@needs_library
def test_in_a_batch_of_prompts_the_products_of_the_absorbed_form_are_not_computed():
    long = MLASpec(**SIZES).mha_threshold + 1
    mla = Case(backend="mla_cpu_native").mla
    cache, params = mla.empty_cache(), mla.prepare_params(PLAIN.params)

    def calls(queries: int) -> int:
        meta = jattn.CommonAttentionMetadata.from_lengths([queries], [queries], np.arange(32)[None], S)
        q = normal(1, queries, SIZES["num_heads"], SPEC.qk_head_dim)
        return kernels_always_called(jax.make_jaxpr(mla.attend)(q, cache, mla.build(meta), params).jaxpr)

    assert (calls(long), calls(1)) == (0, 3)


def loops(jaxpr) -> list[int | None]:
    """The length of each loop of a jaxpr, in calls too; None: it depends on data."""
    found = [eqn.params.get("length") for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    inner = (sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return [*found, *(n for sub in inner for n in loops(sub))]


@pytest.mark.parametrize("backend", ["mla_sdpa", NATIVE])
def test_a_wide_block_table_makes_no_loop_longer(backend, monkeypatch):
    """An engine's table has room for the longest request in each row: thousands of windows, of which few are used."""
    monkeypatch.setattr("jattn.ops.mla.CONTEXT_TOKENS", 7)
    case = Case(MLASpec(**SIZES, scale=0.19), backend=backend)
    params = case.mla.prepare_params(case.params)

    def lengths(width: int) -> list[int | None]:
        table = np.pad(case.table(), ((0, 0), (0, width)))
        meta = jattn.CommonAttentionMetadata.from_lengths(
            QUERIES, TOTALS, table, S, num_tokens=PADDED_TOKENS, num_reqs=PADDED_REQS
        )
        args = case.q, case.cache, case.mla.build(meta), params
        return loops(jax.make_jaxpr(lambda *args: case.mla.prefill_mha(*args))(*args).jaxpr)

    assert lengths(0) == lengths(1000) and None in lengths(0)


def test_cached_tokens_are_materialised_window_by_window(monkeypatch):
    case = Case(MLASpec(**SIZES, scale=0.2))
    monkeypatch.setattr("jattn.ops.mla.CONTEXT_TOKENS", 7)
    check(run(case, MHA), case.wanted())


def in_bfloat16(backend: str = "mla_sdpa") -> Case:
    """Cached rows and weights in bfloat16; float32 queries."""
    case = Case(MLASpec(**SIZES, scale=0.25), options=(("dtype", "bfloat16"),), backend=backend)
    kv_b_proj = jnp.asarray(case.params.kv_b_proj, "bfloat16")
    case.__dict__["params"] = dataclasses.replace(case.params, kv_b_proj=kv_b_proj)
    case.__dict__["rows"] = tuple(
        [np.asarray(jnp.asarray(x, "bfloat16"), np.float32) for x in part] for part in case.rows
    )
    return case


def test_bfloat16_latents_and_weights_are_materialised_without_a_float32_copy():
    case = in_bfloat16()
    m, params = case.mla.build(case.meta()), case.mla.prepare_params(case.params)
    traced = str(jax.make_jaxpr(lambda *args: case.mla.prefill_mha(*args))(case.q, case.cache, m, params))
    for weight in (params.w_uk, params.w_uv):
        shape = ",".join(map(str, weight.shape))
        assert f"bf16[{shape}]" in traced and f"f32[{shape}]" not in traced
    exact = dataclasses.replace(case.params, kv_b_proj=np.asarray(case.params.kv_b_proj, np.float32))
    state = run(case, MHA)
    case.__dict__["params"] = exact
    check(state, case.wanted())


def test_bfloat16_latents_have_the_gradient_of_the_absorbed_form():
    case = in_bfloat16()
    m, params = case.mla.build(case.meta()), case.mla.prepare_params(case.params)

    def loss(reading, q, params):
        return jnp.sum(jnp.sin(getattr(case.mla, reading)(q, case.cache, m, params).out))

    for a, b in zip(*(jax.tree.leaves(jax.grad(loss, (1, 2))(way, case.q, params)) for way in (MQA, MHA)), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=2.0**-7 * np.abs(a).max())


@pytest.fixture
def products_on_a_gpu(monkeypatch):
    """(dtypes of x, of w) of each product by w_uk or w_uv, as on a GPU. The sums are those of float32 factors, because
    not every CPU multiplies bfloat16 in batches."""
    monkeypatch.setattr(mla_ops.device, "detect", lambda: Chip("gpu", "sm_80"))
    einsum, seen = mla_ops.einsum, []

    def recorded(names, x, w):
        seen.append((x.dtype.name, w.dtype.name))
        return einsum(names, x.astype(jnp.float32), w.astype(jnp.float32))

    monkeypatch.setattr(mla_ops, "einsum", recorded)
    return seen


def heads(seed: int, a: int, dtype) -> tuple[jax.Array, jax.Array]:
    """(w_uk or w_uv [2 a 6], rows [5 2 a])"""
    return jnp.asarray(normal(seed, 2, a, 6), dtype), jnp.asarray(normal(seed + 1, 5, 2, a), dtype)


@pytest.mark.parametrize(
    ("dtype", "weights", "factors"),
    [
        ("bfloat16", "bfloat16", "bfloat16"), ("float16", "float16", "float16"), ("float16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"), ("bfloat16", "float32", "float32"), ("bfloat16", "float16", "float32"),
    ],
)  # fmt: skip
def test_queries_are_absorbed_exactly_without_float32_copies_of_weights(dtype, weights, factors, products_on_a_gpu):
    spec = MLASpec(**SIZES | dict(num_heads=2, qk_nope_head_dim=64, kv_lora_rank=6))
    w, nope = heads(1, 64, weights)
    q = jnp.concatenate([nope.astype(dtype), jnp.asarray(normal(3, 5, 2, 8), dtype)], axis=-1)
    found = jax.jit(lambda q, w: mla_ops.absorbed_queries(spec, q, MLAParams(w_uk=w)))(q, w)
    assert products_on_a_gpu == [(factors, factors)]
    x, w = np.asarray(q, np.float64), np.asarray(w, np.float64)
    wanted = np.concatenate([np.einsum("tha,hab->thb", x[..., :64], w), x[..., 64:]], axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "weights", "result", "factors"),
    [
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16"), ("float32", "bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float16", "bfloat16"), ("float16", "bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32", "float32"), ("float32", "float16", "float16", "float32"),
        ("float16", "float16", "float16", "float16"),
    ],
)  # fmt: skip
def test_values_are_projected_with_far_less_error_than_their_rounding(
    dtype, weights, result, factors, products_on_a_gpu
):
    w, out = heads(5, 64, weights)
    out = jnp.asarray(normal(6, 5, 2, 64) * 1.001, dtype)
    found = jax.jit(lambda x, w: mla_ops._per_head(x, w, result))(out, w)
    assert products_on_a_gpu == [(factors, factors)]
    is_pair = "reduce_precision" in str(jax.make_jaxpr(lambda x, w: mla_ops._per_head(x, w, result))(out, w))
    assert is_pair == (dtype != factors)  # XLA:GPU would leave out a conversion and back, and with it the rest
    x, wide = np.asarray(out, np.float64), np.asarray(w, np.float64)
    is_exact = dtype == factors or "float16" in (dtype, weights) or result == "float32"
    limit = 1e-6 if is_exact else 2.0**-17
    most = np.einsum("tha,hab->thb", np.abs(x), np.abs(wide))
    assert (np.abs(found - np.einsum("tha,hab->thb", x, wide)) <= limit * most).all()
    state = AttentionState(out=out, lse=jnp.zeros((5, 2)))
    given = mla_ops.projected_values(state, jnp.dtype(result), MLAParams(w_uv=w), 0.5)
    np.testing.assert_array_equal(given.out, (found * 0.5).astype(result))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_infinity_stays_one_in_a_pair_of_bfloat16(dtype, products_on_a_gpu):
    w = jnp.abs(heads(7, 64, "bfloat16")[0]) + jnp.asarray(1, "bfloat16")
    out = jnp.ones((3, 2, 64), dtype).at[0, 0, 5].set(jnp.inf).at[1, 1, 6].set(-jnp.inf).at[2, 0, 7].set(jnp.nan)
    found = np.asarray(mla_ops._per_head(out, w, "bfloat16"))
    assert products_on_a_gpu == [("bfloat16", "bfloat16")]
    wanted = np.einsum("tha,hab->thb", *(np.asarray(x, np.float64) for x in (out, w)))
    np.testing.assert_allclose(found, wanted, rtol=2.0**-16)


def test_projected_values_have_the_derivatives_of_float32_products(products_on_a_gpu):
    w, out = heads(7, 64, "bfloat16")[0], jnp.asarray(normal(8, 5, 2, 64))
    plain = lambda x, w: jnp.einsum("tha,hab->thb", x, w.astype(jnp.float32))
    along = jnp.asarray(normal(9, 5, 2, 6))
    total = lambda f: lambda x, w: (f(x, w) * along).sum()
    mine = jax.grad(total(lambda x, w: mla_ops._per_head(x, w, "bfloat16")), (0, 1))(out, w)
    for found, wanted in zip(mine, jax.grad(total(plain), (0, 1))(out, w), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, wanted)), rtol=2.0**-8, atol=1e-6)
    np.testing.assert_allclose(mine[0], jax.grad(total(plain))(out, w), atol=2e-5)


@pytest.mark.parametrize(("dtype", "factors"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_new_tokens_of_16_bits_are_materialised_without_float32_copies_of_weights(dtype, factors, products_on_a_gpu):
    case = in_bfloat16()
    params = case.mla.prepare_params(case.params)
    kv_c, k_pe = (jnp.asarray(normal(s, 5, d), dtype) for s, d in ((1, 24), (2, 8)))
    k, v = jax.jit(mla_ops.materialised)(kv_c, k_pe, params)
    assert products_on_a_gpu == [(factors, factors)] * 2
    x, w_uk, w_uv = (np.asarray(x, np.float64) for x in (kv_c, params.w_uk, params.w_uv))
    np.testing.assert_allclose(k[..., :12], np.einsum("tl,hnl->thn", x, w_uk), atol=2e-5)
    np.testing.assert_allclose(v, np.einsum("tl,hlv->thv", x, w_uv), atol=2e-5)


def test_on_a_cpu_the_factors_stay_float32(monkeypatch):
    """Not every CPU multiplies bfloat16 in batches: XLA then fails when the product runs."""
    w, out = heads(7, 64, "bfloat16")
    traced = str(jax.make_jaxpr(lambda x, w: mla_ops._per_head(x, w, "bfloat16"))(out, w))
    assert "f32[2,64,6]" in traced and "reduce_precision" not in traced


def test_gradients_of_both_readings_agree_and_flow_to_everything():
    mla = MLAAttention(MLASpec(**SIZES, has_sinks=True), PLAIN.mla.cache_spec)
    logical = (normal(31, 32, S, 1, 8), normal(32, 32, S, 1, 24))
    cache = jattn.PagedKV.from_logical(mla.cache_spec, *logical, storage="native")
    m = mla.build(jattn.CommonAttentionMetadata.from_lengths([1, 4], [6, 9], PLAIN.table()[:2], S))
    params = dataclasses.replace(PLAIN.params, sinks=normal(33, 3))
    q = normal(34, 5, 3, 20)

    def loss(reading, q, cache, params):
        state = getattr(mla, reading)(q, cache, m, params)
        return jnp.sum(jnp.sin(state.out)) + jnp.sum(state.lse)

    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    grads = {reading: value_and_grad(reading, q, cache, params)[1] for reading in (MQA, MHA)}
    for a, b in zip(*map(jax.tree.leaves, grads.values()), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
        assert np.abs(a).max() > 1e-3
    value, step = jax.jit(loss, static_argnums=0), 1e-2
    weights, along = params.kv_b_proj, normal(35, *params.kv_b_proj.shape)
    above, below = (
        value(MQA, q, cache, dataclasses.replace(params, kv_b_proj=weights + sign * step * along)) for sign in (1, -1)
    )
    np.testing.assert_allclose(np.vdot(grads[MQA][2].kv_b_proj, along), (above - below) / (2 * step), rtol=2e-2)
