"""An array of every rank (device), added up by every rank in one launch.

A thread has pieces, four numbers each. It stores them in the memory of every other rank (peer_words_sm90.py), waits for
the pieces of each, and adds them up in the order of the ranks: all ranks have equal bits.

Two sets of words take turns. A rank that stores to a set has had all words of the sum before, whose senders had then
read that set's.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import peer_memory_sm90 as peer_memory
from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.peer_memory_sm90 import Table
from pallas_kernels.gpu.peer_words_sm90 import PIECE, differs, place_of, store_piece

THREADS = 128
MAX_BYTES = 2**25
"""Of the memory that a step's sums share, which is filled with zeros in each: 2^20 numbers on 2 ranks, 2^18 on 8."""
_MAX_THREADS = 2**16  # that wait for one another: 512 CTAs. A Hopper GPU has 78 SMs or more
_THREAD_BYTES = 32  # of a thread's pieces, at most: it then has 64 registers, so that an SM holds 8 CTAs
_SETS = 2
_SENT = 8  # i32 of a piece that is sent: at most four words, each with its number
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSum:
    """The static sizes of the launches that share memory."""

    ranks: int
    pieces: int  # of the largest array

    @property
    def received(self) -> int:
        """i32 that a rank receives, of both sets."""
        return _SETS * self.ranks * self.pieces * _SENT

    def serves(self, shape: tuple[int, ...], dtype) -> bool:
        """Can a launch add up such arrays?"""
        dtype, (pieces, rest) = jnp.dtype(dtype), divmod(math.prod(shape), PIECE)
        fits = 0 < pieces <= self.pieces and 4 * self.received <= MAX_BYTES
        all_run = pieces * PIECE * dtype.itemsize <= _MAX_THREADS * _THREAD_BYTES
        return not rest and fits and all_run and dtype.name in DTYPES


def exchange(cfg: RankSum) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `sum_ranks` needs: see `exchange` of peer_memory_sm90.py. A counter has the sums so far of a piece."""
    return peer_memory.exchange(cfg.ranks, cfg.received, cfg.pieces)


def sum_ranks(cfg: RankSum, x: jax.Array, peers) -> jax.Array:
    """The sum of the ranks' x, rounded to its dtype. x: cfg.serves it."""
    pieces = x.size // PIECE
    each = pl.cdiv(pieces, _MAX_THREADS)
    ctas = pl.cdiv(pl.cdiv(pieces, each), THREADS)
    mesh = plgpu.Mesh(grid=(ctas,), grid_names=("cta",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

    def sum_ranks(x, received, so_far, table, total):  # the kernel's name in a profile
        first, size = lax.axis_index("cta") * THREADS, (pieces, each, ctas * THREADS)
        _sum(cfg, x.dtype.name, size, first, x, received, so_far, table, total)

    out_type = jax.ShapeDtypeStruct((x.size,), x.dtype)
    call = pl.kernel(sum_ranks, out_type=out_type, mesh=mesh, compiler_params=params, name="sum_ranks")
    return call(x.reshape(-1), *peers).reshape(x.shape)


def _sum(cfg: RankSum, dtype: str, size: tuple[int, int, int], first, *refs):
    """One thread's pieces. size: (pieces, of a thread at most, threads)."""
    pieces, each, threads = size

    @plgpu.inline_mgpu(arg_types=(ptx.SCALAR, *(plgpu.RefType(),) * len(refs)))
    def sum_up(ctx, first, x, received, so_far, table, total):
        x, received, so_far, total = (ptx.pointer(ref, 0) for ref in (x, received, so_far, total))
        table = Table(table, (received, so_far), cfg.ranks)
        others = [differs(table.rank, rank) for rank in range(cfg.ranks)]
        thread = ptx.add(ptx.scalar_value(first), ptx.thread_index())
        own = []
        for i in range(each):
            number = ptx.add(thread, ptx.i32(i * threads))
            is_piece = ptx.less(number, ptx.i32(pieces))
            own.append(_Piece(cfg, dtype, arith.select(is_piece, number, ptx.i32(0)), ptx.bool_to_i32(is_piece)))
        words = [piece.load(x) for piece in own]
        turns = [peer_words.next_number(place_of(so_far, piece.number, 4), piece.works) for piece in own]
        for rank in range(cfg.ranks):
            for piece, pairs, turn in zip(own, words, turns, strict=True):
                places = piece.places(table.address(rank, 0), turn, table.rank)
                for place, pair in zip(places, pairs, strict=True):
                    peer_words.send(place, pair, turn, arith.muli(piece.works, others[rank]), piece.kind)
        sums: list = []
        for rank in range(cfg.ranks):
            places, numbers, waits = [], [], []
            for piece, turn in zip(own, turns, strict=True):
                places += piece.places(received, turn, ptx.i32(rank))
                numbers += [turn] * piece.pairs
                waits += [arith.muli(piece.works, others[rank])] * piece.pairs
            instead = [pair for pairs in words for pair in pairs]
            found = iter(peer_words.receive(places, numbers, waits, instead, own[0].kind))
            values = [piece.floats([next(found) for _ in range(piece.pairs)]) for piece in own]
            sums = [_added(*both) for both in zip(sums, values, strict=True)] if sums else values
        for piece, values in zip(own, sums, strict=True):
            store_piece(dtype, total, piece.number, values, piece.works)

    sum_up(jnp.int32(first), *refs)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Four numbers of an array: two words of 16 bits each, or four."""

    cfg: RankSum
    dtype: str
    number: object  # i32, of the piece; 0 where there is none
    works: object  # i32, 0 where there is none

    @property
    def pairs(self) -> int:
        """Pairs of words."""
        return 2 if self.dtype == "float32" else 1

    @property
    def kind(self) -> str:
        """Of the words, for peer_words."""
        return "f" if self.dtype == "float32" else "r"

    def load(self, base) -> list[list]:
        """The words, by pairs."""
        count, kind = 2 * self.pairs, self.kind
        type_of = {"f": "f32", "r": "b32"}[kind]
        text = f"ld.global.nc.v{count}.{type_of} {{{', '.join(f'${k}' for k in range(count))}}}, [${count}];"
        place = place_of(base, self.number, 4 * count)
        words = ptx.asm_values(text, ",".join((*(f"={kind}",) * count, "l")), count, place, pure=True)
        return [words[k : k + 2] for k in range(0, count, 2)]

    def places(self, base, turn, rank) -> list:
        """Where the pairs that a rank sends lie: [pair, set and rank, piece]."""
        cfg, slot = self.cfg, ptx.add(ptx.mul(arith.andi(turn, ptx.i32(1)), self.cfg.ranks), rank)
        piece = ptx.add(ptx.mul(slot, cfg.pieces), self.number)
        return [
            place_of(base, ptx.add(piece, ptx.i32(pair * _SETS * cfg.ranks * cfg.pieces)), 16)
            for pair in range(self.pairs)
        ]

    def floats(self, pairs: list[list]) -> list:
        words = [word for pair in pairs for word in pair]
        if self.dtype == "float32":
            return words
        of_half = ptx.float_of_bf16 if self.dtype == "bfloat16" else ptx.float_of_f16
        return [of_half(word, half) for word in words for half in range(2)]


def _added(a: list, b: list) -> list:
    return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]
