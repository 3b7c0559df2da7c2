"""Merges the partial results of units that the work list split: a second, small launch.

out = sum_i out_i * 2 ** (lse_i - lse),   lse = log2 sum_i 2 ** lse_i   (+ the sink, once)
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS

PARTS_IN_FLIGHT = 8  # parts that are loaded at the same time
COLUMNS = 32  # at most so many columns of the output are merged at a time


def _kernel(cfg, width, in_flight, chunks, info, cta, per_head, part, part_lse, out_ref, lse_ref):
    """One CTA: 64 rows and chunks * width columns of the unit that CTA `cut` of the first launch cut.

    In GMEM: info i32[tiles, 16], cta i32[C, 12], per_head f32[H, 2], part f32[2C, 128, V], part_lse f32[2C, 128].
    """
    me, half, column0 = lax.axis_index("cut"), lax.axis_index("half"), lax.axis_index("column") * (width * chunks)
    unit, first, last = (cta[me, wl.JOIN + i] for i in range(3))
    set_units, set_heads = cta[me, wl.SET_UNITS], cta[me, wl.SET_HEADS]
    tile, head = wl.place_of(jnp.maximum(unit, 0), set_units, cfg.num_kv_heads, set_heads)
    nrows = info[tile, wl.NROWS] - 64 * half
    shape = (WARPGROUP_ROWS, width)

    def load(i, column):
        slot = jnp.where(i == first, 2 * first + 1, 2 * i)
        usable = jnp.where(i <= last, nrows, 0)
        kind = dict(stride=cfg.v_head_dim, width=width)
        return rows.load_partial(part, part_lse, slot, 64 * half, usable, column, **kind)

    def step(t, state, column):
        i0 = first + t * in_flight
        parts = [load(i0 + k, column) for k in range(in_flight)]
        for out, lse in parts:
            acc, m, total = state
            new_m = jnp.maximum(m, lse)
            a, b = jnp.exp2(m - new_m), jnp.exp2(lse - new_m)
            state = (acc * tiles.across_columns(a, shape) + out * tiles.across_columns(b, shape), new_m, total * a + b)
        return state

    def merge_chunk(k, carry):
        column = column0 + k * width
        steps = lax.div(last - first + in_flight, jnp.int32(in_flight))
        merge = functools.partial(step, column=column)
        acc, m, total = lax.fori_loop(0, steps, merge, tiles.start_state(width))
        row0, head0 = info[tile, wl.ROW0] + 64 * half, head * cfg.group
        sink = None
        if cfg.has_sinks:
            packed = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=tiles.ROW_LAYOUT) + row0
            sink = tiles.value_per_row(cfg, per_head, head0, lax.rem(packed, jnp.int32(cfg.group)), 1)
        factor, lse = tiles.finish_rows(m, total, sink)
        where = (info[tile, wl.TOK0], head0, row0, nrows, column)
        kind = dict(group=cfg.group, heads=cfg.num_heads, stride=cfg.v_head_dim)
        rows.store_rows(out_ref, lse_ref, acc * tiles.across_columns(factor, shape), lse, *where, **kind)
        return carry

    @when((unit >= 0) & (nrows > 0))
    def _():
        lax.fori_loop(0, chunks, merge_chunk, None) if chunks > 1 else merge_chunk(jnp.int32(0), None)


def merge_parts(
    cfg, out, lse, part, part_lse, work: wl.GpuWorkList, per_head, *, in_flight: int = PARTS_IN_FLIGHT, chunks: int = 1
):
    """(out, lse) with the rows of split units filled in, in place. A CTA merges `chunks` times COLUMNS columns."""
    width = math.gcd(cfg.v_head_dim, COLUMNS)

    def merge_partial_attention(*refs):
        _kernel(cfg, width, in_flight, chunks, *refs)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    halves = 2 if cfg.long_tiles else 1  # of a tile: 64 rows each
    grid = (cfg.num_ctas, halves, cfg.v_head_dim // (width * chunks))
    mesh = plgpu.Mesh(grid=grid, grid_names=("cut", "half", "column"), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    pl.kernel(merge_partial_attention, out_type=(), mesh=mesh, compiler_params=params, name="merge_parts")(
        work.info, work.cta, per_head, part, part_lse, out_ref, lse_ref
    )
    return jax.freeze(out_ref), jax.freeze(lse_ref)
