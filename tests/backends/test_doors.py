"""The public attention functions: the oracle's result, and a backend that is chosen once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttentionParams, CommonAttentionMetadata, PagedAttention, UnsupportedError
from jattn.backends import Feature, resolve
from tests.backends.ragged_batch import (
    CLOSE,
    PAST_K,
    PAST_V,
    QUERY,
    SEQ,
    TABLE,
    TOKENS,
    K,
    Q,
    V,
    assert_state,
    batch,
    filled,
    normal,
    witness,
)
from tests.backends.toy import CACHE, SPEC
from tests.oracle import attention as oracle


@pytest.mark.parametrize("backend", ["sdpa", "toy"])
def test_one_step_writes_then_attends(toy, backend):
    attn = PagedAttention(SPEC, CACHE, backend)
    before = filled()
    cache, state = attn(Q, K, V, before, attn.build(batch()))
    assert_state(state, witness())
    assert_state(attn.attend(Q, cache, attn.build(batch())), witness())
    assert_state(jattn.paged_attention(Q, cache, batch(), SPEC, backend=backend), witness())
    written = [20, 21, 22, 29, 12, 13]
    for new, old, rows in zip(cache.logical(), before.logical(), (K, V), strict=True):
        new, old = (np.asarray(x).reshape(32, 2, 8) for x in (new, old))
        np.testing.assert_array_equal(new[written], rows[:6])
        np.testing.assert_array_equal(np.delete(new, written, 0), np.delete(old, written, 0))


def test_no_keys_writes_nothing():
    attn = PagedAttention(SPEC, CACHE, "sdpa")
    m = attn.build(batch())
    full, state = attn(Q, K, V, filled(), m)
    same, again = attn(Q, None, None, full, m)
    assert same is full
    np.testing.assert_array_equal(again.out, state.out)


def test_the_whole_step_is_one_jit_with_the_layer_static():
    def step(attn, q, k, v, cache, meta):
        return attn(q, k, v, cache, attn.build(meta))

    step = jax.jit(step, static_argnums=0)
    cache, state = step(PagedAttention(SPEC, CACHE, "sdpa"), Q, K, V, filled(), batch())
    assert_state(state, witness())
    step(PagedAttention(dataclasses.replace(SPEC), CACHE, "sdpa"), Q, K, V, cache, batch())
    assert step._cache_size() == 1  # equal layers share one trace


def test_packed_attention_needs_no_cache():
    alone = [3, 1, 0, 2]
    meta = CommonAttentionMetadata.from_lengths(alone, alone, None, 1, num_tokens=TOKENS, num_reqs=5)
    own = np.split(np.arange(6), np.cumsum(alone)[:-1])
    keys, values = ([np.asarray(x)[rows] for rows in own] for x in (K, V))
    for attn_type in ("decoder", "encoder_only"):
        spec = dataclasses.replace(SPEC, attn_type=attn_type)
        expected = oracle.ragged(
            Q, keys, values, alone, num_tokens=TOKENS, scale=SPEC.scale, causal=attn_type == "decoder"
        )
        assert_state(jattn.attention(Q, K, V, meta, spec, backend="sdpa"), expected)


def test_packed_keys_may_be_more_than_the_queries():
    """Request r owns keys cumsum(seq_lens)[r-1] onwards; its queries are the last ones."""
    query, seq = [2, 1], [5, 3]
    meta = CommonAttentionMetadata.from_lengths(query, seq, None, 1)
    k, v = normal(5, 8, 2, 8), normal(6, 8, 2, 8)
    expected = oracle.ragged(Q[:3], [k[:5], k[5:]], [v[:5], v[5:]], query, scale=SPEC.scale)
    assert_state(jattn.attention(Q[:3], k, v, meta, SPEC, backend="sdpa"), expected)


def test_cross_attention_writes_the_encoders_keys_once_and_reads_them_later():
    spec, encoder = dataclasses.replace(SPEC, attn_type="encoder_decoder"), [5, 2]
    meta = CommonAttentionMetadata.from_lengths(
        [2, 1],
        [2, 1],
        [[0], [1]],
        4,
        encoder_seq_lens=encoder,
        cross_block_table=[[2, 3], [4, 0]],
        num_encoder_tokens=8,
    )
    k, v = normal(5, 8, 2, 8), normal(6, 8, 2, 8)
    expected = oracle.ragged(Q[:3], [k[:5], k[5:7]], [v[:5], v[5:7]], [2, 1], scale=SPEC.scale, causal=False)
    attn = PagedAttention(spec, CACHE, "sdpa")
    cache, state = attn(Q[:3], k, v, jattn.empty_cache(CACHE, fill=jnp.nan), attn.build(meta))
    assert_state(state, expected)
    later = CommonAttentionMetadata.from_lengths(
        [1, 1], [3, 2], [[0], [1]], 4, encoder_seq_lens=encoder, cross_block_table=[[2, 3], [4, 0]]
    )
    same, state = attn(Q[1:3], None, None, cache, attn.build(later))
    assert same is cache
    np.testing.assert_allclose(state.out, expected[0][1:3], **CLOSE)
    assert_state(jattn.attention(Q[:3], k, v, meta, spec, backend="sdpa"), expected)


@pytest.mark.parametrize("backend", ["sdpa", "toy"])
def test_angles_rotate_queries_and_keys_before_anything_else(toy, backend):
    attn = PagedAttention(SPEC, CACHE, backend)
    angles = jattn.nn.Rope(dim=4).angles(jnp.arange(TOKENS))
    m, turned = attn.build(batch()), jattn.nn.rotate(K, angles)
    cache, state = attn(Q, K, V, filled(), m, angles=angles)
    same_cache, same = attn(jattn.nn.rotate(Q, angles), turned, V, filled(), m)
    assert not np.array_equal(turned, K)
    np.testing.assert_array_equal(cache.logical()[0], same_cache.logical()[0])
    np.testing.assert_array_equal(state.out, same.out)
    _, read_only = attn(Q, None, None, cache, m, angles=angles)
    np.testing.assert_array_equal(read_only.out, state.out)
    with pytest.raises(ValueError, match="rows of angles"):
        attn(Q, K, V, filled(), m, angles=jattn.nn.Rope(dim=4).angles(jnp.arange(TOKENS + 1)))


@pytest.mark.parametrize("backend", ["sdpa", "toy"])
@pytest.mark.parametrize("traced", [False, True])
def test_layers_share_one_pool(toy, backend, traced):
    """The blocks of layer l begin at l * N. A slot after a layer's blocks is not written, in the next layer either."""
    layers = 3
    pool_spec = dataclasses.replace(CACHE, num_blocks=layers * CACHE.num_blocks)
    attn = PagedAttention(SPEC, pool_spec, backend)
    meta = batch()
    slots = np.where(np.asarray(meta.slot_mapping) < 0, 32, meta.slot_mapping).astype(np.int32)
    m = attn.build(meta.replace(slot_mapping=slots))  # the slots of padding tokens are the first of the next layer
    pool = jattn.empty_cache(pool_spec, fill=jnp.nan)
    for layer in range(layers):
        pool = jattn.write_kv(pool, PAST_K, PAST_V, np.asarray([4, 5, 6, 7, 28], np.int32) + layer * 32)

    def layer_step(pool, layer):
        pool, state = attn(Q + layer, K, V, pool, attn.for_layer(m, layer, CACHE.num_blocks))
        return pool, state

    if traced:
        pool, states = jax.lax.scan(layer_step, pool, jnp.arange(layers))
    else:
        states = []
        for layer in range(layers):
            pool, state = layer_step(pool, layer)
            states.append(state)
        states = jax.tree.map(lambda *x: jnp.stack(x), *states)
    assert_state(jax.tree.map(lambda x: x[0], states), witness())
    k, _ = pool.logical()
    for layer in range(1, layers):
        np.testing.assert_array_equal(k[layer * 8 : (layer + 1) * 8], k[:8])
    own = PagedAttention(SPEC, CACHE, backend)
    _, state = own(Q + 2, K, V, filled(), own.build(batch()))
    np.testing.assert_array_equal(states.out[2], state.out)


def test_a_plan_moves_to_another_groups_pages():
    attn = PagedAttention(SPEC, CACHE, "sdpa")
    m = attn.build(batch())
    there = (np.asarray(TABLE + [[0, 0]]) + np.asarray([[2], [5], [0], [3], [0]])) % 8
    meta = CommonAttentionMetadata.from_lengths(QUERY, SEQ, there[:4], 4, num_tokens=TOKENS, num_reqs=5)
    moved = attn.update_block_table(m, jnp.asarray(meta.block_table), jnp.asarray(meta.slot_mapping))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (moved, attn.build(meta)))))


def test_cascade_levels_equal_the_flat_batch():
    cache = jattn.PagedKV.from_logical(CACHE, normal(7, 8, 4, 2, 8), normal(8, 8, 4, 2, 8))
    flat = CommonAttentionMetadata.from_lengths([1, 2], [6, 7], [[0, 1], [0, 2]], 4)
    spec = dataclasses.replace(SPEC, sliding_window=5, has_sinks=True)
    params = AttentionParams(sinks=normal(9, 4))
    levels = jattn.cascade_levels(flat, 4, 4)
    state = jax.jit(lambda *x: jattn.cascade_attention(*x, spec, params, backend="sdpa"))(Q[:3], cache, levels)
    expected = jax.jit(lambda *x: jattn.paged_attention(*x, spec, params, backend="sdpa"))(Q[:3], cache, flat)
    np.testing.assert_allclose(state.out, expected.out, **CLOSE)
    np.testing.assert_allclose(state.lse, expected.lse, **CLOSE)


def test_a_quantised_query_means_stored_times_scale():
    params = AttentionParams(q_scale=jnp.float32(0.5))
    cache = filled()
    q = (Q * 2).astype(jnp.float8_e4m3fn)
    state = jattn.paged_attention(q, cache, batch(), SPEC, params, backend="sdpa")
    real = jattn.paged_attention(q.astype(jnp.float32) * 0.5, cache, batch(), SPEC, backend="sdpa")
    np.testing.assert_allclose(state.out.astype(jnp.float32), real.out, atol=0.02)


def test_the_choice_is_made_once_and_shows():
    attn = PagedAttention(SPEC, CACHE)
    named = PagedAttention(SPEC, CACHE, attn.backend_name)
    assert attn.backend == "auto" and attn.backend_name == resolve(SPEC, CACHE).get_name()
    assert attn == named and hash(attn) == hash(named)
    assert attn != PagedAttention(SPEC, dataclasses.replace(CACHE, num_blocks=9))
    assert attn != PagedAttention(SPEC, CACHE, platform="gpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        attn.backend = "toy"


def test_a_layer_of_another_backend_is_another_layer(toy):
    assert PagedAttention(SPEC, CACHE, "toy") != PagedAttention(SPEC, CACHE, "sdpa")


def test_a_backend_that_cannot_is_refused_at_construction(toy):
    with pytest.raises(UnsupportedError, match="sliding window not supported"):
        PagedAttention(dataclasses.replace(SPEC, sliding_window=2), CACHE, "toy")
    with pytest.raises(UnsupportedError, match="attention without a cache not supported"):
        jattn.attention(Q, K, V, batch(), SPEC, backend="toy")
    with pytest.raises(UnsupportedError, match="levels of keys"):
        jattn.cascade_attention(Q, filled(), [batch()], SPEC, backend="toy")


def test_what_only_the_batch_tells_is_refused_at_build(toy):
    attn = PagedAttention(SPEC, CACHE, "toy")
    with pytest.raises(UnsupportedError, match="non-causal attention not supported: causal=False"):
        attn.build(batch(causal=False))
    with pytest.raises(UnsupportedError, match="causal per request not supported"):
        attn.build(batch(causal=[True, False, True, True]))
    with pytest.raises(UnsupportedError, match="toy: non-causal attention not supported: the caller asks for it"):
        PagedAttention(SPEC, CACHE, "toy", needs=(Feature.NON_CAUSAL,))


def test_what_only_the_call_tells_is_refused_at_the_call(toy):
    attn = PagedAttention(SPEC, CACHE, "toy")
    m = attn.build(batch())
    with pytest.raises(UnsupportedError, match="toy: dtype not supported: bfloat16 seen, float32 supported"):
        attn.attend(Q.astype(jnp.bfloat16), filled(), m)
    with pytest.raises(UnsupportedError, match="toy: dtype not supported: int8 seen, float32 supported"):
        attn.attend(Q.astype(jnp.int8), filled(), m, AttentionParams(q_scale=0.1))
    with pytest.raises(UnsupportedError, match="per-head quant scales not supported: params.k_scale has one per head"):
        attn.attend(Q, filled(), m, AttentionParams(k_scale=jnp.ones(2)))
