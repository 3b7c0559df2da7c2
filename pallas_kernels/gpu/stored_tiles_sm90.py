"""Tiles of an 8-bit cache, as TMA stored them in shared memory -> tiles that wgmma multiplies: by one warpgroup.

    target float16, bfloat16   decoded exactly, [keys, dim]
    target 8 bits, values      [dim, keys]: in 8 bits wgmma needs the axis that is summed to be contiguous

Of every 32 keys of a transposed tile, place 16 h + 4 t + 2 j + e holds key 16 h + 8 j + 2 t + e (t < 4; h, j, e < 2):
the order in which a thread of a product's result holds its columns, so that weights need no exchange among threads.
"""

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.decode_sm90 import decode_word

THREADS = 128
GROUP = 32  # keys that a warp transposes, and that one instruction of an 8-bit product sums
TOGETHER = 8  # chunks that a thread loads before it decodes the first: their latencies overlap


@dataclasses.dataclass(frozen=True)
class StoredTile:
    """The keys or the values of a block of one kv head."""

    keys: int
    dim: int
    source: str  # dtype in the pool
    target: str  # dtype of the product's operand
    transposed: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes of a row of the pool."""
        return self.dim // 16

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tile that is multiplied."""
        return (self.dim, self.keys) if self.transposed else (self.keys, self.dim)

    @property
    def transforms(self) -> tuple[tuple, tuple]:
        """Of the tile from the pool, and of the tile that is multiplied."""
        return rows.tile_transforms(self.dim, self.source), rows.tile_transforms(self.shape[1], self.target)

    def place(self, step: int):
        """(key, chunk of its row) of the chunk that this thread decodes at a step.

        Eight threads load or store 16 bytes each at a time. Of rows of a multiple of 128 bytes they take 4 chunks of
        one key and 4 others of the next: the swizzles put both their loads and their stores in different banks.
        """
        unit = ptx.add(ptx.thread_index(), ptx.i32(step * THREADS))
        if self.chunks % 8:
            return arith.divui(unit, ptx.i32(self.chunks)), arith.remui(unit, ptx.i32(self.chunks))
        fours = ptx.i32(self.chunks // 4)
        four, odd, rest = arith.andi(unit, ptx.i32(3)), arith.shrui(unit, ptx.i32(2)), arith.shrui(unit, ptx.i32(3))
        odd = arith.andi(odd, ptx.i32(1))
        key = ptx.add(ptx.mul(arith.divui(rest, fours), 2), odd)
        return key, ptx.add(ptx.mul(arith.remui(ptx.add(rest, odd), fours), 4), four)

    def stored(self, base, key, chunk):
        """Address of a chunk of the tile from the pool."""
        turn = rows.swizzle_bytes(self.dim, self.source)
        return ptx.add(base, ptx.swizzled(key, ptx.mul(chunk, 16), self.dim, turn))


def convert(tile: StoredTile, source, target):
    """source SMEM [keys, dim] as TMA stored it -> target SMEM tile.shape. The caller must call commit_smem."""

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType(transforms) for transforms in tile.transforms))
    def run(ctx, source, target):
        (_transpose if tile.transposed else _decode)(tile, ptx.pointer(source, 3), ptx.pointer(target, 3))

    run(source, target)


def _decode(tile: StoredTile, source, target):
    text, turn = decode_word(tile.source, tile.target), rows.swizzle_bytes(tile.dim, tile.target)
    steps = range(tile.keys * tile.chunks // THREADS)
    for first in steps[::TOGETHER]:
        loaded = []
        for step in steps[first : first + TOGETHER]:
            key, chunk = tile.place(step)
            load = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
            loaded.append((key, chunk, ptx.asm_values(load, "=r,=r,=r,=r,r", 4, tile.stored(source, key, chunk))))
        for key, chunk, words in loaded:
            decoded = []
            for word in words:
                decoded += ptx.asm_values(text, "=r,=r,r", 2, word, pure=True)
            for half in range(2):
                byte = ptx.add(ptx.mul(chunk, 32), ptx.i32(16 * half))
                place = ptx.add(target, ptx.swizzled(key, byte, 2 * tile.dim, turn))
                store = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
                ptx.asm(store, "r,r,r,r,r", place, *decoded[4 * half : 4 * half + 4])


def _transpose(tile: StoredTile, source, target):
    """Each warp: 32 keys and some chunks of them. ldmatrix transposes matrices of 8 x 8 pairs of bytes, and prmt parts
    the two bytes of a pair."""
    groups = tile.keys // GROUP
    own, me = tile.chunks * groups // 4, ptx.thread_index()
    warp, lane = arith.divui(me, ptx.i32(32)), arith.remui(me, ptx.i32(32))
    group, first_chunk = arith.remui(warp, ptx.i32(groups)), ptx.mul(arith.divui(warp, ptx.i32(groups)), own)
    key = ptx.add(ptx.mul(group, GROUP), lane)
    # of the four matrices that are stored, lane 8 i + j addresses row j of matrix i: even or odd columns of 16 keys
    matrix, row = arith.divui(lane, ptx.i32(8)), arith.remui(lane, ptx.i32(8))
    odd, half = arith.andi(matrix, ptx.i32(1)), arith.shrui(matrix, ptx.i32(1))
    column, first = ptx.add(ptx.mul(group, GROUP), ptx.mul(half, 16)), ptx.add(ptx.mul(row, 2), odd)
    turn = rows.swizzle_bytes(tile.keys, tile.target)
    chunks = [ptx.add(first_chunk, ptx.i32(i)) for i in range(own)]
    for start in range(0, own, TOGETHER):
        together = chunks[start : start + TOGETHER]
        for chunk, loaded in [(c, ptx.ldmatrix(tile.stored(source, key, c), transpose=True)) for c in together]:
            pairs = loaded[:2], loaded[2:]
            parted = [_bytes(*pair, which) for pair in pairs for which in ("0x6420", "0x7531")]
            place = ptx.swizzled(ptx.add(ptx.mul(chunk, 16), first), column, tile.keys, turn)
            text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
            ptx.asm(text, "r,r,r,r,r", ptx.add(target, place), *parted)


def _bytes(low, high, selector: str):
    return ptx.asm_value(f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", low, high, pure=True)
