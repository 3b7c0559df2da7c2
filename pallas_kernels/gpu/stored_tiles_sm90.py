"""Tiles of an 8-bit cache: from the pages through registers to shared memory, in the form that wgmma multiplies.

Two warpgroups do it, one for keys and one for values. A thread holds its share of the next block in registers while
the block before is multiplied, so neither TMA nor a copy of the stored bytes takes shared memory.

    target float16, bfloat16   decoded exactly, [keys, dim]
    target 8 bits              as stored, [keys, dim]; values as [dim, keys], since wgmma's 8-bit operands need the
                               axis that is summed to be contiguous

Of every 32 keys of a transposed tile, place 16 h + 4 t + 2 j + e holds key 16 h + 8 j + 2 t + e (t < 4; h, j, e < 2):
the order in which a thread of a product's result holds its columns, so that weights need no exchange among threads.
"""

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.config import KV_DTYPES_8BIT
from pallas_kernels.gpu.decode_sm90 import decode_word

THREADS = 128
GROUP = 32  # keys that a warp transposes, and that one instruction of an 8-bit product sums
_ID = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
_LOAD = (
    "{ .reg .pred p; setp.ge.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)


@dataclasses.dataclass(frozen=True)
class StoredTile:
    """The keys or the values of a block of one kv head, and which 16 bytes of them a thread holds at each step."""

    keys: int
    dim: int
    source: str  # dtype in the pool
    target: str  # dtype in shared memory
    page: int
    heads: int  # of the pool
    heads_first: bool  # pool [N, K, S, dim], else [N, S, K, dim]
    transposed: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes of a row."""
        return self.dim // 16

    @property
    def steps(self) -> int:
        """Chunks of a thread."""
        return self.keys * self.chunks // THREADS

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tile in shared memory."""
        return (self.dim, self.keys) if self.transposed else (self.keys, self.dim)

    @property
    def transforms(self) -> tuple:
        return rows.tile_transforms(self.shape[1], self.target)

    @property
    def swizzle(self) -> int:
        return rows.swizzle_bytes(self.shape[1], self.target)

    @property
    def staged_chunks(self) -> int:
        """Of a transposed tile: the chunks of a row that one warp takes. Each warp has the same number of keys."""
        return self.chunks * self.keys // (4 * GROUP)

    def place(self, step: int):
        """(key, chunk of its row) of this thread's chunk `step`."""
        me, ahead = ptx.thread_index(), step * THREADS
        if self.transposed:
            groups, own = self.keys // GROUP, self.staged_chunks
            warp, lane = arith.divui(me, ptx.i32(32)), arith.remui(me, ptx.i32(32))
            unit = ptx.add(lane, ptx.i32(32 * step))
            key = ptx.add(ptx.mul(arith.remui(warp, ptx.i32(groups)), GROUP), arith.divui(unit, ptx.i32(own)))
            part = arith.divui(warp, ptx.i32(groups))
            return key, ptx.add(ptx.mul(part, own), arith.remui(unit, ptx.i32(own)))
        unit = ptx.add(me, ptx.i32(ahead))
        if self.target in KV_DTYPES_8BIT or self.chunks % 4:
            return arith.divui(unit, ptx.i32(self.chunks)), arith.remui(unit, ptx.i32(self.chunks))
        # Eight threads store 16 bytes each at a time: 4 chunks of two keys, which the swizzle puts in other banks
        four, pair, rest = arith.andi(unit, ptx.i32(3)), arith.shrui(unit, ptx.i32(2)), arith.shrui(unit, ptx.i32(3))
        key = ptx.add(ptx.mul(arith.divui(rest, ptx.i32(self.chunks // 4)), 2), arith.andi(pair, ptx.i32(1)))
        return key, ptx.add(ptx.mul(arith.remui(rest, ptx.i32(self.chunks // 4)), 4), four)

    def row(self, page_id, offset, head):
        """i64 row of the pool."""
        return ptx.pool_row(page_id, offset, head, heads=self.heads, page=self.page, heads_first=self.heads_first)


def _held(size: int):
    """Layout: element i is held by thread i % THREADS."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def _words(values):
    size = THREADS * len(values)
    fragment = rows.empty_fragment((size,), _held(size), ptx.int_type())
    rows.fill(fragment, lambda i: values[i : i + 1])
    return fragment


def load_page_ids(tile: StoredTile, block_table, req, kv0, start, stop, *, columns: int):
    """i32 (128 steps,): the page of each chunk's key, kv0 + its number in the block; -1 unless start <= key < stop.

    block_table GMEM i32[R, columns].
    """
    size = THREADS * tile.steps
    kind = plgpu.ShapeDtypeStruct((size,), jnp.int32, _held(size))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 4), return_type=kind)
    def load(ctx, table, req, kv0, start, stop):
        req, kv0, start, stop = map(ptx.scalar_value, (req, kv0, start, stop))
        base = ptx.add(ptx.pointer(table, 0), arith.muli(ptx.to_i64(ptx.mul(req, columns)), ptx.i64(4)))
        found = []
        for step in range(tile.steps):
            key = ptx.add(kv0, tile.place(step)[0])
            known = arith.cmpi(arith.CmpIPredicate.sge, key, start)
            seen = ptx.bool_to_i32(arith.andi(known, ptx.less(key, stop)))
            place = ptx.add(base, arith.muli(ptx.to_i64(arith.divui(key, ptx.i32(tile.page))), ptx.i64(4)))
            found.append(ptx.asm_value(_ID, "=&r,l,r", place, seen))
        return _words(found)

    return load(block_table, req, kv0, start, stop)


def load_chunks(tile: StoredTile, pool, ids, head, kv0):
    """i32 (512 steps,): the 16 bytes of each of a thread's chunks; 0 where the page is -1. In flight until used.

    ids: what load_page_ids gave for these keys.
    """
    size = 4 * THREADS * tile.steps
    kind = plgpu.ShapeDtypeStruct((size,), jnp.int32, _held(size))
    arguments = (plgpu.RefType(), _held(THREADS * tile.steps), ptx.SCALAR, ptx.SCALAR)

    @plgpu.inline_mgpu(arg_types=arguments, return_type=kind)
    def load(ctx, pool, ids, head, kv0):
        head, kv0, base = ptx.scalar_value(head), ptx.scalar_value(kv0), ptx.pointer(pool, 0)
        words = []
        for step, register in zip(range(tile.steps), ids.registers.flat, strict=True):
            page_id, (number, chunk) = rows.register_value(register), tile.place(step)
            offset = arith.remui(ptx.add(kv0, number), ptx.i32(tile.page))
            place = arith.muli(tile.row(page_id, offset, head), ptx.i64(tile.dim))
            place = ptx.add(base, place, ptx.to_i64(ptx.mul(chunk, 16)))
            words += ptx.asm_values(_LOAD, "=&r,=&r,=&r,=&r,l,r", 4, place, page_id)
        return _words(words)

    return load(pool, ids, head, kv0)


def put_chunks(tile: StoredTile, words, target, staging=None):
    """Stores what load_chunks gave. The caller must call commit_smem.

    target SMEM tile.shape; staging SMEM 8 bits [keys, dim], raw memory, for a transposed tile.
    """
    kinds = [_held(4 * THREADS * tile.steps), plgpu.RefType(tile.transforms)]
    kinds += [] if staging is None else [plgpu.RefType()]

    @plgpu.inline_mgpu(arg_types=tuple(kinds))
    def put(ctx, words, target, *staging):
        held = [rows.register_value(register) for register in words.registers.flat]
        chunks = [held[4 * step : 4 * step + 4] for step in range(tile.steps)]
        target = ptx.pointer(target, 3)
        if tile.transposed:
            _transpose(tile, chunks, target, ptx.pointer(staging[0], 3))
        elif tile.target in KV_DTYPES_8BIT:
            _copy(tile, chunks, target)
        else:
            _decode(tile, chunks, target)

    put(words, target, *([] if staging is None else [staging]))


def _store(place, words):
    ptx.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", place, *words)


def _copy(tile: StoredTile, chunks, target):
    for step, words in enumerate(chunks):
        key, chunk = tile.place(step)
        _store(ptx.add(target, ptx.swizzled(key, ptx.mul(chunk, 16), tile.dim, tile.swizzle)), words)


def _decode(tile: StoredTile, chunks, target):
    text = decode_word(tile.source, tile.target)
    for step, words in enumerate(chunks):
        key, chunk = tile.place(step)
        decoded = []
        for stored in words:
            decoded += ptx.asm_values(text, "=r,=r,r", 2, stored, pure=True)
        for half in range(2):
            byte = ptx.add(ptx.mul(chunk, 32), ptx.i32(16 * half))
            place = ptx.add(target, ptx.swizzled(key, byte, 2 * tile.dim, tile.swizzle))
            _store(place, decoded[4 * half : 4 * half + 4])


def _transpose(tile: StoredTile, chunks, target, staging):
    """A warp's 32 keys and some chunks of them -> columns of the tile, in the order above.

    Matrices of 8 x 8 pairs of bytes are transposed by ldmatrix, and the two bytes of a pair are parted by prmt.
    """
    own, me = tile.staged_chunks, ptx.thread_index()
    warp, lane = arith.divui(me, ptx.i32(32)), arith.remui(me, ptx.i32(32))
    groups, row_bytes = tile.keys // GROUP, 16 * own
    staging = ptx.add(staging, ptx.mul(warp, GROUP * row_bytes))
    turn = rows.swizzle_bytes(row_bytes, jnp.int8)
    inside = lambda key, chunk: ptx.add(staging, ptx.swizzled(key, ptx.mul(chunk, 16), row_bytes, turn))
    ptx.asm("bar.warp.sync 0xffffffff;", "")  # the warp has read what it staged for the block before
    for step, words in enumerate(chunks):
        unit = ptx.add(lane, ptx.i32(32 * step))
        _store(inside(arith.divui(unit, ptx.i32(own)), arith.remui(unit, ptx.i32(own))), words)
    ptx.asm("bar.warp.sync 0xffffffff;", "")
    # of the four stored matrices, lane 8 i + j addresses row j of matrix i: even or odd columns, of 16 keys h
    matrix, row = arith.divui(lane, ptx.i32(8)), arith.remui(lane, ptx.i32(8))
    odd, half = arith.andi(matrix, ptx.i32(1)), arith.shrui(matrix, ptx.i32(1))
    first = ptx.add(ptx.mul(ptx.mul(arith.divui(warp, ptx.i32(groups)), own), 16), ptx.mul(row, 2), odd)
    column = ptx.add(ptx.mul(arith.remui(warp, ptx.i32(groups)), GROUP), ptx.mul(half, 16))
    for chunk in range(own):
        a, b, c, d = ptx.ldmatrix(inside(lane, ptx.i32(chunk)), transpose=True)
        parted = [_bytes(low, high, which) for low, high in ((a, b), (c, d)) for which in ("0x6420", "0x7531")]
        place = ptx.swizzled(ptx.add(first, ptx.i32(16 * chunk)), column, tile.keys, tile.swizzle)
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        ptx.asm(text, "r,r,r,r,r", ptx.add(target, place), *parted)


def _bytes(low, high, selector: str):
    return ptx.asm_value(f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", low, high, pure=True)
