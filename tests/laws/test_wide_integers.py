"""With jax_enable_x64, JAX's own integers have 64 bits: they mean the same, and none outside int32 is another index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.device import Chip
from jattn.engine import Engine, SamplingParams
from tests.models import examples
from tests.ops.latent import PLAIN

BEYOND = 2**32  # what int32 would forget
SPEC = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE = jattn.KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
META = jattn.CommonAttentionMetadata.from_lengths([1, 2], [5, 2], [[0, 1], [2, 3]], 4, num_tokens=4)
FIELDS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def written(cache: jattn.PagedKV) -> list[int]:
    return np.flatnonzero(np.asarray(cache.logical()[0]).sum(axis=(2, 3)).reshape(-1)).tolist()


@pytest.mark.parametrize("backend", ["sdpa", "cpu_native"])
def test_a_batch_of_wide_integers_is_the_same_batch(backend):
    attn = jattn.PagedAttention(SPEC, CACHE, backend)
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(4, heads, 8)).astype(np.float32) for heads in (4, 2))
    many = META.replace(**{name: jnp.asarray(getattr(META, name), jnp.int64) for name in FIELDS})
    assert many.seq_lens.dtype == jnp.int64
    for build in (attn.build, jax.jit(attn.build)):
        (cache, state), (wanted, answer) = (
            attn(q, k, k, jattn.empty_cache(CACHE), build(meta)) for meta in (many, META)
        )
        np.testing.assert_array_equal(state.out, answer.out)
        assert written(cache) == written(wanted) == [4, 8, 9]
    moved = attn.update_block_table(attn.build(META), many.block_table, many.slot_mapping)
    np.testing.assert_array_equal(attn.attend(q, cache, moved).out, attn.attend(q, cache, attn.build(META)).out)


@pytest.mark.parametrize("backend", ["sdpa", "cpu_native"])
def test_a_slot_beyond_int32_is_written_by_nobody(backend):
    attn, ones = jattn.PagedAttention(SPEC, CACHE, backend), np.ones((4, 2, 8), np.float32)
    meta = META.replace(slot_mapping=jnp.asarray(META.slot_mapping, jnp.int64) + BEYOND)
    cache, _ = attn(np.ones((4, 4, 8), np.float32), ones, ones, jattn.empty_cache(CACHE), attn.build(meta))
    assert written(cache) == []


def test_a_listed_key_beyond_int32_is_no_key():
    m, listed = PLAIN.mla.build(PLAIN.meta()), jnp.zeros((21, 2), jnp.int64)
    read = lambda listed: PLAIN.mla.attend(PLAIN.q, PLAIN.cache, m, PLAIN.params, listed)
    assert np.asarray(read(listed).out).any()
    for bad in (listed + BEYOND, listed - BEYOND):
        assert not np.asarray(read(bad).out).any() and not np.asarray(jax.jit(read)(bad).out).any()


def test_attention_and_its_gradient_are_the_same():
    """By the path of sdpa that computes gradients, and results on accelerators."""
    attn, rng = jattn.PagedAttention(SPEC, CACHE, "sdpa", "gpu"), np.random.default_rng(0)
    q, k = (rng.normal(size=(4, heads, 8)).astype(np.float32) for heads in (4, 2))
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1], [5, 2], [[0, 1], [2, 3]], 4, num_tokens=4)

    def loss(q):
        return jnp.sum(jnp.sin(attn(q, k, k, jattn.empty_cache(CACHE, storage="native"), attn.build(meta))[1].out))

    found = jax.jit(jax.value_and_grad(loss))(q)
    with jax.enable_x64(False):
        wanted = jax.jit(jax.value_and_grad(loss))(q)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_layers_of_one_pool_are_scanned_by_wide_numbers():
    attn, q = jattn.PagedAttention(SPEC, CACHE, "sdpa"), np.ones((4, 4, 8), np.float32)
    ones, plan = np.ones((4, 2, 8), np.float32), attn.build(META)

    def layer(cache, index):
        cache, state = attn(q, ones, ones, cache, attn.for_layer(plan, index, 4))
        return cache, state.out

    cache, _ = jax.lax.scan(layer, jattn.empty_cache(CACHE), jnp.arange(2))
    assert written(cache) == [4, 8, 9, 20, 24, 25]


def test_a_batch_with_wide_scales_lowers_for_a_tpu():
    """Both kernels: a write, and attention of all heads' scales and biases."""
    spec = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, has_alibi=True, has_sinks=True)
    cache_spec = jattn.KVCacheSpec(
        num_blocks=4, block_size=16, num_kv_heads=2, head_dim=128, dtype="float8_e4m3fn", quant="per_head"
    )
    attn = jattn.PagedAttention(spec, cache_spec, "pallas_tpu", Chip("tpu", "v6e"))
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 2], [5, 2], [[0], [2]], 16, num_tokens=4)
    meta = meta.replace(**{name: jnp.asarray(getattr(meta, name), jnp.int64) for name in FIELDS})
    of = lambda *shape, dtype=jnp.float64: jax.ShapeDtypeStruct(shape, dtype)
    params = jattn.AttentionParams(alibi_slopes=of(4), sinks=of(4), q_scale=of(), k_scale=of(2), v_scale=of(2))
    q, k = (of(4, heads, 128, dtype=jnp.bfloat16) for heads in (4, 2))
    cache = jax.eval_shape(lambda: jattn.empty_cache(cache_spec, storage="native"))

    def layer(q, k, v, cache, meta, params):
        return attn(q, k, v, cache, attn.build(meta), params)

    exported = jax.export.export(jax.jit(layer), platforms=["tpu"])(q, k, k, cache, meta, params)
    assert exported.mlir_module().count("@tpu_custom_call") == 2


KINDS = [
    SamplingParams(temperature=0, max_tokens=5, logprobs=4),
    SamplingParams(seed=5, n=2, top_k=9, top_p=0.9, min_p=0.01, max_tokens=5),
    SamplingParams(seed=2**62, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, max_tokens=5),
]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_an_engine_serves_the_same_tokens(family):
    """The setting of the whole process, because the engine's own thread traces its programs."""
    config = models.config_of(examples.ALL[family])
    params = examples.params_of(config)

    def tokens():
        sizes = dict(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
        outputs = Engine(config, params, **sizes).generate([[5, 6, 7], list(range(17)), [3]], KINDS)
        return [[completion.token_ids for completion in output.outputs] for output in outputs]

    with jax.enable_x64(False):
        wanted = tokens()
    jax.config.update("jax_enable_x64", True)
    try:
        assert tokens() == wanted
    finally:
        jax.config.update("jax_enable_x64", False)
