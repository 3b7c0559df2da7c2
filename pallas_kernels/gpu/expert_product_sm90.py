"""Rows times the matrices of their experts on a Hopper GPU, in 16 bits: y[row] = x[row] w[expert of the row].

The rows of an expert lie together, padded to a multiple of `tile_rows`, or x is a few tokens, which every tile has. A
tile of rows has one expert. Columns of w are the rows of wgmma, and rows of x its columns, so that a tile may have as
few as 8 rows:

    y^T [64 columns, tile_rows]  =  w^T [64 columns, inner] . x^T [inner, tile_rows]

    warpgroups 0 .. n - 1:  64 columns each of the CTA's strip, of one matrix or of both
    warpgroup n:            loads [tile_rows, 64] of x and [64, strip] of each matrix by TMA into a ring of stages

A CTA takes each `ctas`-th item, a tile and a strip: all tiles of an expert with one strip, then with the next, so that
its matrix is read from memory once. The ring goes on from one item to the next. Sums are float32 and in one order,
whatever the tile: equal rows give equal bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.expert_product_config import COLUMNS, DEPTH, ExpertProductConfig, supports
from pallas_kernels.gpu.gates import gated

LOADING_REGISTERS = 40
COMPUTING_REGISTERS = {1: 240, 2: 232, 3: 152}  # by the number of warpgroups that multiply


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def expert_product(
    x: jax.Array, matrices: tuple[jax.Array, ...], tiles: jax.Array, config: ExpertProductConfig
) -> jax.Array:
    """[rows, width]: x [config.x_rows, inner] times a matrix [experts, inner, width]; of two, silu(x gate) * (x up).

    tiles i32[1 + config.tiles, 3]: how many tiles have rows; then of each tile its expert, the expert's first tile, and
    the number of the expert's tiles. Rows of the result after the tiles that have rows are undefined.
    """
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    _check(c, x, matrices, tiles)
    join = functools.partial(gated, "silu") if c.matrices == 2 else lambda y: y

    def expert_product(tiles, x, *refs):  # the kernel's name in a profile
        *matrices, out = refs
        run = functools.partial(_cta, c, join, tiles, x, matrices, out)
        pl.run_scoped(run, _shared(c), collective_axes="wg")

    mesh = plgpu.Mesh(grid=(c.ctas,), grid_names=("cta",), num_threads=c.warpgroups + 1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((c.rows, c.width), x.dtype)
    return pl.kernel(expert_product, out_type=out, mesh=mesh, compiler_params=params)(tiles, x, *matrices)


def _check(c: ExpertProductConfig, x, matrices: Sequence[jax.Array], tiles):
    """ValueError unless the arrays have the shapes and dtypes of the config."""
    wanted = [("x", x, (c.x_rows, c.inner), c.dtype), ("tiles", tiles, (1 + c.tiles, 3), "int32")]
    wanted += [("matrix", matrix, (c.experts, c.inner, c.width), c.dtype) for matrix in matrices]
    for name, array, shape, dtype in wanted:
        if (array.shape, array.dtype.name) != (shape, dtype):
            raise ValueError(f"{name} {array.dtype.name}{list(array.shape)} must be {dtype}{list(shape)}")
    if len(matrices) != c.matrices:
        raise ValueError(f"{len(matrices)} matrices, and the config has {c.matrices}")


def _shared(c: ExpertProductConfig) -> dict:
    """The shared memory and the barriers of a CTA. full: a stage has arrived; free: all warpgroups have read it."""
    dtype = jnp.dtype(c.dtype)
    tiled = lambda *shape: plgpu.SMEM(shape, dtype, transforms=rows.tile_transforms(64, dtype))
    return dict(
        tokens=tiled(c.stages, c.tile_rows, DEPTH),
        matrices=[tiled(c.stages, DEPTH, c.strip) for _ in range(c.matrices)],
        stored=tiled(c.warpgroups, c.buffers, c.stored_rows, COLUMNS),
        full=plgpu.Barrier(num_arrivals=1 + c.matrices, num_barriers=c.stages),
        free=plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
    )


def _cta(c: ExpertProductConfig, join: Callable, tiles, x, matrices, out, smem: dict):
    wg = lax.axis_index("wg")

    @when(wg < c.warpgroups)
    def _():
        plgpu.set_max_registers(COMPUTING_REGISTERS[c.warpgroups], action="increase")
        _compute(c, join, tiles, out, smem, wg)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @when(wg == c.warpgroups)
    def _():
        plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
        _load(c, tiles, x, matrices, smem)


def each_item(c: Any, tiles, body: Callable):
    """body(expert, first row, first column, first step, number of steps of this CTA) for each of its items.

    Steps are counted over all items. c: has ctas, strips, strip, tile_rows and chunks.
    """
    cta, count = lax.axis_index("cta"), tiles[0, 0] * c.strips
    turns = lax.div(count - cta + (c.ctas - 1), jnp.int32(c.ctas))

    @pl.loop(0, turns)
    def _(turn):
        item = cta + turn * c.ctas
        # An expert has the items from first * strips to (first + of_expert) * strips, so this tile is one of its own.
        own = lax.div(item, jnp.int32(c.strips)) + 1
        expert, first, of_expert = (tiles[own, i] for i in range(3))
        place = item - first * c.strips
        tile, strip = first + lax.rem(place, of_expert), lax.div(place, of_expert)
        body(expert, tile * c.tile_rows, strip * c.strip, turn * c.chunks, turns * c.chunks)


def each_free_stage(c: Any, tiles, free, depth: int, copy: Callable):
    """copy(expert, first row, first column, chunk, inputs of the chunk, stage) for all steps of this CTA's items.

    Each waits until its stage is free, so that the warpgroup that loads is as far ahead as there are stages.
    """

    def item(expert, row, column, first, _):
        @pl.loop(0, jnp.int32(c.chunks))
        def _(chunk):
            step = first + chunk
            slot, at_inner = lax.rem(step, jnp.int32(c.stages)), pl.ds(chunk * depth, depth)
            when(step >= c.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            copy(expert, row, column, chunk, at_inner, slot)

    each_item(c, tiles, item)


def _load(c: ExpertProductConfig, tiles, x, matrices, smem: dict):
    """The warpgroup that loads: x and the matrices."""

    def copy(expert, row, column, _, at_inner, slot):
        send = lambda source, target: plgpu.copy_gmem_to_smem(source, target.at[slot], smem["full"].at[slot])
        first = row * 0 if c.tokens else row  # traced, as TMA fills rows past the end of x with zeros
        send(x.at[pl.ds(first, c.tile_rows), at_inner], smem["tokens"])
        for matrix, stages in zip(matrices, smem["matrices"], strict=True):
            send(matrix.at[expert, at_inner, pl.ds(column, c.strip)], stages)

    each_free_stage(c, tiles, smem["free"], DEPTH, copy)


def _compute(c: ExpertProductConfig, join: Callable, tiles, out, smem: dict, wg):
    """A warpgroup that multiplies: its 64 columns of all items."""
    own = pl.ds(wg * COLUMNS, COLUMNS)

    def item(_, row, column, first, __):
        def run(*sums):
            @pl.loop(0, jnp.int32(c.chunks))
            def _(chunk):
                step = first + chunk
                slot = lax.rem(step, jnp.int32(c.stages))
                plgpu.barrier_wait(smem["full"].at[slot])
                tokens = smem["tokens"].at[slot].transpose((1, 0))
                for each, stages in zip(sums, smem["matrices"], strict=True):
                    plgpu.wgmma(each, stages.at[slot, :, own].transpose((1, 0)), tokens)
                plgpu.wgmma_wait(c.matrices)  # those of the step before are done
                before = lax.rem(step + (c.stages - 1), jnp.int32(c.stages))
                when(chunk > 0)(lambda: plgpu.barrier_arrive(smem["free"].at[before]))

            plgpu.wgmma_wait(0)
            last = lax.rem(first + (c.chunks - 1), jnp.int32(c.stages))
            plgpu.barrier_arrive(smem["free"].at[last])
            target = out.at[pl.ds(row, c.tile_rows), pl.ds(column + wg * COLUMNS, COLUMNS)]
            _store(c, join(*[y[...] for y in sums]).astype(out.dtype), smem["stored"].at[wg], target)

        pl.run_scoped(run, *[plgpu.ACC((COLUMNS, c.tile_rows), jnp.float32)] * c.matrices)

    each_item(c, tiles, item)


def _store(c: ExpertProductConfig, y, stored, out):
    """y [64 columns, tile_rows] -> out [tile_rows, 64 columns] in GMEM, through buffers of shared memory in turn."""
    for i in range(c.parts):
        part = slice(i * c.stored_rows, (i + 1) * c.stored_rows)
        plgpu.wait_smem_to_gmem(c.buffers - 1, wait_read_only=True)
        stored.at[i % c.buffers].transpose((1, 0))[...] = plgpu.layout_cast(y[:, part], plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored.at[i % c.buffers], out.at[part])
