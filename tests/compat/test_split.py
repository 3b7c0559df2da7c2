"""Counting decodes, extends and prefills of an ordered batch."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import (
    apply_permutation,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from tests.metadata.batches import lengths, padded, plain


@pytest.mark.parametrize(
    "query, threshold, uniform, counts",
    [
        ([1, 1, 1], 1, False, (3, 0, 3, 0)),
        ([1, 2, 1, 3, 2, 1, 2], 3, False, (7, 0, 12, 0)),
        ([4, 5, 6, 7], 3, False, (0, 4, 0, 22)),
        ([2, 1, 3, 4, 5, 6, 7, 8], 4, False, (4, 4, 10, 26)),
        ([1, 1, 1], 1, True, (3, 0, 3, 0)),
        ([2, 2, 1, 3, 2, 1, 2], 3, True, (2, 5, 4, 9)),
        ([4, 5, 6, 7], 3, True, (0, 4, 0, 22)),
        ([2, 2, 2, 4, 5, 6, 7, 8], 4, True, (3, 5, 6, 30)),
        ([2, 1, 2, 4, 5, 6, 7, 8], 4, True, (1, 7, 2, 33)),
        ([2, 2, 2, 0], 3, True, (4, 0, 6, 0)),
        ([2, 0, 2, 5], 3, True, (3, 1, 4, 5)),
        ([5, 1], 1, True, (0, 2, 0, 6)),
    ],
)
def test_decodes_are_the_leading_short_or_uniform_requests(query, threshold, uniform, counts):
    meta = plain(query, [10 * (i + 1) for i in range(len(query))])
    assert split_decodes_and_prefills(meta, threshold, require_uniform=uniform) == counts


def test_padding_does_not_count():
    meta = plain([1, 1, 3], [5, 6, 7]).padded(9, 8)
    assert split_decodes_and_prefills(meta) == (2, 1, 2, 3)
    assert split_decodes_prefills_and_extends(meta) == (2, 1, 0, 2, 3, 0)


def test_a_short_piece_of_a_prompt_is_a_prefill_when_asked():
    meta = plain([1, 1, 9], [5, 6, 9])
    split = lambda **kw: split_decodes_and_prefills(meta, treat_short_extends_as_decodes=False, **kw)
    assert split_decodes_and_prefills(meta) == (2, 1, 2, 9)
    assert split(is_prefilling=[False, True, True]) == (1, 2, 1, 10)
    with pytest.raises(ValueError, match=r"needs is_prefilling, bool\[R\]"):
        split()
    with pytest.raises(ValueError, match=r"is_prefilling.shape=\(2,\) must be \[R\]"):
        split(is_prefilling=[False, True])


def test_a_decode_behind_a_prefill_is_an_error_not_a_miscount():
    with pytest.raises(ValueError, match="request 2 with query_len=1 is a decode .* after the prefill of request 1"):
        split_decodes_and_prefills(plain([1, 7, 1], [4, 9, 4]))
    with pytest.raises(ValueError, match="order the batch with reorder_batch_to_split_decodes_and_prefills"):
        split_decodes_prefills_and_extends(plain([7, 1], [9, 4]))
    with pytest.raises(ValueError, match="request 1 has computed tokens but comes after the prefill of request 0"):
        split_decodes_prefills_and_extends(plain([7, 7], [7, 9]))


def test_a_new_prompt_of_one_token_may_stand_among_the_prefills():
    assert split_decodes_and_prefills(plain([1, 7, 1], [4, 7, 1])) == (1, 2, 1, 8)


def test_the_six_counts_of_a_mixed_batch():
    meta = plain([1, 2, 4, 5, 6], [10, 11, 20, 5, 6])
    assert split_decodes_prefills_and_extends(meta, 3) == (2, 1, 2, 3, 4, 11)
    assert split_decodes_prefills_and_extends(plain([3, 2], [9, 9]), 3) == (2, 0, 0, 5, 0, 0)
    assert split_decodes_prefills_and_extends(plain([9, 9], [9, 9]), 3) == (0, 0, 2, 0, 0, 18)


@given(lengths(), st.integers(1, 4))
def test_every_reordered_batch_splits_and_the_counts_add_up(batch, threshold):
    meta = padded(batch)
    meta = apply_permutation(meta, reorder_batch_to_split_decodes_and_prefills(meta, threshold)[0])
    decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(meta, threshold)
    query, seq = np.diff(meta.query_start_loc), meta.seq_lens
    assert decodes + prefills == meta.num_reqs and decode_tokens + prefill_tokens == meta.num_actual_tokens
    assert (query[:decodes] <= threshold).all() and decode_tokens == query[:decodes].sum()
    behind = slice(decodes, decodes + prefills)
    assert ((query[behind] > threshold) | (seq[behind] == query[behind])).all()
    six = split_decodes_prefills_and_extends(meta, threshold)
    assert six[0] == decodes and sum(six[:3]) == meta.num_reqs and sum(six[3:]) == meta.num_actual_tokens


@given(st.lists(st.integers(0, 10), max_size=12), st.integers(10, 30), st.integers(0, 5))
def test_prefill_chunks_are_consecutive_fit_and_could_not_be_longer(lens, workspace, offset):
    chunks = split_prefill_chunks(lens, workspace, offset)
    bounds = [offset, *(stop for _, stop in chunks)]
    assert [start for start, _ in chunks] == bounds[:-1] and bounds[-1] == offset + len(lens)
    for start, stop in chunks:
        mine, following = lens[start - offset : stop - offset], lens[stop - offset : stop - offset + 1]
        assert mine and sum(mine) <= workspace < sum(mine) + sum(following) + (not following) * (workspace + 1)


def test_a_request_longer_than_the_workspace_is_refused():
    with pytest.raises(ValueError, match=r"seq_lens\[1\]=11 is above workspace_size=10"):
        split_prefill_chunks([3, 11], 10)


def test_splitting_inside_jit_points_to_the_host():
    with pytest.raises(ValueError, match="this array is traced; split on the host, before jit"):
        jax.jit(lambda meta: split_decodes_and_prefills(meta)[0])(plain([1], [4]))
