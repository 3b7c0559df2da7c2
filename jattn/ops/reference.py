"""Attention of a ragged batch by its formula, in two forms: `dense` and `chunked`.

    x[i, j] = logit(scale * q[i] . k[j])              algebra.logits: soft cap, ALiBi, bias, score_fn
    out[i]  = sum_j softmax(x[i])[j] * v[j]           over the keys j that i sees (algebra.mask), and the sink
    lse[i]  = log sum_j exp(x[i, j])

Both support every option, are differentiable, run on every platform, and compute in float32 for all dtypes. They
return out f32[T H V] and lse f32[T H]: (0, -inf) for tokens that see no key, padding included.
`dense` is the specification. For each request, it computes all T queries with the keys of that request, and keeps the
rows of the request's own queries. `chunked` runs on accelerators and gives the gradient of every path. It holds the
logits of ROWS_AT_ONCE queries and one chunk of keys at a time.
"""

import jax
import jax.numpy as jnp

from jattn.ops import layer
from jattn.ops.keys import KeySource, KVChunk
from jattn.ops.layer import LayerTerms, einsum
from jattn.ops.ragged import RaggedBatch, RaggedTile, at_least, classes_for, cut_tile, index_tiles, key_ranges
from jattn.ops.state import AttentionState
from pallas_kernels.algebra import softmax
from pallas_kernels.algebra.mask import most_keys
from pallas_kernels.algebra.paging import cdiv

CHUNK_TOKENS = 256
"""Keys of a chunk."""
ROWS_AT_ONCE = 4096
"""Queries that are computed in parallel. The logits of a head have at most this many rows, and a chunk of columns."""


def dense(terms: LayerTerms, q: jax.Array, keys: KeySource, batch: RaggedBatch) -> AttentionState:
    """One softmax over all keys of a request, request by request; q [T H D]."""
    keys = keys.in_chunks(CHUNK_TOKENS)
    num_tokens, num_heads, _ = q.shape
    index = jnp.arange(keys.max_chunks * keys.chunk_tokens, dtype=jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)

    def add_request(state: AttentionState, req: jax.Array):
        run, first = batch.keys_of(req), batch.start[req]
        mine = (token >= first) & (token < first + batch.query_lens[req])
        kv_pos = run.positions(index)
        seen = layer.visible(terms, batch.rows, kv_pos, index < run.length) & mine[None, :, None, None]
        k, v = _all_keys(keys, req).zero_outside_range(jnp.any(seen, axis=(0, 1, 2))).dequantised()
        own = _by_kv_head(jnp.where(mine[:, None, None], q, 0), keys.num_kv_heads)
        dots = _product("krd,kcd->krc", own, k)
        logits = jnp.where(seen, layer.logits(terms, dots, batch.rows, kv_pos), -jnp.inf)
        m = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
        p = jnp.exp(logits - softmax.finite_max(m))
        values = _product("krc,kcv->krv", layer.weights(terms, p, m), v)
        out, lse = layer.finish(terms, m, jnp.sum(p, axis=-1, keepdims=True), values)
        out = jnp.where(mine[:, None, None], out, state.out)
        return AttentionState(out=out, lse=jnp.where(mine[:, None], lse, state.lse)), None

    nothing = AttentionState.empty(num_tokens, num_heads, keys.v_head_dim)
    return jax.lax.scan(add_request, nothing, jnp.arange(batch.num_reqs, dtype=jnp.int32))[0]


def chunked(
    terms: LayerTerms,
    q: jax.Array,
    keys: KeySource,
    batch: RaggedBatch,
    max_query_len: int,
    differentiable: bool = False,
    in_order: bool = True,
) -> AttentionState:
    """The online softmax over chunks of keys, for tiles of queries in parallel, ROWS_AT_ONCE queries at a time.

    max_query_len: upper bound of the queries of a request. differentiable: a loop over as many chunks as any tile can
    need, as reverse-mode differentiation needs a static length; the backward pass computes the logits again. Otherwise
    only the chunks in the key range of the tile. in_order: the queries of a request have consecutive positions.
    """
    keys = keys.in_chunks(CHUNK_TOKENS)
    num_tokens, num_heads, _ = q.shape
    out = jnp.zeros((num_tokens, num_heads, keys.v_head_dim), jnp.float32)
    lse = jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    for kind in classes_for(max_query_len):
        capacity = kind.capacity(num_tokens, batch.num_reqs)
        if capacity == 0:
            continue
        index, queries = index_tiles(batch, kind), at_least(q, kind.rows)

        def attend(t, kind=kind, index=index, queries=queries):
            tile = cut_tile(queries, batch, kind, *index.locate(t)).cleared(t < index.total)
            rows = jnp.where(tile.live, tile.first_row + jnp.arange(kind.rows, dtype=jnp.int32), num_tokens)
            return rows, *_attend_tile(terms, tile, keys, differentiable, in_order)

        tiles, at_once = jnp.arange(capacity, dtype=jnp.int32), ROWS_AT_ONCE // kind.rows
        rows, new_out, new_lse = (
            jax.vmap(attend)(tiles) if capacity <= at_once else jax.lax.map(attend, tiles, batch_size=at_once)
        )
        rows = rows.reshape(-1)  # rows that are not live have the index num_tokens and are dropped
        out = out.at[rows].set(new_out.reshape(-1, *out.shape[1:]), mode="drop")
        lse = lse.at[rows].set(new_lse.reshape(-1, num_heads), mode="drop")
    return AttentionState(out=out, lse=lse)


def _attend_tile(terms: LayerTerms, tile: RaggedTile, keys: KeySource, differentiable: bool, in_order: bool):
    """(out f32[M H V], lse f32[M H]) of one tile."""
    q = _by_kv_head(tile.q, keys.num_kv_heads)
    prefix_stop, first, last = key_ranges(tile, terms.mask_rule)

    def add_chunk(state, chunk, wanted):
        m, l, acc = state  # noqa: E741
        index = chunk * keys.chunk_tokens + jnp.arange(keys.chunk_tokens, dtype=jnp.int32)
        inside, kv_pos = wanted(index), tile.keys.positions(index)
        k, v = keys.read(tile.req, chunk).zero_outside_range(inside).dequantised()
        logits = layer.logits(terms, _product("krd,kcd->krc", q, k), tile.rows, kv_pos)
        seen = layer.visible(terms, tile.rows, kv_pos, inside)
        m, shrink, p = softmax.weights(m, jnp.where(seen, logits, -jnp.inf))
        values = _product("krc,kcv->krv", layer.weights(terms, p, m), v)
        return m, l * shrink + jnp.sum(p, -1, keepdims=True), acc * shrink + values

    state = softmax.start(q.shape[:3], keys.v_head_dim)
    if differentiable:
        wanted = lambda i: ((i >= first) & (i < last)) | (i < prefix_stop)  # noqa: E731
        step = jax.checkpoint(lambda state, chunk: (add_chunk(state, chunk, wanted), None))
        count = _most_chunks(terms, tile, keys, in_order)
        begin = first // keys.chunk_tokens if count < keys.max_chunks else 0
        state, _ = jax.lax.scan(step, state, begin + jnp.arange(count, dtype=jnp.int32))
    else:
        size = keys.chunk_tokens
        ranges = [(jnp.maximum(first, prefix_stop), last)]
        for begin, end in [(0, prefix_stop), *ranges] if terms.mask_rule.prefix else ranges:
            wanted = lambda i, a=begin, b=end: (i >= a) & (i < b)  # noqa: E731
            step = lambda chunk, state, wanted=wanted: add_chunk(state, chunk, wanted)  # noqa: E731
            state = jax.lax.fori_loop(begin // size, (end + size - 1) // size, step, state)
    return layer.finish(terms, *state)


def _most_chunks(terms: LayerTerms, tile: RaggedTile, keys: KeySource, in_order: bool) -> int:
    """The most chunks from the first to the last key that a tile can see."""
    if not in_order:
        return keys.max_chunks
    most = most_keys(terms.mask_rule, len(tile.live), tile.rows.causal is not None)
    return keys.max_chunks if most is None else min(keys.max_chunks, cdiv(most - 1, keys.chunk_tokens) + 1)


def _all_keys(keys: KeySource, req: jax.Array) -> KVChunk:
    """All chunks of a request as one, up to max_chunks."""
    chunks = jax.vmap(keys.read, in_axes=(None, 0))(req, jnp.arange(keys.max_chunks, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunks)


def _by_kv_head(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[M H D] -> f32[K M G D]."""
    rows, _, dim = q.shape
    return q.astype(jnp.float32).reshape(rows, num_kv_heads, -1, dim).transpose(1, 0, 2, 3)


def _product(formula: str, rows: jax.Array, x: jax.Array) -> jax.Array:
    """einsum of rows [K M G *] and x [K C *], with M and G as one axis r, so that a gradient sums over one axis."""
    num_kv, num_rows, group, width = rows.shape
    product = einsum(formula, rows.reshape(num_kv, num_rows * group, width), x)
    return product.reshape(num_kv, num_rows, group, product.shape[-1])
