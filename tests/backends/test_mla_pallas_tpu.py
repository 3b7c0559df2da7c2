"""mla_pallas_tpu: the choice of auto, what it refuses, and ragged batches in JAX's interpreter beside the witness."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLAParams, MLASpec, mla_cache_spec
from jattn.backends.mla_pallas_tpu import kernel_config, new_tokens_config
from jattn.device import Chip
from pallas_kernels.tpu.supports import VMEM, supports
from pallas_kernels.tpu.tile_policy import for_packed_keys
from tests.kernels.tpu.interpreted import V6E, judged
from tests.ops.latent import normal, poisoned_table
from tests.oracle.mla import latent_attention

SIZES = dict(num_heads=12, kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=24)
DEEPSEEK = MLASpec(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
TABLE = jnp.array([True, False, True, True])
SERVED = {
    "split": {},
    "page 16": dict(block_size=16),
    "8 bits": dict(dtype="float8_e4m3fn", quant="per_tensor"),
    "NHD": dict(layout="NHD"),
}
REFUSED = {
    "mask_fn with a table": (dict(mask_fn=lambda h, i, j: TABLE[i % 4]), {}, V6E, "reads an array of its own"),
    "score_fn that sums": (dict(score_fn=lambda s, h, i, j: s - s.sum()), {}, V6E, "score_fn uses reduce_sum"),
    "a scale a token": ({}, dict(dtype="int8", quant="per_token_head"), V6E, "quant"),
    "f16": ({}, dict(dtype="float16"), V6E, "kv_cache_dtype"),
    "latent 96": (dict(kv_lora_rank=96), {}, V6E, "kv_lora_rank 96"),
    "rope 8": (dict(qk_rope_head_dim=8), {}, V6E, "qk_rope_head_dim 8"),
    "129 heads": (dict(num_heads=129), {}, V6E, "129 query heads"),
    "page 24": ({}, dict(block_size=24), V6E, "block_size"),
    "v4": ({}, {}, Chip("tpu", "v4"), "v4"),
    "cpu": ({}, {}, Chip("cpu"), "platform"),
}


def reasons(spec, cache_spec, chip, needs=()):
    return next(r for r in jattn.explain(spec, cache_spec, chip, needs) if r.name == "mla_pallas_tpu").reasons


@pytest.mark.parametrize("name", SERVED)
def test_auto_takes_it_on_a_tpu(name):
    cache_spec = mla_cache_spec(DEEPSEEK, 8, **(dict(block_size=128) | SERVED[name]))
    assert not reasons(DEEPSEEK, cache_spec, V6E)
    assert MLAAttention(DEEPSEEK, cache_spec, platform=V6E).backend_name == "mla_pallas_tpu"


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_the_reason_and_auto_takes_another(name):
    fields, cache, chip, why = REFUSED[name]
    spec = dataclasses.replace(DEEPSEEK, **fields)
    cache_spec = mla_cache_spec(spec, 8, **(dict(block_size=64) | cache))
    found = reasons(spec, cache_spec, chip)
    assert any(why.lower() in reason.lower() for reason in found), found
    assert MLAAttention(spec, cache_spec, platform=chip).backend_name != "mla_pallas_tpu"


def test_new_tokens_are_materialised_in_a_batch_that_may_have_a_long_prompt():
    """Where a layer's mask and logits do not depend on positions, beyond causality."""
    build = lambda n, spec=DEEPSEEK: jax.eval_shape(
        MLAAttention(spec, mla_cache_spec(spec, 8, 128), platform=V6E).build,
        jattn.CommonAttentionMetadata.from_lengths([n], [n + 7], [[0, 1, 2, 3]], 128),
    )
    assert DEEPSEEK.mha_threshold == 170
    assert build(341).new_tokens is not None and build(340).new_tokens is None
    assert build(400, dataclasses.replace(DEEPSEEK, sliding_window=(99, 0))).new_tokens is None


GENERATIONS = [Chip("tpu", name) for name in ("", *VMEM)]
DIMS = [
    dict(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
    for nope, rope, v in ((16, 16, 16), (128, 64, 128), (192, 64, 256))
]


def test_a_long_prompt_of_float32_is_traced_for_every_generation():
    """The queries' dtype, which is that of the new tokens' keys, is known to the launch only. In one test: a commit
    passes only a sample of a parametrised one."""
    for chip in GENERATIONS:
        mla = MLAAttention(DEEPSEEK, mla_cache_spec(DEEPSEEK, 8, 128, dtype="float32"), platform=chip)
        assert mla.backend_name == "mla_pallas_tpu"
        meta = jattn.CommonAttentionMetadata.from_lengths([600], [700], [list(range(6))], 128)
        q = jnp.zeros((600, DEEPSEEK.num_heads, DEEPSEEK.qk_head_dim))
        params = MLAParams(kv_b_proj=jnp.zeros((512, DEEPSEEK.num_heads, 256)))
        attend = lambda *args, mla=mla: mla.attend(*args[:2], mla.build(args[2]), args[3])  # noqa: E731
        state = jax.eval_shape(attend, q, mla.empty_cache(storage="native"), meta, params)
        assert state.out.shape == (600, DEEPSEEK.num_heads, DEEPSEEK.v_head_dim)


def test_the_sizes_of_both_launches_fit_every_generation():
    """With queries of each dtype, over a cache of each."""
    heads = (1, 2, 3, 4, 6, 16, 127, 128)
    for dims, n, cached, chip in itertools.product(DIMS, heads, ("bfloat16", "float32"), GENERATIONS):
        spec = MLASpec(num_heads=n, kv_lora_rank=512, has_sinks=True, **dims)
        meta = jattn.CommonAttentionMetadata.from_lengths([4096], [4096], [list(range(32))], 128)
        absorbed = kernel_config(spec, mla_cache_spec(spec, 64, 128, dtype=cached), common=meta)
        new = new_tokens_config(spec, absorbed, meta, chip)
        assert new is not None
        for dtype in ("bfloat16", "float32"):
            before = dataclasses.replace(absorbed, dtype=dtype, out_dtype="float32")
            among = for_packed_keys(new, dtype, chip.generation)
            assert among.tile_tokens == new.tile_tokens  # that of the work list
            for config in (before, among):
                assert not supports(config, chip=chip.generation), (chip, config)


def test_refuses_keys_on_several_ranks():
    assert reasons(DEEPSEEK, mla_cache_spec(DEEPSEEK, 8, 64), V6E, (jattn.Feature.DCP,))


@dataclasses.dataclass(frozen=True)
class Row:
    """A batch over permuted pages of 16. Pages of no request are NaN, and so is what their last page does not use."""

    queries: tuple[int, ...] = (1, 3, 0, 2)
    totals: tuple[int, ...] = (300, 33, 5, 9)
    spec: MLASpec = MLASpec(**SIZES)
    cache: tuple = ()
    wide: int = 0  # v_head_dim of a wide cache
    dtype: str = "bfloat16"
    causal: bool | tuple[bool, ...] = True
    atol: float = 2e-2
    mode: str = "on_wait"


ALL = MLASpec(
    **SIZES, has_sinks=True, has_alibi=True, sliding_window=(70, 3), chunk_size=90, logits_soft_cap=2.0, scale=0.2
)
USER = MLASpec(
    **SIZES, mask_fn=lambda h, i, j: (i - j) % 3 != h, score_fn=lambda s, h, i, j: s + 0.1 * h - 0.01 * (i - j)
)
LONG = dict(queries=(1, 40, 0, 90, 2), totals=(1700, 300, 5, 90, 20))
MATERIALISED = MLASpec(**SIZES | dict(v_head_dim=32), has_sinks=True, logits_soft_cap=2.0)
INT8 = (("dtype", "int8"), ("quant", "per_tensor"))
ROWS = {
    "decode": Row((1, 1, 0, 1, 1)[:4], (1600, 33, 0, 1)),
    "decode, wide, eager": Row((1, 1, 1, 1), (300, 16, 17, 1), wide=128, mode="eager"),
    "mixed": Row(**LONG),
    "mixed, whole rows, NHD, eager": Row(**LONG, wide=160, cache=(("layout", "NHD"),), mode="eager"),
    "every option, float32, eager": Row(
        (1, 40, 5, 9), (300, 90, 5, 20), ALL, (("dtype", "float32"),), dtype="float32", mode="eager", atol=2e-5,
        causal=(True, False, True, False),
    ),
    "every option, wide": Row((1, 40, 5, 9), (300, 90, 5, 20), ALL, wide=128, atol=4e-2),
    "functions of the user": Row((1, 40, 5, 9), (300, 90, 5, 20), USER, atol=4e-2),
    "long prompts, alternating": Row(**LONG, spec=MATERIALISED, causal=(True, False, True, False, True)),
    "long prompts, int8, wide, eager": Row(**LONG, spec=MATERIALISED, cache=INT8, wide=128, mode="eager"),
    "int8": Row(cache=INT8),
    "float8_e4m3fn, eager": Row(cache=(("dtype", "float8_e4m3fn"), ("quant", "per_tensor")), mode="eager"),
    "float8_e5m2, new tokens materialised": Row(
        (61, 0, 31), (544, 0, 31), MATERIALISED, (("dtype", "float8_e5m2"), ("quant", "per_tensor")), atol=4e-2
    ),
    "int8, wide, not causal": Row(cache=INT8, wide=128, causal=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_ragged_batch_is_attention_by_its_definition(name, monkeypatch):
    row = ROWS[name]
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    with judged(row.mode):
        out, lse, rows, proj, q = result(row)
    spec, count = row.spec, sum(row.queries)
    want, want_lse = latent_attention(
        q[:count], *rows, proj, row.queries, nope=spec.qk_nope_head_dim, scale=spec.scale, chunk_size=spec.chunk_size,
        window=spec.sliding_window, soft_cap=spec.logits_soft_cap, causal=row.causal,
        mask_fn=spec.mask_fn, score_fn=spec.score_fn,
        slopes=SLOPES if spec.has_alibi else None, sinks=SINKS if spec.has_sinks else None,
    )  # fmt: skip
    np.testing.assert_allclose(out[:count], want, atol=row.atol)
    np.testing.assert_allclose(lse[:count], want_lse, atol=row.atol)
    assert (out[count:] == 0).all() and np.isneginf(lse[count:]).all()


SLOPES, SINKS = normal(7, 12) ** 2 / 10, normal(8, 12)


def result(row: Row):
    """(out, lse, the cached rows of each request, kv_b_proj, q), as numpy in float64."""
    spec, size, latent, rope = row.spec, 16, row.spec.kv_lora_rank, row.spec.qk_rope_head_dim
    cache_spec = mla_cache_spec(spec, 160, size, **dict(row.cache))
    if row.wide:
        cache_spec = dataclasses.replace(cache_spec, head_dim=spec.head_dim, v_head_dim=row.wide)
    mla = MLAAttention(spec, cache_spec)
    assert mla.backend_name == "mla_pallas_tpu"
    table = poisoned_table(row.totals, size, 160, 120)
    scales = dict(kv_c_scale=1 / 32) if row.wide else dict(kv_c_scale=1 / 32, k_pe_scale=1 / 16)
    proj = normal(1, latent, 12, spec.qk_nope_head_dim + spec.v_head_dim) / 12
    options = dict(sinks=SINKS if spec.has_sinks else None, alibi_slopes=SLOPES if spec.has_alibi else None)
    params = mla.prepare_params(MLAParams(kv_b_proj=proj, **scales, **options))
    # values that the cache holds exactly: whole numbers of up to 7 bits, fewer in an 8-bit float
    whole = lambda seed, dim: np.clip(np.round(normal(seed, sum(row.totals), dim) * 32), -100, 100)
    steps = lambda seed, dim, scale: whole(seed, dim).astype(jnp.dtype(cache_spec.dtype)).astype(np.float64) * scale
    kv_c, k_pe = steps(2, latent, 1 / 32), steps(3, rope, scales.get("k_pe_scale", 1 / 32))
    writer = MLAAttention(spec, cache_spec, "mla_sdpa", platform="cpu")
    everything = jattn.CommonAttentionMetadata.from_lengths(row.totals, row.totals, table, size)
    cache = writer.empty_cache(99.0 if cache_spec.dtype == "int8" else float("nan"), storage="native")
    cache = writer.write(kv_c, k_pe, cache, writer.build(everything), params)
    tokens, reqs = sum(row.queries) + 5, len(row.totals) + 1
    meta = jattn.CommonAttentionMetadata.from_lengths(
        row.queries, row.totals, table, size, num_tokens=tokens, num_reqs=reqs, causal=row.causal
    )
    q = jnp.asarray(normal(4, tokens, 12, spec.qk_head_dim), row.dtype)
    state = jax.jit(lambda q, cache, params: mla.attend(q, cache, mla.build(meta), params))(q, cache, params)
    ends = np.cumsum(row.totals)[:-1]
    found = (np.asarray(x, np.float64) for x in (state.out, state.lse))
    return *found, (np.split(kv_c, ends), np.split(k_pe, ends)), proj, np.asarray(q, np.float64)


@pytest.mark.slow
def test_the_gradient_and_sparse_attention_are_those_of_mla_sdpa(monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    spec, size, found = MLASpec(**SIZES), 16, []
    cache_spec, table = mla_cache_spec(spec, 8, size, dtype="float32"), np.array([[1, 2], [3, 4]])
    written = MLAAttention(spec, cache_spec, "mla_sdpa")
    plan = written.build(jattn.CommonAttentionMetadata.from_lengths([20, 9], [20, 9], table, size))
    rows = normal(2, 29, 128), normal(3, 29, 32)
    cache = written.write(*rows, written.empty_cache(storage="native"), plan, MLAParams())
    params, q = MLAParams(kv_b_proj=jnp.asarray(normal(1, 128, 12, 40) / 12)), jnp.asarray(normal(4, 10, 12, 48))
    listed = np.random.default_rng(5).integers(-1, 9, (10, 3))
    with judged():
        for mla in (MLAAttention(spec, cache_spec), written):
            m = mla.build(jattn.CommonAttentionMetadata.from_lengths([1, 9], [20, 9], table, size))
            loss = lambda q, p, mla=mla, m=m: (mla.attend(q, cache, m, p).out ** 2).sum()  # noqa: E731
            sparse = mla.attend(q, cache, m, params, listed)
            found.append(jax.tree.map(np.asarray, (jax.jit(jax.grad(loss, (0, 1)))(q, params), sparse)))
    for mine, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
