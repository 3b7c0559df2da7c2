"""Rows times the matrices of their experts as XLA's dots of tiles: some rows of one expert, and its matrix.

XLA:CPU and XLA:GPU expand `jax.lax.ragged_dot` to a product of all rows with every expert, most of it with zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jattn.ops.expert_rows import experts_of_tiles
from jattn.ops.product import varying_as
from jattn.ops.quantised import QuantisedArray, plain

MAX_TILE_ROWS = 256
GATHERED_BYTES = 2**28
"""Upper bound of the matrices that `batched` copies at a time, unless one is larger."""


def row_tiles(sizes: jax.Array, tile_rows: int, count: int) -> jax.Array:
    """i32[count, 3]: (expert, first row, rows) of each tile, of at most tile_rows rows; 0 rows at the end.

    sizes i32[experts]: rows of each expert. `most_tiles` is the largest count that is needed.
    """
    expert, first_tile, _ = experts_of_tiles(sizes, tile_rows, count)
    skipped = (jnp.arange(count, dtype=jnp.int32) - first_tile) * tile_rows
    rows = jnp.clip(sizes[expert] - skipped, 0, tile_rows)
    first = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)[expert] + skipped
    used = rows > 0
    return jnp.stack([expert, jnp.where(used, first, 0), jnp.where(used, rows, 0)], axis=1).astype(jnp.int32)


def tile_rows_of(rows: int, experts: int) -> int:
    """The power of two not above the mean rows of an expert: shorter tiles read a matrix more often, longer ones are
    partly empty. At least 2, with which XLA:CPU multiplies bfloat16 ten times as fast as with one row."""
    return min(MAX_TILE_ROWS, max(2, 1 << max(0, (rows // experts).bit_length() - 1)))


def most_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """Each expert that has rows has at most one tile that is not full."""
    return min(rows, experts) + rows // tile_rows


def looped(x: jax.Array, kernel: "jax.Array | QuantisedArray", sizes: jax.Array) -> jax.Array:
    """x [N, in], in the order of the rows' experts, times kernel [experts, in, out]: [N, out], summed in float32.

    One tile after the other, only those that have rows, so it has no reverse derivative. Of a quantised kernel each
    tile's matrix is dequantised. Rows beyond the sum of the sizes are zero.
    """
    tiles, tile_rows, padded = _tiles(x, kernel, sizes)

    def multiply(i: jax.Array, y: jax.Array) -> jax.Array:
        expert, first, rows = tiles[i]
        # Without the barrier XLA:CPU widens bfloat16 before it slices, and so all matrices in front of the loop.
        matrices, expert = lax.optimization_barrier((kernel, expert))
        begin = jnp.minimum(first, padded.shape[0] - tile_rows)
        row = begin + jnp.arange(tile_rows)
        product = _dot(padded, matrices, begin, expert, tile_rows)
        before = lax.dynamic_slice_in_dim(y, begin, tile_rows)
        own = (row >= first) & (row < first + rows)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(own[:, None], product, before), begin, axis=0)

    used = (tiles[:, 2] > 0).sum()
    first = varying_as(jnp.zeros((padded.shape[0], kernel.shape[2]), _sum_dtype(x)), (x, kernel, sizes))
    y = lax.fori_loop(0, used, multiply, first)
    return y[: x.shape[0]].astype(x.dtype)


def batched(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """The same, with a reverse derivative: in batches of tiles whose matrices, gathered, have GATHERED_BYTES at most.
    Tiles without rows are multiplied too.

    Rows beyond the sum of the sizes may hold anything, NaN too, and are zero in the result and in derivatives.
    """
    row = jnp.arange(x.shape[0])
    keep = lambda y: jnp.where((row < sizes.sum())[:, None], y, 0)
    tiles, tile_rows, padded = _tiles(keep(x), kernel, sizes)
    begins = jnp.minimum(tiles[:, 1], padded.shape[0] - tile_rows)
    at_once = max(1, GATHERED_BYTES // max(1, kernel.nbytes // kernel.shape[0]))
    multiply = lambda tile: _dot(padded, kernel, tile[1], tile[0], tile_rows).astype(x.dtype)
    products = lax.map(multiply, (tiles[:, 0], begins), batch_size=min(at_once, tiles.shape[0]))

    before = jnp.cumsum(tiles[:, 2]) - tiles[:, 2]
    tile = jnp.searchsorted(before, row, side="right") - 1
    return keep(products[tile, jnp.clip(row - begins[tile], 0, tile_rows - 1)])


def _tiles(x: jax.Array, kernel: "jax.Array | QuantisedArray", sizes: jax.Array) -> tuple[jax.Array, int, jax.Array]:
    """(`row_tiles` of x, the rows of a tile, x padded to at least one tile)"""
    rows, experts = x.shape[0], kernel.shape[0]
    tile_rows = tile_rows_of(rows, experts)
    padded = x if rows >= tile_rows else jnp.pad(x, ((0, tile_rows - rows), (0, 0)))
    return row_tiles(sizes, tile_rows, most_tiles(rows, experts, tile_rows)), tile_rows, padded


def _dot(
    x: jax.Array, kernel: "jax.Array | QuantisedArray", begin: jax.Array, expert: jax.Array, tile_rows: int
) -> jax.Array:
    """[tile_rows, out]: the rows of x from `begin` on, times the matrix of the expert."""
    rows = lax.dynamic_slice_in_dim(x, begin, tile_rows)
    matrix = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, expert, keepdims=False), kernel)
    return jnp.dot(rows, plain(matrix, x.dtype), preferred_element_type=_sum_dtype(x))


def _sum_dtype(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
