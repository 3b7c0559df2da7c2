"""silu(x gate) * (x up) of many rows on a Hopper GPU: one launch, in which neither product leaves the registers.

XLA writes both products to memory and reads them again to join them: 44 us for 256 rows of 2048 by 8192, where this
takes 28 and the arithmetic 25 (docs/notebook/nvidia_h200.md).

    warpgroups 0, 1: 64 rows each of a tile [128, columns] of both products, by wgmma; then that tile of the result
    warpgroup 2:     loads [128, 64] of x and [64, columns] of each weight by TMA, as far ahead as there are stages

Every CTA takes each `ctas`-th tile, those of the same columns one after the other, whose weights are then in the L2
cache. Sums are float32 and in one order, so equal inputs give equal bits.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.gated_product_config import DEPTH, ROWS, STAGES, GatedProductConfig

_WARPGROUP_ROWS = ROWS // 2
_STORED = _WARPGROUP_ROWS, 64  # rows and columns that a warpgroup stores at once


@functools.partial(jax.jit, static_argnames="config")  # equal layers share one compiled kernel
def gated_product(x: jax.Array, gate: jax.Array, up: jax.Array, config: GatedProductConfig) -> jax.Array:
    """silu(x @ gate) * (x @ up): bf16[T, width], of bf16 x [T, inner] and weights [inner, width]."""
    rows, width = x.shape[0], gate.shape[1]
    padded = -(-rows // ROWS) * ROWS

    def gated_product(*refs):  # the kernel's name in a profile
        _kernel(config, *refs)

    mesh = plgpu.Mesh(grid=(config.ctas,), grid_names=("cta",), num_threads=3, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((padded, width), x.dtype)
    call = pl.kernel(gated_product, out_type=out, mesh=mesh, compiler_params=params)
    return call(jnp.pad(x, ((0, padded - rows), (0, 0))), gate, up)[:rows]


def _tiled(columns: int) -> tuple:
    """The layout in shared memory that wgmma and TMA want, for rows of so many elements."""
    swizzle = plgpu.find_swizzle(columns * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _kernel(config: GatedProductConfig, x, gate, up, out):
    """One CTA."""
    columns = config.columns
    row_tiles, strips = x.shape[0] // ROWS, gate.shape[1] // columns
    tokens = plgpu.BlockSpec((ROWS, DEPTH), lambda k: (0, k), transforms=_tiled(DEPTH))
    weights = plgpu.BlockSpec((DEPTH, columns), lambda k: (k, 0), transforms=_tiled(64))

    def pipeline(body, context):
        """A loop over the inner dimension; `context` surrounds it in the warpgroups that compute."""
        return plgpu.emit_pipeline_warp_specialized(
            body, grid=(x.shape[1] // DEPTH,), memory_registers=40, in_specs=[tokens, weights, weights], wg_axis="wg",
            num_compute_wgs=2, max_concurrent_steps=STAGES, compute_context=context,
        )  # fmt: skip

    def tiles(allocations, stored):
        wg = lax.axis_index("wg")
        own_rows = pl.ds(wg * _WARPGROUP_ROWS, _WARPGROUP_ROWS)

        @plgpu.nd_loop((row_tiles * strips,), collective_axes="cta")
        def _(loop):
            (number,) = loop.index
            at_rows = pl.ds(lax.rem(number, row_tiles) * ROWS, ROWS)
            at_columns = pl.ds(lax.div(number, row_tiles) * columns, columns)

            def with_sums(run):
                def joined(of_gate, of_up):
                    run((of_gate, of_up))
                    g, u = of_gate[...], of_up[...]
                    tile = (g / (1 + jnp.exp(-g)) * u).astype(out.dtype)
                    _store(tile, stored.at[wg], out.at[at_rows, at_columns].at[own_rows])

                sums = plgpu.ACC((_WARPGROUP_ROWS, columns), jnp.float32)
                pl.run_scoped(joined, sums, sums)

            def multiply(_, x_tile, gate_tile, up_tile, sums):
                of_gate, of_up = sums
                plgpu.wgmma(of_gate, x_tile.at[own_rows], gate_tile)
                plgpu.wgmma(of_up, x_tile.at[own_rows], up_tile)
                plgpu.wgmma_wait(0)
                return sums

            operands = x.at[at_rows], gate.at[:, at_columns], up.at[:, at_columns]
            pipeline(multiply, with_sums)(*operands, allocations=allocations)

    nothing = lambda *_: None  # the allocations do not depend on what is computed
    allocations = pipeline(nothing, nothing).get_allocations(x, gate, up)
    stored = plgpu.SMEM((2, 2, *_STORED), out.dtype, transforms=_tiled(_STORED[1]))
    pl.run_scoped(tiles, allocations, stored, collective_axes="wg")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(tile, stored, out):
    """Write a warpgroup's tile to global memory, through its two blocks of shared memory in turn."""
    for i in range(tile.shape[1] // _STORED[1]):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        part = slice(i * _STORED[1], (i + 1) * _STORED[1])
        stored[i % 2] = tile[:, part]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored.at[i % 2], out.at[:, part])
