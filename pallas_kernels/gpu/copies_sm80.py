"""Copies of pages to shared memory by cp.async, and the waits for them: no TMA, no mbarrier.

Of every block of keys, warp w of the CTA's four copies keys w * block / 4 .. (w + 1) * block / 4 - 1. The lanes of the
warp find the pool's rows of its keys, one each, and pass them on through shared memory (lanes_sm80.py says why not by
shuffles). A key outside the range that is wanted has no row: it is filled with zeros and not read, so that no NaN of an
unused slot takes part in a product.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

WARPS = 4  # of a CTA
PER_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def pool_rows(block_table, req, head, kv0, start, stop, *, block, page, columns, heads, heads_first):
    """i32 (128,): lane i of warp w holds the pool's row of key kv0 + w * block / 4 + i; -1 unless start <= key < stop.

    i is taken modulo block / 4, the keys of a warp. block_table GMEM i32[R, columns]. The pool's rows are counted as
    [N, K, S] (heads_first) or [N, S, K], without a sign. A pool must have less than 2^32 - 1; nothing checks it.
    """
    out, keys = plgpu.ShapeDtypeStruct((128,), jnp.int32, PER_THREAD), block // WARPS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 5), return_type=out)
    def load(ctx, block_table, req, head, kv0, start, stop):
        req, head, kv0, start, stop = map(ptx.scalar_value, (req, head, kv0, start, stop))
        _, _, lane, warp = ptx.lane_position(hidden=True)
        own = arith.addi(arith.muli(warp, ptx.i32(keys)), arith.remui(lane, ptx.i32(keys)))
        key = arith.addi(kv0, own)
        row = arith.muli(ptx.to_i64(req), ptx.i64(columns))
        place = arith.addi(row, ptx.to_i64(arith.divui(key, ptx.i32(page))))
        place = arith.addi(ptx.pointer(block_table, 0), arith.muli(place, ptx.i64(4)))
        offset = arith.remui(key, ptx.i32(page))
        outer, size, inner = (head, page, offset) if heads_first else (offset, heads, head)
        inside = arith.addi(arith.muli(outer, ptx.i32(size)), inner)
        wanted = _is_inside(key, start, stop)
        page_id = ptx.asm_value(ptx.predicated_load("b32"), "=&r,l,r", place, wanted, pure=True)
        value = arith.addi(arith.muli(page_id, ptx.i32(heads * page)), inside)
        value = arith.ori(value, arith.subi(wanted, ptx.i32(1)))  # -1 where it is not wanted
        fragment = rows.empty_fragment((128,), PER_THREAD, ptx.int_type())
        rows.fill(fragment, lambda i: [value])
        return fragment

    return load(block_table, req, head, kv0, start, stop)


def _is_inside(key, start, stop):
    """i32: 1 if start <= key < stop, else 0."""
    return ptx.bool_to_i32(arith.andi(ptx.less(arith.subi(start, ptx.i32(1)), key), ptx.less(key, stop)))


def put_rows(row_list, own_rows, *, block):
    """What pool_rows gave -> SMEM i32[block]. A warp may read the rows of its keys after its next wait."""
    keys = block // WARPS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD))
    def put(ctx, row_list, own_rows):
        _, _, lane, warp = ptx.lane_position(hidden=True)
        mine = rows.register_value(own_rows.registers.flat[0])
        place = ptx.add(ptx.pointer(row_list, 3), ptx.mul(ptx.add(ptx.mul(warp, keys), lane), 4))
        ptx.store_if(place, ptx.bool_to_i32(ptx.less(lane, ptx.i32(keys))), mine, space="shared")

    put(row_list, own_rows)


def copy_block(pool, tile, row_list, *, block, dim, dtype):
    """Begins to copy the keys of the rows in `row_list` (see put_rows) from a GMEM pool to SMEM [block, dim]."""
    row_bytes, swizzle = dim * jnp.dtype(dtype).itemsize, rows.swizzle_bytes(dim, dtype)
    chunks, keys = row_bytes // 16, block // WARPS  # of 16 bytes in a row; of a warp
    assert keys * chunks % 32 == 0, (block, dim, dtype)  # every lane copies a chunk in every step
    kinds = (plgpu.RefType(), plgpu.RefType(rows.tile_transforms(dim, dtype)), plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=kinds)
    def copy(ctx, pool, tile, row_list):
        base, smem, (_, _, lane, warp) = ptx.pointer(pool, 0), ptx.pointer(tile, 3), ptx.lane_position(hidden=True)
        # hidden: the start of each step's chunks would otherwise stay in two registers during the loop
        first = arith.muli(warp, ptx.i32(keys))
        smem, row_list = arith.addi(smem, arith.muli(first, ptx.i32(row_bytes))), ptx.pointer(row_list, 3)
        for step in range(keys * chunks // 32):
            row, byte, target = _chunk(lane, step, chunks, swizzle)
            place = ptx.add(row_list, ptx.mul(ptx.add(first, row), 4))
            pool_row = ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", place)
            source = arith.muli(ptx.to_u64(pool_row), ptx.i64(row_bytes))
            source = arith.addi(source, arith.addi(base, ptx.to_i64(byte)))
            target, offset = target(smem)
            text = f"setp.eq.u32 p, $2, -1; cp.async.cg.shared.global [$0+{offset}], [$1], 16, p;"  # p: zeros instead
            ptx.asm("{ .reg .pred p; " + text + " }", "r,l,r", target, source, pool_row)

    copy(pool, tile, row_list)


def copy_scales(pool, tile, row_list, *, block):
    """copy_block for one f32 scale of each key, to an SMEM tile [block]. Lanes beyond the warp's keys copy nothing."""
    keys = block // WARPS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def copy(ctx, pool, tile, row_list):
        _, _, lane, warp = ptx.lane_position(hidden=True)
        key = ptx.mul(ptx.add(ptx.mul(warp, keys), arith.minsi(lane, ptx.i32(keys - 1))), 4)
        mine = ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", ptx.add(ptx.pointer(row_list, 3), key))
        source = arith.addi(ptx.pointer(pool, 0), arith.muli(ptx.to_u64(mine), ptx.i64(4)))
        target = ptx.add(ptx.pointer(tile, 3), key)
        own = ptx.bool_to_i32(ptx.less(lane, ptx.i32(keys)))
        text = "setp.ne.u32 q, $3, 0; setp.eq.u32 p, $2, -1; @q cp.async.ca.shared.global [$0], [$1], 4, p;"
        ptx.asm("{ .reg .pred p, q; " + text + " }", "r,l,r,r", target, source, mine, own)

    copy(pool, tile, row_list)


def _chunk(lane, step: int, chunks: int, swizzle: int):
    """A lane's chunk of 16 bytes in a step: (key of the warp's, byte of its row, tile -> (address, offset to add)).

    If a step copies 1, 2, 4 .. whole rows, the address of step 0 serves all steps: the bits of the key's number that
    come from the step and those that come from the lane are different ones, so what the step adds to the swizzle is an
    xor with a constant, and the rest is an offset in the instruction. One instruction instead of ten.
    """
    if 32 % chunks:
        chunk = arith.addi(lane, ptx.i32(32 * step))
        row = arith.divui(chunk, ptx.i32(chunks))
        byte = arith.muli(arith.remui(chunk, ptx.i32(chunks)), ptx.i32(16))
        return row, byte, lambda tile: (arith.addi(tile, ptx.swizzled(row, byte, 16 * chunks, swizzle)), 0)
    first, byte = arith.divui(lane, ptx.i32(chunks)), arith.muli(arith.remui(lane, ptx.i32(chunks)), ptx.i32(16))
    pieces, inside = divmod(32 // chunks * step, 8)  # the step's first row: piece of 8 rows, row in the piece
    mixed = (inside * swizzle >> 3) & (swizzle - 16)  # as ptx.swizzled mixes it into the address

    def target(tile):
        place = arith.addi(tile, ptx.swizzled(first, byte, 16 * chunks, swizzle))
        place = arith.xori(place, ptx.i32(mixed)) if mixed else place
        return place, 128 * chunks * pieces + inside * swizzle

    return arith.addi(first, ptx.i32(32 // chunks * step)), byte, target


def commit():
    """Ends a group of copies; an empty group is a group too."""

    @plgpu.inline_mgpu()
    def end_group(ctx):
        ptx.asm("cp.async.commit_group;", "")

    end_group()


def wait_for_copies(pending: int, warps: int):
    """Waits for all groups of copies but the latest `pending`: for those of this warp (1), or of all warps (4)."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        ptx.asm(f"cp.async.wait_group {pending};", "")

    wait()
    sync_lanes() if warps == 1 else sync_warps()


def sync_lanes():
    """What the lanes of this warp wrote to shared memory is visible to all of them.

    Each warp has a barrier, since bar.warp.sync may be a call (lanes_sm80.py). Mosaic's own barrier of a warpgroup has
    the number of warp 0's: a kernel that calls this must have no such barrier (a test looks for one).
    """

    @plgpu.inline_mgpu()
    def wait(ctx):
        sync_lanes_of(ptx.lane_position(hidden=True)[3])

    wait()


def sync_lanes_of(warp):
    """sync_lanes inside inline_mgpu."""
    ptx.asm("bar.sync $0, 32;", "r", ptx.add(warp, ptx.i32(1)))


def sync_warps():
    """No warp passes before all have come here; what they wrote to shared memory is visible to all."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        ptx.asm("bar.sync 0;", "")

    wait()
