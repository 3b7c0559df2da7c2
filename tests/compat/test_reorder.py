"""Decodes first: a minimal, stable permutation that does not change the results of attention."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import (
    apply_permutation,
    batch_regions,
    decode_threshold,
    inverse_permutation,
    region_permutation,
    reorder_batch_to_split_decodes_and_prefills,
    token_permutation,
)
from jattn.metadata import CommonAttentionMetadata
from tests.metadata.batches import (
    REQS,
    TOKENS,
    Lengths,
    assert_same,
    attend,
    lengths,
    padded,
    plain,
    pool,
    reaching,
)

CASES = {  # (new, computed) of each request, threshold, expected order
    "all decodes": ([(1, 10), (1, 20), (1, 30)], 1, [0, 1, 2]),
    "all extends": ([(100, 100), (200, 200), (300, 300)], 1, [0, 1, 2]),
    "mixed, interleaved": ([(100, 100), (1, 10), (200, 200), (1, 20)], 1, [3, 1, 2, 0]),
    "ordered already": ([(1, 10), (1, 20), (100, 100), (200, 0)], 1, [0, 1, 2, 3]),
    "one request": ([(1, 10)], 1, [0]),
    "higher threshold": ([(2, 10), (3, 20), (5, 30), (6, 40)], 4, [0, 1, 2, 3]),
    "decodes at the end": ([(100, 100), (200, 200), (1, 10), (1, 20)], 1, [2, 3, 0, 1]),
    "prefill, extend, decode": ([(100, 0), (10, 50), (1, 10)], 1, [2, 1, 0]),
    "extends and prefills": ([(100, 0), (10, 50), (200, 0), (20, 75)], 1, [3, 1, 2, 0]),
    "complicated": (
        [(1, 20), (1, 50), (374, 0), (300, 20), (1, 20), (256, 0), (1, 5), (27, 0), (1, 4)],
        1,
        [0, 1, 6, 8, 4, 3, 2, 7, 5],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_order_is_the_worked_example(case):
    requests, threshold, order = CASES[case]
    query, computed = np.array(requests, np.int32).T
    meta = plain(query, query + computed)
    perm, modified = reorder_batch_to_split_decodes_and_prefills(meta, threshold)
    assert perm.tolist() == order and modified is (order != sorted(order)) and perm.dtype == np.int32


def test_four_regions_and_padding_stand_in_this_order():
    query, computed = np.array([0, 9, 9, 2, 2, 1]), np.array([0, 0, 5, 5, 5, 0])
    prefilling = np.array([False, True, True, True, False, True])
    assert batch_regions(query, computed, 2, prefilling).tolist() == [4, 3, 2, 1, 0, 3]
    assert batch_regions(query, computed, 2).tolist() == [4, 3, 2, 0, 0, 3]


regions = st.lists(st.integers(0, 4), min_size=1, max_size=7).map(np.array)


@given(regions)
def test_the_permutation_sorts_the_regions(region):
    perm = region_permutation(region)
    assert sorted(perm) == list(range(len(region))) and (np.diff(region[perm]) >= 0).all()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).map(np.array))
def test_no_sorting_permutation_moves_fewer_requests(region):
    moves = lambda perm: sum(i != p for i, p in enumerate(perm))
    sorting = (p for p in itertools.permutations(range(len(region))) if (np.diff(region[list(p)]) >= 0).all())
    assert moves(region_permutation(region)) == min(map(moves, sorting))


@given(regions)
def test_requests_that_move_within_a_region_keep_their_order(region):
    perm = region_permutation(region)
    moved = perm[perm != np.arange(len(perm))]
    for r in range(5):
        mine = moved[region[moved] == r]
        assert (np.diff(mine) > 0).all()


@given(regions)
def test_the_inverse_undoes_the_permutation(region):
    perm = region_permutation(region)
    assert (
        perm[inverse_permutation(perm)].tolist() == inverse_permutation(perm)[perm].tolist() == list(range(len(perm)))
    )


@given(lengths(), st.randoms(use_true_random=False))
def test_a_permuted_batch_is_the_batch_of_the_permuted_lengths(batch, random):
    meta = padded(batch, causal=np.arange(len(batch.query)) % 2 == 0)
    order = random.sample(range(len(batch.query)), len(batch.query))
    perm = np.array([*order, *range(len(order), REQS)], np.int32)
    pick = lambda x: [x[i] for i in order]
    direct = CommonAttentionMetadata.from_lengths(
        pick(batch.query),
        pick(batch.seq),
        meta.block_table[order],
        4,
        num_tokens=TOKENS,
        num_reqs=REQS,
        causal=meta.causal_per_request[order],
    )
    moved = apply_permutation(meta, perm)
    reset = dict(causal_per_request=None, block_table=None)  # rows of padding may have any values
    assert_same(moved.replace(**reset), direct.replace(**reset))
    live = len(order)
    np.testing.assert_array_equal(moved.block_table[:live], direct.block_table[:live])
    np.testing.assert_array_equal(moved.causal_per_request[:live], direct.causal_per_request[:live])


def test_spans_and_prefixes_move_with_their_request():
    meta = reaching(padded(Lengths([3, 1, 2], [4, 5, 6])))
    moved = apply_permutation(meta, np.array([2, 0, 1, 3, 4, 5], np.int32))
    assert moved.rswa_prefix_lens.tolist() == [9, 7, 8, 10, 11, 12]
    assert moved.mm_prefix_ranges[:, 0, 0].tolist() == [2, 0, 1, 3, 4, 5]


@given(lengths())
def test_attention_of_the_reordered_batch_is_the_reordered_attention(batch):
    meta, (q, k, v) = padded(batch), pool()
    perm, _ = reorder_batch_to_split_decodes_and_prefills(meta)
    tokens = token_permutation(meta, perm)
    for before, after in zip(
        attend(meta, q, k, v), attend(apply_permutation(meta, perm), q[tokens], k, v), strict=True
    ):
        np.testing.assert_array_equal(before[tokens], after)
        np.testing.assert_array_equal(before, after[inverse_permutation(tokens)])


def _reordered(meta):
    perm, modified = reorder_batch_to_split_decodes_and_prefills(meta, 2)
    return perm, modified, token_permutation(meta, perm), apply_permutation(meta, perm)


_reordered_in_jit = jax.jit(_reordered)


@given(lengths())
def test_reordering_inside_jit_is_reordering_on_the_host(batch):
    meta = padded(batch).replace(max_query_len=8)
    *host, moved = _reordered(meta)
    *traced, moved_in_jit = _reordered_in_jit(meta)
    for a, b in zip(host, traced, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same(moved_in_jit, moved)


def test_wanted_logits_and_encoder_tokens_travel_with_their_requests():
    meta = CommonAttentionMetadata.from_lengths(
        [3, 1],
        [3, 5],
        [[0, 1], [2, 3]],
        4,
        num_tokens=6,
        encoder_seq_lens=[1, 2],
        cross_block_table=[[4], [5]],
    ).replace(logits_indices=np.array([2, 3, -1, 99], np.int32))
    moved = apply_permutation(meta, np.array([1, 0]))
    assert moved.logits_indices.tolist() == [3, 0, -1, -1]
    assert moved.encoder_seq_lens.tolist() == [2, 1] and moved.cross.slot_mapping.tolist() == [20, 21, 16]
    assert token_permutation(meta, np.array([1, 0])).tolist() == [3, 0, 1, 2, 4, 5]


def test_the_threshold_counts_drafts_as_decodes_and_context_parallelism_clamps_last():
    spec, varlen = dict(supports_spec_as_decode=True), dict(supports_dcp_with_varlen=True)
    assert decode_threshold() == 1 and decode_threshold(None) is None
    assert decode_threshold(num_speculative_tokens=3) == 1
    assert decode_threshold(num_speculative_tokens=3, **spec) == 4
    assert decode_threshold(8, num_speculative_tokens=3, **spec) == 8
    assert decode_threshold(num_speculative_tokens=3, dcp_size=2, **spec) == 1
    assert decode_threshold(num_speculative_tokens=3, dcp_size=2, **spec, **varlen) == 4
