"""Sums over ranks, inside inline_mgpu: each thread adds up its pieces with those of the same thread of every rank.

    one hop     a thread sends its pieces to every rank, and adds up what comes
    two hops    it sends a piece to the rank that owns it, where one thread adds it up and sends the sum to every rank

A rank sends R - 1 times its bytes in one hop, and 2 (R - 1) / R times in two, which take longer to begin. Ranks are
added in their order and the sum is rounded once: the bits are the same on all ranks, in one hop and in two.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.peer_words_sm90 import Words, differs

RATE = 240e3  # bytes a microsecond that a rank sends to the others together, measured on four H200s
HOP = 2.5  # microseconds that a second hop takes
WARP = 32


def hops(ranks: int, sent: int) -> int:
    """1 or 2, whichever is faster. sent: bytes of a rank's pieces and of the numbers beside their words."""
    saved = (ranks - 1) * (ranks - 2) / ranks * sent / RATE
    return 2 if saved > HOP else 1


def owner(number, ranks: int):
    """i32: the rank that owns the piece of this number. Those of a warp have one owner: its stores lie side by side."""
    return arith.remui(arith.divui(number, ptx.i32(WARP)), ptx.i32(ranks))


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a thread adds up: four numbers, as words that are sent together in pairs."""

    pairs: Sequence[Sequence]  # of this rank
    turn: object  # i32, the number of the sum, sent beside its words
    works: object  # i32, 0: there is no such piece
    owner: object  # i32
    places: Callable  # (base of a rank's memory, rank that sends) -> the address of each pair


def sums(pieces: Sequence[Piece], words: Words, hops: int, table, received) -> list[list]:
    """The words of each piece's sum. table: peer_memory_sm90.Table, whose first array is at `received` here."""
    ranks = range(table.ranks)
    others = [differs(table.rank, rank) for rank in ranks]
    here = [arith.muli(piece.works, _equal(piece.owner, table.rank)) for piece in pieces]
    elsewhere = [arith.subi(piece.works, own) for piece, own in zip(pieces, here, strict=True)]
    adds = [piece.works for piece in pieces] if hops == 1 else here

    def send(piece, rank, pairs, sends):
        places = piece.places(table.address(rank, 0), table.rank)
        for place, pair in zip(places, pairs, strict=True):
            peer_words.send(place, pair, piece.turn, sends, words.kind)

    def receive(ranks, waits, instead):
        places, turns, each = [], [], []
        for piece, rank, waiting, pairs in zip(pieces, ranks, waits, instead, strict=True):
            places += piece.places(received, rank)
            turns += [piece.turn] * len(pairs)
            each += [waiting] * len(pairs)
        found = iter(peer_words.receive(places, turns, each, [p for pairs in instead for p in pairs], words.kind))
        return [[next(found) for _ in pairs] for pairs in instead]

    if hops == 1:
        for rank in ranks:
            for piece in pieces:
                send(piece, rank, piece.pairs, arith.muli(piece.works, others[rank]))
    else:
        for piece, sends in zip(pieces, elsewhere, strict=True):
            send(piece, piece.owner, piece.pairs, sends)
    own, totals = [piece.pairs for piece in pieces], []
    for rank in ranks:
        waits = [arith.muli(waiting, others[rank]) for waiting in adds]
        values = [words.floats(_flat(pairs)) for pairs in receive([ptx.i32(rank)] * len(pieces), waits, own)]
        totals = [_added(*both) for both in zip(totals, values, strict=True)] if rank else values
    found = [_in_pairs(words.rounded(total), pairs) for total, pairs in zip(totals, own, strict=True)]
    if hops == 2:
        for rank in ranks:
            for piece, pairs, sends in zip(pieces, found, here, strict=True):
                send(piece, rank, pairs, arith.muli(sends, others[rank]))
        found = receive([piece.owner for piece in pieces], elsewhere, found)
    return [_flat(pairs) for pairs in found]


def _flat(pairs: Sequence[Sequence]) -> list:
    return [word for pair in pairs for word in pair]


def _in_pairs(words: Sequence, like: Sequence[Sequence]) -> list[list]:
    each = iter(words)
    return [[next(each) for _ in pair] for pair in like]


def _added(a: Sequence, b: Sequence) -> list:
    return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]


def _equal(a, b):
    return ptx.bool_to_i32(ptx.equal(a, b))
