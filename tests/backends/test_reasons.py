"""The reasons of a backend: all of them, in one order, and one for each field of a spec that needs a feature."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import pytest

from jattn.backends import Feature, Question, gpu_kernel, pallas_tpu, registry
from jattn.cache import KVCacheSpec
from jattn.cache.latent import mla_cache_spec
from jattn.device import Chip
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionSpec
from pallas_kernels.algebra import logits, mask
from pallas_kernels.algebra.checks import Reason, Subject
from pallas_kernels.gpu import supports as gpu_supports
from pallas_kernels.tpu import supports as tpu_supports
from tests.backends.toy import CACHE, CPU, SPEC, ToyBackend, derived

CHIP_SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128)
CHIP_CACHE = KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=128)


def test_every_reason_is_given_in_vllms_order_then_ours_then_the_combination():
    picky = derived(
        platforms=("gpu",),
        min_compute_capability=90,
        kv_cache_layouts=("NHD",),
        supports_combination=classmethod(lambda cls, question: "and all of that at once"),
    )
    flags = {f"use_{feature.name.lower()}": True for feature in Feature if feature is not Feature.LSE}
    reasons = picky.validate_configuration(
        7,
        dtype="float16",
        kv_cache_dtype="fp8",
        block_size=5,
        use_mla=True,
        use_sparse=True,
        attn_type="encoder",
        device_capability=Chip("gpu", "sm_80"),
        kv_cache_layout="HND",
        quant="per_head",
        **flags,
    )
    starts = [
        "head_size not supported",
        "dtype not supported",
        "kv_cache_dtype not supported",
        "block_size not supported",
        "partial multimodal token full attention not supported",
        "MLA not supported",
        "attention sinks not supported",
        "sparse not supported",
        "per-head quant scales not supported",
        "compute capability not supported",
        "attention type encoder not supported",
        "sliding window not supported",
        "R-SWA not supported",
        "non-causal attention not supported",
        "non-causal MLA attention with DCP not supported",
        "batch invariance not supported",
        "KV connector not supported",
        "PCP not supported",
        "DCP not supported",
        "device-cpu query lens mismatch not supported",
    ]
    ours = [f"{f} not supported" for f in list(Feature)[list(Feature).index(Feature.TWO_SIDED_WINDOW) :]]
    starts += [reason for reason in ours if not reason.startswith(Feature.LSE)]
    starts += ["kv_cache_layout not supported", "quant not supported", "and all of that at once"]
    assert [reason.split(":")[0] for reason in reasons] == starts


def test_platform_is_ours_and_comes_late():
    reasons = derived(platforms=("gpu",)).validate_configuration(7, device_capability=CPU)
    assert [reason.split(":")[0] for reason in reasons] == ["head_size not supported", "platform not supported"]
    assert reasons[1] == "platform not supported: cpu seen, gpu supported"


def test_a_reason_says_what_was_seen_and_what_is_supported():
    reasons = ToyBackend.validate_configuration(24, dtype=jnp.bfloat16, block_size=6, quant="per_head")
    assert reasons == [
        "head_size not supported: 24 seen, 8, 16 supported",
        "dtype not supported: bfloat16 seen, float32 supported",
        "block_size not supported: 6 seen, multiples of 4 supported",
        "quant not supported: 'per_head' seen, 'none' supported",
    ]


def test_mla_and_sparse_are_refused_both_ways():
    plain, latent = ToyBackend, derived(mla=True, sparse=True)
    assert plain.validate_configuration(8) == [] == latent.validate_configuration(8, use_mla=True, use_sparse=True)
    assert [r.split(":")[0] for r in plain.validate_configuration(8, use_mla=True, use_sparse=True)] == [
        "MLA not supported",
        "sparse not supported",
    ]
    assert latent.validate_configuration(8) == [
        "non-MLA not supported: for latent caches (MLA) only",
        "non-sparse not supported: for listed tokens only",
    ]


LATENT = MLASpec(num_heads=8, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
ONE_FACT = {
    "pallas_tpu": (CHIP_SPEC, dataclasses.replace(CHIP_CACHE, block_size=8), Chip("tpu")),
    "pallas_tpu_invariant": (CHIP_SPEC, dataclasses.replace(CHIP_CACHE, block_size=24), Chip("tpu")),
    "mla_pallas_tpu": (LATENT, mla_cache_spec(LATENT, 8, 8), Chip("tpu")),
    "mla_pallas_gpu": (LATENT, mla_cache_spec(LATENT, 8, 4), Chip("gpu", "sm_90")),
}


@pytest.mark.parametrize("name", ONE_FACT)
def test_a_block_size_is_refused_once(name):
    """By the list, and not by the kernel in other words."""
    spec, cache_spec, chip = ONE_FACT[name]
    reasons = registry.load(name).reasons(spec, cache_spec, chip)
    assert [reason.split(":")[0] for reason in reasons] == ["block_size not supported"]


def test_what_else_a_kernel_refuses_is_told_beside_a_block_size():
    dims = dict(head_dim=40, num_kv_heads=2)
    spec, cache_spec = AttentionSpec(num_heads=8, **dims), KVCacheSpec(num_blocks=8, block_size=8, **dims)
    found = registry.load("pallas_tpu").reasons(spec, cache_spec, Chip("tpu"))
    assert found == (
        "block_size not supported: 8 seen, multiples of 16 supported",
        "head_dim 40: wanted a multiple of 16 from 16 to 256",
        "v_head_dim 40: wanted a multiple of 16 from 16 to 256",
    )
    large = dataclasses.replace(cache_spec, num_blocks=2**27)  # pages of 16 would be too many
    assert registry.load("pallas_tpu").reasons(spec, large, Chip("tpu")) == found
    lanes = KVCacheSpec(num_blocks=8, block_size=8, num_kv_heads=2, head_dim=32, layout="HND128")
    (only,) = registry.load("pallas_tpu").reasons(
        AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=32), lanes, Chip("tpu", "v6e")
    )
    assert only.startswith("block_size not supported: 8"), "it is not told of another layout's pages"


@pytest.mark.parametrize("block_size", [12, 16])
def test_too_little_memory_is_told_beside_any_block_size(block_size):
    dims = dict(head_dim=192, num_kv_heads=128)
    spec, cache_spec = AttentionSpec(num_heads=896, **dims), KVCacheSpec(num_blocks=8, block_size=block_size, **dims)
    found = registry.load("pallas_tpu").reasons(spec, cache_spec, Chip("tpu"))
    assert ["bytes of VMEM (128 kv heads)" in reason for reason in found] == [False] * (block_size == 12) + [True]


@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_tpu_invariant"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_too_little_memory_is_told_once_for_the_queries_that_are_asked_about(name, dtype):
    dims = dict(head_dim=192, num_kv_heads=128)
    spec, cache_spec = AttentionSpec(num_heads=896, **dims), KVCacheSpec(num_blocks=8, block_size=16, **dims)
    (found,) = registry.load(name).reasons(spec, cache_spec, Chip("tpu"), (), (dtype,))
    wanted = pallas_tpu.kernel_config(spec, cache_spec, dtype).vmem_bytes() + tpu_supports.SPILL
    assert found.startswith(f"{wanted} bytes of VMEM")


def test_what_a_reason_is_about_is_not_read_from_its_words():
    def own(*reasons):
        return derived(layer_reasons=classmethod(lambda cls, *layer: reasons))

    listed = "block_size not supported: 6 seen, multiples of 4 supported"
    cache_spec = dataclasses.replace(CACHE, block_size=6)
    plain, other = "over page size 6: no such library", Reason("no memory", Subject.MEMORY)
    assert own(plain, other).reasons(SPEC, cache_spec, CPU) == (listed, plain, other)
    assert own(Reason("six is odd", Subject.PAGE_SIZE)).reasons(SPEC, cache_spec, CPU) == (listed,)
    assert own(Reason("six is odd", Subject.PAGE_SIZE)).reasons(SPEC, CACHE, CPU) == ("six is odd",)


def test_a_reason_keeps_what_it_is_about_in_a_copy():
    reason = Reason("too large", Subject.MEMORY)
    for copied in (copy.deepcopy(reason), pickle.loads(pickle.dumps(reason))):
        assert copied == "too large" and copied.about is Subject.MEMORY


def test_a_combination_may_be_refused_where_its_parts_are_not():
    class Either(ToyBackend):
        features = ToyBackend.features | {Feature.SINK}

        @classmethod
        def supports_combination(cls, question):
            both = question.needs_feature(Feature.SINK) and question.head_size == 16
            return "sinks with head_size 16 not supported" if both else None

    assert Either.validate_configuration(8, has_sink=True) == Either.validate_configuration(16) == []
    assert Either.validate_configuration(16, has_sink=True) == ["sinks with head_size 16 not supported"]


def test_a_method_may_be_overridden_instead_of_the_data():
    sinks = derived(supports_sink=classmethod(lambda cls: True))
    assert sinks.validate_configuration(8, has_sink=True) == []


def test_an_unknown_keyword_is_refused():
    with pytest.raises(ValueError, match="use_magic: not known; use .*has_sink.*use_mla"):
        ToyBackend.validate_configuration(8, use_magic=True)


NEEDS = [
    (dict(has_sinks=True), {}, Feature.SINK),
    (dict(sliding_window=4), {}, Feature.SLIDING_WINDOW),
    (dict(sliding_window=(-1, 2)), {}, Feature.TWO_SIDED_WINDOW),
    (dict(chunk_size=4), {}, Feature.CHUNK),
    (dict(chunk_size=4, chunk_lookback=1), {}, Feature.CHUNK_LOOKBACK),
    (dict(has_alibi=True), {}, Feature.ALIBI),
    (dict(has_alibi=True, use_alibi_sqrt=True), {}, Feature.ALIBI_SQRT),
    (dict(sliding_window=4, use_rswa=True), {}, Feature.RSWA),
    (dict(use_mm_prefix=True), {}, Feature.MM_PREFIX),
    (dict(logits_soft_cap=5.0), {}, Feature.SOFT_CAP),
    (dict(mask_fn=lambda h, q, k: k <= q), {}, Feature.MASK_FN),
    (dict(score_fn=lambda s, h, q, k: s), {}, Feature.SCORE_FN),
    (dict(v_head_dim=16), dict(v_head_dim=16), Feature.DIFF_KV),
    (dict(use_qq_bias=True), {}, Feature.QQ_BIAS),
    (dict(use_distance_bias=True), {}, Feature.DISTANCE_BIAS),
    (dict(output_dtype="int8"), {}, Feature.FUSED_OUTPUT_QUANT),
    (dict(compute_dtype="float8_e4m3fn"), {}, Feature.EIGHT_BIT_PRODUCTS),
    ({}, dict(dtype="int8", quant="per_head"), Feature.PER_HEAD_QUANT_SCALES),
]


@pytest.mark.parametrize(("layer", "cache", "feature"), NEEDS, ids=[feature.name for *_, feature in NEEDS])
def test_each_field_of_a_spec_asks_for_its_feature(layer, cache, feature):
    spec, cache_spec = dataclasses.replace(SPEC, **layer), dataclasses.replace(CACHE, **cache)
    asked = {name for name, _ in Question.of(spec, cache_spec, CPU).needs}
    assert feature in asked and asked <= {feature, Feature.LSE, Feature.SLIDING_WINDOW, Feature.CHUNK, Feature.ALIBI}
    able = derived(
        features=ToyBackend.features | asked,
        supported_kv_cache_dtypes=("float32", "int8"),
        quant_modes=("none", "per_head"),
    )
    assert able.reasons(spec, cache_spec, CPU) == ()
    without = derived(
        features=able.features - {feature},
        supported_kv_cache_dtypes=able.supported_kv_cache_dtypes,
        quant_modes=able.quant_modes,
    )
    assert [reason.split(":")[0] for reason in without.reasons(spec, cache_spec, CPU)] == [f"{feature} not supported"]


def test_every_field_of_a_spec_is_asked_for_by_a_feature_or_is_everybodys():
    """Without this test, backends could ignore a field that is in neither list."""
    everybodys = {"num_heads", "head_dim", "num_kv_heads", "scale", "attn_type"}
    with_another = {"mm_prefix_clamp_sliding_window"}  # changes MM_PREFIX, and is allowed only with it
    asked = {name for layer, _, _ in NEEDS for name in layer}
    assert {field.name for field in dataclasses.fields(SPEC)} == asked | everybodys | with_another


RULES = [
    (mask.MaskRule(), dict(lookback=1)),
    (mask.MaskRule(), dict(prefix=True)),
    (mask.MaskRule(), dict(spans=True)),
    (mask.MaskRule(), dict(clamp_spans=True)),
    (logits.LogitRule(1.0), dict(alibi_sqrt=True)),
]


@pytest.mark.parametrize(("rule", "field"), RULES, ids=[next(iter(field)) for _, field in RULES])
def test_a_chips_kernel_refuses_a_field_of_a_rule_that_it_does_not_list(rule, field):
    """Also if the kernel is called directly: it would leave the field out of its mask."""
    ((name, value),) = field.items()
    for module, kernel in ((gpu_kernel, gpu_supports), (pallas_tpu, tpu_supports)):
        config = module.kernel_config(CHIP_SPEC, CHIP_CACHE, "bfloat16")
        assert not kernel.supports(config)
        which = "mask" if isinstance(rule, mask.MaskRule) else "logits"
        changed = dataclasses.replace(config, **{which: dataclasses.replace(getattr(config, which), **field)})
        listed = name in (*kernel.MASKS, *kernel.LOGITS)
        assert kernel.supports(changed) == ([] if listed else [f"{name}={value}: not in this kernel"])


def test_a_plain_window_looks_left_only_unless_the_type_has_no_causality():
    asked = lambda spec: {feature for feature, _ in Question.of(spec, CACHE).needs}
    assert Feature.TWO_SIDED_WINDOW not in asked(dataclasses.replace(SPEC, sliding_window=4))
    encoder = dataclasses.replace(SPEC, sliding_window=4, attn_type="encoder_only")
    assert Feature.TWO_SIDED_WINDOW in asked(encoder)


def test_packed_attention_is_a_feature_and_own_reasons_come_before_the_combination():
    own = derived(layer_reasons=classmethod(lambda cls, spec, cache_spec, chip: ("no such library",)))
    assert own.reasons(SPEC, CACHE, CPU) == ("no such library",)
    assert own.reasons(SPEC, None, CPU) == (
        "attention without a cache not supported: no cache_spec given",
        "no such library",
    )
