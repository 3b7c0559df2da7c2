"""Sums over the ranks (devices) of a mesh inside layer_tail_sm90.py: each CTA sends its own to the CTAs of its number.

A rank stores its sums, rounded to bfloat16, into the memory of every rank, and then adds one to a counter there. Each
adds up what it received in the order of the ranks, so that all ranks have equal bits.

Once a step, `exchange` allocates the memory for this and tells every rank its addresses (peer_memory_sm90.py). A CTA
may overwrite what its other launch received: o's sums of the next layer are sent by a CTA that has had the sums of down
from this one, which read o's sums before it sent them; and so for down.
"""

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import MAX_CTAS, THREADS, LayerTailConfig
from pallas_kernels.gpu.peer_memory_sm90 import Table, told
from pallas_kernels.gpu.stage_ring_sm90 import DTYPE
from pallas_kernels.gpu.token_share_sm90 import TokenShare, floats, packed

_PRODUCTS = 2  # whose sums are sent: o and down
_COUNTER = 8  # int32 of a CTA and product: what arrived in all launches, launches that have ended


def exchange(cfg: LayerTailConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(received [2 ranks T8, W], arrived i32, table) of this rank. Call it on all ranks, in shard_map."""
    received = jax.ShapeDtypeStruct((_PRODUCTS * cfg.ranks * cfg.rows8, cfg.hidden), DTYPE)
    arrived = jax.new_ref(jnp.zeros(_PRODUCTS * MAX_CTAS * _COUNTER, jnp.int32))
    received, table = told(cfg.ranks, (arrived,), (received,))
    return received, jax.freeze(arrived), table


def sum_over_ranks(cfg: LayerTailConfig, product: int, share: TokenShare, refs, cta, fours):
    """Inside inline_mgpu: the sums of this CTA's columns over all ranks, as bfloat16 rounds them.

    refs: what `exchange` gave. fours: this rank's sums.
    """
    received, arrived, table = refs
    table = Table(table, (ptx.pointer(received, 0), ptx.pointer(arrived, 0)), cfg.ranks)
    counter = ptx.add(ptx.mul(cta, _COUNTER), ptx.i32(product // 2 * MAX_CTAS * _COUNTER))
    counter = arith.muli(ptx.to_i64(counter), ptx.i64(4))
    row = ptx.add(share.row, ptx.i32(product // 2 * cfg.ranks * cfg.rows8))
    own = ptx.add(ptx.mul(table.rank, cfg.rows8), row)
    for peer in range(cfg.ranks):
        share.store_at(table.address(peer, 0), fours, own)
    ptx.asm(f"bar.sync 8, {THREADS};", "")
    for peer in range(cfg.ranks):  # thread `peer` tells that rank
        text = (
            "{ .reg .pred p; setp.eq.u32 p, $1, $2; setp.ne.and.u32 p, $3, $2, p;"
            " @p red.release.sys.global.add.u32 [$0], 1; }"
        )
        place = arith.addi(table.address(peer, 1), counter)
        ptx.asm(text, "l,r,r,r", place, ptx.thread_index(), ptx.i32(peer), table.rank)
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
