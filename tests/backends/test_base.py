"""AttentionBackend, AttentionImpl, AttentionMetadataBuilder: what they say, and what can be made from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jattn import backends
from jattn.backends import AttentionCGSupport, AttentionType, ContextParallel, Feature, MultipleOf, Question
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.spec import AttentionParams, AttentionSpec
from tests.backends.toy import ToyBackend, ToyBuilder, ToyImpl, ToyMetadata

CPU = Chip("cpu")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE = KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
BUILDER = ToyBuilder(SPEC, CACHE, CPU)


def batch(query_lens=(3, 1), seq_lens=(3, 5), **options):
    table = np.arange(2 * len(query_lens)).reshape(-1, 2)
    return CommonAttentionMetadata.from_lengths(list(query_lens), list(seq_lens), table, 4, **options)


def derived(**overrides) -> type[backends.AttentionBackend]:
    """A backend that differs from the toy in these attributes."""
    return backends.subclass_attention_backend_with_overrides("Other", ToyBackend, overrides)


# What a backend says


def test_a_backend_is_never_instantiated():
    with pytest.raises(TypeError, match="ToyBackend is never instantiated"):
        ToyBackend()


def test_defaults_are_vllms_and_every_feature_is_refused():
    base = backends.AttentionBackend
    assert base.get_supported_dtypes() == ("float16", "bfloat16")
    assert base.supported_kv_cache_dtypes == ("auto", "float16", "bfloat16")
    assert base.get_supported_kernel_block_sizes() == (MultipleOf(1),)
    assert base.get_supported_head_sizes() == () and base.supports_head_size(7)
    assert not any(base.supports(feature) for feature in Feature)
    assert not any((base.is_mla(), base.is_sparse(), base.is_ssm(), base.supports_sink(), base.supports_mm_prefix()))
    assert [t for t in AttentionType if base.supports_attn_type(t)] == [AttentionType.DECODER]
    assert base.get_required_kv_cache_layout() is None
    assert all(base.supports_platform(platform) for platform in ("cpu", "gpu", "tpu"))
    assert base.supports_compute_capability(0) and base.supports_compute_capability(75)


@pytest.mark.parametrize(
    ("listed", "asked", "answer"),
    [
        (("auto",), None, True),
        ((), "int8", True),
        (("auto",), "auto", True),
        (("auto",), "bfloat16", False),
        (("auto", "bfloat16"), jnp.bfloat16, True),
        (("float8_e4m3fn",), "fp8", True),
        (("float8_e4m3fn",), "fp8_e4m3", True),
        (("float8_e4m3fn",), "fp8_e5m2", False),
        (("int8",), "int8_per_token_head", True),
        (("auto",), "nvfp4", False),
    ],
)
def test_supports_kv_cache_dtype(listed, asked, answer):
    assert derived(supported_kv_cache_dtypes=listed).supports_kv_cache_dtype(asked) is answer


@pytest.mark.parametrize(
    ("listed", "asked", "answer"),
    [
        ((MultipleOf(16),), None, True),
        ((), 3, True),
        ((MultipleOf(16),), 48, True),
        ((MultipleOf(16),), 24, False),
        ((64,), 64, True),
        ((64,), 128, True),  # pages can be split
        ((64,), 32, False),
        ((64, MultipleOf(24)), 48, True),
        ((MultipleOf(1),), 17, True),
    ],
)
def test_supports_block_size(listed, asked, answer):
    assert derived(supported_block_sizes=listed).supports_block_size(asked) is answer


def test_preferred_block_size_is_the_default_where_it_can_be():
    fixed = derived(supported_block_sizes=(64, MultipleOf(24)))
    assert fixed.get_preferred_block_size(128) == 128
    assert fixed.get_preferred_block_size(16) == 24
    assert derived(supported_block_sizes=()).get_preferred_block_size(7) == 7


@pytest.mark.parametrize(
    ("name", "quantised"),
    [("auto", False), ("bfloat16", False), ("float32", False), ("fp8", True), ("fp8_e5m2", True)]
    + [("float8_e4m3fn", True), ("int8", True), ("int8_per_token_head", True), ("nvfp4", True)],
)
def test_is_quantized_kv_cache(name, quantised):
    assert backends.is_quantized_kv_cache(name) is quantised


def test_head_size_is_refused_in_vllms_words_with_our_way_out():
    ToyBackend.validate_head_size(8)
    with pytest.raises(ValueError) as refused:
        ToyBackend.validate_head_size(24)
    assert str(refused.value) == (
        "Head size 24 is not supported by Toy. Supported head sizes are: [8, 16]. "
        "Use backend='sdpa', which supports all head sizes."
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_stride_order_takes_the_logical_shape_to_the_stored_one(layout):
    backend = derived(kv_cache_layouts=(layout,))
    shape = backend.get_kv_cache_shape(8, 4, 2, 16)
    order = backend.get_kv_cache_stride_order()
    stored = KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=16, layout=layout).shape
    assert tuple(shape[axis] for axis in order) == stored
    with_layers = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert tuple((3, *shape)[axis] for axis in with_layers) == (3, *stored)
    assert backend.get_required_kv_cache_layout() == layout


def test_without_a_required_layout_the_order_is_that_of_auto():
    spec = dataclasses.replace(CACHE, layout="auto")
    shape = ToyBackend.get_kv_cache_shape(8, 4, 2, 8)
    assert tuple(shape[axis] for axis in ToyBackend.get_kv_cache_stride_order()) == spec.shape


def test_full_cls_name():
    assert ToyBackend.full_cls_name() == ("tests.backends.toy", "ToyBackend")


# Reasons: all of them, in one order


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
    assert [r.split(":")[0] for r in latent.validate_configuration(8)] == [
        "non-MLA not supported",
        "non-sparse not supported",
    ]


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
    (dict(has_alibi=True), {}, Feature.ALIBI),
    (dict(logits_soft_cap=5.0), {}, Feature.SOFT_CAP),
    (dict(mask_fn=lambda h, q, k: k <= q), {}, Feature.MASK_FN),
    (dict(score_fn=lambda s, h, q, k: s), {}, Feature.SCORE_FN),
    (dict(v_head_dim=16), dict(v_head_dim=16), Feature.DIFF_KV),
    ({}, dict(dtype="int8", quant="per_head"), Feature.PER_HEAD_QUANT_SCALES),
]


@pytest.mark.parametrize(("layer", "cache", "feature"), NEEDS, ids=[feature.name for *_, feature in NEEDS])
def test_each_field_of_a_spec_asks_for_its_feature(layer, cache, feature):
    spec, cache_spec = dataclasses.replace(SPEC, **layer), dataclasses.replace(CACHE, **cache)
    asked = {name for name, _ in Question.of(spec, cache_spec, CPU).needs}
    assert feature in asked and asked <= {feature, Feature.LSE, Feature.SLIDING_WINDOW}
    able = derived(features=ToyBackend.features | asked, supported_kv_cache_dtypes=(), quant_modes=("none", "per_head"))
    assert able.reasons(spec, cache_spec, CPU) == ()
    without = derived(features=able.features - {feature}, supported_kv_cache_dtypes=(), quant_modes=able.quant_modes)
    assert [reason.split(":")[0] for reason in without.reasons(spec, cache_spec, CPU)] == [f"{feature} not supported"]


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


# Derived backends and builders


def test_subclass_attention_backend_changes_the_builder_only():
    class Quick(ToyBuilder):
        pass

    backend = backends.subclass_attention_backend("Quick", ToyBackend, Quick)
    assert backend.__name__ == "QuickToyBackend" and issubclass(backend, ToyBackend)
    assert backend.get_builder_cls() is Quick and ToyBackend.get_builder_cls() is ToyBuilder
    assert backend.get_impl_cls() is ToyImpl


def test_overrides_must_name_something():
    with pytest.raises(ValueError, match="ToyBackend has no supported_dtype to override"):
        derived(supported_dtype=())


def test_subclass_attention_metadata_builder_transforms_the_batch_first():
    builder_cls = backends.subclass_attention_metadata_builder(
        "Blind", ToyBuilder, lambda meta: meta.replace(slot_mapping=jnp.full_like(meta.slot_mapping, -1))
    )
    builder = builder_cls(SPEC, CACHE, CPU)
    assert builder_cls.__name__ == "BlindToyBuilder" and isinstance(builder, ToyBuilder)
    assert (builder.build(0, batch()).slot_mapping == -1).all()
    assert hash(builder) == hash(builder_cls(SPEC, CACHE, CPU)) and builder != BUILDER


# Builders


def test_a_plan_takes_another_groups_pages():
    m = BUILDER.build(0, batch())
    other = BUILDER.update_block_table(m, m.block_table + 4, m.slot_mapping + 16)
    assert (other.block_table == m.block_table + 4).all() and (other.position == m.position).all()


def test_update_block_table_is_refused_where_it_was_not_declared():
    class Fixed(ToyBuilder):
        supports_update_block_table = False

    m = BUILDER.build(0, batch())
    with pytest.raises(UnsupportedError, match="Fixed cannot exchange the block table"):
        Fixed(SPEC, CACHE, CPU).update_block_table(m, m.block_table, m.slot_mapping)


def test_the_capture_plan_is_shapes_only_and_fits_the_real_one():
    meta = batch()
    abstract = BUILDER.build_for_cudagraph_capture(meta)
    assert isinstance(abstract, ToyMetadata)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert backends.fits(abstract, jax.jit(BUILDER.build, static_argnums=0)(0, meta))
    from_shapes = BUILDER.build_for_cudagraph_capture(jax.eval_shape(lambda: jax.tree.map(jnp.asarray, meta)))
    assert backends.fits(abstract, from_shapes)


def test_fits_is_the_trace_key():
    meta = batch(num_tokens=8, num_reqs=4)
    assert backends.fits(meta, batch((2, 1), (4, 6), num_tokens=8, num_reqs=4))
    assert not backends.fits(meta, batch(num_tokens=16, num_reqs=4))
    assert not backends.fits(meta, batch((1, 1), (1, 1), num_tokens=8, num_reqs=4))  # max_query_len is static
    assert not backends.fits(meta, batch(num_tokens=8, num_reqs=4, causal=[True, False]))


def test_drafting_builds_quickly_inside_a_scan():
    class Recording(ToyBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            assert (common_prefix_len, fast_build) == (0, True)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    builder, meta = Recording(SPEC, CACHE, CPU), jax.tree.map(jnp.asarray, batch((1, 1), (3, 5)))

    def step(meta, draft_index):
        m = builder.build_for_drafting(meta, draft_index)
        return meta.advanced(4), m.position

    _, positions = jax.lax.scan(step, meta, jnp.arange(2))
    np.testing.assert_array_equal(positions, [[2, 4], [3, 5]])


@pytest.mark.parametrize(
    ("support", "single", "uniform", "mixed"),
    [
        (AttentionCGSupport.NEVER, False, False, False),
        (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, True, False, False),
        (AttentionCGSupport.UNIFORM_BATCH, True, True, False),
        (AttentionCGSupport.ALWAYS, True, True, True),
    ],
)
def test_can_run_in_cudagraph(support, single, uniform, mixed):
    class Builder(ToyBuilder):
        cudagraph_support = support

    builder = Builder(SPEC, CACHE, CPU)
    answers = [builder.can_run_in_cudagraph(batch(lens, (7, 7))) for lens in ((1, 1), (3, 3), (1, 3))]
    assert answers == [single, uniform, mixed]
    assert Builder.get_cudagraph_support(SPEC, CACHE) is support


def test_the_order_of_requests_is_left_alone_unless_a_threshold_asks():
    perm, changed = BUILDER.reorder_batch(batch((3, 1), (3, 5)))
    assert list(perm) == [0, 1] and changed is False

    class DecodesFirst(ToyBuilder):
        reorder_batch_threshold = 1

    perm, changed = DecodesFirst(SPEC, CACHE, CPU).reorder_batch(batch((3, 1), (3, 5)))
    assert list(perm) == [1, 0] and changed


def test_decode_threshold_is_raised_by_drafts_and_clamped_last():
    class Spec(ToyBuilder):
        reorder_batch_threshold = 1
        supports_spec_as_decode = True

    class Ragged(Spec):
        supports_dcp_with_varlen = True

    spec, ragged = Spec(SPEC, CACHE, CPU), Ragged(SPEC, CACHE, CPU)
    assert BUILDER.decode_threshold(3) is None
    assert [spec.decode_threshold(), spec.decode_threshold(3), spec.decode_threshold(3, dcp_world_size=2)] == [1, 4, 1]
    assert ragged.decode_threshold(3, dcp_world_size=2) == 4


def test_cascade_is_off_unless_declared_and_then_the_heuristic_decides():
    asked = (4096, np.ones(64, np.int32), 32, 8, False, False, False, 132)
    assert BUILDER.use_cascade_attention(*asked) is False

    class Cascading(ToyBuilder):
        supports_cascade = True

    builder = Cascading(SPEC, CACHE, CPU)
    assert builder.use_cascade_attention(*asked) is True
    assert builder.use_cascade_attention(128, *asked[1:]) is False
    with pytest.raises(UnsupportedError, match="ToyBuilder has no cascade"):
        BUILDER.build_cascade((batch(),))


# Implementations


def test_an_impl_shows_its_layer_and_hashes_by_value():
    spec = dataclasses.replace(SPEC, sliding_window=4, logits_soft_cap=3.0)
    impl = ToyImpl(spec, CACHE, CPU)
    assert (impl.num_heads, impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size) == (4, 2, 2, 8)
    assert (impl.scale, impl.sliding_window, impl.logits_soft_cap) == (8**-0.5, (3, 0), 3.0)
    assert (impl.attn_type, impl.kv_cache_dtype) == (AttentionType.DECODER, "float32")
    assert ToyImpl(spec, None, CPU).kv_cache_dtype == "auto"
    assert hash(impl) == hash(ToyImpl(dataclasses.replace(spec), CACHE, Chip("cpu"))) and impl != BUILDER
    flags = ("can_return_lse_for_decode", "supports_pcp", "supports_quant_query_input", "need_to_return_lse_for_decode")
    assert not any(getattr(impl, flag) for flag in flags)
    assert not impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not impl.fused_output_quant_supported("fp8")
    params = AttentionParams()
    assert impl.prepare_params(params) is params


def test_an_impl_without_packed_attention_says_so():
    with pytest.raises(UnsupportedError, match="ToyImpl attends over pages only"):
        ToyImpl(SPEC, None, CPU).forward_packed(None, None, None, None, None)


def test_context_parallel_ranks_are_the_meshs():
    parallel = ContextParallel(dcp_axis="d", dcp_world_size=2, pcp_axis="p", pcp_world_size=2)
    assert parallel.total_cp_world_size == 4
    mesh = jax.make_mesh((2, 2), ("p", "d"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ranks = jax.shard_map(
        lambda: jnp.asarray([[parallel.pcp_rank(), parallel.dcp_rank(), parallel.total_cp_rank()]]),
        mesh=mesh,
        in_specs=(),
        out_specs=P(("p", "d")),
    )()
    np.testing.assert_array_equal(ranks, [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]])


def test_without_context_parallelism_there_is_one_rank():
    alone = ContextParallel()
    assert (alone.total_cp_world_size, alone.total_cp_rank()) == (1, 0)
    with pytest.raises(ValueError, match="dcp_axis=None with dcp_world_size=2: a size > 1 needs an axis"):
        ContextParallel(dcp_world_size=2)


def test_lse_is_needed_when_ranks_share_a_request():
    class Merging(ToyImpl):
        can_return_lse_for_decode = True

    shared = ContextParallel(dcp_axis="d", dcp_world_size=2)
    assert Merging(SPEC, CACHE, CPU, shared).need_to_return_lse_for_decode
    assert not ToyImpl(SPEC, CACHE, CPU, shared).need_to_return_lse_for_decode
    assert not Merging(SPEC, CACHE, CPU).need_to_return_lse_for_decode


# Every registered backend


@pytest.mark.parametrize("name", backends.list_backends())
def test_a_registered_backend_is_consistent(name):
    backend = backends.registry.load(name)
    assert backend.get_name() == name
    for part in (backend.get_impl_cls(), backend.get_builder_cls(), backend.get_metadata_cls()):
        assert not part.__dict__.get("__abstractmethods__")
    quantised = any(map(backends.is_quantized_kv_cache, backend.get_supported_dtypes()))
    assert backend.get_impl_cls().supports_quant_query_input == quantised
    assert set(backend.supported_kv_cache_layouts()) <= {"NHD", "HND"}
