"""Merges the partial results of a split unit of few rows: each thread has four columns of a row.

The merge of merge_sm90.py has 64 rows of few columns at a time; with a decode's 4 to 16 rows most of its threads are
idle, and it takes 180 registers. The same sums in the same order: see there.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.merge_sm90 import launch_merge, split_unit
from pallas_kernels.gpu.row_states_sm90 import LOG2E, M_START

THREADS, EACH = 128, 4
STEP = THREADS * EACH  # numbers of the output that a warpgroup merges at a time
PARTS_IN_FLIGHT = 8  # parts that are loaded at the same time
MOST_CTAS = 8  # for each helper of a unit, where there may be many units
_ACC, _ONE = (plgpu.Layout.WG_STRIDED((THREADS * n,), vec_size=n) for n in (EACH, 1))


def merge_few_parts(
    cfg, out, lse, part, part_lse, work: wl.GpuWorkList, per_head, *, rows: int | None = None, ctas: int = MOST_CTAS
):
    """(out, lse) with the rows of split units filled in, in place, where no tile has more than 64 rows.

    rows: of a tile, at most; None: as the config says. ctas: for each helper of a unit (merge_sm90.SplitUnit), at most.
    """
    ctas = min(steps_of(cfg, rows or cfg.few_rows), ctas)

    def kernel(info, cta, *refs):
        unit = split_unit(cfg, info, cta, lax.axis_index("cut"))

        @when(unit.exists)
        def _():
            holders = unit.first, unit.last
            step = lambda number: merge_few_rows(cfg, refs, unit.info_of, unit.head, holders, number)
            unit.shared(lax.axis_index("step"), ctas, steps_of(cfg, unit.info_of(wl.NROWS)), step)

    arrays = (work.info, work.cta, per_head, part, part_lse)
    return launch_merge(kernel, dict(cut=cfg.workers, step=ctas), arrays, out, lse)


def steps_of(cfg, nrows):
    """How often merge_few_rows is called for so many rows: for all their columns."""
    return cdiv(nrows * cfg.v_head_dim, STEP)


def merge_few_rows(cfg, refs, piece, head, holders, number):
    """Merges numbers STEP * number .. of the rows of a unit. holders: the first and the last worker that has a part.

    refs: per_head, part, part_lse, out, lse in GMEM. piece: function, column of info -> its value for the tile.
    """
    per_head, part, part_lse, out, lse = refs
    (first, last), kind = holders, dict(dim=cfg.v_head_dim)
    where = (number * STEP, piece(wl.NROWS))

    def step(t, state):
        return add_parts(part, part_lse, first + t * PARTS_IN_FLIGHT, first, last, *where, state, **kind)

    zeros = plgpu.layout_cast(jnp.zeros((STEP,), jnp.float32), _ACC)
    start = [plgpu.layout_cast(jnp.full((THREADS,), x, jnp.float32), _ONE) for x in (M_START, 0.0)]
    count = lax.div(last - first + PARTS_IN_FLIGHT, jnp.int32(PARTS_IN_FLIGHT))
    state = lax.fori_loop(0, count, step, (zeros, *start))
    place = (piece(wl.TOK0), head * cfg.group, piece(wl.ROW0))
    kind |= dict(group=cfg.group, heads=cfg.num_heads, has_sinks=cfg.has_sinks, dtype=cfg.result_dtype)
    store_merged(per_head, out, lse, *where, *place, state, **kind)


def _row_and_column(element, dim: int):
    """The row of this thread's four numbers, and the first one's column."""
    chunk = ptx.add(arith.divui(element, ptx.i32(EACH)), ptx.thread_index())
    row = arith.divui(chunk, ptx.i32(dim // EACH))
    return row, ptx.mul(arith.subi(chunk, ptx.mul(row, dim // EACH)), EACH)


def add_parts(part_ref, lse_ref, part, first, last, element, nrows, state, *, dim: int):
    """(acc, maximum, sum) after PARTS_IN_FLIGHT parts, from worker `part` on; there is none after `last`."""
    shapes = [
        plgpu.ShapeDtypeStruct((size,), jnp.float32, kind)
        for size, kind in ((STEP, _ACC), (THREADS, _ONE), (THREADS, _ONE))
    ]
    kinds = (plgpu.RefType(), plgpu.RefType(), *(ptx.SCALAR,) * 5, _ACC, _ONE, _ONE)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=tuple(shapes))
    def add(ctx, part_ref, lse_ref, part, first, last, element, nrows, acc, top, total):
        part, first, last, element, nrows = map(ptx.scalar_value, (part, first, last, element, nrows))
        row, column = _row_and_column(element, dim)
        exists = ptx.less(row, nrows)
        base, lse_base = ptx.pointer(part_ref, 0), ptx.pointer(lse_ref, 0)
        sums = [rows.pair_element(acc.registers.item(), k) for k in range(EACH)]
        m, s = (rows.register_value(x.registers.item()) for x in (top, total))
        loaded = []
        for k in range(PARTS_IN_FLIGHT):
            holder = ptx.add(part, ptx.i32(k))
            wanted = ptx.bool_to_i32(arith.andi(exists, ptx.less(holder, ptx.add(last, ptx.i32(1)))))
            slot = ptx.add(ptx.mul(holder, 2), ptx.bool_to_i32(ptx.equal(holder, first)))
            at = ptx.to_i64(ptx.add(ptx.mul(slot, wl.TILE_ROWS), row))
            text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f32 $0, 0fFF800000; @p ld.global.f32 $0, [$1]; }"
            lse = ptx.asm_value(text, "=&f,l,r", arith.addi(lse_base, arith.muli(at, ptx.i64(4))), wanted)
            at = arith.addi(arith.muli(at, ptx.i64(dim)), ptx.to_i64(column))
            text = "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;"
            text += " mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; @p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }"
            place = arith.addi(base, arith.muli(at, ptx.i64(4)))
            loaded.append((lse, ptx.asm_values(text, "=&f,=&f,=&f,=&f,l,r", EACH, place, wanted)))
        for lse, values in loaded:
            new = ptx.fmax(m, lse)
            a, b = (ptx.exp2(arith.subf(x, new)) for x in (m, lse))
            sums = [ptx.fma(v, b, arith.mulf(x, a)) for x, v in zip(sums, values, strict=True)]
            m, s = new, ptx.fma(s, a, b)
        results = [rows.empty_fragment((STEP,), _ACC), *(rows.empty_fragment((THREADS,), _ONE) for _ in range(2))]
        for fragment, values in zip(results, (sums, [m], [s]), strict=True):
            rows.fill(fragment, lambda _, values=values: values)
        return tuple(results)

    return add(part_ref, lse_ref, part, first, last, element, nrows, *state)


def store_merged(
    heads_ref, out_ref, lse_ref, element, nrows, tok0, head0, row0, state, *, dim, group, heads, has_sinks, dtype
):
    """Merged rows -> out [T, H, V], and by the thread of the first column -> lse [T, H], with the sink."""
    kinds = (*(plgpu.RefType(),) * 3, *(ptx.SCALAR,) * 5, _ACC, _ONE, _ONE)

    @plgpu.inline_mgpu(arg_types=kinds)
    def store(ctx, heads_ref, out_ref, lse_ref, element, nrows, tok0, head0, row0, acc, top, total):
        element, nrows, tok0, head0, row0 = map(ptx.scalar_value, (element, nrows, tok0, head0, row0))
        row, column = _row_and_column(element, dim)
        exists = ptx.less(row, nrows)
        row = arith.select(exists, row, ptx.i32(0))
        m, s = (rows.register_value(x.registers.item()) for x in (top, total))
        seen, shift, up = arith.cmpf(arith.CmpFPredicate.OGT, s, ptx.f32(0.0)), m, ptx.f32(1.0)
        if has_sinks:
            head = ptx.add(head0, arith.remui(ptx.add(row0, row), ptx.i32(group)))
            place = arith.addi(ptx.pointer(heads_ref, 0), ptx.to_i64(ptx.add(ptx.mul(head, 8), ptx.i32(4))))
            sink = arith.mulf(ptx.asm_value("ld.global.f32 $0, [$1];", "=f,l", place), ptx.f32(LOG2E))
            shift = ptx.fmax(m, sink)
            up = ptx.exp2(arith.subf(m, shift))
            s = ptx.fma(s, up, ptx.exp2(arith.subf(sink, shift)))
        safe = arith.select(seen, s, ptx.f32(1.0))
        factor = arith.select(seen, ptx.divide(up, safe), ptx.f32(0.0))
        natural = arith.mulf(arith.addf(shift, ptx.log2(safe)), ptx.f32(1 / LOG2E))
        natural = arith.select(seen, natural, ptx.f32(float("-inf")))
        flat = ptx.flat_row(row, tok0, head0, row0, group, heads)
        ok = ptx.bool_to_i32(arith.andi(exists, ptx.equal(column, ptx.i32(0))))
        place = arith.addi(ptx.pointer(lse_ref, 0), arith.muli(flat, ptx.i64(4)))
        ptx.store_if(place, ok, natural, kind="f32")
        values = [arith.mulf(rows.pair_element(acc.registers.item(), k), factor) for k in range(EACH)]
        size = jnp.dtype(dtype).itemsize
        at = arith.addi(arith.muli(flat, ptx.i64(dim)), ptx.to_i64(column))
        place, ok = arith.addi(ptx.pointer(out_ref, 0), arith.muli(at, ptx.i64(size))), ptx.bool_to_i32(exists)
        if size == 4:
            ptx.store_if(place, ok, *values, kind="f32")
        else:
            words = [ptx.pack_16bit(values[2 * i], values[2 * i + 1], dtype) for i in range(2)]
            ptx.store_if(place, ok, *words)

    store(heads_ref, out_ref, lse_ref, element, nrows, tok0, head0, row0, *state)
