"""Merges the partial results of units that the work list split: a second, small launch.

out = sum_i out_i * 2 ** (lse_i - lse),   lse = log2 sum_i 2 ** lse_i   (+ the sink, once)
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import row_states_sm90 as row_states
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS

COLUMNS = 32  # at most so many columns of the output are merged at a time
PARTS_IN_FLIGHT = 4
"""Parts that are loaded at the same time. With 8 a thread has 179 registers and a multiprocessor holds 2 of 8 CTAs: a
launch that finds nothing to merge takes four waves, 3.7 us on an H200."""


def _kernel(cfg, width, in_flight, chunks, info, cta, per_head, part, part_lse, out_ref, lse_ref):
    """One CTA: 64 rows and at most chunks * width output columns of the unit that CTA `cut` of the first launch cut.

    In GMEM: info i32[tiles, 16], cta i32[C, 16], per_head f32[H, 2], part f32[2C, part_rows, V], part_lse
    f32[2C, part_rows].
    """
    row_group, all_chunks = lax.axis_index("row_group"), cfg.v_head_dim // width
    unit = split_unit(cfg, info, cta, lax.axis_index("cut"))
    refs = (per_head, part, part_lse, out_ref, lse_ref)

    @when(unit.exists & (unit.info_of(wl.NROWS) - 64 * row_group > 0))
    def _():
        def chunk(number):
            column, holders = number * width, (unit.first, unit.last)
            merge_rows(cfg, width, refs, unit.info_of, unit.head, holders, 64 * row_group, column, in_flight)

        unit.shared(lax.axis_index("column"), all_chunks // chunks, all_chunks, chunk)


@dataclasses.dataclass(frozen=True)
class SplitUnit:
    """A unit whose parts are merged. Its helpers are CTAs of the first launch, each of which has CTAs of the merge."""

    exists: jax.Array
    info_of: Callable[[int], jax.Array]  # column of info -> its value for the unit's tile
    head: jax.Array
    first: jax.Array  # the CTA of the first launch that has the first part
    last: jax.Array
    helper: jax.Array  # the number of this one, 0 for `first`
    helpers: jax.Array  # how many there are

    def shared(self, mine, each: int, count, do: Callable[[jax.Array], None]):
        """do(number) for this CTA's of `count` numbers. mine: its place among the `each` CTAs of every helper."""
        first, stride = self.helper * each + mine, self.helpers * each
        own = lax.div(count - first + stride - 1, stride)
        lax.fori_loop(0, own, lambda k, _: do(first + k * stride), None)


def split_unit(cfg, info, cta, me) -> SplitUnit:
    """The unit that CTA `me` of the first launch cut.

    Of a flat list every CTA but the last that has a part of a unit helps to merge it: a unit of 66 parts of 64 heads of
    latents of 512 takes 29 us without.
    """
    join, first, last = (cta[me, wl.JOIN + i] for i in range(3))
    unit = join
    if cfg.flat_list:
        unit = jnp.where(cta[me, wl.LINE_BLK1] > 0, cta[me, wl.LINE_UNIT1], -1)
        first = jnp.where((unit >= 0) & (join < 0), cta[me, wl.FROM], me)
        last = cta[first, wl.JOIN + 2]
    set_units, set_heads = cta[me, wl.SET_UNITS], cta[me, wl.SET_HEADS]
    tile, head = wl.place_of(jnp.maximum(unit, 0), set_units, cfg.num_kv_heads, set_heads)
    helper, helpers = (me - first, last - first) if cfg.flat_list else (jnp.int32(0), jnp.int32(1))
    return SplitUnit(unit >= 0, lambda number: info[tile, number], head, first, last, helper, helpers)


def merge_rows(cfg, width, refs, info_of, head, ctas, skipped, column, in_flight):
    """64 rows of a tile from row `skipped` on, and `width` columns of the output from `column` on, of a unit split over
    ctas = (first, last).

    refs: per_head, part, part_lse, out, lse in GMEM. info_of: function, column of info -> its value for the tile.
    in_flight: parts that are loaded at the same time.
    """
    per_head, part, part_lse, out_ref, lse_ref = refs
    (first, last), nrows, shape = ctas, info_of(wl.NROWS) - skipped, (WARPGROUP_ROWS, width)

    def load(i):
        slot = jnp.where(i == first, 2 * first + 1, 2 * i)
        usable = jnp.where(i <= last, nrows, 0)
        kind = dict(stride=cfg.v_head_dim, width=width)
        return rows.load_partial(part, part_lse, slot, skipped, usable, column, **kind)

    def step(t, state):
        i0 = first + t * in_flight
        parts = [load(i0 + k) for k in range(in_flight)]
        for out, lse in parts:
            acc, m, total = state
            new_m = jnp.maximum(m, lse)
            a, b = jnp.exp2(m - new_m), jnp.exp2(lse - new_m)
            state = (
                acc * row_states.across_columns(a, shape) + out * row_states.across_columns(b, shape),
                new_m,
                total * a + b,
            )
        return state

    steps = lax.div(last - first + in_flight, jnp.int32(in_flight))
    acc, m, total = lax.fori_loop(0, steps, step, row_states.start_state(width))
    row0, head0 = info_of(wl.ROW0) + skipped, head * cfg.group
    sink = None
    if cfg.has_sinks:
        packed = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=row_states.ROW_LAYOUT) + row0
        sink = row_states.value_per_row(cfg, per_head, head0, lax.rem(packed, jnp.int32(cfg.group)), 1)
    factor, lse = row_states.finish_rows(m, total, sink)
    where = (info_of(wl.TOK0), head0, row0, nrows, column)
    kind = dict(group=cfg.group, heads=cfg.num_heads, stride=cfg.v_head_dim)
    rows.store_rows(out_ref, lse_ref, acc * row_states.across_columns(factor, shape), lse, *where, **kind)


def merge_parts(
    cfg, out, lse, part, part_lse, work: wl.GpuWorkList, per_head, *, in_flight: int | None = None,
    chunks: int | None = None,
):  # fmt: skip
    """(out, lse) with the rows of split units filled in, in place. A CTA merges up to `chunks` times COLUMNS columns.

    None: as many as suit the kernel.
    """
    width = math.gcd(cfg.v_head_dim, COLUMNS)
    in_flight = in_flight or PARTS_IN_FLIGHT
    if chunks is None:
        chunks = 2 if cfg.v_head_dim > 128 and cfg.v_head_dim // width % 2 == 0 else 1

    groups = cfg.tile_rows // WARPGROUP_ROWS if cfg.long_tiles else 1  # of 64 rows of a tile
    grid = dict(cut=cfg.workers, row_group=groups, column=cfg.v_head_dim // (width * chunks))
    kernel = functools.partial(_kernel, cfg, width, in_flight, chunks)
    return launch_merge(kernel, grid, (work.info, work.cta, per_head, part, part_lse), out, lse)


def launch_merge(kernel, grid: dict[str, int], arrays, out, lse):
    """Runs a merge of one warpgroup a CTA over arrays in GMEM, and out and lse in place."""

    def merge_partial_attention(*refs):
        kernel(*refs)

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    names = tuple(grid)
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=names, num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(merge_partial_attention, out_type=(), mesh=mesh, compiler_params=params, name="merge_parts")
    call(*arrays, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
