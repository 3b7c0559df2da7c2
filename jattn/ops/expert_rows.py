"""ExpertRows: where the rows of each expert lie, together and padded."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops.partitioner import is_partitioned
from pallas_kernels.gpu import expert_rows_sm80 as kernel

BLOCK = 128  # choices that are compared with one another


class ExpertRows(NamedTuple):
    """An order of choices of experts, each a token's choice of one expert. A pytree.

    The rows of an expert lie together, in the order of the choices, padded to tiles; then the next expert's.
    """

    choice: jax.Array  # i32[rows]: the choice in each row; 0 in padding
    row: jax.Array  # i32[choices]: the row of each choice; the number of rows: its expert is not among these
    expert: jax.Array  # i32[rows]: the expert of the choice in each row; 0 in padding, whichever expert's
    sizes: jax.Array  # i32[experts]: rows of each expert, with padding
    tiles: jax.Array | None = None  # i32[1 + rows / tile_rows, 3]: see expert_product_sm90.py; None: not computed


def arrange(expert: jax.Array, experts: int, tile_rows: int = 1) -> ExpertRows:
    """expert i32[choices]: the expert of each choice, from 0 to experts - 1; `experts`: of no expert here.

    tile_rows: each expert's rows are padded to a multiple of it; 1: they are not padded.
    """
    if device.detect().generation == "sm_90" and not is_partitioned() and kernel.serves(expert.shape[0], experts):
        return _by_kernel(expert, experts, tile_rows)
    return arrange_in_steps(expert, experts, tile_rows)


def arrange_in_steps(expert: jax.Array, experts: int, tile_rows: int) -> ExpertRows:
    """`arrange` by XLA."""
    count = expert.shape[0]
    rank, sizes = _ranks(expert, experts)
    padded = -(-sizes // tile_rows) * tile_rows
    rows = count if tile_rows == 1 else padded_count(count, experts, tile_rows)
    first = jnp.append(jnp.cumsum(padded) - padded, rows).astype(jnp.int32)
    row = jnp.where(expert < experts, first[expert] + rank, rows)
    place = lambda value: jnp.zeros(rows, jnp.int32).at[row].set(value, mode="drop")
    found = ExpertRows(place(jnp.arange(count, dtype=jnp.int32)), row, place(expert), padded)
    return jax.lax.optimization_barrier(found)  # else XLA:GPU computes a row's place again for each of its columns


def _by_kernel(expert: jax.Array, experts: int, tile_rows: int) -> ExpertRows:
    """`arrange` in one launch. Under vmap it is called once per element."""
    rows = padded_count(expert.shape[0], experts, tile_rows)
    launch = functools.partial(kernel.arrange, experts=experts, tile_rows=tile_rows, rows=rows)
    *found, tiles = jax.custom_batching.sequential_vmap(lambda expert: launch(expert))(expert)
    return ExpertRows(*found, tiles=tiles if tile_rows > 1 else None)


@jax.custom_jvp
def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] for x [rows, columns]. On a GPU, XLA copies words of 32 bits up to twice as fast as those of 16."""
    if device.detect().platform != "gpu" or x.dtype.itemsize != 2 or x.shape[1] % 2:
        return x.at[index].get(mode="promise_in_bounds")
    words = jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
    found = words.at[index].get(mode="promise_in_bounds")
    return jax.lax.bitcast_convert_type(found, x.dtype).reshape(-1, x.shape[1])


@take_rows.defjvp
def _take_rows_jvp(primals, tangents):
    (x, index), (dx, _) = primals, tangents
    return take_rows(x, index), dx.at[index].get(mode="promise_in_bounds")


def _ranks(expert: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """i32[choices]: how many choices before each have its expert; i32[experts]: the choices of each expert.

    By comparisons within blocks: 9 us for 16384 choices on an H200 (2026-11-28), where sorts take 48.
    """
    count = expert.shape[0]
    blocks = jnp.pad(expert, (0, -count % BLOCK), constant_values=experts).reshape(-1, BLOCK)
    of_block = (blocks[:, :, None] == jnp.arange(experts)[None, None, :]).sum(axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(of_block, axis=0)
    is_before = jnp.arange(BLOCK)[:, None] > jnp.arange(BLOCK)[None, :]
    in_block = ((blocks[:, :, None] == blocks[:, None, :]) & is_before[None]).sum(axis=2, dtype=jnp.int32)
    before = jnp.take_along_axis(ends - of_block, jnp.minimum(blocks, experts - 1), axis=1)
    return (before + in_block).reshape(-1)[:count], of_block.sum(axis=0)


def experts_of_tiles(sizes: jax.Array, tile_rows: int, tiles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the expert of each tile and that expert's first tile, i32[tiles]; the tiles of each expert, i32[experts]).

    sizes i32[experts]: rows of each expert. A tile has rows of one expert, at most tile_rows. Tiles after the last one
    with rows belong to the last expert.
    """
    of_expert = (-(-sizes // tile_rows)).astype(jnp.int32)
    ends = jnp.cumsum(of_expert, dtype=jnp.int32)
    expert = jnp.sum(ends[None, :] <= jnp.arange(tiles)[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, sizes.shape[0] - 1)
    return expert, (ends - of_expert)[expert], of_expert


def padded_count(choices: int, experts: int, tile_rows: int) -> int:
    """Rows that are enough for any choices, each expert's padded to tiles of `tile_rows`."""
    return (choices + min(choices, experts) * (tile_rows - 1)) // tile_rows * tile_rows
