"""Latent attention: the absorbed and the materialised reading agree with each other and with the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLAParams, MLASpec, mla_cache_spec
from tests.oracle import quant
from tests.oracle.mla import latent_attention

SIZES = dict(num_heads=3, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
SPEC = MLASpec(**SIZES)
S = 4
QUERIES, TOTALS = (1, 5, 0, 11, 1), (9, 5, 0, 30, 1)  # decode, whole prompt, none, a later chunk, first token
PADDED_TOKENS, PADDED_REQS = 21, 7
FEATURES = {
    "window, scale": dict(sliding_window=6, scale=0.4),
    "chunk, user": dict(
        chunk_size=16,
        mask_fn=lambda h, i, j: (i - j) % 3 != h,
        score_fn=lambda s, h, i, j: s + 0.1 * h - 0.01 * (i - j),
    ),
    "cap, alibi, window, sinks": dict(has_sinks=True, sliding_window=(9, -1), has_alibi=True, logits_soft_cap=2.0),
}
MQA, MHA, OWN = "forward_mqa", "prefill_mha", "prefill_mha with the new tokens as given"


def normal(seed: int, *shape) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch over permuted pages; what no request refers to is NaN."""

    spec: MLASpec = SPEC
    options: tuple = ()  # of the cache

    @functools.cached_property
    def mla(self) -> MLAAttention:
        wide = dict(self.options).get("wide")
        options = dict(dtype="float32") | dict(self.options)
        if wide:
            sizes = dict(num_kv_heads=1, head_dim=self.spec.head_dim, v_head_dim=options.pop("wide"))
            return MLAAttention(self.spec, jattn.KVCacheSpec(num_blocks=32, block_size=S, **sizes, **options))
        return MLAAttention(self.spec, mla_cache_spec(self.spec, 32, S, **options))

    @functools.cached_property
    def rows(self) -> tuple[list, list]:
        kv_c = [normal(10 + r, n, self.spec.kv_lora_rank) for r, n in enumerate(TOTALS)]
        k_pe = [normal(20 + r, n, self.spec.qk_rope_head_dim) for r, n in enumerate(TOTALS)]
        return kv_c, k_pe

    @functools.cached_property
    def q(self) -> np.ndarray:
        return normal(1, PADDED_TOKENS, self.spec.num_heads, self.spec.qk_head_dim)

    @functools.cached_property
    def params(self) -> MLAParams:
        width = self.spec.qk_nope_head_dim + self.spec.v_head_dim
        heads, latent = self.spec.num_heads, self.spec.kv_lora_rank
        return MLAParams(
            kv_b_proj=normal(2, latent, heads, width) * latent**-0.5,
            alibi_slopes=np.array([0.5, 0.25, 0.1], np.float32) if self.spec.has_alibi else None,
            sinks=np.array([0.5, -1.0, 2.0], np.float32) if self.spec.has_sinks else None,
        )

    def table(self, seed=3) -> np.ndarray:
        """Each request's pages, drawn at random; unused columns name a page that nobody owns, or nothing."""
        pages = np.random.default_rng(seed).permutation(30)
        table = np.full((len(TOTALS), 9), 31)
        table[:, -1] = 10**6
        for r, total in enumerate(TOTALS):
            need = -(-total // S)
            table[r, :need], pages = pages[:need], pages[need:]
        return table

    def meta(self, queries=QUERIES, totals=TOTALS, **options):
        options = dict(num_tokens=PADDED_TOKENS, num_reqs=PADDED_REQS) | options
        return jattn.CommonAttentionMetadata.from_lengths(queries, totals, self.table(), S, **options)

    def packed(self, rows, first, last) -> np.ndarray:
        out = np.concatenate([x[a:b] for x, a, b in zip(rows, first, last, strict=True)])
        return np.concatenate([out, np.full((PADDED_TOKENS - len(out), out.shape[1]), np.nan, np.float32)])

    def new_rows(self):
        first = np.subtract(TOTALS, QUERIES)
        return tuple(self.packed(x, first, TOTALS) for x in self.rows)

    @functools.cached_property
    def cache(self) -> jattn.PagedKV:
        """Filled in two writes, context first."""
        poison = float("nan") if self.mla.cache_spec.dtype != "int8" else 99.0
        cache, done = self.mla.empty_cache(poison, storage="native"), np.zeros(len(TOTALS), int)
        for upto in (np.subtract(TOTALS, QUERIES), np.array(TOTALS)):
            while (count := np.minimum(upto - done, 4)).any():
                m = self.mla.build(self.meta(count, done + count))
                kv_c, k_pe = (self.packed(x, done, done + count) for x in self.rows)
                cache, done = self.mla.write(kv_c, k_pe, cache, m, self.params), done + count
        return cache

    def wanted(self, rows=None, **options):
        spec, (kv_c, k_pe) = self.spec, self.rows if rows is None else rows
        return latent_attention(
            self.q[: sum(QUERIES)], kv_c, k_pe, self.params.kv_b_proj, QUERIES,
            nope=spec.qk_nope_head_dim, num_tokens=PADDED_TOKENS, scale=spec.scale, chunk_size=spec.chunk_size,
            window=spec.sliding_window, soft_cap=spec.logits_soft_cap, slopes=self.params.alibi_slopes,
            sinks=self.params.sinks, mask_fn=spec.mask_fn, score_fn=spec.score_fn, **options,
        )  # fmt: skip


def check(state, wanted, atol=2e-5):
    np.testing.assert_allclose(state.out, wanted[0], rtol=0, atol=atol)
    np.testing.assert_allclose(state.lse, wanted[1], rtol=0, atol=atol)


def read(mla, reading, *args):
    return getattr(mla, reading.split()[0])(*args)


SHARED = jax.jit(read, static_argnums=(0, 1))


def run(case: Case, reading: str, *, cache=None, jitted=SHARED, **options):
    """One reading, compiled once for all tests that ask for the same."""
    m, params = case.mla.build(case.meta(**options)), case.mla.prepare_params(case.params)
    extra = case.new_rows() if reading == OWN else ()
    return jitted(case.mla, reading, case.q, case.cache if cache is None else cache, m, params, *extra)


def anew():
    """For what a test has patched."""
    return jax.jit(lambda *args: read(*args), static_argnums=(0, 1))


PLAIN = Case()


@pytest.mark.parametrize("reading", [MQA, MHA, OWN, "attend"])
def test_every_reading_is_the_definition(reading):
    state = run(PLAIN, reading)
    check(state, PLAIN.wanted())
    assert (np.asarray(state.out)[sum(QUERIES) :] == 0).all()


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("reading", [MQA, OWN])
def test_features_mean_what_they_mean_in_any_attention(name, reading):
    case = Case(MLASpec(**SIZES, **FEATURES[name]))
    check(run(case, reading), case.wanted())


@pytest.mark.parametrize("reading", [MQA, MHA])
def test_causality_may_differ_from_request_to_request(reading):
    causal = (True, False, True, False, True)
    check(run(PLAIN, reading, causal=causal), PLAIN.wanted(causal=causal))


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
    long = np.repeat([n > 3 for n in QUERIES], QUERIES)[:, None, None]
    mha, mqa = (np.asarray(run(PLAIN, reading).out)[: sum(QUERIES)] for reading in (MHA, MQA))
    monkeypatch.setattr(MLASpec, "mha_threshold", property(lambda self: 3))
    state = run(PLAIN, "attend", jitted=anew())
    check(state, PLAIN.wanted())
    np.testing.assert_array_equal(state.out[: sum(QUERIES)], np.where(long, mha, mqa))
    assert not np.array_equal(mha, mqa)


def test_cached_tokens_are_materialised_window_by_window(monkeypatch):
    monkeypatch.setattr("jattn.ops.mla.CONTEXT_TOKENS", 7)
    check(run(PLAIN, MHA, jitted=anew()), PLAIN.wanted())


def test_write_then_attend_in_one_call_decodes_token_by_token():
    spec, case = SPEC, PLAIN
    mla, cache = case.mla, case.mla.empty_cache(float("nan"))
    kv_c, k_pe, q = normal(5, 6, spec.kv_lora_rank), normal(6, 6, spec.qk_rope_head_dim), normal(7, 6, 3, 20)
    table = [[7, 2]]
    step = jax.jit(mla, donate_argnums=3)
    params = mla.prepare_params(case.params)
    for i in range(6):
        m = mla.build(jattn.CommonAttentionMetadata.from_lengths([1], [i + 1], table, S))
        cache, state = step(q[i : i + 1], kv_c[i : i + 1], k_pe[i : i + 1, None], cache, m, params)
        wanted = latent_attention(
            q[i : i + 1], [kv_c[: i + 1]], [k_pe[: i + 1]], case.params.kv_b_proj, [1], nope=spec.qk_nope_head_dim
        )
        check(state, wanted)


def test_blocks_of_latents_move_like_any_blocks():
    case = PLAIN
    k, v = case.cache.logical()
    pairs = jnp.array([[0, 31], [1, 0]])
    moved_k, moved_v = jattn.copy_blocks(case.cache, pairs).logical()
    for old, new in ((k, moved_k), (v, moved_v)):
        np.testing.assert_array_equal(new[31], old[0])
        np.testing.assert_array_equal(new[0], old[1])
    swapped = jattn.swap_blocks(case.cache, case.mla.empty_cache(storage="native"), pairs)
    np.testing.assert_array_equal(swapped.logical()[1][31], v[0])


def test_a_shared_prefix_changes_nothing():
    mla = PLAIN.mla
    table = np.array([[3, 9, 1, 0], [3, 9, 7, 5]])
    rows = normal(8, 2, 13, SPEC.kv_lora_rank), normal(9, 2, 13, SPEC.qk_rope_head_dim)
    for x in rows:
        x[1, :8] = x[0, :8]
    cache = mla.empty_cache()
    for r in range(2):
        m = mla.build(jattn.CommonAttentionMetadata.from_lengths([13], [13], table[r : r + 1], S))
        cache = mla.write(rows[0][r], rows[1][r], cache, m)
    meta = jattn.CommonAttentionMetadata.from_lengths([2, 3], [13, 13], table, S)
    shared = jax.jit(mla.attend)(PLAIN.q[:5], cache, mla.build(meta, common_prefix_len=9), PLAIN.params)
    wanted = latent_attention(PLAIN.q[:5], *rows, PLAIN.params.kv_b_proj, [2, 3], nope=SPEC.qk_nope_head_dim)
    check(shared, wanted)


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


def test_prepared_params_are_the_same_layer():
    case = Case()
    prepared = case.mla.prepare_params(case.params)
    assert prepared.kv_b_proj is None and prepared.w_uk.shape == (3, 12, 24) and prepared.w_uv.shape == (3, 24, 10)
    flat = dataclasses.replace(case.params, kv_b_proj=case.params.kv_b_proj.reshape(24, -1))
    for params in (flat, prepared):
        for a, b in zip(jax.tree.leaves(case.mla.prepare_params(params)), jax.tree.leaves(prepared), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_threshold_is_where_the_multiplications_meet():
    deepseek = MLASpec(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    n = deepseek.mha_threshold
    absorbed, materialised = 512 * 2 + 64, 128 + 64 + 128
    assert n * absorbed <= n * materialised + 512 * 256 < (n + 1) * (absorbed - materialised) + (n + 1) * materialised
    assert deepseek.scale == 192**-0.5 and deepseek.head_dim == 576
    assert mla_cache_spec(deepseek, 10, 16).bytes_per_block == 16 * 576 * 2


def test_explain_sends_latent_layers_to_latent_backends():
    cache_spec = mla_cache_spec(SPEC, 8, S)
    reports = {report.name: report for report in jattn.explain(SPEC, cache_spec)}
    assert reports["mla_sdpa"].supported and not reports["sdpa"].supported
    assert any("MLA" in why for why in reports["sdpa"].reasons)
    ordinary = jattn.AttentionSpec(num_heads=2, head_dim=8)
    reports = jattn.explain(ordinary, jattn.KVCacheSpec(num_blocks=8, block_size=S, num_kv_heads=2, head_dim=8))
    assert any("non-MLA" in why for report in reports if report.name == "mla_sdpa" for why in report.reasons)
    with pytest.raises(jattn.UnsupportedError, match="MLA not supported"):
        MLAAttention(SPEC, cache_spec, backend="sdpa")


@pytest.mark.parametrize("reading", ["attend", "forward_mqa", "prefill_mha"])
def test_refusals_say_what_was_wanted(reading):
    case = Case()
    mla, m = case.mla, case.mla.build(case.meta())
    read = getattr(mla, reading)
    with pytest.raises(ValueError, match=r"q.*\[T, 3, 20\]"):
        read(case.q[..., :-1], case.cache, m, case.params)
    with pytest.raises(ValueError, match="either kv_b_proj"):
        read(case.q, case.cache, m, MLAParams())
    with pytest.raises(ValueError, match="sinks"):
        read(case.q, case.cache, m, dataclasses.replace(case.params, sinks=np.zeros(3, np.float32)))
    with pytest.raises(TypeError, match="MLAParams"):
        read(case.q, case.cache, m, jattn.AttentionParams())
    with pytest.raises(ValueError, match="kv_c.shape"):
        mla(case.q, case.new_rows()[0][:, :-1], case.new_rows()[1], case.cache, m, case.params)
    with pytest.raises(ValueError, match="cannot hold rows"):
        MLAAttention(SPEC, jattn.KVCacheSpec(num_blocks=8, block_size=S, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize(
    "bad", [dict(kv_lora_rank=0), dict(qk_rope_head_dim=1.5), dict(q_lora_rank=-1), dict(sliding_window=0)]
)
def test_a_spec_is_checked_and_its_spellings_are_one(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MLASpec(**(SIZES | bad))
    assert MLASpec(**SIZES, sliding_window=4, logits_soft_cap=0) == MLASpec(**SIZES, sliding_window=(3, 0))
    assert hash(MLASpec(**SIZES)) == hash(dataclasses.replace(SPEC))
