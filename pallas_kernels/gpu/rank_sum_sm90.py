"""An array of every rank (device), added up by every rank in one launch.

A thread has pieces, four numbers each, which it adds up with the same thread of every other rank (peer_sums_sm90.py):
all ranks have equal bits.

Two sets of words take turns. A rank stores to a set after it has had the sum before, in the other set. Every rank sent
its part of that sum after it had read all that it waited for in this set.
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
from pallas_kernels.gpu import peer_sums_sm90 as peer_sums
from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.peer_memory_sm90 import Table
from pallas_kernels.gpu.peer_words_sm90 import KINDS, PIECE, Words, place_of, store_words, words_of

THREADS = 128
MAX_BYTES = 2**25
"""Of the memory that a step's sums share, which is filled with zeros in each: 2^20 numbers on 2 ranks, 2^18 on 8."""
_MAX_THREADS = 2**16  # that wait for one another: 512 CTAs. A Hopper GPU has 78 SMs or more
_THREAD_BYTES = 32  # of a thread's pieces, at most: it then has 72 registers at most, so that an SM holds 7 CTAs
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
    count, each, threads = size

    @plgpu.inline_mgpu(arg_types=(ptx.SCALAR, *(plgpu.RefType(),) * len(refs)))
    def sum_up(ctx, first, x, received, so_far, table, total):
        x, received, so_far, total = (ptx.pointer(ref, 0) for ref in (x, received, so_far, total))
        thread = ptx.add(ptx.scalar_value(first), ptx.thread_index())
        own, numbers, pieces = words_of(dtype), [], []
        for i in range(each):
            number = ptx.add(thread, ptx.i32(i * threads))
            is_piece = ptx.less(number, ptx.i32(count))
            numbers.append(arith.select(is_piece, number, ptx.i32(0)))
            pieces.append(_piece(cfg, own, numbers[-1], ptx.bool_to_i32(is_piece), x, so_far))
        hops = peer_sums.hops(cfg.ranks, 2 * PIECE * count * jnp.dtype(dtype).itemsize)
        table = Table(table, (received, so_far), cfg.ranks)
        found = peer_sums.sums(pieces, own, hops, table, received)
        for number, piece, words in zip(numbers, pieces, found, strict=True):
            store_words(total, number, words, piece.works, own.kind)

    sum_up(jnp.int32(first), *refs)


def _piece(cfg: RankSum, own: Words, number, works, x, so_far) -> peer_sums.Piece:
    """The piece of this number of the array at x, whose pieces are such words."""
    kind, count = own.kind, own.count
    text = f"ld.global.nc.v{count}.{KINDS[kind]} {{{', '.join(f'${k}' for k in range(count))}}}, [${count}];"
    constraints = ",".join((*(f"={kind}",) * count, "l"))
    words = ptx.asm_values(text, constraints, count, place_of(x, number, 4 * count), pure=True)
    turn = peer_words.next_number(place_of(so_far, number, 4), works)

    def places(base, rank):  # [pair, set and rank, piece]
        slot = ptx.add(ptx.mul(arith.andi(turn, ptx.i32(1)), cfg.ranks), rank)
        place = ptx.add(ptx.mul(slot, cfg.pieces), number)
        planes = range(0, count // 2 * _SETS * cfg.ranks * cfg.pieces, _SETS * cfg.ranks * cfg.pieces)
        return [place_of(base, ptx.add(place, ptx.i32(plane)), 16) for plane in planes]

    pairs = [words[k : k + 2] for k in range(0, count, 2)]
    return peer_sums.Piece(pairs, turn, works, peer_sums.owner(number, cfg.ranks), places)
