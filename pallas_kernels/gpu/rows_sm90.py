"""Rows of tiles in PTX: loads and stores that neither TMA nor plain Refs can express.

A tile's rows are packed (token, head of the group) pairs: row p of a request is token p // G, head p % G, and lies at
flat row (tok0 + p // G) * H + head0 + p % G of a [T, H, D] array. A tile starts at any token and ends at any row, so
each row is loaded and stored under a predicate of its own, 16 bytes (loads) or one pair of values (stores) at a time.
All functions are called by one warpgroup (128 threads); scalars are i32.
"""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.ptx_sm90 import (
    SCALAR,
    asm,
    asm_values,
    bool_to_i32,
    f32,
    flat_row,
    i32,
    i64,
    less,
    pointer,
    scalar_value,
    store_if,
    swizzled,
    thread_index,
    to_i64,
)

_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
LOADS_UNROLLED = 8  # loads per thread in a loop's body


def tile_transforms(dim: int, dtype) -> tuple:
    """(tiling, swizzle) of an SMEM tile [rows, dim] that wgmma and TMA share; dim must be a multiple of 16."""
    return plgpu.TilingTransform((8, swizzle_columns(dim, dtype))), plgpu.SwizzleTransform(swizzle_bytes(dim, dtype))


def smem_tiles(dtype, *shape):
    """Shared memory for such tiles, the last two axes of `shape`."""
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(shape[-1], dtype))


def swizzle_bytes(dim: int, dtype) -> int:
    """The widest of 128, 64, 32 bytes that divides a row."""
    return math.gcd(dim * jnp.dtype(dtype).itemsize, 128)


def swizzle_columns(dim: int, dtype) -> int:
    """Columns of one swizzled tile."""
    return swizzle_bytes(dim, dtype) // jnp.dtype(dtype).itemsize


def load_rows(src_ref, tile_ref, tok0, head0, row0, nrows, *, group, heads, dim, dtype, hidden=False, unrolled=16):
    """Rows row0 .. row0 + 63 of a request's packed rows -> a swizzled SMEM tile; rows past `nrows` become 0.

    src_ref GMEM [T, H, D], tile_ref SMEM [64, D]. Asynchronous: the caller must call
    await_rows and commit_smem. hidden: see ptx.lane_position. unrolled: so many loads of a thread need no loop; fewer
    take fewer registers.
    """
    swizzle = swizzle_bytes(dim, dtype)
    chunks = dim * 2 // 16  # chunks of 16 bytes in a row
    steps = WARPGROUP_ROWS * chunks // 128
    most = steps if steps <= unrolled else LOADS_UNROLLED
    parts = next(n for n in range(1, steps + 1) if steps % n == 0 and steps // n <= most)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(tile_transforms(dim, dtype)), *(SCALAR,) * 5))
    def load(ctx, src, tile, tok0, head0, row0, nrows, first_chunk):
        tok0, head0, row0, nrows, first_chunk = map(scalar_value, (tok0, head0, row0, nrows, first_chunk))
        base, smem, me = pointer(src, 0), pointer(tile, 3), thread_index(hidden=hidden)
        for step in range(steps // parts):
            chunk = arith.addi(arith.addi(me, first_chunk), i32(step * 128))
            row = arith.divui(chunk, i32(chunks))
            col = arith.muli(arith.subi(chunk, arith.muli(row, i32(chunks))), i32(16))  # byte in the row
            flat = flat_row(row, tok0, head0, row0, group, heads)
            source = arith.addi(base, arith.addi(arith.muli(flat, i64(dim * 2)), to_i64(col)))
            ok = less(row, nrows)
            source = arith.select(ok, source, base)
            size = arith.select(ok, i32(16), i32(0))
            target = arith.addi(smem, swizzled(row, col, dim * 2, swizzle))
            asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r", target, source, size)

    def load_part(part, carry):
        load(src_ref, tile_ref, tok0, head0, row0, nrows, part * (128 * steps // parts))
        return carry

    if parts == 1:
        load_part(jnp.int32(0), None)
    else:
        lax.fori_loop(0, jnp.int32(parts), load_part, None)


def await_rows():
    """Waits until this thread's load_rows are in SMEM."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        asm("cp.async.wait_all;", "")

    wait()


def zero_rows(tile_ref, first, last, *, rows, dim, dtype, half=None):
    """Zeroes the rows of an SMEM tile [rows, dim] outside first <= row < last: they may hold NaN.

    half: an i32, 0 or 1: only rows of that half of the tile; None: of all.
    """
    swizzle = swizzle_bytes(dim, dtype)
    row_bytes = dim * jnp.dtype(dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tile_transforms(dim, dtype)), *(SCALAR,) * 4))
    def zero(ctx, tile, first, last, begin, end):
        first, last = scalar_value(first), scalar_value(last)
        begin, end, row, smem = scalar_value(begin), scalar_value(end), thread_index(), pointer(tile, 3)
        negate = lambda pred: arith.xori(pred, utils.c(1, ir.IntegerType.get_signless(1)))
        outside = arith.ori(less(row, first), negate(less(row, last)))
        outside = arith.andi(outside, arith.andi(less(row, end), negate(less(row, begin))))
        for piece in range(row_bytes // swizzle):
            offset = arith.addi(
                arith.muli(arith.divui(row, i32(8)), i32(8 * row_bytes)),
                arith.addi(i32(piece * 8 * swizzle), arith.muli(arith.remui(row, i32(8)), i32(swizzle))),
            )
            target = arith.addi(smem, offset)
            for byte in range(0, swizzle, 16):
                text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.shared.v4.b32 [$0+{byte}], {{$2,$2,$2,$2}}; }}"
                asm(text, "r,r,r", target, bool_to_i32(outside), i32(0))

    begin, end = (0, rows) if half is None else (half * (rows // 2), (half + 1) * (rows // 2))
    zero(tile_ref, first, last, jnp.int32(begin), jnp.int32(end))


def store_rows(out_ref, lse_ref, out, lse, tok0, head0, row0, nrows, column, *, group, heads, stride):
    """f32 (64, n) in WGMMA layout, f32 (64,) -> nrows rows of [T, H, V], from column `column`, and of [T, H]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA, _ROW_LAYOUT, *(SCALAR,) * 5))
    def store(ctx, out_ref, lse_ref, out, lse, tok0, head0, row0, nrows, column):
        tok0, head0, row0, nrows, column = map(scalar_value, (tok0, head0, row0, nrows, column))

        def address(row):
            return flat_row(row, tok0, head0, row0, group, heads)

        _store_fragment(out_ref, out, address, nrows, column, stride)
        _store_row_values(lse_ref, lse, address, nrows)

    store(out_ref, lse_ref, out, lse, tok0, head0, row0, nrows, column)


def store_tile(tile_ref, out_ref, lse_ref, lse, tok0, head0, row0, nrows, *, group, heads, dim, dtype):
    """store_rows from a swizzled SMEM tile [64, dim] in the output's dtype; each thread stores 16 bytes at a time."""
    swizzle, chunks = swizzle_bytes(dim, dtype), dim * 2 // 16
    kinds = (plgpu.RefType(tile_transforms(dim, dtype)), plgpu.RefType(), plgpu.RefType(), _ROW_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(*kinds, *(SCALAR,) * 4))
    def store(ctx, tile, out_ref, lse_ref, lse, tok0, head0, row0, nrows):
        tok0, head0, row0, nrows = map(scalar_value, (tok0, head0, row0, nrows))

        def address(row):
            return flat_row(row, tok0, head0, row0, group, heads)

        base, smem, me = pointer(out_ref, 0), pointer(tile, 3), thread_index()
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        for step in range(WARPGROUP_ROWS * chunks // 128):
            chunk = arith.addi(me, i32(step * 128))
            row = arith.divui(chunk, i32(chunks))
            col = arith.muli(arith.subi(chunk, arith.muli(row, i32(chunks))), i32(16))
            place = arith.addi(smem, swizzled(row, col, dim * 2, swizzle))
            words = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", place, result=four)
            words = [llvm.extractvalue(ir.IntegerType.get_signless(32), words, [i]) for i in range(4)]
            target = arith.addi(base, arith.addi(arith.muli(address(row), i64(dim * 2)), to_i64(col)))
            store_if(target, bool_to_i32(less(row, nrows)), *words)
        _store_row_values(lse_ref, lse, address, nrows)

    store(tile_ref, out_ref, lse_ref, lse, tok0, head0, row0, nrows)


def store_partial(acc_ref, lse_ref, acc, lse, slot, row0, nrows, column, *, stride):
    """f32 (64, n), f32 (64,) -> rows row0 .. row0 + nrows - 1 of a slot of [slots, rows, V] and [slots, rows].

    The columns are column .. column + n - 1 of V = stride.
    """
    slot_rows = acc_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA, _ROW_LAYOUT, *(SCALAR,) * 4))
    def store(ctx, acc_ref, lse_ref, acc, lse, slot, row0, nrows, column):
        slot, row0, nrows, column = map(scalar_value, (slot, row0, nrows, column))

        def address(row):
            return to_i64(arith.addi(arith.muli(slot, i32(slot_rows)), arith.addi(row0, row)))

        _store_fragment(acc_ref, acc, address, nrows, column, stride)
        _store_row_values(lse_ref, lse, address, nrows)

    store(acc_ref, lse_ref, acc, lse, slot, row0, nrows, column)


def end_reads():
    """Call before an arrival that lets TMA overwrite a stage that this thread read: its loads complete first.

    An arrival alone orders the accesses of threads, not those of TMA: a load that was begun before it may return what
    TMA writes after it. wgmma, which is waited for, needs no such fence.
    """

    @plgpu.inline_mgpu()
    def fence(ctx):
        asm("fence.proxy.async.shared::cta;", "")

    fence()


def sync_warpgroup():
    """The threads of this warpgroup see what all of them wrote to shared memory."""

    @plgpu.inline_mgpu()
    def sync(ctx):
        utils.warpgroup_barrier()

    sync()


def arrive(counters_ref, arrived_ref, index, count):
    """Counts this warpgroup's arrival, after its stores, at counter `index`: arrived_ref[0] = 1 if it is the count-th.

    The stores of the warpgroups that arrived before are then visible to this one.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def count_arrival(ctx, counters, arrived, index, count):
        index, count = map(scalar_value, (index, count))
        place = arith.addi(pointer(counters, 0), arith.muli(to_i64(index), i64(4)))
        asm("fence.acq_rel.gpu;", "")
        utils.warpgroup_barrier()
        text = (
            "{ .reg .pred p, q; .reg .b32 old; setp.ne.u32 p, $2, 0; @p bra DONE;"
            " atom.acq_rel.gpu.global.add.u32 old, [$0], 1; add.u32 old, old, 1; setp.eq.u32 q, old, $3;"
            " selp.u32 old, 1, 0, q; st.shared.u32 [$1], old; DONE: }"
        )
        asm(text, "l,r,r,r", place, pointer(arrived, 3), thread_index(), count)
        utils.warpgroup_barrier()
        asm("fence.acq_rel.gpu;", "")

    count_arrival(counters_ref, arrived_ref, index, count)


def _store_fragment(ref, fragment, address, nrows, column, stride):
    """Pairs of a WGMMA fragment -> rows of a row-major GMEM array, as f32 or rounded to 16 bits.

    A thread holds two rows, 8 apart, with the same column pairs in both: two base addresses and constant offsets.
    """
    element = ir.MemRefType(ref.type).element_type
    size = utils.bitwidth(element) // 8
    word_type = ir.IntegerType.get_signless(32)
    me, bases = thread_index(hidden=True), []
    first = arith.addi(arith.muli(arith.divui(me, i32(32)), i32(16)), arith.divui(arith.remui(me, i32(32)), i32(4)))
    pair_col = arith.addi(column, arith.muli(arith.remui(me, i32(4)), i32(2)))
    for row in (first, arith.addi(first, i32(8))):
        place = arith.addi(arith.muli(address(row), i64(stride)), to_i64(pair_col))
        ok = bool_to_i32(less(row, nrows))
        bases.append((arith.addi(pointer(ref, 0), arith.muli(place, i64(size))), ok))
    for (second, col), pair in zip(pair_places(fragment), fragment.registers.flat, strict=True):
        (base, ok), offset = bases[second], col * size
        if size == 2:
            word = utils.bitcast(arith.truncf(ir.VectorType.get((2,), element), pair), word_type)
            store_if(base, ok, word, offset=offset)
        else:
            low, high = (pair_element(pair, i) for i in range(2))
            store_if(base, ok, low, high, kind="f32", offset=offset)


def pair_places(fragment):
    """For each register: (which of the thread's two rows, first column of the pair relative to the thread's first)."""
    layout, (_, columns) = fragment.layout, fragment.shape
    strides = layout.tiling.tile_strides((columns, 1))
    for index in np.ndindex(fragment.registers.shape):
        linear = sum(i * s for i, s in zip(index, strides, strict=False))
        row, col = divmod(linear, columns)
        assert row in (0, 8), (row, col)
        yield row // 8, col


def add_slope(x, factor, slope, shift):
    """x * factor + slope * column + shift, x f32 (64, n), slope and shift f32 (64,), factor f32 scalar.

    A thread's columns are its first column plus constants, so only one integer is converted to float.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, SCALAR, _ROW_LAYOUT, _ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def add(ctx, x, factor, slope, shift):
        f32 = ir.F32Type.get()
        fma = lambda a, b, c: llvm.inline_asm(f32, [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")
        constant = lambda value: arith.constant(f32, ir.FloatAttr.get(f32, float(value)))
        mine = arith.uitofp(f32, arith.muli(arith.remui(thread_index(), i32(4)), i32(2)))
        slopes, shifts = ([register_value(r) for r in v.registers.flat] for v in (slope, shift))
        bases = [fma(slopes[i], mine, shifts[i]) for i in range(2)]
        factor, out = scalar_value(factor), x.copy()
        places = list(pair_places(x))
        flat = out.registers.reshape(-1)
        for i, pair in enumerate(x.registers.flat):
            second, col = places[i]
            new = pair
            for k in range(2):
                value = pair_element(pair, k)
                bias = fma(slopes[second], constant(col + k), bases[second])
                new = vector.insert(fma(value, factor, bias), new, [], ir.DenseI64ArrayAttr.get([k]))
            flat[i] = new
        out.registers[...] = flat.reshape(out.registers.shape)
        return out

    return add(x, factor, slope, shift)


def keep_columns(x, counts, starts=None, *, hidden=False):
    """f32 (64, n) with -inf in row r from column counts[r] on, and before column starts[r]; i32 (64,) each.

    A thread's columns are its first column plus constants, so each is compared with a constant. hidden: see
    ptx.lane_position.
    """
    bounds = (counts,) if starts is None else (counts, starts)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(_ROW_LAYOUT for _ in bounds)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def keep(ctx, x, *bounds):
        first = arith.muli(arith.remui(thread_index(hidden=hidden), i32(4)), i32(2))
        left, *before = [[arith.subi(register_value(r), first) for r in b.registers.flat] for b in bounds]
        out, places = x.copy(), list(pair_places(x))
        flat = out.registers.reshape(-1)
        for i, pair in enumerate(x.registers.flat):
            second, col = places[i]
            new = pair
            for k in range(2):
                seen = less(i32(col + k), left[second])
                for start in before:
                    seen = arith.andi(seen, less(start[second], i32(col + k + 1)))
                value = arith.select(seen, pair_element(pair, k), f32(-math.inf))
                new = vector.insert(value, new, [], ir.DenseI64ArrayAttr.get([k]))
            flat[i] = new
        out.registers[...] = flat.reshape(out.registers.shape)
        return out

    return keep(x, *bounds)


def row_numbers():
    """i32 (64,): the number of each row, computed where it is used (see ptx.lane_position)."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((WARPGROUP_ROWS,), jnp.int32, _ROW_LAYOUT))
    def number(ctx):
        thread = thread_index(hidden=True)
        warp, g = arith.divui(thread, i32(32)), arith.divui(arith.remui(thread, i32(32)), i32(4))
        first = arith.addi(arith.muli(warp, i32(16)), g)
        out = empty_fragment((WARPGROUP_ROWS,), _ROW_LAYOUT, ir.IntegerType.get_signless(32))
        fill(out, lambda i: [arith.addi(first, i32(8 * i))])
        return out

    return number()


def numbers(shape, axis: int):
    """i32 (64, n) in WGMMA layout: the row (axis 0) or the column (1) of each element, as row_numbers."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, plgpu.Layout.WGMMA))
    def number(ctx):
        thread = thread_index(hidden=True)
        warp, lane = arith.divui(thread, i32(32)), arith.remui(thread, i32(32))
        row = arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))
        column = arith.muli(arith.remui(lane, i32(4)), i32(2))
        out = empty_fragment(shape, plgpu.Layout.WGMMA, ir.IntegerType.get_signless(32))
        places = list(pair_places(out))

        def read(i):
            second, first = places[i]
            return [arith.addi(column, i32(first + k)) if axis else arith.addi(row, i32(8 * second)) for k in range(2)]

        fill(out, read)
        return out

    return number()


def column_numbers(count: int):
    """i32 (count,): the number of each column of a fragment [64, count], as row_numbers."""
    layout = plgpu.Layout.WGMMA.reduce(0)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((count,), jnp.int32, layout))
    def number(ctx):
        first = arith.muli(arith.remui(thread_index(hidden=True), i32(4)), i32(2))
        out = empty_fragment((count,), layout, ir.IntegerType.get_signless(32))
        fill(out, lambda i: [arith.addi(first, i32(8 * i + k)) for k in range(2)])
        return out

    return number()


def scale_rows(x, factors):
    """f32 (64, n) times f32 (64,) by rows. A warp all of whose factors are 1 skips the products."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, _ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def scale(ctx, x, factors):
        values = [pair_element(pair, k) for pair in x.registers.flat for k in range(2)]
        rows, count = [second for second, _ in pair_places(x) for _ in range(2)], len(values)
        text = f"setp.ne.f32 p, ${2 * count}, 0f3F800000; setp.ne.or.f32 p, ${2 * count + 1}, 0f3F800000, p;"
        text += " vote.sync.any.pred p, p, -1; @!p bra SAME;"
        text += "".join(f" mul.f32 ${i}, ${i}, ${2 * count + rows[i]};" for i in range(count))
        constraints = ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f", "f"])
        factors = [register_value(r) for r in factors.registers.flat]
        text = f"{{ .reg .pred p; {text} SAME: }}"
        values, out = (
            asm_values(text, constraints, count, *values, *factors),
            empty_fragment(x.shape, plgpu.Layout.WGMMA),
        )
        fill(out, lambda i: values[2 * i : 2 * i + 2])
        return out

    return scale(x, factors)


def _store_row_values(ref, rows, address, nrows):
    """Stores one f32 a row, by the first lane of each group of four."""
    base = pointer(ref, 0)
    word_type = ir.IntegerType.get_signless(32)
    first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread_index(hidden=True), i32(4)), i32(0))
    for (row,), value in zip(rows.layout.thread_idxs(rows.shape), rows.registers.flat, strict=True):
        row = arith.index_cast(word_type, row)
        ok = bool_to_i32(arith.andi(first, less(row, nrows)))
        target = arith.addi(base, arith.muli(address(row), i64(4)))
        value = register_value(value)
        store_if(target, ok, value, kind="f32")


def pair_element(pair, k: int):
    """Element k of a register that holds a vector."""
    return vector.extract(pair, [], ir.DenseI64ArrayAttr.get([k]))


def register_value(register):
    """The value of a register that holds one value: a vector of one or a scalar, as JAX's version has it."""
    return pair_element(register, 0) if isinstance(register.type, ir.VectorType) else register


def put_fragment(q_ref, stats_ref, acc, top, total, *, dim, q_dim, q_dtype):
    """A warpgroup's state -> SMEM, in the order of its registers; get_fragment reads it back.

    q_ref SMEM [2 or more, 64, D] is used as 64 * V floats of raw memory, stats_ref f32[512]; acc f32 (64, V), V <= D.
    """
    tile = plgpu.RefType(tile_transforms(q_dim, q_dtype))

    @plgpu.inline_mgpu(arg_types=(tile, plgpu.RefType(), plgpu.Layout.WGMMA, _ROW_LAYOUT, _ROW_LAYOUT))
    def put(ctx, q_tile, stats, acc, top, total):
        mine = arith.muli(thread_index(), i32(8))
        base = arith.addi(pointer(q_tile, 3), mine)
        for i, pair in enumerate(acc.registers.flat):
            low, high = (pair_element(pair, k) for k in range(2))
            asm(f"st.shared.v2.f32 [$0+{i * 1024}], {{$1, $2}};", "r,f,f", base, low, high)
        base = arith.addi(pointer(stats, 3), mine)
        for i, (m, s) in enumerate(zip(top.registers.flat, total.registers.flat, strict=True)):
            asm(f"st.shared.v2.f32 [$0+{i * 1024}], {{$1, $2}};", "r,f,f", base, register_value(m), register_value(s))

    put(q_ref, stats_ref, acc, top, total)


def get_fragment(q_ref, stats_ref, *, dim, q_dim, q_dtype):
    """The state that put_fragment wrote: (acc (64, V), top (64,), total (64,))."""
    f32 = jnp.float32
    shapes = (
        plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, dim), f32, plgpu.Layout.WGMMA),
        plgpu.ShapeDtypeStruct((WARPGROUP_ROWS,), f32, _ROW_LAYOUT),
        plgpu.ShapeDtypeStruct((WARPGROUP_ROWS,), f32, _ROW_LAYOUT),
    )
    tile = plgpu.RefType(tile_transforms(q_dim, q_dtype))

    @plgpu.inline_mgpu(arg_types=(tile, plgpu.RefType()), return_type=shapes)
    def get(ctx, q_tile, stats):
        mine = arith.muli(thread_index(), i32(8))
        pair = ir.Type.parse("!llvm.struct<(f32, f32)>")

        def read(base, i):
            both = asm(f"ld.shared.v2.f32 {{$0, $1}}, [$2+{i * 1024}];", "=f,=f,r", base, result=pair)
            return [llvm.extractvalue(ir.F32Type.get(), both, [k]) for k in range(2)]

        acc = empty_fragment((WARPGROUP_ROWS, dim), plgpu.Layout.WGMMA)
        base = arith.addi(pointer(q_tile, 3), mine)
        fill(acc, lambda i: read(base, i))
        top, total = (empty_fragment((WARPGROUP_ROWS,), _ROW_LAYOUT) for _ in range(2))
        base = arith.addi(pointer(stats, 3), mine)
        values = [read(base, i) for i in range(top.registers.size)]
        fill(top, lambda i: values[i][:1])
        fill(total, lambda i: values[i][1:])
        return acc, top, total

    return get(q_ref, stats_ref)


def load_partial(acc_ref, lse_ref, slot, row0, nrows, column, *, stride, width):
    """`width` columns of what store_partial wrote: (acc (64, width), lse (64,)); rows past nrows are (0, -inf)."""
    slot_rows = acc_ref.shape[1]
    shapes = (
        plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, width), jnp.float32, plgpu.Layout.WGMMA),
        plgpu.ShapeDtypeStruct((WARPGROUP_ROWS,), jnp.float32, _ROW_LAYOUT),
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *(SCALAR,) * 4), return_type=shapes)
    def load(ctx, acc_ref, lse_ref, slot, row0, nrows, column):
        slot, row0, nrows, column = map(scalar_value, (slot, row0, nrows, column))
        me, f32 = thread_index(), ir.F32Type.get()
        first = arith.addi(arith.muli(arith.divui(me, i32(32)), i32(16)), arith.divui(arith.remui(me, i32(32)), i32(4)))
        pair_col = arith.addi(column, arith.muli(arith.remui(me, i32(4)), i32(2)))
        bases, lse_values = [], []
        for row in (first, arith.addi(first, i32(8))):
            place = to_i64(arith.addi(arith.muli(slot, i32(slot_rows)), arith.addi(row0, row)))
            ok = bool_to_i32(less(row, nrows))
            source = arith.addi(arith.muli(place, i64(stride)), to_i64(pair_col))
            bases.append((arith.addi(pointer(acc_ref, 0), arith.muli(source, i64(4))), ok))
            source = arith.addi(pointer(lse_ref, 0), arith.muli(place, i64(4)))
            text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f32 $0, 0fFF800000; @p ld.global.f32 $0, [$1]; }"
            lse_values.append(asm(text, "=&f,l,r", source, ok, result=f32))
        acc = empty_fragment((WARPGROUP_ROWS, width), plgpu.Layout.WGMMA)
        places = list(pair_places(acc))

        def read(i):
            second, col = places[i]
            text = (
                "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;"
                f" @p ld.global.v2.f32 {{$0, $1}}, [$2+{col * 4}]; }}"
            )
            both = asm(text, "=&f,=&f,l,r", *bases[second], result=ir.Type.parse("!llvm.struct<(f32, f32)>"))
            return [llvm.extractvalue(f32, both, [k]) for k in range(2)]

        fill(acc, read)
        lse = empty_fragment((WARPGROUP_ROWS,), _ROW_LAYOUT)
        fill(lse, lambda i: [lse_values[i]])
        return acc, lse

    return load(acc_ref, lse_ref, slot, row0, nrows, column)


def empty_fragment(shape, layout, element=None):
    """A FragmentedArray of `element` (i32 or a float; None: f32), to be filled register by register."""
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    element = element or ir.F32Type.get()
    whole = isinstance(element, ir.IntegerType)
    zero = i32(0) if whole else arith.constant(element, ir.FloatAttr.get(element, 0.0))
    return fa.FragmentedArray.splat(zero, shape, layout.to_mgpu(), is_signed=whole or None).copy()


def fill(fragment, read):
    """Sets registers[i] to the vector of values read(i)."""
    flat = fragment.registers.reshape(-1)
    for i in range(flat.size):
        values, old = read(i), flat[i]
        if isinstance(old.type, ir.VectorType):
            new = llvm.mlir_undef(old.type)
            for k, value in enumerate(values):
                new = vector.insert(value, new, [], ir.DenseI64ArrayAttr.get([k]))
            flat[i] = new
        else:
            flat[i] = values[0]
    fragment.registers[...] = flat.reshape(fragment.registers.shape)


def fragment_of_words(shape, element, words):
    """A WGMMA fragment of 16-bit `element`s whose registers are these 32-bit words."""
    fragment = empty_fragment(shape, plgpu.Layout.WGMMA, element)
    flat = fragment.registers.reshape(-1)
    assert flat.size == len(words), (flat.size, len(words))
    for i, word in enumerate(words):
        flat[i] = utils.bitcast(word, ir.VectorType.get((2,), element))
    fragment.registers[...] = flat.reshape(fragment.registers.shape)
    return fragment
