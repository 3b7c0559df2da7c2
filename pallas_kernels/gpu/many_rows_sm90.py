"""Products of many rows on a Hopper GPU: several weights in one launch, joined by an activation or side by side.

    gated_product    act(x gate) * (x up). XLA writes both products to memory and reads them again: 44 us for 256 rows
                     of 2048 by 8192, where this takes 28 and the arithmetic 25 (docs/notebook/nvidia_h200.md)
    joined_product   x [q k v]. XLA joins the weights, in every step, or launches small products

    warpgroups 0, 1: 64 rows each of a tile [128, columns], by wgmma; then that tile of the result
    warpgroup 2:     loads [128, 64] of x and [64, columns] of weights by TMA, as far ahead as there are stages

Every CTA takes each `ctas`-th tile, those of the same columns one after the other, whose weights are then in the L2
cache. Sums are float32 and in one order, so equal inputs give equal bits.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.gates import gated
from pallas_kernels.gpu.many_rows_config import DEPTH, ROWS, STAGES, ManyRowsConfig

_WARPGROUP_ROWS = ROWS // 2
_STORED = _WARPGROUP_ROWS, 64  # rows and columns that a warpgroup stores at once


@functools.partial(jax.jit, static_argnames=("config", "activation"))  # equal layers share one compiled kernel
def gated_product(
    x: jax.Array, gate: jax.Array, up: jax.Array, config: ManyRowsConfig, activation: str = "silu"
) -> jax.Array:
    """activation(x @ gate) * (x @ up): bf16[T, width], of bf16 x [T, inner] and weights [inner, width]."""

    def gated_product(x, gate, up, out):  # the kernel's name in a profile
        _kernel(config, x, [(gate, up)], out, functools.partial(gated, activation))

    return _launch(gated_product, x, (gate, up), gate.shape[1], config)


@functools.partial(jax.jit, static_argnames="config")
def joined_product(x: jax.Array, weights: tuple[jax.Array, ...], config: ManyRowsConfig) -> jax.Array:
    """x @ each weight, side by side: bf16[T, sum of widths], of bf16 x [T, inner] and weights [inner, width]."""

    def joined_product(x, *refs):
        *weights, out = refs
        _kernel(config, x, [(weight,) for weight in weights], out, lambda y: y)

    return _launch(joined_product, x, weights, sum(w.shape[1] for w in weights), config)


def _launch(kernel, x: jax.Array, weights: tuple[jax.Array, ...], width: int, config: ManyRowsConfig) -> jax.Array:
    rows = x.shape[0]
    padded = -(-rows // ROWS) * ROWS
    mesh = plgpu.Mesh(grid=(config.ctas,), grid_names=("cta",), num_threads=3, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((padded, width), x.dtype)
    call = pl.kernel(kernel, out_type=out, mesh=mesh, compiler_params=params)
    return call(jnp.pad(x, ((0, padded - rows), (0, 0))), *weights)[:rows]


def _tiled(columns: int) -> tuple:
    """The layout in shared memory that wgmma and TMA want, for rows of so many elements."""
    swizzle = plgpu.find_swizzle(columns * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _kernel(config: ManyRowsConfig, x, groups, out, join):
    """One CTA. Each group of weights has columns of its own in `out`: `join` of its products."""
    columns = config.columns
    row_tiles = x.shape[0] // ROWS
    tokens = plgpu.BlockSpec((ROWS, DEPTH), lambda k: (0, k), transforms=_tiled(DEPTH))
    weights = plgpu.BlockSpec((DEPTH, columns), lambda k: (k, 0), transforms=_tiled(64))

    def pipeline(body, context):
        """A loop over the inner dimension; `context` surrounds it in the warpgroups that compute."""
        return plgpu.emit_pipeline_warp_specialized(
            body, grid=(x.shape[1] // DEPTH,), memory_registers=40, in_specs=[tokens, *[weights] * len(groups[0])],
            wg_axis="wg", num_compute_wgs=2, max_concurrent_steps=STAGES, compute_context=context,
        )  # fmt: skip

    def tiles(allocations, stored):
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        own_rows = pl.ds(wg * _WARPGROUP_ROWS, _WARPGROUP_ROWS)
        tiles_before = 0
        for group in groups:
            # The first tile of the group that is this CTA's.
            first = lax.rem(cta + (-tiles_before % config.ctas), jnp.int32(config.ctas))
            count = row_tiles * (group[0].shape[1] // columns)
            offset = tiles_before // row_tiles * columns
            tiles_before += count

            @pl.loop(first, jnp.int32(count), step=jnp.int32(config.ctas))
            def _(number, group=group, offset=offset):
                at_rows = pl.ds(lax.rem(number, jnp.int32(row_tiles)) * ROWS, ROWS)
                start = lax.div(number, jnp.int32(row_tiles)) * columns
                own_out = out.at[at_rows, pl.ds(offset + start, columns)].at[own_rows]

                def with_sums(run):
                    def joined(*sums):
                        run(sums)
                        _store(join(*[y[...] for y in sums]).astype(out.dtype), stored.at[wg], own_out)

                    pl.run_scoped(joined, *[plgpu.ACC((_WARPGROUP_ROWS, columns), jnp.float32)] * len(group))

                def multiply(_, x_tile, *rest):
                    *blocks, sums = rest
                    for each, block in zip(sums, blocks, strict=True):
                        plgpu.wgmma(each, x_tile.at[own_rows], block)
                    plgpu.wgmma_wait(0)
                    return sums

                operands = [weight.at[:, pl.ds(start, columns)] for weight in group]
                pipeline(multiply, with_sums)(x.at[at_rows], *operands, allocations=allocations)

    nothing = lambda *_: None  # the allocations do not depend on what is computed
    allocations = pipeline(nothing, nothing).get_allocations(x, *groups[0])
    stored = plgpu.SMEM((2, 2, *_STORED), out.dtype, transforms=_tiled(_STORED[1]))
    pl.run_scoped(tiles, allocations, stored, collective_axes="wg")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(tile, stored, out):
    """Write a warpgroup's tile to global memory, through its two blocks of shared memory in turn.

    A tile of one block always takes the first one, so that the copy of the tile before must have ended.
    """
    blocks = tile.shape[1] // _STORED[1]
    for i in range(blocks):
        plgpu.wait_smem_to_gmem(min(blocks, 2) - 1, wait_read_only=True)
        part = slice(i * _STORED[1], (i + 1) * _STORED[1])
        stored[i % 2] = tile[:, part]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored.at[i % 2], out.at[:, part])
