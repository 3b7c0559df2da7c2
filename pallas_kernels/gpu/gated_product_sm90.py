"""silu(x gate) * (x up) of many rows on a Hopper GPU: one launch, in which neither product leaves the registers.

XLA writes both products to memory, and reads them again to join them: a fifth of the time for 256 rows.

    warpgroups 0, 1: 64 rows each of a tile [128, columns] of both products, by wgmma; then the tile of the result
    warpgroup 2:     loads [128, 64] of x and [64, columns] of each weight by TMA, as far ahead as there are stages

Each CTA takes every CTAS-th tile. In a cluster two CTAs take the tiles of one strip of columns and different rows, and
each loads half of that strip's weights for both. Sums are float32 and in one order, so equal inputs give equal bits.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.gated_product_config import DEPTH, ROWS, GatedProductConfig

_STORED = 64, 64  # rows and columns that a warpgroup stores at once


@functools.partial(jax.jit, static_argnames="config")  # equal layers share one compiled kernel
def gated_product(x: jax.Array, gate: jax.Array, up: jax.Array, config: GatedProductConfig) -> jax.Array:
    """silu(x @ gate) * (x @ up): bf16[T, width], of bf16 x [T, inner] and weights [inner, width]."""
    shape = (x.shape[0], gate.shape[1])

    def gated_product(*refs):  # the kernel's name in a profile
        _kernel(config, *refs)

    mesh = plgpu.Mesh(
        grid=(config.ctas // config.cluster,), grid_names=("strip",), cluster=(config.cluster,),
        cluster_names=("member",), num_threads=3, thread_name="wg",
    )  # fmt: skip
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(gated_product, out_type=jax.ShapeDtypeStruct(shape, x.dtype), mesh=mesh, compiler_params=params)
    return call(x, gate, up)


def _tiled(columns: int) -> tuple:
    """The layout in shared memory that wgmma and TMA want, for rows of so many elements."""
    swizzle = plgpu.find_swizzle(columns * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _kernel(config: GatedProductConfig, x, gate, up, out):
    columns = config.columns
    clusters_of_rows = x.shape[0] // (ROWS * config.cluster)
    strips = gate.shape[1] // columns
    shared = ("member",) if config.cluster > 1 else ()
    weights = plgpu.BlockSpec(
        (DEPTH, columns), lambda k: (k, 0), transforms=_tiled(min(columns, 64)), collective_axes=shared,
        delay_release=config.delay,
    )  # fmt: skip
    tokens = plgpu.BlockSpec((ROWS, DEPTH), lambda k: (0, k), transforms=_tiled(DEPTH), delay_release=config.delay)

    def pipeline(body, context):
        return plgpu.emit_pipeline_warp_specialized(
            body, grid=(x.shape[1] // DEPTH,), memory_registers=40, in_specs=[tokens, weights, weights], wg_axis="wg",
            num_compute_wgs=2, max_concurrent_steps=config.stages, compute_context=context,
        )  # fmt: skip

    def tiles(allocations, stored):
        wg, member = lax.axis_index("wg"), lax.axis_index("member")
        mine = pl.ds(wg * 64, 64)

        @plgpu.nd_loop((clusters_of_rows * strips,), collective_axes="strip")
        def _(loop):
            (number,) = loop.index
            row_tile = lax.rem(number, clusters_of_rows) * config.cluster + member
            strip = lax.div(number, clusters_of_rows)
            at_rows, at_columns = pl.ds(row_tile * ROWS, ROWS), pl.ds(strip * columns, columns)

            def context(run):
                def sums(of_gate, of_up):
                    run((of_gate, of_up))
                    g, u = of_gate[...], of_up[...]
                    _store(
                        (g / (1 + jnp.exp(-g)) * u).astype(out.dtype),
                        stored.at[wg],
                        out.at[at_rows, at_columns].at[mine],
                    )

                acc = plgpu.ACC((64, columns), jnp.float32)
                pl.run_scoped(sums, acc, acc)

            def body(_, x_tile, gate_tile, up_tile, carry):
                of_gate, of_up = carry
                plgpu.wgmma(of_gate, x_tile.at[mine], gate_tile)
                plgpu.wgmma(of_up, x_tile.at[mine], up_tile)
                plgpu.wgmma_wait(2 * config.delay)
                return carry

            pipeline(body, context)(
                x.at[at_rows], gate.at[:, at_columns], up.at[:, at_columns], allocations=allocations
            )

    nothing = lambda *_, **__: None
    allocations = pipeline(nothing, nothing).get_allocations(x, gate, up)
    stored = plgpu.SMEM((2, 2, *_STORED), out.dtype, transforms=_tiled(_STORED[1]))
    pl.run_scoped(tiles, allocations, stored, collective_axes="wg")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(tile, stored, out):
    """Write a warpgroup's tile to global memory, through its two blocks of shared memory."""
    for i in range(tile.shape[1] // _STORED[1]):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        part = slice(i * _STORED[1], (i + 1) * _STORED[1])
        stored[i % 2] = tile[:, part]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored.at[i % 2], out.at[:, part])
