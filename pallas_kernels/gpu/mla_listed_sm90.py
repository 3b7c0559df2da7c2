"""The memory warpgroup of latent attention over listed rows: each token names its keys, and its heads share them.

A block is 64 entries of the token's list. Rows lie anywhere in the pool, so each is copied by cp.async, 16 bytes a
thread, into the swizzled parts that TMA would fill. An entry below 0 names no row: it is not read, and the scores of
its place are masked. Parts are copied as they become free, and published in the same order when they are there.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.mla_config import BLOCK_KV, MlaKernelConfig
from pallas_kernels.gpu.mla_pieces_sm90 import MlaRefs, barrier_of, order_of_parts
from pallas_kernels.gpu.pieces_sm90 import count_pieces, piece_from_list

_SCALAR = ptx.SCALAR


def load_listed(cfg: MlaKernelConfig, refs: MlaRefs):
    """Fetches the listed rows of each block of the CTA's pieces in order."""
    row_bytes = 2 * (cfg.head_dim if cfg.whole_rows else cfg.latent_dim)
    rope_bytes = row_bytes if cfg.whole_rows else 2 * cfg.rope_dim
    order, width = order_of_parts(cfg), refs.block_table.shape[1]

    def load_piece(j, block_number):
        piece = piece_from_list(cfg.attention, refs, j)

        def load_block(i, number):
            stage = lax.rem(number, jnp.int32(cfg.stages))
            place = piece[wl.REQ] * width + (piece[wl.BLK0] + piece.lo + i) * BLOCK_KV
            for part in order:
                when(number >= cfg.stages)(lambda p=part: plgpu.barrier_wait(refs.free.at[barrier_of(cfg, stage, p)]))
                if part == 0:
                    put_list(refs.block_table, refs.listed, place, stage)
                    column = 2 * cfg.latent_dim if cfg.whole_rows else 0
                    where = dict(columns=cfg.rope_dim, row_bytes=rope_bytes, column=column, dtype=cfg.dtype)
                    copy_rows(refs.ropes, refs.block_table, refs.rope.at[stage], place, commits=False, **where)
                where = dict(columns=cfg.part, row_bytes=row_bytes, column=2 * cfg.part * part, dtype=cfg.dtype)
                copy_rows(refs.latents, refs.block_table, refs.latent.at[stage, part], place, **where)
            for n, part in enumerate(order):
                await_copies(len(order) - 1 - n)
                plgpu.commit_smem()
                if part == 0:
                    plgpu.barrier_arrive(refs.rope_full.at[stage])
                plgpu.barrier_arrive(refs.full.at[barrier_of(cfg, stage, part)])
            return number + 1

        return lax.fori_loop(0, piece.count, load_block, block_number)

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), load_piece, jnp.int32(0))


def put_list(list_ref, listed_ref, place, stage):
    """The block's entries, from flat place `place` of the lists on -> row `stage` of SMEM i32[stages, 64]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR))
    def put_list(ctx, source, target, place, stage):
        me = ptx.thread_index()
        entry = _entry(source, ptx.scalar_value(place), arith.remui(me, ptx.i32(BLOCK_KV)))
        row = ptx.add(ptx.mul(ptx.scalar_value(stage), BLOCK_KV), arith.remui(me, ptx.i32(BLOCK_KV)))
        address = ptx.add(ptx.pointer(target, 3), ptx.mul(row, 4))
        ptx.asm("st.shared.b32 [$0], $1;", "r,r", address, entry)  # both halves of the threads store the same

    put_list(list_ref, listed_ref, place, stage)


def _entry(source, place, row):
    """The entry of the block's row `row`."""
    at = arith.muli(ptx.to_i64(ptx.add(place, row)), ptx.i64(4))
    return ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", arith.addi(ptx.pointer(source, 0), at))


def copy_rows(
    pool_ref, list_ref, tile_ref, place, *, columns: int, row_bytes: int, column: int, dtype: str, commits=True
):
    """Starts copies of `columns` values from byte `column` of 64 listed rows -> a swizzled SMEM tile [64, columns].

    commits: they are a group with those of the calls before that did not commit: see await_copies.
    """
    swizzle, chunks = rows.swizzle_bytes(columns, dtype), columns * 2 // 16
    steps, at_once = BLOCK_KV * chunks // 128, 128 // chunks  # rows of the tile that are copied in one step

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(rows.tile_transforms(columns, dtype)), _SCALAR)
    )
    def copy_rows(ctx, pool, lists, tile, place):
        me, place = ptx.thread_index(), ptx.scalar_value(place)
        base, smem = ptx.pointer(pool, 0), ptx.pointer(tile, 3)
        byte = ptx.mul(arith.remui(me, ptx.i32(chunks)), 16)
        first = arith.divui(me, ptx.i32(chunks))
        own = [ptx.add(first, ptx.i32(at_once * step)) for step in range(steps)]
        entries = [_entry(lists, place, row) for row in own]
        for row, entry in zip(own, entries, strict=True):
            named = arith.cmpi(arith.CmpIPredicate.sge, entry, ptx.i32(0))
            line = arith.muli(ptx.to_i64(arith.select(named, entry, ptx.i32(0))), ptx.i64(row_bytes))
            source = arith.addi(base, arith.addi(line, ptx.to_i64(ptx.add(byte, ptx.i32(column)))))
            size = arith.select(named, ptx.i32(16), ptx.i32(0))
            target = arith.addi(smem, ptx.swizzled(row, byte, columns * 2, swizzle))
            ptx.asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r", target, source, size)
        if commits:
            ptx.asm("cp.async.commit_group;", "")

    copy_rows(pool_ref, list_ref, tile_ref, place)


def await_copies(pending: int):
    """Waits until at most the last `pending` groups of this thread's copies are under way."""

    @plgpu.inline_mgpu()
    def await_copies(ctx):
        ptx.asm(f"cp.async.wait_group {pending};", "")

    await_copies()


def keep_listed(x, listed_ref, stage):
    """f32 (64, 64) with -inf in the columns of a block whose entry names no row."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def keep_listed(ctx, x, listed, stage):
        first = arith.muli(arith.remui(ptx.thread_index(), ptx.i32(4)), ptx.i32(2))
        place = ptx.add(ptx.mul(ptx.scalar_value(stage), BLOCK_KV), first)
        base, entries = ptx.add(ptx.pointer(listed, 3), ptx.mul(place, 4)), {}
        out, places = x.copy(), list(rows.pair_places(x))
        flat = out.registers.reshape(-1)
        for _, column in places:
            if column not in entries:
                text = f"ld.shared.v2.b32 {{$0, $1}}, [$2+{4 * column}];"
                pair = ptx.asm_values(text, "=r,=r,r", 2, base)
                entries[column] = [arith.cmpi(arith.CmpIPredicate.sge, e, ptx.i32(0)) for e in pair]
        old = list(flat)

        def read(i):
            seen = entries[places[i][1]]
            return [arith.select(seen[k], rows.pair_element(old[i], k), ptx.f32(float("-inf"))) for k in range(2)]

        rows.fill(out, read)
        return out

    return keep_listed(x, listed_ref, stage)
