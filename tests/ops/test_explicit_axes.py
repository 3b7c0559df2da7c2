"""Arrays on a mesh with Explicit axes, which jax.make_mesh gives: numbers, gradients and places of results."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import spmd
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
from tests.nn import test_layer as layers
from tests.ops import latent

LENGTHS, TOKENS, H, K, D, S = (5, 3, 0, 6), 16, 4, 2, 8, 4
SPEC = jattn.AttentionSpec(num_heads=H, num_kv_heads=K, head_dim=D, has_sinks=True, sliding_window=4)
CACHE = jattn.KVCacheSpec(num_blocks=8, block_size=S, num_kv_heads=K, head_dim=D, dtype="float32")
META = jattn.CommonAttentionMetadata.from_lengths(LENGTHS, LENGTHS, None, 1, num_tokens=TOKENS)
TABLE = [[3, 7], [1, 0], [0, 0], [2, 5]]
PAGED = jattn.CommonAttentionMetadata.from_lengths(LENGTHS, LENGTHS, TABLE, S, num_tokens=TOKENS)
KEYS = jax.random.split(jax.random.key(0), 3)
Q, KEY, VALUE = (jax.random.normal(k, (TOKENS, n, D)) for k, n in zip(KEYS, (H, K, K), strict=True))
PARAMS = jattn.AttentionParams(sinks=jnp.linspace(-1, 1, H))
PLACES = (PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "heads"), PartitionSpec("data", "heads"))
BACKENDS = ("sdpa", "cpu_native", "split")


def mesh():
    return jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)


def placed(where: PartitionSpec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh(), where)) for x in arrays]


def oracle() -> np.ndarray:
    """out f64[T H D]"""
    out, start = np.zeros((TOKENS, H, D)), 0
    q, k, v = (np.asarray(x, np.float64) for x in (Q, np.repeat(KEY, H // K, 1), np.repeat(VALUE, H // K, 1)))
    for n in LENGTHS:
        rows, i = slice(start, start + n), np.arange(n)
        logits = np.einsum("ihd,jhd->hij", q[rows], k[rows]) * D**-0.5
        seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 4)
        p = np.where(seen, np.exp(logits), 0)
        total = p.sum(-1) + np.exp(np.linspace(-1, 1, H))[:, None]
        out[rows] = np.einsum("hij,jhd->ihd", p / total[..., None], v[rows])
        start += n
    return out


@pytest.mark.parametrize("is_set", [False, True], ids=["mesh of the arrays", "jax.set_mesh"])
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_attention_and_its_gradient(backend, where, is_set):
    def loss(q, k, v):
        state = jattn.attention(q, k, v, META, SPEC, PARAMS, backend=backend)
        return jnp.sum(jnp.square(state.out)), state

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, wanted), dwanted = step(Q, KEY, VALUE)
    if is_set:
        with jax.set_mesh(mesh()):
            (_, state), grads = step(*placed(where, Q, KEY, VALUE))
    else:
        (_, state), grads = step(*placed(where, Q, KEY, VALUE))
    np.testing.assert_allclose(state.out, oracle(), atol=2e-5)
    np.testing.assert_allclose(state.lse, wanted.lse, atol=2e-5)
    assert state.out.sharding.spec[:2] == state.lse.sharding.spec[:2] == (*where, None, None)[:2]
    for got, like in zip(grads, dwanted, strict=True):
        np.testing.assert_allclose(got, like, atol=2e-5)


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_written_and_read_where_they_are(backend, where):
    """The pool is divided by blocks and heads, the tokens by heads."""
    attn = jattn.PagedAttention(SPEC, CACHE, backend=backend)
    args = placed(PartitionSpec(None, *where[1:]), Q, KEY, VALUE)
    (cache,) = placed(where, jattn.empty_cache(CACHE))
    step = jax.jit(lambda cache, q, k, v, meta: attn(q, k, v, cache, attn.build(meta), PARAMS), donate_argnums=0)
    cache, state = step(cache, *args, PAGED)
    np.testing.assert_allclose(state.out, oracle(), atol=2e-5)
    wanted = jattn.write_kv(jattn.empty_cache(CACHE), KEY, VALUE, PAGED.slot_mapping)
    np.testing.assert_array_equal(cache.k, wanted.k)
    assert cache.k.sharding.spec[:2] == (*where, None, None)[:2]
    np.testing.assert_allclose(attn.attend(args[0], cache, attn.build(PAGED), PARAMS).out, oracle(), atol=2e-5)


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_blocks_are_written_and_copied_outside_attention(where):
    (cache,) = placed(where, jattn.empty_cache(CACHE))
    cache = jattn.copy_blocks(jattn.write_kv(cache, KEY, VALUE, PAGED.slot_mapping), jnp.asarray([[3, 6], [7, 3]]))
    wanted = jattn.write_kv(jattn.empty_cache(CACHE), KEY, VALUE, PAGED.slot_mapping)
    for got, like in zip(cache.logical(), wanted.logical(), strict=True):
        got, like = np.asarray(got), np.asarray(like)
        np.testing.assert_array_equal(got[[6, 3]], like[[3, 7]])


@pytest.mark.parametrize("where", [PartitionSpec(), PartitionSpec("data")], ids=str)
def test_a_latent_layer(where):
    spec, cache_spec, params = latent.PLAIN.mla.spec, latent.PLAIN.mla.cache_spec, latent.PLAIN.params
    mla = jattn.MLAAttention(spec, cache_spec)
    plan = mla.build(jattn.CommonAttentionMetadata.from_lengths([4, 4], [4, 4], [[1], [2]], latent.S))
    shapes = (8, spec.num_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim), (8, spec.kv_lora_rank)
    shapes = *shapes, (8, spec.qk_rope_head_dim)
    args = [np.asarray(jax.random.normal(k, n)) for k, n in zip(KEYS, shapes, strict=True)]

    def loss(q, kv_c, k_pe):
        cache, state = mla(q, kv_c, k_pe, mla.empty_cache(), plan, params)
        return jnp.sum(jnp.square(state.out)), (cache, state)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    wanted, got = step(*args), step(*placed(where, *args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("of_weights", ["whole", "heads"])
@pytest.mark.parametrize("where", [PartitionSpec(), PartitionSpec("data")], ids=str)
def test_training_a_layer(where, of_weights):
    """The packed tokens are divided over "data", the weights by their logical axes over "heads"."""
    config = dataclasses.replace(layers.FULL, fused_qkv=False)
    module = jattn.nn.linen.PagedAttention(config)
    meta, x = layers.batch((5, 3)), np.concatenate(layers.tokens(5, 3))
    boxed = module.init(jax.random.key(1), x, meta)
    rules = [("heads", of_weights), ("kv_heads", of_weights)] if of_weights == "heads" else []
    places = spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh(), rules)

    def loss(variables, x):
        y: Any = module.apply(variables, x, meta)[1]
        return jnp.sum(jnp.square(y))

    variables: Any = nn.unbox(boxed)
    wanted = jax.grad(loss)(variables, x)
    got = jax.jit(jax.grad(loss))(jax.device_put(variables, places), *placed(where, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1, np.abs(b).max()))
