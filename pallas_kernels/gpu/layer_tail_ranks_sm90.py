"""Sums over the ranks (devices) of a mesh inside layer_tail_sm90.py: each thread sends its own to that of each rank.

A thread rounds its sums to bfloat16, stores them in the memory of every other rank (peer_words_sm90.py), waits for
theirs, and adds all up in the order of the ranks, so that all ranks have equal bits.

Once a step, `exchange` allocates the memory for this and tells every rank its addresses (peer_memory_sm90.py). A thread
may overwrite what its other launch received: o's sums of the next layer are sent by a thread that has had the sums of
down from this one, whose sender had read o's sums before; and so for down.
"""

import jax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import peer_memory_sm90 as peer_memory
from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import MAX_CTAS, THREADS, LayerTailConfig
from pallas_kernels.gpu.peer_memory_sm90 import Table
from pallas_kernels.gpu.token_share_sm90 import TokenShare, floats, packed

_PRODUCTS = 2  # whose sums are sent: o and down
_COLUMN_BYTES = 4  # of a column that is sent: a bfloat16, and half of the number beside each word of two


def exchange(cfg: LayerTailConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `exchange` of peer_memory_sm90.py. A counter has the sums so far of a product and a thread of a CTA."""
    sent = _PRODUCTS * cfg.ranks * cfg.rows8 * cfg.hidden * _COLUMN_BYTES // 4
    return peer_memory.exchange(cfg.ranks, sent, _PRODUCTS * MAX_CTAS * THREADS)


def sum_over_ranks(cfg: LayerTailConfig, product: int, share: TokenShare, refs, cta, fours):
    """Inside inline_mgpu: the sums of this thread's columns over all ranks, as bfloat16 rounds them.

    refs: what `exchange` gave. fours: this rank's sums.
    """
    received, so_far, table = refs
    received, so_far = ptx.pointer(received, 0), ptx.pointer(so_far, 0)
    table = Table(table, (received, so_far), cfg.ranks)
    counter = ptx.add(ptx.mul(ptx.add(cta, ptx.i32(product // 2 * MAX_CTAS)), THREADS), ptx.thread_index())
    counter = peer_words.place_of(so_far, counter, 4)
    number = peer_words.next_number(counter, ptx.i32(1))
    own, inside = [packed(four) for four in fours], [ok for _, ok in share.quads]

    def places(base, rank):  # where this thread's fours of a rank lie
        row = ptx.add(ptx.mul(ptx.add(rank, ptx.i32(product // 2 * cfg.ranks)), cfg.rows8), share.row)
        return [share.place(base, quad, _COLUMN_BYTES, row) for quad, _ in share.quads]

    others = [peer_words.differs(table.rank, rank) for rank in range(cfg.ranks)]
    waits = [[arith.muli(ok, other) for ok in inside] for other in others]
    for rank in range(cfg.ranks):
        for place, words, sends in zip(places(table.address(rank, 0), table.rank), own, waits[rank], strict=True):
            peer_words.send(place, words, number, sends)
    totals: list = []
    for rank in range(cfg.ranks):
        found = peer_words.receive(places(received, ptx.i32(rank)), (number,) * len(own), waits[rank], own)
        fours = [floats(words) for words in found]
        totals = [_added(*pair) for pair in zip(totals, fours, strict=True)] if totals else fours
    return [floats(packed(total)) for total in totals]


def _added(a, b):
    return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]
