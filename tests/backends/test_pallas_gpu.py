"""`pallas_gpu` on a machine without a GPU: what it takes, what it refuses, and that a whole step lowers for CUDA."""

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn.backends import Feature
from jattn.device import Chip

HOPPER = Chip("gpu", "sm_90")
LAYER = dict(num_heads=8, num_kv_heads=2, head_dim=128)
POOL = dict(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=128)


def reasons(spec=(), cache=(), chip=HOPPER):
    """Why pallas_gpu refuses this layer over this cache."""
    reports = jattn.explain(jattn.AttentionSpec(**LAYER | dict(spec)), jattn.KVCacheSpec(**POOL | dict(cache)), chip)
    return next(report for report in reports if report.name == "pallas_gpu").reasons


def lower(spec, cache_spec, query_lens, causal=True, **params):
    """The custom calls in a step of write and attention, lowered for CUDA."""
    attn = jattn.PagedAttention(spec, cache_spec, backend="pallas_gpu", platform=HOPPER)
    table = [[3 * r, 3 * r + 1, 3 * r + 2] for r in range(len(query_lens))]
    meta = jattn.CommonAttentionMetadata.from_lengths(
        query_lens, [40] * len(query_lens), table, cache_spec.block_size, causal=causal
    )
    tokens = sum(query_lens)
    cache = jax.eval_shape(lambda: jattn.empty_cache(cache_spec, platform="gpu"))
    rows = lambda heads, dim: jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16)
    numbers = jattn.AttentionParams(
        **{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    )

    def step(q, k, v, cache, meta, numbers):
        return attn(q, k, v, cache, attn.build(meta), numbers)

    exported = jax.export.export(
        jax.jit(step, donate_argnums=3),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(
        rows(spec.num_heads, spec.head_dim),
        rows(spec.num_kv_heads, spec.head_dim),
        rows(spec.num_kv_heads, spec.v_head_dim),
        cache,
        meta,
        numbers,
    )
    return exported.mlir_module().count("stablehlo.custom_call @mosaic_gpu_v2")


def test_it_is_the_first_choice_on_hopper():
    attn = jattn.PagedAttention(jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), platform=HOPPER)
    assert attn.backend_name == "pallas_gpu"


def test_a_mixed_batch_is_a_write_one_launch_and_a_merge():
    spec = jattn.AttentionSpec(**LAYER, sliding_window=100, has_sinks=True, logits_soft_cap=30.0)
    assert lower(spec, jattn.KVCacheSpec(**POOL), [1, 1, 33, 5], sinks=(8,)) == 3


def test_a_quantised_decode_with_scales_of_each_head_and_causality_of_each_request_lowers():
    cache_spec = jattn.KVCacheSpec(**POOL, dtype="float8_e4m3fn", quant="per_head")
    assert lower(jattn.AttentionSpec(**LAYER), cache_spec, [1, 1], [True, False], k_scale=(2,), v_scale=(2,)) == 3


REFUSED = [
    (dict(cache=dict(dtype="float32")), "kv_cache_dtype not supported: float32"),
    (dict(cache=dict(block_size=24)), "page size 24: wanted a power of two"),
    (dict(cache=dict(block_size=4)), "block_size not supported: 4"),
    (dict(cache=dict(dtype="int8", quant="per_token_head")), "per_token_head"),
    (dict(chip=Chip("gpu", "sm_80")), "compute capability not supported"),
    (dict(chip=Chip("gpu", "sm_100")), "only sm_90"),
    (dict(chip=Chip("cpu")), "platform not supported: cpu"),
    (dict(spec=dict(attn_type="encoder_decoder", has_alibi=True)), "stand at the end of the keys"),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
def test_what_the_kernel_cannot_do_is_refused_with_its_reason(asked, sentence):
    assert any(sentence in reason for reason in reasons(**asked))


def test_batch_invariance_is_not_promised_where_work_is_split_by_the_batch():
    reports = jattn.explain(
        jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), HOPPER, needs=(Feature.BATCH_INVARIANCE,)
    )
    assert not reports[0].supported and "batch invariance" in reports[0].reasons[0]


def test_float32_queries_over_a_bf16_cache_are_refused_at_the_call():
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    attn = jattn.PagedAttention(spec, cache_spec, platform=HOPPER)
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [3], [[0]], 16)
    with pytest.raises((jattn.UnsupportedError, ValueError), match="dtype"):
        attn.attend(jnp.ones((1, 8, 128)), jattn.empty_cache(cache_spec), attn.build(meta))
