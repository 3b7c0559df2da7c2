"""The `chunked` form of `jattn.ops.reference`, tuned for XLA's CPU compiler: tiles one after the other, in one loop.

The result is the reference's (tests/ops/test_paths.py), and shapes never depend on the batch, so neither do a request's
bits. Time follows the work, and memory is one tile's. Forward only: the gradient is that of the reference.
What was tuned, each by measurement on Zen 5: steps of falling size, products that a barrier keeps apart, kv heads in
two parts on JAX 0.10, and the forms of keys in `jattn.ops.cpu_storage`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.ops import layer
from jattn.ops.cpu_storage import CpuKeySource, PlacedChunk, bit_patterns, for_cpu_loop, in_place
from jattn.ops.keys import KeySource, KVChunk
from jattn.ops.layer import LayerTerms, einsum
from jattn.ops.ragged import QueryTile, RaggedBatch, TileClass, at_least, classes_for, cut_tile, index_tiles, key_ranges
from jattn.ops.state import AttentionState
from pallas_kernels.algebra import quant, softmax

FEW_ROWS = 32
"""Up to so many query rows, dots of float32 are made with the keys first: 17 us against 42 for 256 keys."""

CHUNKS = {1: (512, 128), 8: (512, 128), 128: (256, 128)}
"""Keys at once, falling, by the queries of a tile. A long tile's logits must fit the caches (with 512 keys four prompts
of 512 are twice as slow), few rows want long chunks (512 instead of 256: 20 % faster), the smallest spares short
contexts, and the first tiles of a prompt, keys that nobody sees."""

PLACED_CHUNK, PLACED_STEP = 256, 1024
"""Keys of a chunk and of a step where keys are not copied: 16 requests of 1k took 5.2 ms in chunks of 256, four a step,
5.4 with 512, two a step, and 5.6 with one step a chunk."""


class LoopStep(NamedTuple):
    """One loop step size; larger steps first, smaller ones for the remainder."""

    keys: CpuKeySource
    chunks: int = 1
    """Chunks of a step, one after the other in arithmetic: while one is being multiplied, XLA may read the next."""

    @property
    def tokens(self) -> int:
        """Keys of a step."""
        return self.keys.chunk_tokens * self.chunks


def cpu_loop(
    terms: LayerTerms, q: jax.Array, keys: KeySource, batch: RaggedBatch, max_query_len: int, out_dtype: str
) -> AttentionState:
    """`chunked`, with out divided by terms.output_scale if there is one and stored in out_dtype.

    A tile's dead rows lie on other tiles' tokens, so each write keeps what is there already.
    """
    source = for_cpu_loop(keys, q.dtype.name).in_chunks(max(map(max, CHUNKS.values())))  # packed keys: one copy for all
    kinds = classes_for(max_query_len)
    num_tokens, num_heads, _ = q.shape
    queries = at_least(bit_patterns(q), max(kind.rows for kind in kinds))
    stored = quant.storage_dtype(out_dtype, bits=True)
    out = jnp.zeros((queries.shape[0], num_heads, source.v_head_dim), stored)
    lse = jnp.full((queries.shape[0], num_heads), -jnp.inf, jnp.float32)
    for kind in kinds:
        index = index_tiles(batch, kind)
        rows = kind.rows * num_heads // source.num_kv_heads
        steps, parts = loop_steps(source, kind, rows), head_parts(rows, source.num_kv_heads)

        def visit(t, state, kind=kind, index=index, steps=steps, parts=parts):
            out, lse = state
            tile = cut_tile(queries, batch, kind, *index.locate(t))
            new_out, new_lse = attend_tile(terms, tile, quant.decode(tile.q, q.dtype.name), steps, parts)
            new_out = quant.encode(new_out, out_dtype, stored, terms.output_scale)
            return _keep(out, new_out, tile), _keep(lse, new_lse, tile)

        out, lse = jax.lax.fori_loop(0, index.total, visit, (out, lse))
    return AttentionState(out=quant.native(out[:num_tokens], out_dtype), lse=lse[:num_tokens])


def loop_steps(keys: CpuKeySource, kind: TileClass, rows: int) -> list[LoopStep]:
    """Step sizes for tiles of this class, which have so many query rows a kv head."""
    placed = in_place(keys, rows)
    if placed is None:
        sizes = {part.chunk_tokens: part for part in map(keys.in_chunks, CHUNKS[kind.rows])}
        return [LoopStep(part) for part in sizes.values()]
    placed = placed.in_chunks(PLACED_CHUNK)
    together = max(1, PLACED_STEP // placed.chunk_tokens)
    return [LoopStep(placed, together), LoopStep(placed)] if together > 1 else [LoopStep(placed)]


def head_parts(rows: int, num_kv: int) -> int:
    """Parts of the kv heads that wait for each other only where keys are read: two, where a step has many query rows
    and the kv heads can be halved, on JAX 0.10; otherwise one.

    Its XLA gives a product to one thread while the result has at most 512 rows by 128 columns a head, whatever the
    number of heads. Of two products each thread takes one, and one's softmax hides beside the other's: 4 to 13 % of a
    prompt. More than two, or few rows, gain nothing, and newer XLA is 2 to 5 % faster undivided.
    """
    return 2 if rows > FEW_ROWS and num_kv % 2 == 0 and jax.__version_info__ < (0, 11) else 1


def attend_tile(terms: LayerTerms, tile: QueryTile, q: jax.Array, steps: Sequence[LoopStep], num_parts: int):
    """(out f32[M H V], lse f32[M H]) of a tile whose decoded queries are q f32[M H D].

    `steps` hold the same keys in steps of falling size.
    """
    rows, num_heads, _ = q.shape
    num_kv, value_dim = steps[0].keys.num_kv_heads, steps[0].keys.v_head_dim
    group = num_heads // num_kv
    q = q.reshape(rows, num_kv, group, -1).transpose(1, 0, 2, 3)  # [K M G D]
    prefix_stop, first, last = key_ranges(tile, terms.mask_rule)
    parts = [slice(i * num_kv // num_parts, (i + 1) * num_kv // num_parts) for i in range(num_parts)]
    queries = [(part, q[part], terms.of_kv_heads(part)) for part in parts]  # cut outside the loop

    def fold(state, own, chunk, kv_pos, inside):
        m, l, acc = state  # noqa: E741
        part, q, terms = own
        chunk = (chunk if num_parts == 1 else jax.tree.map(lambda x: x[:, part], chunk)).zero_outside_range(inside)
        logits = layer.logits(terms, _dots(q, chunk), tile.rows, kv_pos)
        seen = layer.visible(terms, tile.rows, kv_pos, inside)
        m, alpha, p = softmax.weights(m, jnp.where(seen, logits, softmax.NEG_INF))
        return m, l * alpha + jnp.sum(p, -1, keepdims=True), acc * alpha + _weighted(p, chunk)

    def add_chunk(keys, c, states, begin, end):
        index = c * keys.chunk_tokens + jnp.arange(keys.chunk_tokens)
        shared = keys.read(tile.req, c), tile.keys.positions(index), (index >= begin) & (index < end)
        return tuple(fold(state, own, *shared) for state, own in zip(states, queries, strict=True))

    def sweep(states, begin, end):
        """Adds keys begin .. end - 1. Steps align to the key range, chunks to the request."""
        for step, finer in zip(steps, (*steps[1:], steps[-1]), strict=True):
            size = step.keys.chunk_tokens
            chunk = begin // size
            # a remainder that would take finer steps just as many keys is one more step of this size
            count = (end - chunk * size + finer.tokens - 1) // step.tokens

            def visit(s, states, step=step, begin=begin, chunk=chunk):
                for c in range(step.chunks):
                    states = add_chunk(step.keys, chunk + s * step.chunks + c, states, begin, end)
                return states

            states = jax.lax.fori_loop(0, count, visit, states)
            begin = jnp.maximum(begin, chunk * size + count * step.tokens)
        return states

    states = tuple(softmax.start((part.stop - part.start, rows, group), value_dim) for part in parts)
    if terms.mask_rule.prefix:  # its keys first, none of them twice
        states = sweep(states, 0, prefix_stop)
    states = sweep(states, jnp.maximum(first, prefix_stop), last)
    return layer.finish(terms, *map(jnp.concatenate, zip(*states, strict=True)))


def _keep(buffer: jax.Array, rows: jax.Array, tile: QueryTile) -> jax.Array:
    """buffer with the tile's live rows replaced."""
    old = jax.lax.dynamic_slice_in_dim(buffer, tile.first_row, rows.shape[0])
    live = tile.live.reshape((-1,) + (1,) * (rows.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(live, rows, old), tile.first_row, 0)


def _dots(q: jax.Array, chunk: KVChunk | PlacedChunk) -> jax.Array:
    """q [K M G D] . k -> f32[K M G C]."""
    num_kv, rows, group, dim = q.shape
    flat = q.reshape(num_kv, rows * group, dim)
    if isinstance(chunk, PlacedChunk):
        return chunk.dots(flat).reshape(num_kv, rows, group, -1)
    pages, _, slots, _ = chunk.k.shape
    flat = flat.astype(chunk.k.dtype)
    keys = chunk.k.transpose(1, 0, 2, 3).reshape(num_kv, pages * slots, dim)
    if rows * group <= FEW_ROWS and keys.dtype == jnp.float32:  # XLA would fold the transposition without a barrier
        dots = jax.lax.optimization_barrier(einsum("kmd,kcd->kcm", flat, keys)).transpose(0, 2, 1)
    else:
        dots = einsum("kmd,kcd->kmc", flat, keys)
    if chunk.k_scale is not None:
        dots = dots * chunk.k_scale.transpose(1, 0, 2).reshape(num_kv, 1, -1)
    return dots.reshape(num_kv, rows, group, pages * slots)


def _weighted(p: jax.Array, chunk: KVChunk | PlacedChunk) -> jax.Array:
    """p [K M G C] . v -> f32[K M G V]."""
    num_kv, rows, group, _ = p.shape
    pages, _, slots, dim = chunk.v.shape
    if isinstance(chunk, KVChunk) and chunk.v_scale is not None:
        p = p * chunk.v_scale.transpose(1, 0, 2).reshape(num_kv, 1, 1, -1)
    values = chunk.v.transpose(1, 0, 2, 3).reshape(num_kv, pages * slots, dim)
    return einsum("kmc,kcd->kmd", p.reshape(num_kv, rows * group, -1), values).reshape(num_kv, rows, group, dim)
