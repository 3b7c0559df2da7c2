"""AttentionBackend: its lists and predicates, and vLLM's names for them."""

import dataclasses

import jax.numpy as jnp
import pytest

from jattn import backends
from jattn.backends import AttentionType, Feature, MultipleOf
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from tests.backends.toy import CACHE, ToyBackend, derived


def test_a_backend_is_never_instantiated():
    with pytest.raises(TypeError, match="ToyBackend is never instantiated"):
        ToyBackend()


def test_defaults_are_vllms_and_every_feature_is_refused():
    base = backends.AttentionBackend
    assert base.get_supported_dtypes() == ("float16", "bfloat16")
    assert base.supported_kv_cache_dtypes == ("auto", "float16", "bfloat16")
    assert base.get_supported_kernel_block_sizes() == (MultipleOf(1),)
    assert base.get_supported_head_sizes() == (MultipleOf(1),) and base.supports_head_size(7)
    assert not any(base.supports(feature) for feature in Feature)
    assert not any((base.is_mla(), base.is_sparse(), base.is_ssm(), base.supports_sink(), base.supports_mm_prefix()))
    assert [t for t in AttentionType if base.supports_attn_type(t)] == [AttentionType.DECODER]
    assert base.get_required_kv_cache_layout() is None
    assert all(base.supports_platform(platform) for platform in ("cpu", "gpu", "tpu"))
    assert base.supports_compute_capability(0) and base.supports_compute_capability(75)


@pytest.mark.parametrize(
    ("generation", "capability"), [("sm_90", 90), ("sm_90a", 90), ("sm_100f", 100), ("sm_", 0), ("sm_x", 0), ("v6e", 0)]
)
def test_a_chips_compute_capability(generation, capability):
    assert Chip("gpu", generation).compute_capability == capability


@pytest.mark.parametrize(
    ("listed", "asked", "answer"),
    [
        (("auto",), None, True),
        ((), "int8", False),
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
        ((), 3, False),
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
    assert derived(supported_block_sizes=(MultipleOf(1),)).get_preferred_block_size(7) == 7


def test_an_empty_list_supports_nothing():
    none = derived(supported_head_sizes=(), platforms=(), attn_types=(), quant_modes=(), kv_cache_layouts=())
    assert not none.supports_head_size(8) and not none.supports_platform("cpu")
    assert not none.supports_attn_type("decoder") and not none.supported_kv_cache_layouts()
    assert "head_size not supported: 8 seen, none supported" in none.validate_configuration(8)
    assert derived(supported_head_sizes=(MultipleOf(8), 20)).supports_head_size(20)
    assert not derived(supported_head_sizes=(MultipleOf(8), 20)).supports_head_size(12)


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


@pytest.mark.parametrize("name", backends.list_backends())
def test_a_registered_backend_is_consistent(name):
    backend = backends.registry.load(name)
    assert backend.get_name() == name
    for part in (backend.get_impl_cls(), backend.get_builder_cls(), backend.get_metadata_cls()):
        assert not part.__dict__.get("__abstractmethods__")
    quantised = any(map(backends.is_quantized_kv_cache, backend.get_supported_dtypes()))
    assert backend.get_impl_cls().supports_quant_query_input == quantised
    assert set(backend.supported_kv_cache_layouts()) <= {"NHD", "HND", "HND128"}
