"""mla_pallas_gpu: what it refuses, that a model's step lowers for CUDA, and a mixed batch in JAX's interpreter."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLAParams, MLASpec, device, mla_cache_spec, models
from jattn.backends import mla_pallas_gpu
from jattn.device import Chip
from tests.backends.paged_oracle import by_numpy
from tests.ops.latent import normal, poisoned_table
from tests.oracle.mla import latent_attention

HOPPER = Chip("gpu", "sm_90")
SIZES = dict(num_heads=16, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=48)
DEEPSEEK = MLASpec(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SERVED = {
    "split": dict(block_size=64),
    "page 16": dict(block_size=16),
    "f16": dict(block_size=128, dtype="float16"),
    "e4m3": dict(block_size=64, dtype="float8_e4m3fn", quant="per_tensor"),
    "int8": dict(block_size=16, dtype="int8", quant="per_head"),
}
REFUSED = {
    "window": (dict(sliding_window=9), {}, HOPPER, "SLIDING_WINDOW"),
    "soft cap": (dict(logits_soft_cap=9.0), {}, HOPPER, "SOFT_CAP"),
    "sinks": (dict(has_sinks=True), {}, HOPPER, "SINK"),
    "a scale for each token": ({}, dict(dtype="float8_e4m3fn", quant="per_token_head"), HOPPER, "per_token_head"),
    "f32": ({}, dict(dtype="float32"), HOPPER, "kv_cache_dtype"),
    "latent 96": (dict(kv_lora_rank=96), {}, HOPPER, "kv_lora_rank 96"),
    "page 48": ({}, dict(block_size=48), HOPPER, "page size 48"),
    "ampere": ({}, {}, Chip("gpu", "sm_80"), "sm_90"),
    "blackwell": ({}, {}, Chip("gpu", "sm_100"), "sm_90"),
    "cpu": ({}, {}, Chip("cpu"), "platform"),
}


def reasons(spec, cache_spec, chip, needs=()):
    return next(r for r in jattn.explain(spec, cache_spec, chip, needs) if r.name == "mla_pallas_gpu").reasons


@pytest.mark.parametrize("name", SERVED)
def test_is_the_first_choice_for_latent_layers_on_hopper(name):
    cache_spec = mla_cache_spec(DEEPSEEK, 8, **SERVED[name])
    assert not reasons(DEEPSEEK, cache_spec, HOPPER)
    assert MLAAttention(DEEPSEEK, cache_spec, platform=HOPPER).backend_name == "mla_pallas_gpu"


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_one_reason(name):
    fields, cache, chip, why = REFUSED[name]
    spec = dataclasses.replace(DEEPSEEK, **fields)
    cache_spec = mla_cache_spec(spec, 8, **(dict(block_size=64) | cache))
    found = reasons(spec, cache_spec, chip)
    assert MLAAttention(spec, cache_spec, platform=chip).backend_name != "mla_pallas_gpu"
    assert any(why.lower() in reason.lower() for reason in found), found


def test_refuses_keys_on_several_ranks():
    assert reasons(DEEPSEEK, mla_cache_spec(DEEPSEEK, 8, 64), HOPPER, (jattn.Feature.DCP,))


@pytest.mark.parametrize(
    ("query_lens", "dtype", "launches"), [([1, 3], "bfloat16", 3), ([1, 20], "bfloat16", 7), ([1, 3], "float32", 1)]
)
def test_a_step_of_a_model_lowers_for_cuda(query_lens, dtype, launches):
    """A launch, a merge and a write, in the function that both layers call; the write alone for float32 queries. With
    a long prompt, a launch and a merge for its new tokens and for earlier ones, too."""
    config = models.config_of(
        dict(
            model_type="deepseek_v3", vocab_size=67, hidden_size=64, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=16, max_position_embeddings=128, rms_norm_eps=1e-5, eos_token_id=0, kv_lora_rank=128,
            q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16, first_k_dense_replace=2,
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_group=2, topk_group=1,
        )
    )  # fmt: skip
    params = jax.eval_shape(lambda: models.init_params(config, 0, dtype))
    caches = jax.eval_shape(lambda: config.make_caches(8, 16, "bfloat16"))
    meta = jattn.CommonAttentionMetadata.from_lengths(query_lens, [30, 40], [[1, 2, 0], [3, 4, 5]], 16)
    step = jax.jit(lambda params, ids, caches, meta: models.forward(config, params, ids, caches, meta))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    with mock.patch.object(device, "detect", lambda: HOPPER):
        export = jax.export.export(step, platforms=["cuda"], disabled_checks=[check])
        text = export(params, jnp.zeros(sum(query_lens), jnp.int32), caches, meta).mlir_module()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == launches


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 11), reason="the interpreter needs JAX 0.11"
)
@pytest.mark.parametrize("queries", [(1, 3, 0, 2), (1, 20, 5, 9)], ids=["few tokens", "mixed"])
@pytest.mark.parametrize("cached", ["bfloat16", "bfloat16, wide", "float8_e4m3fn"])
def test_a_ragged_batch_is_attention_by_its_definition(queries, cached):
    from tests.kernels.gpu.interpreter import interpreted

    spec, size, totals, dtype, wide = MLASpec(**SIZES), 16, (70, 33, 5, 9), cached.split(",")[0], "wide" in cached
    fields = dict(num_blocks=32, block_size=size, num_kv_heads=1, dtype=dtype)
    split = mla_cache_spec(spec, 32, size, dtype=dtype, quant="per_tensor" if dtype == "float8_e4m3fn" else "none")
    cache_spec = jattn.KVCacheSpec(head_dim=192, v_head_dim=128, **fields) if wide else split
    few_ctas = functools.partial(_with_ctas, mla_pallas_gpu.kernel_config)
    few_ctas = mock.patch.object(mla_pallas_gpu, "kernel_config", few_ctas)
    with few_ctas, by_numpy(), interpreted():
        mla = MLAAttention(spec, cache_spec, "mla_pallas_gpu", HOPPER)
        written = MLAAttention(spec, cache_spec, "mla_sdpa")
        cache, table = written.empty_cache(float("nan"), storage="native"), poisoned_table(totals, size, 32, 8)
        scales = dict(kv_c_scale=0.5) if wide else dict(kv_c_scale=0.5, k_pe_scale=2.0)
        params = mla.prepare_params(MLAParams(kv_b_proj=normal(1, 128, 16, 80) / 12, **scales))
        kv_c, k_pe = (np.asarray(jnp.asarray(normal(s, 117, d), dtype), np.float32) for s, d in ((2, 128), (3, 64)))
        plan = written.build(jattn.CommonAttentionMetadata.from_lengths(totals, totals, table, size))
        cache = written.write(kv_c, k_pe, cache, plan, MLAParams())
        options = dict(num_tokens=sum(queries) + 5, num_reqs=5)
        meta = jattn.CommonAttentionMetadata.from_lengths(queries, totals, table, size, **options)
        q = normal(4, sum(queries) + 5, 16, 96).astype(jnp.bfloat16)
        m = mla.build(meta)
        state = jax.jit(mla.attend)(q, cache, m, params)
        out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse)
    ends = np.cumsum(totals)[:-1]
    rows = np.split(kv_c * 0.5, ends), np.split(k_pe * (0.5 if wide else 2.0), ends)
    count = sum(queries)
    proj = normal(1, 128, 16, 80) / 12
    want, want_lse = latent_attention(np.asarray(q, np.float64)[:count], *rows, proj, queries, nope=32)
    np.testing.assert_allclose(out[:count], want, atol=2e-2)
    np.testing.assert_allclose(lse[:count], want_lse, atol=2e-2)
    assert (out[count:] == 0).all() and np.isneginf(lse[count:]).all()


@pytest.mark.parametrize("queries", [(20, 9, 0), (20, 0, 9, 1, 12, 3)], ids=["prompts", "mixed"])
def test_rows_of_the_absorbed_form_are_those_of_short_requests(queries, monkeypatch):
    spec = MLASpec(**SIZES, scale=0.17)  # a layer of its own: what is patched is seen by fresh traces only
    cache_spec = mla_cache_spec(spec, 32, 16)

    def short(self, q, cache, m, params):
        return jattn.AttentionState(out=q[..., :48] + 1, lse=q[..., 0].astype(jnp.float32))

    monkeypatch.setattr(mla_pallas_gpu.MLAGpuImpl, "_short", short)
    mla = MLAAttention(spec, cache_spec, "mla_pallas_gpu", HOPPER)
    params = mla.prepare_params(MLAParams(kv_b_proj=normal(1, 128, 16, 80) / 12))
    table, count = poisoned_table(queries, 16, 32, 8), sum(queries)
    meta = jattn.CommonAttentionMetadata.from_lengths(queries, queries, table, 16, num_tokens=count + 5, num_reqs=8)
    q = jnp.asarray(normal(4, count + 5, 16, 96), jnp.bfloat16)
    with by_numpy():
        state = mla.attend(q, mla.empty_cache(storage="native"), mla.build(meta), params)
    is_short = np.pad(np.repeat([0 < n <= 8 for n in queries], queries), (0, 5))
    np.testing.assert_array_equal(state.out[is_short], (q[..., :48] + 1)[is_short])
    np.testing.assert_array_equal(state.lse[is_short], q[..., 0][is_short])
    assert (np.asarray(state.out)[~is_short] == 0).all()  # an empty cache
    keys = np.pad(np.concatenate([np.arange(n) + 1.0 for n in queries]), (0, 5))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(state.lse[~is_short, 0], np.log(keys)[~is_short], rtol=1e-6)


def _with_ctas(config, *args):
    """The config with 3 CTAs instead of 132."""
    return dataclasses.replace(config(*args), num_ctas=3)


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 11), reason="the interpreter needs JAX 0.11"
)
def test_the_gradient_of_a_mixed_batch_is_that_of_mla_sdpa():
    from tests.kernels.gpu.interpreter import interpreted

    spec, size, found = MLASpec(**SIZES), 16, []
    cache_spec, table = mla_cache_spec(spec, 8, size), np.array([[1, 2], [3, 4]])
    written = MLAAttention(spec, cache_spec, "mla_sdpa")
    plan = written.build(jattn.CommonAttentionMetadata.from_lengths([20, 9], [20, 9], table, size))
    rows = normal(2, 29, 128), normal(3, 29, 64)
    cache = written.write(*rows, written.empty_cache(storage="native"), plan, MLAParams())
    params, q = MLAParams(kv_b_proj=jnp.asarray(normal(1, 128, 16, 80) / 12)), jnp.asarray(normal(4, 10, 16, 96))
    few_ctas = functools.partial(_with_ctas, mla_pallas_gpu.kernel_config)
    few_ctas = mock.patch.object(mla_pallas_gpu, "kernel_config", few_ctas)
    with few_ctas, by_numpy(), interpreted():
        for mla in (MLAAttention(spec, cache_spec, "mla_pallas_gpu", HOPPER), written):
            m = mla.build(jattn.CommonAttentionMetadata.from_lengths([1, 9], [20, 9], table, size))
            loss = lambda q, p, mla=mla, m=m: (mla.attend(q, cache, m, p).out.astype(jnp.float32) ** 2).sum()  # noqa: E731
            found.append(jax.tree.map(np.asarray, jax.jit(jax.grad(loss, (0, 1)))(q.astype(jnp.bfloat16), params)))
    for mine, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        assert np.linalg.norm(mine - theirs) < 1e-2 * np.linalg.norm(theirs)
