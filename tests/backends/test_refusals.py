"""The error of each bad input says what was seen, what was wanted, and the way out. It is raised at trace time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttentionParams, CommonAttentionMetadata, PagedAttention
from tests.backends.ragged_batch import (
    QUERY,
    SEQ,
    TOKENS,
    K,
    Q,
    V,
    batch,
    filled,
)
from tests.backends.toy import CACHE, SPEC


def attend(q=Q, cache=None, m=None, params=None, spec=SPEC):
    attn = PagedAttention(spec, CACHE, "sdpa")
    return attn.attend(q, filled() if cache is None else cache, attn.build(batch()) if m is None else m, params)


def call(q=Q, k=K, v=V):
    attn = PagedAttention(SPEC, CACHE, "sdpa")
    return attn(q, k, v, filled(), attn.build(batch()))


def build(meta=None, spec=SPEC, **options):
    return PagedAttention(spec, CACHE, "sdpa").build(batch() if meta is None else meta, **options)


def packed(q=Q, k=K, v=V, spec=SPEC, params=None, seq=QUERY, **options):
    options = dict(num_tokens=TOKENS) | options
    meta = CommonAttentionMetadata.from_lengths(seq, seq, None, 1, **options)
    return jattn.attention(q, k, v, meta, spec, params, backend="sdpa")


def layer_of(**changes):
    return dataclasses.replace(SPEC, **changes)


def cache_of(**changes):
    return dataclasses.replace(CACHE, **changes)


def plan():
    attn = PagedAttention(SPEC, CACHE, "sdpa")
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
    "ragged groups": (lambda: layer_of(num_kv_heads=3), ValueError, "must be a multiple of num_kv_heads=3"),
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
    "negative prefix": (
        lambda: build(common_prefix_len=-1),
        ValueError,
        "common_prefix_len=-1 must be an integer >= 0",
    ),
    "no level": (lambda: PagedAttention(SPEC, CACHE, "sdpa").build_cascade([]), ValueError, "at least one level"),
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
        r"params.sinks.shape=\(2,\) must be \(4,\), one for each query head",
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
        r"block_table.shape=\(5, 3\) must be \(5, 2\), as in the plan; call build",
    ),
    "another T": (
        lambda: plan()[0].update_block_table(plan()[1], plan()[1].block_table, jnp.zeros(9, jnp.int32)),
        ValueError,
        r"slot_mapping.shape=\(9,\) must be \(8,\), as in the plan",
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
    "packed k too short": (
        lambda: packed(k=K[:5], v=V[:5]),
        ValueError,
        "k has 5 tokens but .* add up to 6: .* pass a cache",
    ),
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
