"""A write puts each row where its slot says, touches nothing else, and copies nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.cache.write import write_by_head
from tests.oracle import cache as witness_cache
from tests.oracle import quant as witness_quant

SLOTS = np.array([5, -1, 11, 0, 99, 12, -7, 23], np.int32)
MODES = [("float32", "none"), ("float16", "none"), ("bfloat16", "none")] + [
    (dtype, mode)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8", "float8_e4m3fnuz")
    for mode in ("per_tensor", "per_head", "per_token_head")
]


def spec_of(dtype="bfloat16", quant="none", layout="auto", **options):
    dims = dict(head_dim=32) if layout == "HND128" else dict(head_dim=8, v_head_dim=5)
    shape = dict(num_blocks=6, block_size=4, num_kv_heads=2) | dims | options
    return jattn.KVCacheSpec(dtype=dtype, quant=quant, layout=layout, **shape)


def rows_of(spec, tokens, seed=0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.standard_normal((tokens, spec.num_kv_heads, dim)), jnp.float32)
        for dim in (spec.head_dim, spec.v_head_dim)
    )


def bits(cache):
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(cache)]


WRITES = [
    *((jattn.write_kv, layout) for layout in ("NHD", "HND", "HND128")),
    *((write_by_head, layout) for layout in ("HND", "HND128")),
]


@pytest.mark.parametrize(("write", "layout"), WRITES)
@pytest.mark.parametrize(("dtype", "quant"), MODES)
def test_a_write_is_the_witness_write(dtype, quant, write, layout):
    spec = spec_of(dtype, quant, layout)
    k, v = rows_of(spec, len(SLOTS))
    scale = {"per_tensor": 0.03, "per_head": np.array([0.03, 0.07])}.get(quant)
    params = jattn.AttentionParams(k_scale=scale, v_scale=scale)
    before = jattn.PagedKV.from_logical(spec, *(np.stack([x[:4]] * 6) for x in (k, v)), params)
    after = jax.jit(write, donate_argnums=0)(jax.tree.map(jnp.copy, before), k, v, SLOTS, params)
    for old, new, x in zip(before.logical(), after.logical(), (k, v), strict=True):
        if quant == "none":
            stored = np.asarray(x.astype(dtype).astype(jnp.float32))
        elif quant == "per_token_head":
            token = witness_quant.scale_of(x, dtype, "per_token_head")[..., None]
            stored = witness_quant.round_to(np.asarray(x, np.float32) / token.astype(np.float32), dtype) * token
        else:
            divisor = np.float32(scale) if np.ndim(scale) == 0 else np.asarray(scale, np.float32)[:, None]
            stored = witness_quant.round_to(np.asarray(x) / divisor, dtype)
        expected = witness_cache.write(np.asarray(old), stored, SLOTS)
        np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["NHD", "HND", "HND128"])
@pytest.mark.parametrize(("dtype", "quant"), MODES)
def test_what_is_not_addressed_keeps_its_bits(dtype, quant, layout):
    spec = spec_of(dtype, quant, layout)
    k, v = rows_of(spec, 4)
    cache = jattn.empty_cache(spec, 1.5)
    for slots in ([-1, -1, -1, -1], [24, 25, 2**31 - 1, -(2**31)], [-24, -23, -6, -1]):
        after = jattn.write_kv(cache, k, v, jnp.array(slots, jnp.int32))
        for old, new in zip(bits(cache), bits(after), strict=True):
            np.testing.assert_array_equal(old, new)


def test_rows_past_a_shorter_slot_mapping_are_not_written():
    spec = spec_of("float32")
    k, v = rows_of(spec, 4)
    got = jattn.write_kv(jattn.empty_cache(spec), k, v, jnp.array([3, 4]))
    expected = jattn.write_kv(jattn.empty_cache(spec), k[:2], v[:2], jnp.array([3, 4]))
    for a, b in zip(bits(got), bits(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("dtype", "quant"), MODES)
def test_a_donated_write_needs_no_memory_that_grows_with_the_pool(dtype, quant):
    """The memory analysis of a 1 GiB pool, without allocating it: no temporary, and outputs that alias the inputs."""
    blocks = 2**30 // spec_of(dtype, quant, num_kv_heads=8, head_dim=128, v_head_dim=128, block_size=16).bytes_per_block
    spec = spec_of(dtype, quant, num_blocks=blocks, num_kv_heads=8, head_dim=128, v_head_dim=128, block_size=16)
    cache = jax.eval_shape(lambda: jattn.empty_cache(spec))
    row = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    step = jax.jit(jattn.write_kv, donate_argnums=0).lower(cache, row, row, jax.ShapeDtypeStruct((64,), jnp.int32))
    memory = step.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**22
    assert memory.alias_size_in_bytes >= 0.99 * blocks * spec.bytes_per_block


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_write_inside_a_scan_over_layers_copies_nothing(dtype):
    """Layers share one pool as the scan's carry: layer l's blocks begin at l * N."""
    quant = "none" if dtype == "bfloat16" else "per_token_head"
    layers, blocks = 8, 4096
    spec = spec_of(
        dtype, quant, num_blocks=layers * blocks, num_kv_heads=8, head_dim=128, v_head_dim=128, block_size=16
    )

    def step(cache, k, v, slots):
        def layer(cache, index):
            here = jnp.where(slots >= 0, slots + index * blocks * spec.block_size, -1)
            return jattn.write_kv(cache, k, v, here), None

        return jax.lax.scan(layer, cache, jnp.arange(layers))[0]

    cache = jax.eval_shape(lambda: jattn.empty_cache(spec))
    row = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, row, row, jax.ShapeDtypeStruct((64,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22


def test_a_differentiable_cache_carries_a_gradient_through_the_write():
    spec = spec_of("bfloat16")
    k, v = rows_of(spec, 2)
    slots = jnp.array([3, -1])

    def loss(k):
        return jattn.write_kv(jattn.empty_cache(spec, storage="native"), k, v, slots).logical()[0].sum()

    np.testing.assert_array_equal(jax.grad(loss)(k)[:, 0, 0], [1.0, 0.0])


BAD = [
    (dict(k=jnp.ones((2, 3, 8))), r"k.shape=\(2, 3, 8\) must be \[T, 2, 8\]"),
    (dict(v=jnp.ones((2, 2, 8))), r"v.shape=\(2, 2, 8\) must be \[T, 2, 5\]"),
    (dict(k=jnp.ones((2, 2, 8), int)), "must be a float type"),
    (dict(v=jnp.ones((3, 2, 5))), "same number of tokens"),
    (dict(slots=jnp.arange(3)), "at most k.shape"),
    (dict(slots=jnp.ones(2)), "must be an integer type"),
    (dict(params=jattn.AttentionParams(k_scale=jnp.ones(3))), r"k_scale.shape=\(3,\) must be \(\) or \(2,\)"),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD)
def test_a_write_that_cannot_mean_anything_says_why(wrong, sentence):
    right = dict(k=jnp.ones((2, 2, 8)), v=jnp.ones((2, 2, 5)), slots=jnp.arange(2), params=None) | wrong
    with pytest.raises(ValueError, match=sentence):
        jattn.write_kv(jattn.empty_cache(spec_of("float32")), right["k"], right["v"], right["slots"], right["params"])
