"""Sums over the ranks (devices) of a mesh inside layer_tail_sm90.py: each CTA sends its own to the CTAs of its number.

A rank stores its sums, rounded to bfloat16, into the memory of every rank, and then adds one to a counter there. Each
adds up what it received in the order of the ranks, so that all ranks have equal bits.

Once a step, `exchange` allocates the memory for this and tells every rank its addresses. It is a launch for which XLA
has a barrier of all ranks, which takes 8 us; the launches of the layers need none. A CTA may overwrite what its other
launch received: o's sums of the next layer are sent by a CTA that has had the sums of down from this one, which read
o's sums before it sent them; and so for down.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import MAX_CTAS, THREADS, LayerTailConfig
from pallas_kernels.gpu.stage_ring_sm90 import DTYPE
from pallas_kernels.gpu.token_share_sm90 import TokenShare, floats, packed

_PRODUCTS = 2  # whose sums are sent: o and down
_COUNTER = 8  # int32 of a CTA and product: what arrived in all launches, launches that have ended
_ADDRESSES = 2  # of each rank: of `received` and of `arrived`


def exchange(cfg: LayerTailConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(received [2 ranks T8, W], arrived i32, addresses i32) of this rank. Call it on all ranks, in shard_map.

    addresses: those of `received` and `arrived` of each rank, two words each; then the number of this rank.
    """
    words = 2 * _ADDRESSES * cfg.ranks

    def peer_addresses(arrived, received, addresses):  # the kernel's name in a profile
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
        def tell(ctx, arrived, received, addresses):
            base, own = ptx.pointer(addresses, 0), ptx.equal(ptx.thread_index(), ptx.i32(0))
            first = ptx.bool_to_i32(own)
            text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.b64 [$0], $2; }"
            for rank in range(cfg.ranks):
                for i, ref in enumerate((received, arrived)):
                    place = arith.addi(base, ptx.i64(8 * (_ADDRESSES * rank + i)))
                    ptx.asm(text, "l,r,l", place, first, ptx.pointer(ctx.to_remote(ref, ptx.i32(rank)), 0))
            text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.b32 [$0], $2; }"
            ptx.asm(text, "l,r,r", arith.addi(base, ptx.i64(4 * words)), first, ctx.device_id())

        tell(arrived, received, addresses)

    shape = (_PRODUCTS * cfg.ranks * cfg.rows8, cfg.hidden)
    out_type = jax.ShapeDtypeStruct(shape, DTYPE), jax.ShapeDtypeStruct((words + 2,), jnp.int32)
    mesh = plgpu.Mesh(grid=(1,), grid_names=("cta",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    arrived = jax.new_ref(jnp.zeros(_PRODUCTS * MAX_CTAS * _COUNTER, jnp.int32))
    call = pl.kernel(peer_addresses, out_type=out_type, mesh=mesh, compiler_params=params, name="peer_addresses")
    received, addresses = call(arrived)
    return received, jax.freeze(arrived), addresses


def sum_over_ranks(cfg: LayerTailConfig, product: int, share: TokenShare, refs, cta, fours):
    """Inside inline_mgpu: the sums of this CTA's columns over all ranks, as bfloat16 rounds them.

    refs: what `exchange` gave. fours: this rank's sums.
    """
    received, arrived, addresses = refs
    table = ptx.pointer(addresses, 0)
    rank = ptx.asm_value("ld.global.b32 $0, [$1];", "=r,l", arith.addi(table, ptx.i64(16 * cfg.ranks)))
    counter = ptx.add(ptx.mul(cta, _COUNTER), ptx.i32(product // 2 * MAX_CTAS * _COUNTER))
    counter = arith.muli(ptx.to_i64(counter), ptx.i64(4))
    row = ptx.add(share.row, ptx.i32(product // 2 * cfg.ranks * cfg.rows8))
    own = ptx.add(ptx.mul(rank, cfg.rows8), row)
    for peer in range(cfg.ranks):
        share.store_at(_address(table, peer, 0), fours, own)
    _check_places(cfg, table, rank, ptx.pointer(received, 0), ptx.pointer(arrived, 0))
    ptx.asm(f"bar.sync 8, {THREADS};", "")
    for peer in range(cfg.ranks):  # thread `peer` tells that rank
        text = (
            "{ .reg .pred p; setp.eq.u32 p, $1, $2; setp.ne.and.u32 p, $3, $2, p;"
            " @p red.release.sys.global.add.u32 [$0], 1; }"
        )
        place = arith.addi(_address(table, peer, 1), counter)
        ptx.asm(text, "l,r,r,r", place, ptx.thread_index(), ptx.i32(peer), rank)
    text = (
        "{ .reg .pred p; .reg .b32 seen, ended, wanted; setp.ne.u32 p, $1, 0; @p bra DONE;"
        " ld.global.b32 ended, [$0+4]; add.u32 ended, ended, 1; mul.lo.u32 wanted, ended, $2;"
        " AGAIN: ld.acquire.sys.global.u32 seen, [$0]; setp.lt.u32 p, seen, wanted; @p bra AGAIN;"
        " st.global.b32 [$0+4], ended; DONE: }"
    )
    place = arith.addi(ptx.pointer(arrived, 0), counter)
    ptx.asm(text, "l,r,r", place, ptx.thread_index(), ptx.i32(cfg.ranks - 1))
    ptx.asm(f"bar.sync 9, {THREADS};", "")
    parts = [share.words(received, ptx.add(row, ptx.i32(peer * cfg.rows8))) for peer in range(cfg.ranks)]
    totals = []
    for words in zip(*parts, strict=True):
        first, *more = (floats(pair) for pair in words)
        for other in more:
            first = [arith.addf(a, b) for a, b in zip(first, other, strict=True)]
        totals.append(floats(packed(first)))
    return totals


def _address(table, rank: int, which: int):
    """The address in a rank's memory: of `received` (0) or `arrived` (1)."""
    return _load_address(arith.addi(table, ptx.i64(8 * (_ADDRESSES * rank + which))))


def _load_address(place):
    i64 = ir.IntegerType.get_signless(64)
    return ptx.asm("ld.global.b64 $0, [$1];", "=l,l", place, result=i64)


def _check_places(cfg: LayerTailConfig, table, rank, received, arrived):
    """Ends the program if XLA has moved the arrays: the other ranks would write elsewhere, and all would wait."""
    own = arith.addi(table, ptx.to_i64(ptx.mul(rank, 8 * _ADDRESSES)))
    for i, place in enumerate((received, arrived)):
        told = _load_address(arith.addi(own, ptx.i64(8 * i)))
        ptx.asm("{ .reg .pred p; setp.ne.u64 p, $0, $1; @p trap; }", "l,l", place, told)
