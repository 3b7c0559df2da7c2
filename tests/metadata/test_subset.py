"""Some requests as a batch of their own: only their tokens, at the same positions, then padding."""

import dataclasses

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import jattn
from jattn.metadata.subset import subset
from tests.metadata.batches import reaching

REQS, TOKENS = 5, 22  # one shape: one compilation
ROWS = st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans())
JITTED = jax.jit(subset, static_argnums=(2, 3))


def batch(rows, causal=True):
    query = [q for q, _, _ in rows]
    seq = [q + c for q, c, _ in rows]
    table = np.arange(len(rows) * 4).reshape(-1, 4)
    return jattn.CommonAttentionMetadata.from_lengths(
        query, seq, table, 4, num_tokens=TOKENS, num_reqs=REQS + 1, causal=causal, num_encoder_tokens=REQS * 9,
        encoder_seq_lens=[c for _, c, _ in rows], cross_block_table=table,
    )  # fmt: skip


def positions(meta) -> np.ndarray:
    """Of live tokens, in numpy."""
    start, seq = np.asarray(meta.query_start_loc), np.asarray(meta.seq_lens)
    rows = [np.arange(n - (b - a), n) for a, b, n in zip(start, start[1:], seq, strict=False)]
    return np.concatenate([*rows, np.zeros(0, int)])


@given(st.lists(ROWS, min_size=REQS, max_size=REQS))
def test_kept_requests_keep_their_tokens_pages_and_positions(rows):
    meta = batch(rows, causal=[c % 2 == 0 for _, c, _ in rows])
    keep = np.array([k for *_, k in rows] + [False])
    meta = dataclasses.replace(meta, max_query_len=4)
    part, tokens, requests = JITTED(meta, keep, TOKENS, 4)
    kept = np.flatnonzero(keep)
    start = meta.query_start_loc
    mine = [t for r in kept for t in range(start[r], start[r + 1])]
    n, k = len(mine), len(kept)
    assert list(np.asarray(tokens)) == mine + [meta.num_tokens] * (meta.num_tokens - n)
    assert list(np.asarray(requests[:k])) == list(kept)
    assert (int(part.num_reqs), int(part.num_actual_tokens)) == (k, n)
    assert list(positions(part)[:n]) == list(positions(meta)[mine])
    assert list(np.asarray(part.slot_mapping)) == list(meta.slot_mapping[mine]) + [-1] * (meta.num_tokens - n)
    for name, fill in (("seq_lens", 0), ("causal_per_request", True), ("encoder_seq_lens", 0)):
        new, old = np.asarray(getattr(part, name)), np.asarray(getattr(meta, name))
        assert list(new) == list(old[kept]) + [fill] * (len(keep) - k)
    assert (np.asarray(part.block_table)[:k] == meta.block_table[kept]).all()
    assert (np.asarray(part.cross.block_table)[:k] == meta.cross.block_table[kept]).all()
    assert list(np.asarray(part.cross.seq_lens)) == [rows[r][1] for r in kept] + [0] * (len(keep) - k)
    assert (np.asarray(part.cross.slot_mapping) == -1).all()


def test_spans_and_prefixes_stay_with_their_request():
    meta = reaching(batch([(1, 5, True), (3, 2, False), (1, 0, True)]))
    part, *_ = subset(meta, np.array([True, False, True, False, False, False]), 3, 1)
    assert part.rswa_prefix_lens.tolist() == [7, 9, 0, 0, 0, 0]
    assert part.mm_prefix_ranges.tolist() == [[[0, 3]], [[2, 5]], *[[[0, 0]]] * 4]


def test_the_same_in_jit_and_in_any_number_of_tokens():
    meta = batch([(1, 5, True), (3, 2, False), (1, 0, True)])
    keep = np.array([True, False, True, False, False, False])
    eager, traced = subset(meta, keep, 3, 1), JITTED(meta, keep, 3, 1)
    assert eager[0].max_query_len == 1 and eager[0].num_tokens == 3
    assert jax.tree.structure(eager) == jax.tree.structure(traced)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(traced), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(np.asarray(eager[1])) == [0, 4, meta.num_tokens]
