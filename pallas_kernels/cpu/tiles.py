"""Divides a ragged batch into tiles of consecutive queries of one request, and moves arrays into tiles and back.

    packed [T H D]  --gather-->  tiled [K, tiles, rows * G, D]  --kernel-->  tiled  --scatter-->  packed

A program of the kernel writes its own tile only, so the grid may run in any order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.paging import cdiv


class QueryTiles(NamedTuple):
    """Where each tile is in the batch. A dead row has no token; all rows of the tiles after the last one are dead."""

    req: jax.Array  # i32[tiles]
    first_row: jax.Array  # i32[tiles] number of the tile's first query within its request
    token: jax.Array  # i32[tiles rows] packed token of each row; T for dead rows


def make_tiles(query_start_loc: jax.Array, num_tokens: int, rows: int) -> QueryTiles:
    """Tiles of `rows` queries in the order of the requests. Their number is static: one per request, plus T // rows.

    A request's first tile starts at its first query, so its results do not depend on the other requests.
    """
    start = jnp.asarray(query_start_loc, jnp.int32)
    length = start[1:] - start[:-1]
    num_reqs = length.shape[0]
    tile = jnp.arange(min(num_reqs, num_tokens) + num_tokens // rows, dtype=jnp.int32)
    counts = cdiv(length, rows)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    req = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), num_reqs - 1).astype(jnp.int32)
    first_row = (tile - (ends - counts)[req]) * rows
    row = first_row[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    live = row < length[req][:, None]
    return QueryTiles(req, first_row, jnp.where(live, start[req][:, None] + row, num_tokens))


def gather(packed: jax.Array, tiles: QueryTiles, num_kv_heads: int) -> jax.Array:
    """[T H D] -> [K, tiles, rows * G, D], query heads of one kv head side by side; dead rows are 0."""
    count, rows = tiles.token.shape
    taken = packed.at[tiles.token].get(mode="fill", fill_value=0)
    by_head = taken.reshape(count, rows, num_kv_heads, -1, packed.shape[-1]).transpose(2, 0, 1, 3, 4)
    return by_head.reshape(num_kv_heads, count, -1, packed.shape[-1])


def scatter(tiled: jax.Array, tiles: QueryTiles, num_tokens: int, fill: float) -> jax.Array:
    """[K, tiles, rows * G, V] -> [T H V]; tokens that are in no tile get `fill`."""
    num_kv_heads, count, _, dim = tiled.shape
    rows = tiles.token.shape[1]
    by_row = tiled.reshape(num_kv_heads, count, rows, -1, dim).transpose(1, 2, 0, 3, 4)
    packed = jnp.full((num_tokens, by_row.shape[2] * by_row.shape[3], dim), fill, tiled.dtype)
    return packed.at[tiles.token].set(by_row.reshape(count, rows, *packed.shape[1:]), mode="drop")
