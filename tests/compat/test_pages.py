"""Block tables in other forms, and their conversion back."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import (
    block_table_from_csr,
    csr_from_block_table,
    get_batch_indices_positions,
    get_seq_lens,
    split_block_table,
)
from tests.metadata.batches import BLOCK, REQS, TOKENS, WIDTH, attend, lengths, padded, pool


@given(lengths(), st.sampled_from([2, 4]))
def test_smaller_blocks_over_the_same_pool_hold_the_same_keys(batch, ratio):
    meta, (q, k, v) = padded(batch), pool()
    small = meta.replace(block_table=split_block_table(meta.block_table, ratio))
    cut = lambda x: x.reshape(-1, BLOCK // ratio, *x.shape[2:])
    for ours, wanted in zip(attend(small, q, cut(k), cut(v)), attend(meta, q, k, v), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_split_tables_by_hand():
    assert split_block_table(np.array([[3, 0], [1, -1]]), 2).tolist() == [[6, 7, 0, 1], [2, 3, -2, -1]]
    with pytest.raises(ValueError, match="ratio=0 must be a positive integer"):
        split_block_table(np.array([[0]]), 0)


def _round_trip(table, seq_lens):
    indptr, indices, last = csr_from_block_table(table, seq_lens, BLOCK)
    return indptr, indices, last, block_table_from_csr(indptr, indices, WIDTH), get_seq_lens(indptr, last, BLOCK)


_round_trip_in_jit = jax.jit(_round_trip)


@given(lengths())
def test_csr_and_back_is_the_table_and_the_lengths(batch):
    meta = padded(batch)
    indptr, indices, last, table, lens = _round_trip(meta.block_table, meta.seq_lens)
    pages = -(-meta.seq_lens // BLOCK)
    used = np.arange(WIDTH) < pages[:, None]
    assert np.diff(indptr).tolist() == pages.tolist()
    assert indices[: indptr[-1]].tolist() == meta.block_table[used].tolist() and not indices[indptr[-1] :].any()
    assert last.tolist() == [(n - 1) % BLOCK + 1 if n else 0 for n in meta.seq_lens]
    np.testing.assert_array_equal(table, np.where(used, meta.block_table, 0))
    np.testing.assert_array_equal(lens, meta.seq_lens)
    for a, b in zip(
        _round_trip(meta.block_table, meta.seq_lens),
        _round_trip_in_jit(meta.block_table, meta.seq_lens),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype == np.int32


def test_a_batch_without_pages_has_an_empty_table():
    assert block_table_from_csr(np.zeros(3, np.int32), np.zeros(0, np.int32), 2).tolist() == [[0, 0], [0, 0]]


@given(lengths())
def test_appended_tokens_stand_where_the_batch_says(batch):
    meta = padded(batch)
    req, position = get_batch_indices_positions(meta.query_start_loc, meta.seq_lens, TOKENS)
    live = np.asarray(meta.token_is_live())
    np.testing.assert_array_equal(req, np.where(live, meta.token_to_req(), -1))
    np.testing.assert_array_equal(position, np.where(live, meta.positions(), -1))
    assert REQS > req.max()
