"""The `chunked` form of `jattn.ops.reference`, tuned for XLA's CPU compiler: one loop over tiles of queries.

The result equals the reference's (tests/ops/test_paths.py). The shapes inside the loop do not depend on the batch, so
the bits of a request's result do not either. The loop skips tiles and chunks without work, and its memory is that of
one tile. It computes forward only; the gradient is that of the reference.

Tuned by measurement on Zen 5: large loop steps before small ones, a barrier between product and transposition, two
groups of kv heads on JAX 0.10, and the forms of keys in `jattn.ops.cpu_storage`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.ops import layer
from jattn.ops.cpu_storage import CpuKeySource, PlacedChunk, bit_patterns, for_cpu_loop, in_place
from jattn.ops.keys import KeySource, KVChunk
from jattn.ops.layer import LayerTerms, einsum
from jattn.ops.ragged import (
    RaggedBatch,
    RaggedTile,
    TileClass,
    at_least,
    classes_for,
    cut_tile,
    index_tiles,
    key_ranges,
)
from jattn.ops.state import AttentionState
from pallas_kernels.algebra import quant, softmax

FEW_ROWS = 32
"""Up to this many query rows, float32 products take the keys as first operand: 17 us instead of 42 for 256 keys."""

CHUNKS = {1: (512, 128), 8: (512, 128), 128: (256, 128)}
"""Queries of a tile -> keys of a chunk, largest first. The logits of a tile of 128 must fit the CPU's caches (with 512
keys, four prompts of 512 tokens are twice as slow). With few rows, chunks of 512 are 20 % faster than of 256. The
smallest size reads fewer masked keys in short contexts and in the first tiles of a prompt."""

PLACED_CHUNK, PLACED_STEP = 256, 1024
"""Keys of a chunk and of a loop step if keys are read in place. 16 requests of 1k tokens take 5.2 ms with 4 chunks of
256 in a step, 5.4 ms with 2 chunks of 512, and 5.6 ms with one chunk."""


class LoopStep(NamedTuple):
    """One loop step size; larger steps first, smaller ones for the remainder."""

    keys: CpuKeySource
    chunks: int = 1
    """Chunks of a step. They are added in order; XLA can read the next one while it multiplies."""

    @property
    def tokens(self) -> int:
        """Keys of a step."""
        return self.keys.chunk_tokens * self.chunks


def cpu_loop(
    terms: LayerTerms, q: jax.Array, keys: KeySource, batch: RaggedBatch, max_query_len: int, out_dtype: str
) -> AttentionState:
    """Like reference.chunked, with out divided by terms.output_scale, if it is given, and stored in out_dtype.

    Rows of a tile that are not live overlap tokens of other tiles. A write does not change them.
    """
    source = for_cpu_loop(keys, q.dtype.name).in_chunks(max(map(max, CHUNKS.values())))  # pads packed keys once
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
    """Step sizes for tiles of this class. rows: query rows of a tile for each kv head."""
    placed = in_place(keys, rows)
    if placed is None:
        sizes = {part.chunk_tokens: part for part in map(keys.in_chunks, CHUNKS[kind.rows])}
        return [LoopStep(part) for part in sizes.values()]
    placed = placed.in_chunks(PLACED_CHUNK)
    together = max(1, PLACED_STEP // placed.chunk_tokens)
    return [LoopStep(placed, together), LoopStep(placed)] if together > 1 else [LoopStep(placed)]


def head_parts(rows: int, num_kv: int) -> int:
    """The number of groups of kv heads that are computed independently: 2 on JAX 0.10 if a tile has many query rows
    and the number of kv heads is even, else 1.

    XLA of JAX 0.10 runs a product in one thread if each head's result has at most 512 rows and 128 columns, for any
    number of heads. Two products run in two threads, each with its softmax: a prompt is 4 to 13 % faster. More than two
    groups, or few rows, are not faster. With newer versions of XLA, one group is 2 to 5 % faster.
    """
    return 2 if rows > FEW_ROWS and num_kv % 2 == 0 and jax.__version_info__ < (0, 11) else 1


def attend_tile(terms: LayerTerms, tile: RaggedTile, q: jax.Array, steps: Sequence[LoopStep], num_parts: int):
    """(out f32[M H V], lse f32[M H]) of a tile whose decoded queries are q f32[M H D].

    steps: the same keys, the largest step size first.
    """
    rows, num_heads, _ = q.shape
    num_kv, value_dim = steps[0].keys.num_kv_heads, steps[0].keys.v_head_dim
    group = num_heads // num_kv
    q = q.reshape(rows, num_kv, group, -1).transpose(1, 0, 2, 3)  # [K M G D]
    prefix_stop, first, last = key_ranges(tile, terms.mask_rule)
    parts = [slice(i * num_kv // num_parts, (i + 1) * num_kv // num_parts) for i in range(num_parts)]
    queries = [(part, q[part], terms.of_kv_heads(part)) for part in parts]  # sliced once, outside the loop

    def fold(state, own, chunk, kv_pos, inside):
        m, l, acc = state  # noqa: E741
        part, q, terms = own
        chunk = (chunk if num_parts == 1 else jax.tree.map(lambda x: x[:, part], chunk)).zero_outside_range(inside)
        logits = layer.logits(terms, _dots(q, chunk), tile.rows, kv_pos)
        seen = layer.visible(terms, tile.rows, kv_pos, inside)
        m, alpha, p = softmax.weights(m, jnp.where(seen, logits, softmax.NEG_INF))
        return m, l * alpha + jnp.sum(p, -1, keepdims=True), acc * alpha + _weighted(p, chunk)

    def add_chunk(keys, c, states, begin, end):
        index = c * keys.chunk_tokens + jnp.arange(keys.chunk_tokens, dtype=jnp.int32)
        shared = keys.read(tile.req, c), tile.keys.positions(index), (index >= begin) & (index < end)
        return tuple(fold(state, own, *shared) for state, own in zip(states, queries, strict=True))

    def sweep(states, begin, end):
        """Adds keys begin .. end - 1. Steps align to the key range, chunks to the request."""
        for step, finer in zip(steps, (*steps[1:], steps[-1]), strict=True):
            size = step.keys.chunk_tokens
            chunk = begin // size
            # If the remainder fills a step of this size when rounded up to finer steps, one more step of this size.
            count = (end - chunk * size + finer.tokens - 1) // step.tokens

            def visit(s, states, step=step, begin=begin, chunk=chunk):
                for c in range(step.chunks):
                    states = add_chunk(step.keys, chunk + s * step.chunks + c, states, begin, end)
                return states

            states = jax.lax.fori_loop(0, count, visit, states)
            begin = jnp.maximum(begin, chunk * size + count * step.tokens)
        return states

    states = tuple(softmax.start((part.stop - part.start, rows, group), value_dim) for part in parts)
    if terms.mask_rule.prefix:  # the prefix first; the range below starts after it
        states = sweep(states, 0, prefix_stop)
    states = sweep(states, jnp.maximum(first, prefix_stop), last)
    return layer.finish(terms, *map(jnp.concatenate, zip(*states, strict=True)))


def _keep(buffer: jax.Array, rows: jax.Array, tile: RaggedTile) -> jax.Array:
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
    if rows * group <= FEW_ROWS and keys.dtype == jnp.float32:
        # Without the barrier, XLA merges the transposition into the product.
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
