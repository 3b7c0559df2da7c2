"""Two ways to visit the tiles of a batch: one after the other, or side by side.

The arithmetic of a tile is the same function in both. One after the other, its shapes never depend on the batch, so
neither do a request's bits; side by side, the compiler may sum in another order when there are more of them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.ops.keys import Keys, loop_bits
from jattn.ops.ragged import RaggedBatch, TileClass, classes_for, index_tiles
from jattn.ops.state import AttentionState
from jattn.ops.tile import Numbers, Rules, Rung, Tile, attend_tile, shares_of
from pallas_kernels.algebra import quant

ROWS_AT_ONCE = 4096
"""Queries side by side: bounds the logits that are alive to this many rows times a chunk of keys, a head."""

PLACED_CHUNK, PLACED_STEP = 256, 1024
"""Keys of a chunk and of a step where keys are not copied: on a Zen 5, 16 requests of 1k took 5.2 ms in chunks of 256,
four a step, 5.4 with 512, two a step, and 5.6 with one step a chunk."""


@dataclasses.dataclass(frozen=True)
class OutShape:
    """What the result looks like, and how long a request's queries can be."""

    max_query_len: int
    value_dim: int
    dtype: str


def one_by_one(
    q, batch: RaggedBatch, keys: Keys, rules: Rules, numbers: Numbers, shape: OutShape, bits: bool
) -> AttentionState:
    """A loop over live tiles; time follows the work, memory is one tile's.

    A tile's dead rows lie on other tiles' tokens, so each write keeps what is there already.
    `bits`: carry bf16 as bit patterns (see algebra.quant).
    """
    kinds = classes_for(shape.max_query_len)
    num_tokens, num_heads, _ = q.shape
    queries = _at_least(loop_bits(q, bits), max(kind.rows for kind in kinds))
    stored = quant.storage_dtype(shape.dtype, bits)
    out = jnp.zeros((queries.shape[0], num_heads, shape.value_dim), stored)
    lse = jnp.full((queries.shape[0], num_heads), -jnp.inf, jnp.float32)
    for kind in kinds:
        index = index_tiles(batch, kind)
        rows = kind.rows * num_heads // keys.num_kv_heads
        ladder, shares = _ladder(keys, kind, rows), shares_of(rows, keys.num_kv_heads)

        def visit(t, state, kind=kind, index=index, ladder=ladder, shares=shares):
            out, lse = state
            row, tile = _tile(queries, q.dtype.name, batch, kind, *index.locate(t))
            new_out, new_lse = attend_tile(tile, ladder, rules, numbers, shares=shares)
            new_out = quant.encode(new_out, shape.dtype, stored, numbers.output_scale)
            return _keep(out, new_out, row, tile.live), _keep(lse, new_lse, row, tile.live)

        out, lse = jax.lax.fori_loop(0, index.total, visit, (out, lse))
    out = out[:num_tokens]
    if out.dtype != shape.dtype:
        out = jax.lax.bitcast_convert_type(out, shape.dtype)
    return AttentionState(out=out, lse=lse[:num_tokens])


def _ladder(keys: Keys, kind: TileClass, rows: int) -> list[Rung]:
    """Steps for a loop whose tiles have so many query rows a kv head."""
    placed = keys.in_place(rows)
    if placed is None:
        return [Rung(part) for part in {part.chunk_tokens: part for part in map(keys.in_chunks, kind.chunks)}.values()]
    placed = placed.in_chunks(PLACED_CHUNK)
    together = max(1, PLACED_STEP // placed.chunk_tokens)
    return [Rung(placed, together), Rung(placed)] if together > 1 else [Rung(placed)]


def all_at_once(
    q,
    batch: RaggedBatch,
    keys: Keys,
    rules: Rules,
    numbers: Numbers,
    shape: OutShape,
    static_trips: bool = False,
) -> AttentionState:
    """Tiles side by side, ROWS_AT_ONCE queries at a time: for accelerators, and (static_trips) for gradients."""
    num_tokens, num_heads, _ = q.shape
    out = jnp.zeros((num_tokens, num_heads, shape.value_dim), jnp.float32)
    lse = jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    for kind in classes_for(shape.max_query_len):
        capacity = kind.capacity(num_tokens, batch.num_reqs)
        if capacity == 0:
            continue
        index = index_tiles(batch, kind)
        queries = _at_least(q, kind.rows)

        def visit(t, kind=kind, index=index, queries=queries):
            row, tile = _tile(queries, q.dtype.name, batch, kind, *index.locate(t))
            live = tile.live & (t < index.total)
            clear = jnp.where(live[:, None, None], tile.q, 0.0)  # in a gradient 0 * NaN of a dead row would reach keys
            tile = dataclasses.replace(tile, live=live, q=clear)
            return jnp.where(live, row + jnp.arange(kind.rows), num_tokens), *attend_tile(
                tile, (Rung(keys),), rules, numbers, static_trips
            )

        tiles = jnp.arange(capacity, dtype=jnp.int32)
        group = ROWS_AT_ONCE // kind.rows
        run = jax.vmap(visit) if capacity <= group else lambda t, f=visit, g=group: jax.lax.map(f, t, batch_size=g)
        rows, new_out, new_lse = run(tiles)
        rows = rows.reshape(-1)  # dead rows point past the end and are dropped
        out = out.at[rows].set(new_out.reshape(-1, num_heads, shape.value_dim), mode="drop")
        lse = lse.at[rows].set(new_lse.reshape(-1, num_heads), mode="drop")
    return AttentionState(out=quant.to_dtype(out, shape.dtype, numbers.output_scale), lse=lse)


def _tile(queries, dtype: str, batch: RaggedBatch, kind: TileClass, req, number):
    """(first packed row, Tile) of tile `number` of request `req`.

    A tile that would stick out of the batch begins earlier: padding all queries instead would copy them, and large
    fresh memory costs more than the attention of short prompts.
    """
    of = lambda x: jax.lax.dynamic_index_in_dim(x, req, keepdims=False)  # noqa: E731  x may still be numpy
    first = of(batch.start) + number * kind.rows
    row = jnp.minimum(first, queries.shape[0] - kind.rows)
    token = row + jnp.arange(kind.rows)
    live = (token >= first) & (token < jnp.minimum(first + kind.rows, of(batch.start) + of(batch.query_len)))
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, row, kind.rows)  # noqa: E731
    rows = lambda x: None if x is None else cut(_at_least(x, queries.shape[0]))  # noqa: E731
    return row, Tile(
        q=quant.decode(cut(queries), dtype),
        live=live,
        position=rows(batch.position),
        causal=rows(batch.causal),
        prefix=rows(batch.prefix),
        span=rows(batch.span),
        context=rows(batch.context),
        req=req,
        kv_len=of(batch.kv_len),
        kv_offset=of(batch.kv_offset),
        shard=batch.shard,
    )


def _at_least(x, rows: int):
    """x with at least this many rows: only a batch smaller than a tile is padded."""
    short = max(rows - x.shape[0], 0)
    return jnp.pad(x, ((0, short), *[(0, 0)] * (x.ndim - 1))) if short else x


def _keep(buffer, rows, at, live):
    """buffer with its rows from `at` on replaced where live."""
    old = jax.lax.dynamic_slice_in_dim(buffer, at, rows.shape[0])
    mask = live.reshape((-1,) + (1,) * (rows.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(mask, rows, old), at, 0)
