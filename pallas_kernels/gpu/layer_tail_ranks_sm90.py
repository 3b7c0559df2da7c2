"""Sums over the ranks (devices) of a mesh inside layer_tail_sm90.py, by each thread with those of the other ranks.

A thread's sums are rounded to bfloat16, and so are the totals (peer_sums_sm90.py): all ranks have equal bits.

Once a step, `exchange` allocates the memory for this and tells every rank its addresses (peer_memory_sm90.py). A thread
may overwrite what another rank received in the launch before: it sends o's sums of the next layer after it has had
down's total of this one, for which every rank had sent after it had read o's sums; and so for down.
"""

import jax

from pallas_kernels.gpu import peer_memory_sm90 as peer_memory
from pallas_kernels.gpu import peer_sums_sm90 as peer_sums
from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import MAX_CTAS, THREADS, LayerTailConfig
from pallas_kernels.gpu.peer_memory_sm90 import Table
from pallas_kernels.gpu.token_share_sm90 import TokenShare

_PRODUCTS = 2  # whose sums are sent: o and down
_COLUMN_BYTES = 4  # of a column that is sent: a bfloat16, and half of the number beside each word of two
_WORDS = peer_words.words_of("bfloat16")


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
    counter = ptx.add(ptx.mul(ptx.add(cta, ptx.i32(product // 2 * MAX_CTAS)), THREADS), ptx.thread_index())
    turn = peer_words.next_number(peer_words.place_of(so_far, counter, 4), ptx.i32(1))

    def piece(quad, inside, four):
        def places(base, rank):
            row = ptx.add(ptx.mul(ptx.add(rank, ptx.i32(product // 2 * cfg.ranks)), cfg.rows8), share.row)
            return [share.place(base, quad, _COLUMN_BYTES, row)]

        owner = peer_sums.owner(ptx.add(quad, ptx.mul(share.row, peer_sums.WARP)), cfg.ranks)
        return peer_sums.Piece([_WORDS.rounded(four)], turn, inside, owner, places)

    pieces = [piece(*quad, four) for quad, four in zip(share.quads, fours, strict=True)]
    hops = peer_sums.hops(cfg.ranks, cfg.rows * cfg.hidden * _COLUMN_BYTES)
    found = peer_sums.sums(pieces, _WORDS, hops, Table(table, (received, so_far), cfg.ranks), received)
    return [_WORDS.floats(words) for words in found]
