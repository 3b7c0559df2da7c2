"""What a cache spec means, what it refuses, and that a cache gives back what it was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.cache.layout import filled_lanes

BASE = dict(num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8)


def test_sizes_are_what_the_arrays_take():
    for options in (
        dict(dtype="float32"),
        dict(dtype="bfloat16", v_head_dim=5),
        dict(dtype="int8", quant="per_token_head"),
    ):
        spec = jattn.KVCacheSpec(**BASE, **options)
        cache = jattn.empty_cache(spec)
        assert cache.k.shape == spec.shape and cache.v.shape == spec.v_shape
        assert sum(x.nbytes for x in jax.tree.leaves(cache)) == spec.num_blocks * spec.bytes_per_block
        assert spec.capacity_tokens == 24


@pytest.mark.parametrize("layout", ["NHD", "HND", "auto"])
def test_the_logical_view_does_not_depend_on_the_physical_order(layout):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((6, 4, 2, 8)), rng.standard_normal((6, 4, 2, 5))
    spec = jattn.KVCacheSpec(**BASE, v_head_dim=5, dtype="float32", layout=layout)
    got = jattn.PagedKV.from_logical(spec, k, v).logical()
    np.testing.assert_array_equal(got[0], k.astype(np.float32))
    np.testing.assert_array_equal(got[1], v.astype(np.float32))
    assert spec.shape == ((6, 4, 2, 8) if layout == "NHD" else (6, 2, 4, 8))


def test_narrow_heads_fill_lanes_where_pages_are_whole_rows():
    """The rows of consecutive tokens lie side by side; what cannot be so keeps its layout."""
    base = dict(num_blocks=3, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
    spec = filled_lanes(jattn.KVCacheSpec(**base))
    assert spec.shape == (3, 2, 8, 128) and spec.layout == "HND128"
    k, v = (np.random.default_rng(i).standard_normal((3, 16, 2, 64)).astype(np.float32) for i in range(2))
    cache = jattn.PagedKV.from_logical(spec, k, v)
    for got, want in zip(cache.logical(), (k, v), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(cache.k[1, 0, 3], np.concatenate([k[1, 6, 0], k[1, 7, 0]]))
    for kept in (dict(head_dim=128), dict(head_dim=80), dict(v_head_dim=32), dict(block_size=8), dict(layout="HND")):
        other = jattn.KVCacheSpec(**base | kept)
        assert filled_lanes(other) == other


@pytest.mark.parametrize("fill", [0.0, 1.5])
@pytest.mark.parametrize(
    ("dtype", "quant"), [("bfloat16", "none"), ("float8_e5m2", "per_tensor"), ("int8", "per_token_head")]
)
def test_a_fresh_cache_holds_the_fill_everywhere(dtype, quant, fill):
    cache = jattn.empty_cache(jattn.KVCacheSpec(**BASE, dtype=dtype, quant=quant), fill)
    for x in cache.logical():
        np.testing.assert_allclose(x, fill, rtol=1e-2)


def test_a_cache_holds_bits_on_cpu_and_numbers_elsewhere():
    spec = jattn.KVCacheSpec(**BASE)
    assert jattn.empty_cache(spec, platform="cpu").k.dtype == jnp.uint16
    assert jattn.empty_cache(spec, platform="gpu").k.dtype == jnp.bfloat16
    assert jattn.empty_cache(spec, storage="native").k.dtype == jnp.bfloat16


def test_equal_meanings_are_equal_specs():
    assert jattn.KVCacheSpec(**BASE) == jattn.KVCacheSpec(**BASE, v_head_dim=8, dtype=jnp.bfloat16)
    assert hash(jattn.KVCacheSpec(**BASE)) == hash(jattn.KVCacheSpec(**BASE, v_head_dim=8))


BAD = [
    (dict(num_blocks=0), "num_blocks=0 must be a positive integer"),
    (dict(block_size=2.0), "block_size=2.0 must be a positive integer"),
    (dict(dtype="float64"), "use one of bfloat16, float16, float32"),
    (dict(layout="DHN"), "use one of auto, NHD, HND, HND128"),
    (dict(layout="HND128"), "wanted equal dims of 16, 32 or 64"),
    (dict(quant="per_block"), "use one of none, per_tensor, per_head, per_token_head"),
    (dict(dtype="int8"), "int8, float8_e4m3fnuz go with quant per_tensor"),
    (dict(quant="per_tensor"), "go with quant='none'"),
    (dict(num_blocks=2**30), r"below 2\*\*31"),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD)
def test_a_spec_that_cannot_be_says_why(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        jattn.KVCacheSpec(**(BASE | wrong))


def test_an_unknown_storage_names_the_known_ones():
    with pytest.raises(ValueError, match="'native', 'bits' or None"):
        jattn.empty_cache(jattn.KVCacheSpec(**BASE), storage="packed")
