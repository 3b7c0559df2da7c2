"""`pallas_gpu` on a machine without a GPU: what it supports and refuses, and that a step can be lowered for CUDA."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import device
from jattn.backends import Feature, gpu_kernel, gpu_plan, pallas_gpu, resolve
from jattn.backends.split import Halves
from jattn.device import Chip
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu import paged_attention_sm90
from pallas_kernels.gpu.config_sm80 import CHIPS, WarpKernelConfig

HOPPER = Chip("gpu", "sm_90")
LAYER = dict(num_heads=8, num_kv_heads=2, head_dim=128)
POOL = dict(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=128)


def reasons(spec=(), cache=(), chip=HOPPER):
    """Why pallas_gpu refuses this layer over this cache."""
    reports = jattn.explain(jattn.AttentionSpec(**LAYER | dict(spec)), jattn.KVCacheSpec(**POOL | dict(cache)), chip)
    return next(report for report in reports if report.name == "pallas_gpu").reasons


def lower(
    spec, cache_spec, query_lens, causal=True, chip=HOPPER, backend="pallas_gpu", reach=None, max_seq_len=4096, **params
):
    """The custom calls in a step of write and attention, lowered for CUDA."""
    attn = jattn.PagedAttention(spec, cache_spec, backend=backend, platform=chip)
    table = [[3 * r, 3 * r + 1, 3 * r + 2] for r in range(len(query_lens))]
    meta = jattn.CommonAttentionMetadata.from_lengths(
        query_lens, [40] * len(query_lens), table, cache_spec.block_size, causal=causal, **reach or {}
    ).replace(max_seq_len=max_seq_len)
    tokens = sum(query_lens)
    cache = jax.eval_shape(lambda: jattn.empty_cache(cache_spec, platform="gpu"))
    rows = lambda heads, dim: jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16)
    numbers = jattn.AttentionParams(
        **{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    )

    def step(q, k, v, cache, meta, numbers):
        return attn(q, k, v, cache, attn.build(meta), numbers)

    q, k, v = (
        rows(*shape)
        for shape in (
            (spec.num_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim),
            (spec.num_kv_heads, spec.v_head_dim),
        )
    )
    return launches(jax.jit(step, donate_argnums=3), q, k, v, cache, meta, numbers)


def launches(f, *args) -> int:
    """Mosaic GPU calls in f(*args), lowered for CUDA."""
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    exported = jax.export.export(f, platforms=["cuda"], disabled_checks=[check])(*args)
    return exported.mlir_module().count("stablehlo.custom_call @mosaic_gpu_v2")


def test_it_is_the_first_choice_on_hopper():
    attn = jattn.PagedAttention(jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), platform=HOPPER)
    assert attn.backend_name == "pallas_gpu"


def test_explain_names_the_kernel_of_the_chip():
    reports = jattn.explain(jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), platform=HOPPER)
    assert reports[0].name == "pallas_gpu" and reports[0].kernel == "Hopper's kernel (TMA and wgmma)"
    assert reports[0].kernel in str(reports)
    assert all(report.kernel == "" for report in reports if not report.supported)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("layer", "pool", "new_tokens", "crowded"),
    [
        ({}, {}, 400, False),
        (dict(head_dim=256), dict(head_dim=256), 400, True),
        (dict(head_dim=256), dict(head_dim=256), 1, False),
        ({}, dict(dtype="float8_e4m3fn", quant="per_tensor"), 400, True),
        ({}, dict(dtype="float8_e4m3fn", quant="per_tensor"), 1, False),
    ],
)
def test_tiles_that_need_registers_of_their_own_are_hoppers_only_if_they_get_them(
    layer, pool, new_tokens, crowded, keeps
):
    spec, cache_spec = jattn.AttentionSpec(**LAYER | layer), jattn.KVCacheSpec(**POOL | pool)
    meta = jattn.CommonAttentionMetadata.from_lengths([new_tokens], [400], [[*range(25)]], 16)
    with (
        mock.patch.object(device, "detect", lambda: HOPPER),
        mock.patch.object(device, "keeps_registers", lambda: keeps),
    ):
        config = gpu_kernel.kernel_config(spec, cache_spec, "bfloat16", meta, HOPPER)
    assert isinstance(config, WarpKernelConfig) == (crowded and not keeps)
    assert not gpu_kernel.config_reasons(config)
    with mock.patch.object(device, "keeps_registers", lambda: keeps):  # JAX that compiles for a GPU that is not here
        assert not isinstance(gpu_kernel.kernel_config(spec, cache_spec, "bfloat16", meta, HOPPER), WarpKernelConfig)


def test_registers_are_kept_by_ptxas_and_not_by_nvjitlink(monkeypatch):
    for version, found, keeps in (((0, 11, 2), True, True), ((0, 12, 0), False, True), ((0, 12, 0), True, False)):
        monkeypatch.setattr(jax, "__version_info__", version)
        monkeypatch.setattr(device, "_is_installed", lambda plugin: plugin == "jax_plugins.xla_cuda13")
        monkeypatch.setattr(device, "_can_be_loaded", lambda library, found=found: found and library.endswith(".13"))
        device.keeps_registers.cache_clear()
        assert device.keeps_registers() == keeps
    device.keeps_registers.cache_clear()


WARP_CHIPS = tuple(chip for chip in CHIPS if chip != "sm_90")


@pytest.mark.parametrize("generation", WARP_CHIPS)
def test_other_chips_take_the_warp_level_kernel_where_jax_lowers_for_them(generation):
    chip, cache_spec = Chip("gpu", generation), jattn.KVCacheSpec(**POOL)
    if jax.__version_info__ < (0, 12):
        assert any("wanted JAX 0.12" in reason for reason in reasons(chip=chip))
        return
    attn = jattn.PagedAttention(jattn.AttentionSpec(**LAYER), cache_spec, platform=chip)
    assert attn.backend_name == "pallas_gpu"
    for quant in ("per_tensor", "per_head", "per_token_head"):
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
            assert not reasons(chip=chip, cache=dict(dtype=dtype, quant=quant))
    report = jattn.explain(attn.spec, cache_spec, platform=chip)[0]
    assert report.kernel.startswith("the warp-level kernel") and generation in report.kernel
    config = gpu_kernel.kernel_config(attn.spec, cache_spec, "bfloat16", chip=chip)
    assert isinstance(config, WarpKernelConfig) and config.chip == generation


@pytest.mark.parametrize("target", ["sm_90a", "sm_80a", "sm_100f", "sm_120a"])
def test_a_chip_is_the_same_by_the_name_of_a_compilers_target(target):
    """Each was refused, and 'auto' took sdpa."""
    layer = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    named, plain = Chip("gpu", target), Chip("gpu", target[:-1])
    assert jattn.explain(*layer, platform=named) == jattn.explain(*layer, platform=plain)
    assert jattn.PagedAttention(*layer, platform=named) == jattn.PagedAttention(*layer, platform=plain)


@pytest.mark.parametrize(
    ("platform", "way_out"), [("sm_86", r"Chip\('gpu', 'sm_86'\)"), (86, "Chip"), (Chip("gpu", 86), "must be a text")]
)
def test_a_chip_that_is_none_is_refused_with_one_that_is(platform, way_out):
    with pytest.raises(ValueError, match=way_out):
        jattn.explain(jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), platform=platform)


def test_no_version_of_jax_is_asked_for_where_none_helps(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert gpu_kernel.version_reasons(Chip("gpu", "sm_86"))
    assert not gpu_kernel.version_reasons(Chip("gpu", "sm_75"))


def test_a_card_gets_as_many_ctas_as_its_own_multiprocessors_hold(monkeypatch):
    """An L4 has 58, and an RTX 4090, of the same chip, 128. A chip that is only named gets those of its largest."""
    monkeypatch.setattr(jattn.device, "processors", lambda: 58)
    layer = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), "bfloat16"
    for here, counts in (("sm_89", (58, 116)), ("sm_80", (128, 256))):
        monkeypatch.setattr(jattn.device, "detect", lambda here=here: Chip("gpu", here))
        assert gpu_kernel.kernel_config(*layer, chip=Chip("gpu", "sm_89")).num_ctas in counts


def test_a_chips_name_takes_the_warp_level_kernel_on_a_hopper_card(monkeypatch):
    """JAX of any version lowers it for sm_90: a write, one launch, a merge."""
    monkeypatch.setattr(jattn.device, "detect", lambda: HOPPER)
    layer = jattn.AttentionSpec(**LAYER, sliding_window=100, has_sinks=True, logits_soft_cap=30.0)
    seen = []
    launch = paged_attention_sm90.launch_warps
    monkeypatch.setattr(paged_attention_sm90, "launch_warps", lambda *args: seen.append(args[0].chip) or launch(*args))
    cache_spec = jattn.KVCacheSpec(**POOL)
    assert lower(layer, cache_spec, [1, 1, 33, 5], chip=Chip("gpu", "sm_80"), sinks=(8,)) == 3
    assert seen == ["sm_80"]


def test_a_mixed_batch_is_a_write_one_launch_and_a_merge():
    spec = jattn.AttentionSpec(**LAYER, sliding_window=2000, has_sinks=True, logits_soft_cap=30.0)
    assert lower(spec, jattn.KVCacheSpec(**POOL), [1, 1, 33, 5], sinks=(8,)) == 3


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 33]], ids=["decode", "mixed"])
def test_few_keys_are_not_cut_and_no_launch_merges_them(query_lens):
    cache_spec = jattn.KVCacheSpec(**POOL)
    assert lower(jattn.AttentionSpec(**LAYER), cache_spec, query_lens, max_seq_len=512) == 2
    assert lower(jattn.AttentionSpec(**LAYER, sliding_window=100), cache_spec, query_lens) == 2


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 33]], ids=["decode", "mixed"])
def test_a_prefix_beside_a_window_has_a_launch_of_its_own(query_lens):
    """What lies between them is then in neither work list."""
    spec = jattn.AttentionSpec(**LAYER, sliding_window=4, use_rswa=True, has_sinks=True)
    reach = dict(rswa_prefix_lens=[3] * len(query_lens))
    assert lower(spec, jattn.KVCacheSpec(**POOL), query_lens, reach=reach, sinks=(8,)) == 4


@pytest.mark.parametrize("query_lens", [[30], [3] * 4, [1] * 4], ids=["prompt", "12 rows", "decode"])
def test_each_launch_of_rswa_has_the_list_of_its_config(query_lens, monkeypatch):
    """The prefix's list was of the window's blocks: keys past the prefix were seen, and tiles were left out."""
    listed, launched = [], []
    build, launch = gpu_plan.build_work_list, pallas_gpu.ragged_paged_attention
    part = lambda c: (c.block_kv, c.workers, c.tile_rows, c.flat_list, c.long_tiles, c.whole_units, c.mask)
    monkeypatch.setattr(gpu_plan, "build_work_list", lambda *a, **k: (listed.append(part(a[3])), build(*a, **k))[1])
    monkeypatch.setattr(
        pallas_gpu, "ragged_paged_attention", lambda *a, **k: (launched.append(part(a[5])), launch(*a, **k))[1]
    )
    spec = jattn.AttentionSpec(**LAYER, sliding_window=127, use_rswa=True)
    lower(spec, jattn.KVCacheSpec(**POOL), query_lens, reach=dict(rswa_prefix_lens=[3] * len(query_lens)))
    assert len(listed) == 2 and sorted(map(repr, listed)) == sorted(map(repr, launched))


def test_an_invariant_layer_has_the_same_tiles_whatever_its_batch_is():
    spec = jattn.AttentionSpec(**LAYER, sliding_window=127)
    table = [[0, 1, 2], [3, 4, 5]]
    of = lambda causal: jattn.CommonAttentionMetadata.from_lengths([1, 33], [40, 40], table, 16, causal=causal)
    cache = jattn.KVCacheSpec(**POOL)
    configs = [gpu_kernel.kernel_config(spec, cache, "bfloat16", of(c), invariant=True) for c in (True, [True, False])]
    same = [dataclasses.replace(c, mask=MaskRule(), per_request_causal=False) for c in configs]
    assert same[0] == same[1]


def test_a_quantised_decode_with_scales_of_each_head_and_causality_of_each_request_lowers():
    cache_spec = jattn.KVCacheSpec(**POOL, dtype="float8_e4m3fn", quant="per_head")
    assert lower(jattn.AttentionSpec(**LAYER), cache_spec, [1, 1], [True, False], k_scale=(2,), v_scale=(2,)) == 3


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 33]], ids=["decode", "mixed"])
def test_a_cache_with_a_scale_for_each_token_and_head_lowers(query_lens):
    cache_spec = jattn.KVCacheSpec(**POOL, dtype="int8", quant="per_token_head", layout="NHD")
    assert not reasons(cache=dict(dtype="int8", quant="per_token_head"))
    assert lower(jattn.AttentionSpec(**LAYER, sliding_window=2000), cache_spec, query_lens, v_scale=()) == 3


PACKED = {
    "causal": (dict(logits_soft_cap=30.0), [5, 33, 1]),
    "encoder": (dict(attn_type="encoder_only", sliding_window=(9, 3)), [40, 17]),
    "D 64, per request": (dict(head_dim=64, has_sinks=True), [8, 9]),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_keys_are_the_kernels_too_and_their_gradient_is_that_of_sdpa(name, monkeypatch):
    """One launch: with so few keys none is cut. The gradient of a linear loss needs none, so it can be computed here.

    Layers whose gradient is cuDNN's are in test_cudnn_gradient.py.
    """
    options, lens = PACKED[name]
    monkeypatch.setattr(jattn.device, "detect", lambda: HOPPER)
    spec = jattn.AttentionSpec(**LAYER | options)
    causal = [True, False] if "per request" in name else True
    meta = jattn.CommonAttentionMetadata.from_lengths(lens, lens, None, 1, num_tokens=80, num_reqs=4, causal=causal)
    shapes = [(80, heads, spec.head_dim) for heads in (8, 2, 2, 8)]
    rows = [
        jax.random.normal(key, x, jnp.bfloat16)
        for key, x in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    ]
    params = jattn.AttentionParams(sinks=jnp.linspace(-1, 1, 8) if spec.has_sinks else None)

    def step(backend, q, k, v, params):
        return jattn.attention(q, k, v, meta, spec, params, backend=backend).out

    assert launches(jax.jit(functools.partial(step, "pallas_gpu")), *rows[:3], params) == 1
    loss = lambda *args: (step(*args).astype(jnp.float32) * rows[3].astype(jnp.float32)).sum()
    mine, theirs = (
        jax.jit(jax.grad(functools.partial(loss, backend), (0, 1, 2, 3)))(*rows[:3], params)
        for backend in ("pallas_gpu", "sdpa")
    )
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, atol=2.0**-7 * np.abs(want).max())


@pytest.mark.parametrize(
    ("q", "k", "chosen"),
    [("bfloat16",) * 2 + ("pallas_gpu",), ("float32",) * 2 + ("sdpa",), ("bfloat16", "float32", "sdpa")],
)
def test_auto_gives_packed_keys_to_the_kernel_where_it_takes_their_dtypes(q, k, chosen):
    spec = jattn.AttentionSpec(**LAYER)
    dtypes = (jnp.dtype(q), jnp.dtype(k))
    assert resolve(spec, None, platform=HOPPER, dtypes=dtypes).get_name() == chosen
    assert Halves().choose(spec, None, HOPPER, dtypes=dtypes)["prefill"].get_name() == chosen


INT8 = dict(dtype="int8", quant="per_head")
REFUSED = [
    (dict(cache=dict(dtype="float32")), "kv_cache_dtype not supported: float32"),
    (dict(chip=Chip("gpu", "sm_75")), "compute capability not supported"),
    (dict(chip=Chip("gpu", "sm_130")), "chip sm_130: wanted one of sm_80"),
    (dict(chip=Chip("gpu", "nvidia_h200")), "chip nvidia_h200: wanted one of sm_80"),
    (dict(spec=dict(num_heads=129, num_kv_heads=1), cache=dict(num_kv_heads=1)), "129 query heads on one kv head"),
    (
        dict(chip=Chip("gpu", "sm_86"), spec=dict(head_dim=80), cache=dict(INT8, head_dim=80)),
        "with an 8-bit cache: wanted a multiple of 32",
    ),
    (dict(chip=Chip("cpu")), "platform not supported: cpu"),
    (dict(spec=dict(attn_type="encoder_decoder", has_alibi=True)), "aligns the last query with the last key"),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
def test_what_the_kernel_cannot_do_is_refused_with_its_reason(asked, sentence):
    assert any(sentence in reason for reason in reasons(**asked))


def test_packed_keys_of_another_kind_than_the_queries_are_refused_at_the_call(monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: HOPPER)
    meta = jattn.CommonAttentionMetadata.from_lengths([4], [4], None, 1)
    q, kv = jnp.ones((4, 8, 128), jnp.bfloat16), jnp.ones((4, 2, 128), jnp.float16)
    with pytest.raises(jattn.UnsupportedError, match="kv dtype float16 with q bfloat16"):
        jattn.attention(q, kv, kv, meta, jattn.AttentionSpec(**LAYER), backend="pallas_gpu")


def test_packed_cross_attention_has_no_positions():
    spec = jattn.AttentionSpec(**LAYER, attn_type="encoder_decoder", has_alibi=True)
    reports = {report.name: report.reasons for report in jattn.explain(spec, None, HOPPER)}
    assert any("aligns the last query with the last key" in reason for reason in reports["pallas_gpu"])


def test_batch_invariance_is_not_promised_where_work_is_split_by_the_batch():
    reports = jattn.explain(
        jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), HOPPER, needs=(Feature.BATCH_INVARIANCE,)
    )
    assert not reports[0].supported and "batch invariance" in reports[0].reasons[0]
    assert reports[1].name == "pallas_gpu_invariant" and reports[1].supported


def test_float32_queries_over_a_bf16_cache_are_refused_at_the_call():
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    attn = jattn.PagedAttention(spec, cache_spec, platform=HOPPER)
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [3], [[0]], 16)
    with pytest.raises((jattn.UnsupportedError, ValueError), match="dtype"):
        attn.attend(jnp.ones((1, 8, 128)), jattn.empty_cache(cache_spec), attn.build(meta))
