"""The doors of attention: one call each, the same numbers as the witness, and a sentence for every bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttentionParams, AttentionSpec, CommonAttentionMetadata, KVCacheSpec, PagedAttention, UnsupportedError
from jattn.backends import Feature, register_backend, unregister_backend
from tests.backends.toy import ToyBackend
from tests.oracle import attention as oracle

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE = KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
QUERY, SEQ, TABLE = [3, 1, 0, 2], [3, 6, 0, 2], [[5, 0], [1, 7], [0, 0], [3, 0]]  # all but one request are new
TOKENS = 8  # two pad tokens
CLOSE = dict(rtol=2e-6, atol=2e-6)


def batch(**options):
    return CommonAttentionMetadata.from_lengths(QUERY, SEQ, TABLE, 4, **dict(num_tokens=TOKENS, num_reqs=5) | options)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


Q, K, V = normal(0, TOKENS, 4, 8), normal(1, TOKENS, 2, 8), normal(2, TOKENS, 2, 8)
PAST_K, PAST_V = normal(3, 5, 2, 8), normal(4, 5, 2, 8)  # request 1's five computed tokens


def filled(cache_spec=CACHE, offset=0) -> jattn.PagedKV:
    """A cache that holds the past of request 1, and NaN where nobody wrote."""
    slots = np.asarray([4, 5, 6, 7, 28], np.int32)
    return jattn.write_kv(jattn.empty_cache(cache_spec, fill=jnp.nan), PAST_K, PAST_V, slots + offset)


def witness(**options):
    """Out and lse of the batch, by the oracle."""
    own = np.split(np.arange(6), np.cumsum(QUERY)[:-1])
    keys = [np.asarray(K)[rows] for rows in own]
    values = [np.asarray(V)[rows] for rows in own]
    keys[1], values[1] = np.concatenate([PAST_K, keys[1]]), np.concatenate([PAST_V, values[1]])
    return oracle.ragged(Q, keys, values, QUERY, num_tokens=TOKENS, scale=SPEC.scale, **options)


def assert_state(state, expected):
    np.testing.assert_allclose(state.out, expected[0], **CLOSE)
    np.testing.assert_allclose(state.lse, expected[1], **CLOSE)


@pytest.fixture
def toy():
    register_backend("toy", ToyBackend)
    yield "toy"
    unregister_backend("toy")


# What they compute


@pytest.mark.parametrize("backend", ["auto", "sdpa", "toy"])
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
    attn = PagedAttention(SPEC, CACHE)
    m = attn.build(batch())
    full, state = attn(Q, K, V, filled(), m)
    same, again = attn(Q, None, None, full, m)
    assert same is full
    np.testing.assert_array_equal(again.out, state.out)


def test_the_whole_step_is_one_jit_with_the_layer_static():
    @jax.jit
    def step(attn, q, k, v, cache, meta):
        return attn(q, k, v, cache, attn.build(meta))

    step = jax.jit(step.__wrapped__, static_argnums=0)
    cache, state = step(PagedAttention(SPEC, CACHE), Q, K, V, filled(), batch())
    assert_state(state, witness())
    step(PagedAttention(dataclasses.replace(SPEC), CACHE, "sdpa", "cpu"), Q, K, V, cache, batch())
    assert step._cache_size() == 1  # equal layers share one trace


def test_packed_attention_needs_no_cache():
    alone = [3, 1, 0, 2]
    meta = CommonAttentionMetadata.from_lengths(alone, alone, None, 1, num_tokens=TOKENS, num_reqs=5)
    own = np.split(np.arange(6), np.cumsum(alone)[:-1])
    keys, values = ([np.asarray(x)[rows] for rows in own] for x in (K, V))
    for attn_type in ("decoder", "encoder", "encoder_only"):
        spec = dataclasses.replace(SPEC, attn_type=attn_type)
        expected = oracle.ragged(
            Q, keys, values, alone, num_tokens=TOKENS, scale=SPEC.scale, causal=attn_type == "decoder"
        )
        assert_state(jattn.attention(Q, K, V, meta, spec), expected)


def test_packed_keys_may_be_more_than_the_queries():
    """Request r owns keys cumsum(seq_lens)[r-1] onwards; its queries are the last ones."""
    query, seq = [2, 1], [5, 3]
    meta = CommonAttentionMetadata.from_lengths(query, seq, None, 1)
    k, v = normal(5, 8, 2, 8), normal(6, 8, 2, 8)
    expected = oracle.ragged(Q[:3], [k[:5], k[5:]], [v[:5], v[5:]], query, scale=SPEC.scale)
    assert_state(jattn.attention(Q[:3], k, v, meta, SPEC), expected)


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
    attn = PagedAttention(spec, CACHE)
    cache, state = attn(Q[:3], k, v, jattn.empty_cache(CACHE, fill=jnp.nan), attn.build(meta))
    assert_state(state, expected)
    later = CommonAttentionMetadata.from_lengths(
        [1, 1], [3, 2], [[0], [1]], 4, encoder_seq_lens=encoder, cross_block_table=[[2, 3], [4, 0]]
    )
    same, state = attn(Q[1:3], None, None, cache, attn.build(later))
    assert same is cache
    np.testing.assert_allclose(state.out, expected[0][1:3], **CLOSE)
    assert_state(jattn.attention(Q[:3], k, v, meta, spec), expected)


@pytest.mark.parametrize("backend", ["sdpa", "toy"])
@pytest.mark.parametrize("traced", [False, True])
def test_layers_share_one_pool(toy, backend, traced):
    """Layer l's pages begin at l * N; a slot past a layer's own pages writes nowhere, least of all the next layer's."""
    layers = 3
    pool_spec = dataclasses.replace(CACHE, num_blocks=layers * CACHE.num_blocks)
    attn = PagedAttention(SPEC, pool_spec, backend)
    meta = batch()
    slots = np.where(np.asarray(meta.slot_mapping) < 0, 32, meta.slot_mapping).astype(np.int32)
    m = attn.build(meta.replace(slot_mapping=slots))  # pad tokens aim at the next layer's first slot
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
    attn = PagedAttention(SPEC, CACHE)
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
    state = jattn.cascade_attention(Q[:3], cache, levels, spec, params)
    expected = jattn.paged_attention(Q[:3], cache, flat, spec, params)
    np.testing.assert_allclose(state.out, expected.out, **CLOSE)
    np.testing.assert_allclose(state.lse, expected.lse, **CLOSE)


def test_a_quantised_query_means_stored_times_scale():
    params = AttentionParams(q_scale=jnp.float32(0.5))
    cache = filled()
    q = (Q * 2).astype(jnp.float8_e4m3fn)
    state = jattn.paged_attention(q, cache, batch(), SPEC, params)
    real = jattn.paged_attention(q.astype(jnp.float32) * 0.5, cache, batch(), SPEC)
    np.testing.assert_allclose(state.out.astype(jnp.float32), real.out, atol=0.02)


# How they choose


def test_the_choice_is_made_once_and_shows():
    attn = PagedAttention(SPEC, CACHE)
    assert attn.backend_name == "sdpa" and attn.backend == "auto"
    assert attn == PagedAttention(SPEC, CACHE, "sdpa") and hash(attn) == hash(PagedAttention(SPEC, CACHE, "sdpa"))
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
    with pytest.raises(UnsupportedError, match="toy: non-causal attention not supported: asked for"):
        PagedAttention(SPEC, CACHE, "toy", needs=(Feature.NON_CAUSAL,))


def test_what_only_the_call_tells_is_refused_at_the_call(toy):
    attn = PagedAttention(SPEC, CACHE, "toy")
    m = attn.build(batch())
    with pytest.raises(UnsupportedError, match="toy: dtype not supported: bfloat16 seen, float32 supported"):
        attn.attend(Q.astype(jnp.bfloat16), filled(), m)
    with pytest.raises(UnsupportedError, match="toy: dtype not supported: int8 seen, float32 supported"):
        attn.attend(Q.astype(jnp.int8), filled(), m, AttentionParams(q_scale=0.1))
    with pytest.raises(UnsupportedError, match="per-head quant scales not supported: params.k_scale has one a head"):
        attn.attend(Q, filled(), m, AttentionParams(k_scale=jnp.ones(2)))


# What they refuse, and how they say it


def attend(q=Q, cache=None, m=None, params=None, spec=SPEC):
    attn = PagedAttention(spec, CACHE)
    return attn.attend(q, filled() if cache is None else cache, attn.build(batch()) if m is None else m, params)


def call(q=Q, k=K, v=V):
    attn = PagedAttention(SPEC, CACHE)
    return attn(q, k, v, filled(), attn.build(batch()))


def build(meta=None, spec=SPEC, **options):
    return PagedAttention(spec, CACHE).build(batch() if meta is None else meta, **options)


def packed(q=Q, k=K, v=V, spec=SPEC, params=None, seq=QUERY, **options):
    options = dict(num_tokens=TOKENS) | options
    return jattn.attention(q, k, v, CommonAttentionMetadata.from_lengths(seq, seq, None, 1, **options), spec, params)


def layer_of(**changes):
    return dataclasses.replace(SPEC, **changes)


def cache_of(**changes):
    return dataclasses.replace(CACHE, **changes)


def plan():
    attn = PagedAttention(SPEC, CACHE)
    return attn, attn.build(batch())


CROSS = layer_of(attn_type="encoder_decoder")
ONES = jnp.ones(4)
REFUSED = {
    "spec of another kind": (lambda: PagedAttention({}, CACHE), TypeError, "spec must be AttentionSpec, got dict"),
    "no cache_spec": (
        lambda: PagedAttention(SPEC, None),
        TypeError,
        r"cache_spec must be KVCacheSpec, got NoneType; jattn.attention\(q, k, v, meta, spec\) needs no cache",
    ),
    "kv heads differ": (
        lambda: PagedAttention(SPEC, cache_of(num_kv_heads=4)),
        ValueError,
        "spec.num_kv_heads=2 but cache_spec.num_kv_heads=4; they must be equal",
    ),
    "head dims differ": (lambda: PagedAttention(SPEC, cache_of(head_dim=16)), ValueError, "spec.head_dim=8 but"),
    "v dims differ": (lambda: PagedAttention(SPEC, cache_of(v_head_dim=4)), ValueError, "spec.v_head_dim=8 but"),
    "ragged groups": (lambda: layer_of(num_kv_heads=3), ValueError, "must be a multiple of self.num_kv_heads=3"),
    "unknown backend": (lambda: PagedAttention(SPEC, CACHE, "sdpo"), ValueError, r"'sdpo' is not known \(did you mean"),
    "unknown platform": (
        lambda: PagedAttention(SPEC, CACHE, platform="npu"),
        ValueError,
        "platform='npu' is not known",
    ),
    "lengths for meta": (
        lambda: build([3, 1]),
        TypeError,
        "meta must be CommonAttentionMetadata, got list; make one with",
    ),
    "no block table": (
        lambda: build(CommonAttentionMetadata.from_lengths(QUERY, SEQ, None, 4)),
        ValueError,
        "needs block_table: pass it to from_lengths",
    ),
    "starts of another R": (
        lambda: build(batch().replace(query_start_loc=np.zeros(4, np.int32))),
        ValueError,
        r"query_start_loc.shape=\(4,\) must be \(R \+ 1,\) and seq_lens.shape=\(5,\) \(R,\)",
    ),
    "table of another R": (
        lambda: build(batch().replace(block_table=np.zeros((3, 2), np.int32))),
        ValueError,
        r"block_table.shape=\(3, 2\) must be \[R, B\] with R=5",
    ),
    "negative prefix": (lambda: build(common_prefix_len=-1), ValueError, "common_prefix_len=-1 must be >= 0"),
    "no level": (lambda: PagedAttention(SPEC, CACHE).build_cascade([]), ValueError, "at least one level"),
    "cross without encoder": (
        lambda: build(spec=CROSS),
        ValueError,
        "Encoder/decoder cross-attention requires setting cross-attention metadata attributes",
    ),
    "cross without pages": (
        lambda: build(batch(encoder_seq_lens=[1, 1, 1, 1]), spec=CROSS),
        ValueError,
        "needs block_table: .*cross_block_table",
    ),
    "meta instead of a plan": (
        lambda: attend(m=batch()),
        TypeError,
        r"m must be SdpaMetadata, got CommonAttentionMetadata; call m = attn.build\(meta\) first",
    ),
    "array for cache": (
        lambda: attend(cache=K),
        TypeError,
        "cache must be PagedKV, got .*; make one with jattn.empty_cache",
    ),
    "dict for params": (lambda: attend(params={}), TypeError, "params must be AttentionParams, got dict"),
    "another cache": (
        lambda: attend(cache=filled(cache_of(block_size=8, dtype="float16"))),
        ValueError,
        r"made for another cache_spec: block_size 8 \(wanted 4\), dtype 'float16' \(wanted 'float32'\)",
    ),
    "a cache cut": (
        lambda: attend(cache=dataclasses.replace(filled(), v=jnp.zeros((4, 2, 4, 8)))),
        ValueError,
        r"cache.v.shape=\(4, 2, 4, 8\) must be \(8, 2, 4, 8\)",
    ),
    "flattened q": (
        lambda: attend(Q.reshape(8, 32)),
        ValueError,
        r"q.shape=\(8, 32\) is flattened; pass q.reshape\(-1, 4, 8\)",
    ),
    "batched q": (lambda: attend(Q[None]), ValueError, r"q.shape=\(1, 8, 4, 8\) must be \[T, 4, 8\]"),
    "heads of q": (lambda: attend(Q[:, :2]), ValueError, r"q.shape=\(8, 2, 8\) must be \[T, 4, 8\]"),
    "dim of q": (lambda: attend(Q[..., :4]), ValueError, r"q.shape=\(8, 4, 4\) must be \[T, 4, 8\]"),
    "tokens of q": (lambda: attend(Q[:6]), ValueError, "q has 6 tokens but the metadata has T=8: pad q, or make"),
    "integer q": (lambda: attend(Q.astype(jnp.int32)), ValueError, "q.dtype=int32 must be one of bfloat16, float16"),
    "fp8 q without scale": (
        lambda: attend(Q.astype(jnp.float8_e4m3fn)),
        ValueError,
        "q.dtype=float8_e4m3fn needs params.q_scale",
    ),
    "k alone": (lambda: call(v=None), ValueError, "k is given but v is None: pass both, or neither"),
    "v alone": (lambda: call(k=None), ValueError, "v is given but k is None: pass both, or neither"),
    "heads of k": (lambda: call(k=K[:, :1]), ValueError, r"k.shape=\(8, 1, 8\) must be \[T, 2, 8\]"),
    "heads of v": (lambda: call(v=V[:, :1]), ValueError, r"v.shape=\(8, 1, 8\) must be \[T, 2, 8\]"),
    "dim of k": (lambda: call(k=K[..., :4]), ValueError, r"k.shape=\(8, 2, 4\) must be"),
    "dim of v": (lambda: call(v=V[..., :4]), ValueError, r"v.shape=\(8, 2, 4\) must be"),
    "flattened k": (lambda: call(k=K.reshape(8, 16)), ValueError, r"k.shape=\(8, 16\) is flattened; pass k.reshape"),
    "tokens of k": (lambda: call(k=K[:6]), ValueError, "k has 6 tokens but the metadata has slots for 8"),
    "tokens of v": (lambda: call(v=V[:6]), ValueError, "v has 6 tokens but the metadata has slots for 8"),
    "integer k": (
        lambda: call(k=K.astype(jnp.int8)),
        ValueError,
        "k.dtype=int8 must be one of bfloat16, float16, float32",
    ),
    "integer v": (
        lambda: call(v=V.astype(jnp.int8)),
        ValueError,
        "v.dtype=int8 must be one of bfloat16, float16, float32",
    ),
    "slopes missing": (
        lambda: attend(spec=layer_of(has_alibi=True)),
        ValueError,
        r"spec.has_alibi=True needs params.alibi_slopes, f32\[4\]",
    ),
    "slopes unused": (
        lambda: attend(params=AttentionParams(alibi_slopes=ONES)),
        ValueError,
        "params.alibi_slopes is given but spec.has_alibi=False; make the spec with has_alibi=True",
    ),
    "sinks missing": (
        lambda: attend(spec=layer_of(has_sinks=True)),
        ValueError,
        "spec.has_sinks=True needs params.sinks",
    ),
    "sinks unused": (
        lambda: attend(params=AttentionParams(sinks=ONES)),
        ValueError,
        "params.sinks is given but spec.has_sinks",
    ),
    "sinks per kv head": (
        lambda: attend(spec=layer_of(has_sinks=True), params=AttentionParams(sinks=jnp.ones(2))),
        ValueError,
        r"params.sinks.shape=\(2,\) must be \(4,\), one a query head",
    ),
    "slopes as a scalar": (
        lambda: attend(spec=layer_of(has_alibi=True), params=AttentionParams(alibi_slopes=jnp.ones(()))),
        ValueError,
        r"params.alibi_slopes.shape=\(\) must be \(4,\)",
    ),
    "q_scale per kv head": (
        lambda: attend(params=AttentionParams(q_scale=jnp.ones(2))),
        ValueError,
        r"params.q_scale.shape=\(2,\) must be \(\) or \(4,\)",
    ),
    "k_scale per head": (
        lambda: attend(params=AttentionParams(k_scale=ONES)),
        ValueError,
        r"params.k_scale.shape=\(4,\) must be \(\) or \(2,\)",
    ),
    "v_scale per token": (
        lambda: attend(params=AttentionParams(v_scale=jnp.ones((8, 2)))),
        ValueError,
        r"params.v_scale.shape=\(8, 2\) must be",
    ),
    "zero scale": (
        lambda: attend(params=AttentionParams(k_scale=0.0)),
        ValueError,
        "k_scale=0.0 must be finite and > 0",
    ),
    "negative scale": (
        lambda: attend(params=AttentionParams(v_scale=np.float32(-1))),
        ValueError,
        "v_scale=-1.0 must be",
    ),
    "NaN scale": (
        lambda: attend(params=AttentionParams(q_scale=float("nan"))),
        ValueError,
        "q_scale=nan must be finite",
    ),
    "another width": (
        lambda: plan()[0].update_block_table(plan()[1], jnp.zeros((5, 3), jnp.int32), plan()[1].slot_mapping),
        ValueError,
        r"block_table.shape=\(5, 3\) must stay \(5, 2\); build anew",
    ),
    "another T": (
        lambda: plan()[0].update_block_table(plan()[1], plan()[1].block_table, jnp.zeros(9, jnp.int32)),
        ValueError,
        r"slot_mapping.shape=\(9,\) must stay \(8,\)",
    ),
    "uneven pool": (
        lambda: plan()[0].for_layer(plan()[1], 0, 3),
        ValueError,
        "blocks_per_layer=3 must divide the pool's 8",
    ),
    "no such layer": (
        lambda: plan()[0].for_layer(plan()[1], 4, 2),
        ValueError,
        "layer=4 must be one of the pool's 4 layers",
    ),
    "packed without k": (lambda: packed(k=None), ValueError, "attention without a cache needs k and v"),
    "packed k too short": (lambda: packed(k=K[:5], v=V[:5]), ValueError, "k has 5 tokens but .* lengths add up to 6"),
    "packed k and v differ": (
        lambda: packed(v=V[:6]),
        ValueError,
        r"k.shape\[0\]=8 and v.shape\[0\]=6 must be the same",
    ),
    "packed tokens of q": (lambda: packed(Q[:6]), ValueError, "q has 6 tokens but the metadata has T=8"),
    "packed heads of v": (lambda: packed(v=V[:, :1]), ValueError, r"v.shape=\(8, 1, 8\) must be"),
    "packed sinks missing": (lambda: packed(spec=layer_of(has_sinks=True)), ValueError, "needs params.sinks"),
    "packed cross without encoder": (
        lambda: packed(spec=CROSS),
        ValueError,
        "requires setting cross-attention metadata",
    ),
    "packed spec of another kind": (lambda: packed(spec={}), TypeError, "spec must be AttentionSpec"),
    "paged_attention of arrays": (
        lambda: jattn.paged_attention(Q, K, batch(), SPEC),
        TypeError,
        "cache must be PagedKV",
    ),
    "cascade of arrays": (lambda: jattn.cascade_attention(Q, K, [batch()], SPEC), TypeError, "cache must be PagedKV"),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_every_bad_input_gets_its_sentence(bad):
    do, error, sentence = REFUSED[bad]
    with pytest.raises(error, match=sentence):
        do()


def test_refusals_come_at_trace_time():
    with pytest.raises(ValueError, match=r"q.shape=\(8, 2, 8\) must be \[T, 4, 8\]"):
        jax.eval_shape(lambda q: attend(q), jax.ShapeDtypeStruct((8, 2, 8), jnp.float32))
