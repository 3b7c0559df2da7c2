"""Sums over the ranks (devices) of a mesh inside layer_tail_sm90.py: each CTA sends its own to the CTAs of its number.

A rank stores its sums, rounded to bfloat16, into the memory of every rank, and then adds one to a counter there. Each
adds up what it received in the order of the ranks, so that all ranks have equal bits. XLA gives the addresses of the
other ranks' memory, and runs a barrier of all ranks before each launch: so no rank writes where another still reads.
"""

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import layer_tail_arrivals_sm90 as arrivals
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import THREADS, LayerTailConfig
from pallas_kernels.gpu.token_share_sm90 import TokenShare, floats, packed


def clear(cfg: LayerTailConfig, cleared, cta):
    """Inside inline_mgpu, thread 0 sets the counters of this CTA to zero, for the next launch."""
    text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p st.global.b32 [$0], $2; }"
    for product in (0, 2):
        ptx.asm(text, "l,r,r", arrivals.of_ranks(cleared, product, cta), ptx.thread_index(), ptx.i32(0))


def sum_over_ranks(ctx, cfg: LayerTailConfig, product: int, share: TokenShare, sent, counters, cta, fours):
    """Inside inline_mgpu: the sums of this CTA's columns over all ranks, as bfloat16 rounds them.

    sent: GMEM [ranks * T8, W] of each rank: what the others send. fours: this rank's sums.
    """
    rank, row = ctx.device_id(), share.row
    own = ptx.add(ptx.mul(rank, cfg.rows8), row)
    for peer in range(cfg.ranks):
        share.store(ctx.to_remote(sent, ptx.i32(peer)), fours, own)
    ptx.asm(f"bar.sync 8, {THREADS};", "")
    for peer in range(cfg.ranks):  # thread `peer` tells that rank
        place = arrivals.of_ranks(ctx.to_remote(counters, ptx.i32(peer)), product, cta)
        text = (
            "{ .reg .pred p; setp.eq.u32 p, $1, $2; setp.ne.and.u32 p, $3, $2, p;"
            " @p red.release.sys.global.add.u32 [$0], 1; }"
        )
        ptx.asm(text, "l,r,r,r", place, ptx.thread_index(), ptx.i32(peer), rank)
    arrivals.one_thread_waits_for_ranks(cfg, product, counters, cta)
    ptx.asm(f"bar.sync 9, {THREADS};", "")
    received = [share.words(sent, ptx.add(row, ptx.i32(peer * cfg.rows8))) for peer in range(cfg.ranks)]
    totals = []
    for words in zip(*received, strict=True):
        first, *more = (floats(pair) for pair in words)
        for other in more:
            first = [arith.addf(a, b) for a, b in zip(first, other, strict=True)]
        totals.append(floats(packed(first)))
    return totals
