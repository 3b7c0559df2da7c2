"""What a warp of packed_product_sm90.py reads of packed matrices, in a ring of slots of shared memory of its own.

A slot has the codes, scales and zero points of one step. cp.async asks for them `ring - 1` steps before they are used,
and a warp waits for the oldest of them only. Registers do not do that: ptxas gives all loads that one turn of a loop
leaves to the next the same scoreboard, so that a warp which waits for one waits for the one that it just asked for.

    codes of 4 bits         [block][4 rows of words][32 columns]
    codes of 8 bits         [block][32 inputs][64 columns]
    scales, zero points     [group of the step][columns of the warp]

Lanes side by side ask for pieces of 16 bytes side by side. Otherwise memory is asked for 32 bytes at a time, and int4
takes 1.6 times as long. Pieces of codes are permuted in a slot, so that lanes read and write without conflicts.
"""

import dataclasses
from typing import Any

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.packed_product_config import BITS, BLOCK, ITEM_BYTES, PIECE_BYTES, PackedProductConfig
from pallas_kernels.gpu.packed_sums_sm90 import place_of


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of a warp, and what its lanes copy. Addresses in GMEM are i64, in shared memory i32."""

    cfg: PackedProductConfig
    base: Any  # of the first slot
    source: Any  # of the lane's first piece of codes, of the first input
    has_codes: Any  # i1: are the columns of the lane's pieces of codes in the matrix?
    row: Any  # i64: bytes from row to row of codes
    small: Any  # of the piece of scales or zero points that the lane copies, of the first group
    small_row: Any  # i64: bytes from group to group of it
    has_small: Any  # i1: does the lane copy one?

    @classmethod
    def of_warp(cls, cfg: PackedProductConfig, here, base, warp, column) -> "Ring":
        """here: a _Strip of packed_product_sm90.py; base: of the CTA's shared memory; column: the first of the warp."""
        item = 4 if BITS[cfg.format] == 4 else 1
        row, piece = _row_and_piece(cfg)
        own = ptx.add(column, ptx.mul(piece, PIECE_BYTES // item))
        start = ptx.add(base, ptx.i32(cfg.ring_start), ptx.mul(warp, cfg.ring * cfg.slot_bytes))
        small, small_row, has_small = _small_piece(cfg, here, column)
        return cls(
            cfg, start, place_of(here.values, row, here.width, own, item), ptx.less(own, here.width),
            ptx.to_i64(ptx.mul(here.width, item)), small, small_row, has_small,
        )  # fmt: skip

    def step_bytes(self):
        """i64: from the codes of a step to those of the next."""
        return arith.muli(self.row, ptx.i64(self.cfg.unroll * (4 if BITS[self.cfg.format] == 4 else BLOCK)))

    def copy(self, source, slot, group, is_step) -> None:
        """Asks for a step, as one group of cp.async; for none, the group is empty, so that `wait` counts right.

        source: of the lane's codes; slot: i32, its offset; group: the first of the step; is_step: i1, is there one?
        """
        cfg, to, wanted = self.cfg, ptx.add(self.base, slot), arith.andi(is_step, self.has_codes)
        targets, rows = ([_place_of_4(*_row_and_piece(cfg))], 4) if BITS[cfg.format] == 4 else (_targets_of_8(), 8)
        apart = arith.muli(self.row, ptx.i64(rows))
        for b in range(cfg.unroll):
            for i, target in enumerate(targets):
                number = b * len(targets) + i
                place = ptx.add(to, target, ptx.i32(b * cfg.block_bytes))
                _copy(place, arith.addi(source, arith.muli(apart, ptx.i64(number))) if number else source, wanted)
        if cfg.small_pieces:
            place = ptx.add(to, ptx.i32(cfg.code_bytes), ptx.mul(ptx.lane_position()[2], PIECE_BYTES))
            at = arith.addi(self.small, arith.muli(self.small_row, ptx.to_i64(group)))
            _copy(place, at, arith.andi(is_step, self.has_small))
        ptx.asm("cp.async.commit_group;", "")

    def wait(self) -> None:
        """The oldest step has arrived for the whole warp, which has read the slot that is filled next."""
        ptx.asm(f"cp.async.wait_group {self.cfg.ring - 2};", "")
        ptx.asm("bar.warp.sync 0xffffffff;", "")

    def load(self, slot) -> tuple[list, list, list]:
        """(codes of each block, words of scales of each run, or of each block; words of zero points of each run)"""
        cfg, at = self.cfg, ptx.add(self.base, slot)
        g, t, _, _ = ptx.lane_position()
        starts = [b * cfg.block_bytes for b in range(cfg.unroll)]
        if BITS[cfg.format] == 4:
            own = ptx.add(at, _place_of_4(t, g))
            values = [_words(own, 4, start) for start in starts]
        else:
            both = [ptx.add(at, place) for place in _sources_of_8()]
            values = [[_words(both[k % 2], 2, start + 128 * (k // 2)) for k in range(8)] for start in starts]
        size, scales = ITEM_BYTES[cfg.scale_dtype], []
        row_bytes, of_lane = cfg.warp_columns * size, cfg.columns * size
        own = ptx.add(at, ptx.i32(cfg.code_bytes), ptx.mul(g, of_lane))
        if cfg.scales_codes:
            each = BLOCK // cfg.group
            own = ptx.add(own, ptx.mul(arith.shrui(t, ptx.i32(1)), row_bytes)) if each == 2 else own
            scales = [_words(own, of_lane // 4, row_bytes * each * b) for b in range(cfg.unroll)]
        elif cfg.scales_sums:
            scales = [_words(own, of_lane // 4, row_bytes * run) for run in range(cfg.scale_rows)]
        own = ptx.add(at, ptx.i32(cfg.code_bytes + cfg.scale_rows * row_bytes), ptx.mul(g, cfg.columns))
        zeros = [_words(own, cfg.columns // 4, cfg.warp_columns * run) for run in range(cfg.zero_rows)]
        return values, scales, zeros


def next_slot(cfg: PackedProductConfig, slot):
    """i32: the offset of the slot after this one."""
    after = ptx.add(slot, ptx.i32(cfg.slot_bytes))
    return arith.select(ptx.equal(after, ptx.i32(cfg.ring * cfg.slot_bytes)), ptx.i32(0), after)


def _row_and_piece(cfg: PackedProductConfig):
    """(row, piece) of the codes that a lane copies first: 8 lanes copy a row of words of 4 bits, 4 one of 8 bits."""
    return ptx.divided(ptx.lane_position()[2], 8 if BITS[cfg.format] == 4 else 4)


def _small_piece(cfg: PackedProductConfig, here, column) -> tuple:
    """(address, i64 bytes from group to group, is there one?) of the piece of scales or zero points of a lane."""
    lane, size = ptx.lane_position()[2], ITEM_BYTES[cfg.scale_dtype]
    of_row = cfg.warp_columns * size // PIECE_BYTES
    count = cfg.scale_rows * of_row
    row, piece = ptx.divided(lane, of_row)
    own, row_bytes = ptx.add(column, ptx.mul(piece, PIECE_BYTES // size)), ptx.mul(here.width, size)
    place = place_of(here.scales, row, here.width, own, size)
    if cfg.zero_rows:
        is_zero = ptx.less(ptx.i32(count - 1), lane)
        row, piece = ptx.divided(arith.subi(lane, ptx.i32(count)), cfg.warp_columns // PIECE_BYTES)
        of_zeros = ptx.add(column, ptx.mul(piece, PIECE_BYTES))
        place = arith.select(is_zero, place_of(here.zeros, row, here.width, of_zeros, 1), place)
        own, row_bytes = arith.select(is_zero, of_zeros, own), arith.select(is_zero, here.width, row_bytes)
    has_one = arith.andi(ptx.less(lane, ptx.i32(cfg.small_pieces)), ptx.less(own, here.width))
    return place, ptx.to_i64(row_bytes), has_one


def _place_of_4(row, piece):
    """Where a piece of a row of words is in a block: at `piece` ^ 2 `row`. 8 lanes write a row, or read two pieces of
    each row."""
    return ptx.add(ptx.mul(row, 128), ptx.mul(arith.xori(piece, ptx.mul(row, 2)), PIECE_BYTES))


def _targets_of_8() -> list:
    """Where the lane's four pieces of a block go: piece t of the inputs 8 i + g, for i from 0 to 3.

    Input 8 i + k is row 8 i + (k ^ (i / 2)) of the block, and its piece p is at p ^ 2 (i % 2). 16 lanes read two pieces
    of input k of each i, and 8 lanes write two rows: neither has conflicts.
    """
    g, t, _, _ = ptx.lane_position()
    places = []
    for i in range(4):
        row, piece = arith.xori(g, ptx.i32(i // 2)), arith.xori(t, ptx.i32(2 * (i % 2)))
        places.append(ptx.add(ptx.i32(512 * i), ptx.mul(row, 64), ptx.mul(piece, PIECE_BYTES)))
    return places


def _sources_of_8() -> list:
    """Where the lane's 8 bytes of inputs 8 t and 8 t + 1 are; every two inputs are 128 bytes further."""
    g, t, _, _ = ptx.lane_position()
    piece = arith.xori(arith.shrui(g, ptx.i32(1)), ptx.mul(arith.andi(t, ptx.i32(1)), 2))
    start = ptx.add(ptx.mul(t, 512), ptx.mul(piece, PIECE_BYTES), ptx.mul(arith.andi(g, ptx.i32(1)), 8))
    row = ptx.mul(arith.shrui(t, ptx.i32(1)), 64)
    return [ptx.add(start, arith.xori(row, ptx.i32(64 * k))) for k in range(2)]


def _copy(to, source, is_wanted) -> None:
    """Asks for a piece. Where it is not wanted, shared memory keeps what it has."""
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16; }"
    ptx.asm(text, "r,l,r", to, source, ptx.bool_to_i32(is_wanted))


def _words(place, count: int, offset: int) -> list:
    """So many 32-bit words of shared memory, from this offset on: 1, or an even number."""
    if count == 1:
        return [ptx.asm_value(f"ld.shared.b32 $0, [$1+{offset}];", "=r,r", place)]
    found = []
    for first in range(0, count, 4):
        some = min(4, count - first)
        names, kinds = ", ".join(f"${k}" for k in range(some)), ",".join(["=r"] * some)
        text = f"ld.shared.v{some}.b32 {{{names}}}, [${some}+{offset + 4 * first}];"
        found += ptx.asm_values(text, f"{kinds},r", some, place)
    return found
