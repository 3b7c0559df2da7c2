"""Copies of pages to shared memory by cp.async, and the waits for them: no TMA, no mbarrier.

Of every block of keys, warp w of the CTA's four copies keys w * block / 4 .. (w + 1) * block / 4 - 1. The lanes of the
warp hold the page numbers of its keys, one each, and pass them on by shuffles. A key outside the range that is wanted
is filled with zeros and not read, so that no NaN of an unused slot takes part in a product.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

WARPS = 4
PER_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def page_ids(block_table, req, kv0, start, stop, *, block: int, page: int, columns: int):
    """i32 (128,): lane i of warp w holds the page of key kv0 + w * block / 4 + i; 0 unless start <= key < stop.

    i is taken modulo block / 4, the keys of a warp. block_table GMEM i32[R, columns].
    """
    out, keys = plgpu.ShapeDtypeStruct((128,), jnp.int32, PER_THREAD), block // WARPS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 4), return_type=out)
    def load(ctx, block_table, req, kv0, start, stop):
        req, kv0, start, stop = map(ptx.scalar_value, (req, kv0, start, stop))
        _, _, lane, warp = ptx.lane_position()
        own = arith.addi(arith.muli(warp, ptx.i32(keys)), arith.remui(lane, ptx.i32(keys)))
        key = arith.addi(kv0, own)
        row = arith.muli(ptx.to_i64(req), ptx.i64(columns))
        place = arith.addi(row, ptx.to_i64(arith.divui(key, ptx.i32(page))))
        place = arith.addi(ptx.pointer(block_table, 0), arith.muli(place, ptx.i64(4)))
        text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
        value = ptx.asm_value(text, "=&r,l,r", place, _is_inside(key, start, stop), pure=True)
        fragment = rows.empty_fragment((128,), PER_THREAD, ptx.int_type())
        rows.fill(fragment, lambda i: [value])
        return fragment

    return load(block_table, req, kv0, start, stop)


def _is_inside(key, start, stop):
    """i32: 1 if start <= key < stop, else 0."""
    return ptx.bool_to_i32(arith.andi(ptx.less(arith.subi(start, ptx.i32(1)), key), ptx.less(key, stop)))


def copy_block(pool, tile, ids, head, kv0, start, stop, *, block, page, dim, dtype, heads, heads_first):
    """Begins to copy keys kv0 .. kv0 + block - 1 of one head to an SMEM tile [block, dim]; see page_ids.

    pool GMEM [N, K, S, dim] (heads_first) or [N, S, K, dim].
    """
    row_bytes = dim * jnp.dtype(dtype).itemsize
    chunks, keys = row_bytes // 16, block // WARPS  # of 16 bytes in a row; of a warp
    page_bytes = heads * page * row_bytes
    head_bytes, slot_bytes = (page * row_bytes, row_bytes) if heads_first else (row_bytes, heads * row_bytes)
    kinds = (plgpu.RefType(), plgpu.RefType(rows.tile_transforms(dim, dtype)), PER_THREAD, *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds)
    def copy(ctx, pool, tile, ids, head, kv0, start, stop):
        head, kv0, start, stop = map(ptx.scalar_value, (head, kv0, start, stop))
        base, smem, (_, _, lane, warp) = ptx.pointer(pool, 0), ptx.pointer(tile, 3), ptx.lane_position(hidden=True)
        # hidden: the start of each step's chunks would otherwise stay in two registers during the loop
        head_start = arith.muli(ptx.asm_value("mov.b32 $0, $1;", "=r,r", head), ptx.i32(head_bytes))
        own_id, first = rows.register_value(ids.registers.flat[0]), arith.muli(warp, ptx.i32(keys))
        for step in range(-(-keys * chunks // 32)):
            chunk = arith.addi(lane, ptx.i32(32 * step))
            row = arith.divui(chunk, ptx.i32(chunks))
            byte = arith.muli(arith.remui(chunk, ptx.i32(chunks)), ptx.i32(16))
            page_id = ptx.asm_value("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", own_id, row)
            key = arith.addi(kv0, arith.addi(first, row))
            offset = arith.remui(key, ptx.i32(page))
            inside = arith.addi(head_start, arith.addi(arith.muli(offset, ptx.i32(slot_bytes)), byte))
            source = arith.muli(ptx.to_i64(page_id), ptx.i64(page_bytes))
            source = arith.addi(arith.addi(source, base), ptx.to_i64(inside))
            size = arith.muli(_is_inside(key, start, stop), ptx.i32(16))
            target = ptx.swizzled(arith.addi(first, row), byte, row_bytes, rows.swizzle_bytes(dim, dtype))
            text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
            operands = (arith.addi(smem, target), source, size)
            if 32 * (step + 1) > keys * chunks:  # not every lane has a chunk left
                text = f"{{ .reg .pred p; setp.ne.u32 p, $3, 0; @p {text} }}"
                operands += (ptx.bool_to_i32(ptx.less(row, ptx.i32(keys))),)
            ptx.asm(text, ",".join(["r", "l", "r", "r"][: len(operands)]), *operands)

    copy(pool, tile, ids, head, kv0, start, stop)


def commit():
    """Ends a group of copies; an empty group is a group too."""

    @plgpu.inline_mgpu()
    def end_group(ctx):
        ptx.asm("cp.async.commit_group;", "")

    end_group()


def wait_for_copies(pending: int, warps: int):
    """Waits for all groups of copies but the latest `pending`: for those of this warp (1), or of all warps (4)."""
    fence = "bar.warp.sync -1;" if warps == 1 else "bar.sync 0;"

    @plgpu.inline_mgpu()
    def wait(ctx):
        ptx.asm(f"cp.async.wait_group {pending};", "")
        ptx.asm(fence, "")

    wait()


def sync_warps():
    """No warp passes before all have come here; what they wrote to shared memory is visible to all."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        ptx.asm("bar.sync 0;", "")

    wait()


def put_numbers(box, numbers):
    """Writes 4 n i32 scalars to SMEM i32[16], by every thread, without the two barriers of each plain store."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * len(numbers)))
    def put(ctx, box, *numbers):
        base = ptx.pointer(box, 3)
        for i in range(0, len(numbers), 4):
            words = [ptx.scalar_value(x) for x in numbers[i : i + 4]]
            ptx.asm(f"st.shared.v4.b32 [$0+{4 * i}], {{$1, $2, $3, $4}};", "r,r,r,r,r", base, *words)

    put(box, *numbers)
