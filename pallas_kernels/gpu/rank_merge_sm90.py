"""The states of several ranks (devices), each of other keys, merged by every rank in one launch.

A state is out f32[T, H, V] and its log-sum-exp f32[T, H]. A thread has a piece, four numbers of a row. It stores them
and the row's log-sum-exp in the memory of every other rank (peer_words_sm90.py), waits for the words of each, and
merges in the order of the ranks: all ranks have equal bits.

Two sets of words take turns. A rank that stores to a set has had all words of the merge before, whose senders had then
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
MAX_PIECES = 2**16
"""Threads that wait for those of their number on other ranks: 512 CTAs. With 8 ranks a thread has 98 registers, so that
an SM holds 4 CTAs and 128 SMs hold all. On fewer SMs those of the lowest numbers run first on every rank, and end."""
_SETS = 2
_WORDS = 10  # of a piece that is sent: four numbers and a log-sum-exp, each with the number of the merge
_PLANES = (0, 4), (4, 4), (8, 2)  # (words of a piece before those that are stored together, so many)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMerge:
    """The static sizes of a launch."""

    ranks: int
    tokens: int
    heads: int
    dim: int
    dtype: str  # of the merged out: float32, bfloat16 or float16

    @property
    def pieces(self) -> int:
        return self.tokens * self.heads * self.dim // PIECE

    @property
    def fits(self) -> bool:
        """Are rows whole pieces, and can all threads of a launch wait at the same time?"""
        return self.dim % PIECE == 0 and 0 < self.pieces <= MAX_PIECES


def exchange(cfg: RankMerge) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `merge_ranks` needs: see `exchange` of peer_memory_sm90.py. A counter has the merges so far of a piece."""
    return peer_memory.exchange(cfg.ranks, _SETS * cfg.ranks * cfg.pieces * _WORDS, cfg.pieces)


def merge_ranks(cfg: RankMerge, out, lse, peers) -> tuple[jax.Array, jax.Array]:
    """(out [T, H, V], lse f32[T, H]) of all ranks' keys. out f32[T, H, V], lse f32[T, H]: of this rank's."""
    mesh = plgpu.Mesh(grid=(pl.cdiv(cfg.pieces, THREADS),), grid_names=("cta",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    shape = (cfg.tokens, cfg.heads, cfg.dim)
    out_type = jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.dtype)), jax.ShapeDtypeStruct(shape[:2], jnp.float32)

    def merge_ranks(out, lse, received, merges, table, merged, merged_lse):  # the kernel's name in a profile
        _merge(cfg, lax.axis_index("cta") * THREADS, out, lse, received, merges, table, merged, merged_lse)

    call = pl.kernel(merge_ranks, out_type=out_type, mesh=mesh, compiler_params=params, name="merge_ranks")
    return call(out, lse, *peers)


def _merge(cfg: RankMerge, first, *refs):
    @plgpu.inline_mgpu(arg_types=(ptx.SCALAR, *(plgpu.RefType(),) * len(refs)))
    def merge(ctx, first, out, lse, received, merges, table, merged, merged_lse):
        out, lse, received, merges, merged, merged_lse = (
            ptx.pointer(ref, 0) for ref in (out, lse, received, merges, merged, merged_lse)
        )
        table = Table(table, (received, merges), cfg.ranks)
        piece = ptx.add(ptx.scalar_value(first), ptx.thread_index())
        is_piece = ptx.less(piece, ptx.i32(cfg.pieces))
        piece = arith.select(is_piece, piece, ptx.i32(0))
        works = ptx.bool_to_i32(is_piece)
        row, inside = arith.divui(piece, ptx.i32(cfg.dim // PIECE)), arith.remui(piece, ptx.i32(cfg.dim // PIECE))
        load = "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];"
        own = ptx.asm_values(load, "=f,=f,=f,=f,l", 4, place_of(out, piece, 16), pure=True)
        own += [ptx.asm_value("ld.global.nc.f32 $0, [$1];", "=f,l", place_of(lse, row, 4), pure=True)]
        number = peer_words.next_number(place_of(merges, piece, 4), works)
        turn = ptx.mul(arith.andi(number, ptx.i32(1)), cfg.ranks)
        others = [arith.muli(works, differs(table.rank, rank)) for rank in range(cfg.ranks)]
        planes = own[:2], own[2:4], own[4:]
        for rank in range(cfg.ranks):
            places = _places(cfg, table.address(rank, 0), ptx.add(turn, table.rank), piece)
            for place, words in zip(places, planes, strict=True):
                peer_words.send(place, words, number, others[rank], "f")
        states = []
        for rank in range(cfg.ranks):
            places = tuple(_places(cfg, received, ptx.add(turn, ptx.i32(rank)), piece))
            found = peer_words.receive(places, (number,) * 3, (others[rank],) * 3, planes, "f")
            states.append([word for words in found for word in words])
        numbers, total_lse = _merged(states)
        store_piece(cfg.dtype, merged, piece, numbers, works)
        is_first = arith.muli(works, ptx.bool_to_i32(ptx.equal(inside, ptx.i32(0))))
        ptx.store_if(place_of(merged_lse, row, 4), is_first, total_lse, kind="f32")

    merge(jnp.int32(first), *refs)


def _places(cfg: RankMerge, base, slot, piece):
    """Where a piece's words of each plane lie in `received`: [plane, set and rank (slot), piece, words]."""
    for before, count in _PLANES:
        plane = arith.addi(base, ptx.i64(4 * before * _SETS * cfg.ranks * cfg.pieces))
        yield place_of(plane, ptx.add(ptx.mul(slot, cfg.pieces), piece), 4 * count)


def _merged(states):
    """(the four numbers, the log-sum-exp) of jattn.merge."""
    infinity, zero = ptx.f32(math.inf), ptx.f32(0.0)
    is_ = lambda a, b: arith.cmpf(arith.CmpFPredicate.OEQ, a, b)
    lowest = ptx.f32(-math.inf)
    lses = [arith.select(is_(lse, infinity), lowest, lse) for *_, lse in states]
    top = lses[0]
    for lse in lses[1:]:
        top = ptx.fmax(top, lse)
    shift = arith.select(is_(top, lowest), zero, top)
    weights = [ptx.exp2(arith.mulf(arith.subf(lse, shift), ptx.f32(math.log2(math.e)))) for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = arith.addf(total, weight)
    nothing = is_(total, zero)
    safe, numbers = arith.select(nothing, ptx.f32(1.0), total), [zero] * PIECE
    for weight, (*values, _) in zip(weights, states, strict=True):
        share, unseen = ptx.divide(weight, safe), is_(weight, zero)
        terms = [arith.select(unseen, zero, arith.mulf(x, share)) for x in values]
        numbers = [arith.addf(a, b) for a, b in zip(numbers, terms, strict=True)]
    lse = arith.addf(shift, arith.mulf(ptx.log2(safe), ptx.f32(math.log(2))))
    return numbers, arith.select(nothing, lowest, lse)
