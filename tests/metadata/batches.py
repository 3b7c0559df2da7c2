"""Ragged batches for the metadata laws, and numpy attention through a batch's block table to compare with."""

import dataclasses

import jax
import numpy as np
from hypothesis import strategies as st

from jattn.metadata import CommonAttentionMetadata
from tests.oracle import attention

BLOCK, REQS, TOKENS, WIDTH = 4, 6, 48, 16
"""Fixed static sizes: jit traces once for all examples."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """New and computed tokens of each request."""

    query: list[int]
    computed: list[int]

    @property
    def seq(self) -> list[int]:
        return [q + c for q, c in zip(self.query, self.computed, strict=True)]


@st.composite
def lengths(draw, min_reqs=1, min_query=0, max_query=8, max_computed=50):
    """At most REQS requests that fit TOKENS tokens and WIDTH blocks."""
    n = draw(st.integers(min_reqs, REQS))
    some = lambda low, high: draw(st.lists(st.integers(low, high), min_size=n, max_size=n))
    query = some(min_query, max_query)
    room = [TOKENS - min(sum(query[:i]), TOKENS) for i in range(n)]
    return Lengths([min(q, left) for q, left in zip(query, room, strict=True)], some(0, max_computed))


def padded(batch: Lengths, *, causal=True, block_size=BLOCK, width=WIDTH, seed=0) -> CommonAttentionMetadata:
    """The batch in the fixed static sizes, its pages scattered over a pool of REQS * width blocks."""
    pages = np.random.default_rng(seed).permutation(REQS * width).reshape(REQS, width)
    return CommonAttentionMetadata.from_lengths(
        batch.query,
        batch.seq,
        pages[: len(batch.query)],
        block_size,
        num_tokens=TOKENS,
        num_reqs=REQS,
        causal=causal,
    )


def reaching(meta: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with different spans and prefixes for each request."""
    own = np.arange(meta.max_num_reqs, dtype=np.int32)
    ranges = np.stack([own, own + 3], axis=-1)[:, None]
    return meta.replace(mm_prefix_ranges=ranges, rswa_prefix_lens=own + 7)


def plain(query, seq, block_size=BLOCK, **options) -> CommonAttentionMetadata:
    """A batch as given, unpadded; request r owns blocks r*width, r*width + 1, ..."""
    width = -(-max(seq) // block_size)
    table = np.arange(len(query) * width).reshape(len(query), width)
    return CommonAttentionMetadata.from_lengths(query, seq, table, block_size, **options)


def pool(seed=0, block_size=BLOCK, blocks=REQS * WIDTH, heads=2, dim=4):
    """(q [T H D], k [N S K D], v [N S K D]), N(0, 1)."""
    make = np.random.default_rng(seed).standard_normal
    return make((TOKENS, heads, dim)), make((blocks, block_size, 1, dim)), make((blocks, block_size, 1, dim))


def attend(meta: CommonAttentionMetadata, q, k, v, **options):
    """(out, lse) of packed q by the oracle, keys gathered through the batch's own table; scale 1."""
    start, seq, table = (np.asarray(x) for x in (meta.query_start_loc, meta.seq_lens, meta.block_table))
    rows = lambda pages, r: pages[table[r]].reshape(-1, *pages.shape[2:])[: seq[r]]
    causal = np.broadcast_to(np.asarray(meta.causal), seq.shape)
    out = np.zeros((q.shape[0], q.shape[1], v.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    for r in np.flatnonzero(np.diff(start)):
        mine = slice(start[r], start[r + 1])
        out[mine], lse[mine] = attention.ragged(
            q[mine], [rows(k, r)], [rows(v, r)], [start[r + 1] - start[r]], scale=1.0, causal=causal[r], **options
        )
    return out, lse


def assert_same(a, b) -> None:
    """Two pytrees hold the same int32 (or bool) numbers in the same structure, on the host or on a device."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), (_, y) in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b), strict=True
    ):
        assert np.asarray(x).dtype == np.asarray(y).dtype, path
        np.testing.assert_array_equal(x, y, err_msg=str(path))
