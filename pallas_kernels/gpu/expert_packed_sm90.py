"""Rows times the packed matrices of their experts on a Hopper GPU: y[row] = x[row] w[expert of the row].

Products are those of packed_wgmma_sm90.py: warpgroups turn codes into numbers in registers, the first operand of wgmma,
and rows of x, in shared memory, are its columns. Work is shared as in expert_product_sm90.py: the rows of an expert lie
together, padded to a multiple of `tile_rows`, and a CTA takes each `ctas`-th item, a tile and a strip of columns.

    warpgroups 0 .. n - 1:  64 columns each of the CTA's strip, of one matrix or of a gate and up
    warpgroup n:            loads codes, scales and rows by TMA into a ring of stages, which goes on from item to item

Sums are float32 and in one order, whatever the tile: equal rows give equal bits.
"""

import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import packed_wgmma_sm90 as packed
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.expert_packed_config import ExpertPackedConfig, supports
from pallas_kernels.gpu.expert_product_sm90 import each_free_stage, each_item
from pallas_kernels.gpu.gates import gated
from pallas_kernels.gpu.packed_codes_sm90 import unit_of_scaled
from pallas_kernels.gpu.packed_wgmma_config import COLUMNS
from pallas_kernels.gpu.row_states_sm90 import across_columns

LOADING_REGISTERS = {1: 40, 2: 40, 3: 40, 4: 24}  # by the number of warpgroups that multiply
COMPUTING_REGISTERS = {1: 240, 2: 232, 3: 152, 4: 112}  # together at most what the CTA has at its start
_WGMMA = plgpu.Layout.WGMMA


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def expert_packed_product(
    x: jax.Array, matrices: tuple[packed_sums.Packed, ...], tiles: jax.Array, config: ExpertPackedConfig
) -> jax.Array:
    """[rows, width]: x [rows, inner] times a matrix of its row's expert; of two, silu(x gate) * (x up).

    matrices: the arrays of QuantisedArrays with a leading axis of experts. tiles i32[1 + config.tiles, 3]: as for
    expert_product_sm90.py. Rows of the result after the tiles that have rows are undefined.
    """
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    packed_sums.check_operands(c, x, matrices, c.experts)
    if (tiles.shape, tiles.dtype) != ((1 + c.tiles, 3), jnp.int32):
        raise ValueError(f"tiles {tiles.dtype.name}{list(tiles.shape)} must be int32[{1 + c.tiles}, 3]")

    def expert_packed_product(tiles, x, *refs):  # the kernel's name in a profile
        *refs, out = refs
        run = functools.partial(_cta, c, tiles, x, packed_sums.of_each(c, refs), out)
        pl.run_scoped(run, _shared(c), collective_axes="wg")

    mesh = plgpu.Mesh(grid=(c.ctas,), grid_names=("cta",), num_threads=c.warpgroups + 1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((c.rows, c.width), x.dtype)
    call = pl.kernel(expert_packed_product, out_type=out, mesh=mesh, compiler_params=params)
    return call(tiles, x, *packed_sums.joined(matrices))


def _shared(c: ExpertPackedConfig) -> dict:
    """The shared memory and the barriers of a CTA."""
    each = [packed.matrix_stages(c) for _ in range(c.matrices)]
    return dict(matrices=each, **packed.row_stages(c), **packed.stage_barriers(c))


def _cta(c: ExpertPackedConfig, tiles, x, arrays: Sequence, out, smem: dict):
    wg = lax.axis_index("wg")

    @when(wg < c.warpgroups)
    def _():
        plgpu.set_max_registers(COMPUTING_REGISTERS[c.warpgroups], action="increase")
        _compute(c, tiles, [matrix[-1] for matrix in arrays] if c.has_factor else [], out, smem, wg)

    @when(wg == c.warpgroups)
    def _():
        plgpu.set_max_registers(LOADING_REGISTERS[c.warpgroups], action="decrease")
        _load(c, tiles, x, arrays, smem)


def _load(c: ExpertPackedConfig, tiles, x, arrays: Sequence, smem: dict):
    """The warpgroup that loads: x and the matrices."""

    def copy(expert, row, column, chunk, at_inner, slot):
        full = smem["full"].at[slot]
        plgpu.copy_gmem_to_smem(x.at[pl.ds(row, c.tile_rows), at_inner], smem["tokens"].at[slot], full)
        for matrix, stages in zip(arrays, smem["matrices"], strict=True):
            packed.copy_matrix(c, matrix, (expert,), column, stages, full, chunk, slot)

    each_free_stage(c, tiles, smem["free"], c.depth, copy)


def _compute(c: ExpertPackedConfig, tiles, factors: Sequence, out, smem: dict, wg):
    """A warpgroup that multiplies: its 64 columns of all items. factors: of each matrix, or none."""
    zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, c.tile_rows), jnp.float32), _WGMMA)
    place = lambda step: lax.rem(step, jnp.int32(c.stages))
    of_matrix = [dict(tokens=smem["tokens"], **stages) for stages in smem["matrices"]]

    def item(expert, row, column, first, last):
        of_columns = [factor_of_columns(c, factor, expert, column, wg) for factor in factors]
        when(first == 0)(lambda: plgpu.barrier_wait(smem["full"].at[0]))

        def chunk(i, carry):
            totals, step = list(carry[: c.matrices]), first + i
            slot = place(step)

            def await_next():
                when(step + 1 < last)(lambda: plgpu.barrier_wait(smem["full"].at[place(step + 1)]))

            runs = c.depth // c.run
            for m, stages in enumerate(of_matrix):
                for run in range(runs):
                    is_end = run == runs - 1 and m == c.matrices - 1
                    meanwhile = await_next if is_end else lambda: None
                    totals[m] = packed.add_run(c, stages, slot, run, wg, totals[m], meanwhile)
            scales = [packed.scales_of_columns(c, s["scales"].at[slot, 0], wg) for s in of_matrix] if c.is_whole else []
            rows.end_reads()  # of codes, scales and zero points
            when(step + c.stages < last)(lambda: plgpu.barrier_arrive(smem["free"].at[slot]))
            return (*totals, *scales)

        ones = plgpu.layout_cast(jnp.ones((COLUMNS,), jnp.float32), _WGMMA.reduce(1))
        start = (*[zeros] * c.matrices, *[ones] * (c.matrices * c.is_whole))
        found = lax.fori_loop(0, jnp.int32(c.chunks), chunk, start)
        sums, scales = found[: c.matrices], found[c.matrices :]
        for of_each in (scales, of_columns):
            if of_each:
                sums = [y * across_columns(each, y.shape) for y, each in zip(sums, of_each, strict=True)]
        if c.scales_codes:
            sums = [y * unit_of_scaled(c.scale_dtype, c.element) for y in sums]
        store_pairs(c, out, gated("silu", *sums) if c.matrices == 2 else sums[0], wg, row, column)

    each_item(c, tiles, item)


def factor_of_columns(c: ExpertPackedConfig, factor, expert, column, wg):
    """f32 (64,): of the warpgroup's columns, from GMEM [experts, 1, width]."""
    layout = _WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 3),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout),
    )
    def read(ctx, factor, expert, column, wg):
        expert, column = map(ptx.scalar_value, (expert, column))
        column = ptx.add(column, packed.first_column(wg))
        place = packed_sums.place_of(ptx.pointer(factor, 0), expert, ptx.i32(c.width), column, 4)
        found = ptx.asm_values("ld.global.nc.v2.f32 {$0, $1}, [$2];", "=f,=f,l", 2, place)
        fragment = rows.empty_fragment((COLUMNS,), layout)
        rows.fill(fragment, lambda i: found[i : i + 1])
        return fragment

    return read(factor, expert, column, wg)


def store_pairs(c: ExpertPackedConfig, out, y, wg, row, column):
    """y [64 columns, tile_rows] -> out [tile_rows, 64 columns] in GMEM. A thread has two neighbours of each row."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, *(ptx.SCALAR,) * 3))
    def store(ctx, out, y, wg, row, column):
        t = ptx.lane_position()[1]
        row, column = map(ptx.scalar_value, (row, column))
        row, column = ptx.add(row, ptx.mul(t, 2)), ptx.add(column, packed.first_column(wg))
        place = packed_sums.place_of(ptx.pointer(out, 0), row, ptx.i32(c.width), column, 2)
        both: dict[int, list] = {}
        for (second, at), pair in zip(rows.pair_places(y), list(y.registers.flat), strict=True):
            for k in range(2):
                both.setdefault(at + k, [None, None])[second] = rows.pair_element(pair, k)
        for at, two in both.items():
            word = ptx.pack_16bit(*two, c.x_dtype)
            ptx.asm(f"st.global.b32 [$0+{2 * c.width * at}], $1;", "l,r", place, word)

    store(out, y, wg, row, column)
