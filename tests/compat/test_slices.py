"""Parts of a batch: their attention is that of the whole batch."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import (
    UbatchSlice,
    apply_permutation,
    decode_metadata,
    prefill_metadata,
    reorder_batch_to_split_decodes_and_prefills,
    slice_query_start_locs,
    slice_requests,
    split_attn_metadata,
    split_decodes_and_prefills,
    ubatch_slices,
)
from jattn.metadata import CommonAttentionMetadata
from tests.metadata.batches import assert_same, attend, lengths, padded, plain, pool


@given(lengths(), st.data())
def test_a_slice_is_the_batch_of_those_requests(batch, data):
    live = len(batch.query)
    start = data.draw(st.integers(0, live - 1))
    stop = data.draw(st.integers(start + 1, live))
    meta = padded(batch)
    direct = CommonAttentionMetadata.from_lengths(
        batch.query[start:stop], batch.seq[start:stop], meta.block_table[start:stop], 4
    )
    assert_same(slice_requests(meta, start, stop), direct)


@pytest.mark.parametrize(
    "requests, starts",
    [(slice(1, 3), [0, 7, 15]), (slice(0, 2), [0, 5, 12]), (slice(3, 5), [0, 15, 30]), (slice(4, 5), [0, 15])],
)
def test_starts_are_rebased(requests, starts):
    assert slice_query_start_locs(np.array([0, 5, 12, 20, 35, 50]), requests).tolist() == starts


def test_a_slice_of_requests_and_tokens_by_hand():
    meta = plain([1, 1, 5], [32, 40, 48])
    (part,) = split_attn_metadata([UbatchSlice(slice(1, 3), slice(1, 7))], meta)
    assert (part.num_reqs, part.num_actual_tokens, part.max_query_len) == (2, 6, 8)
    assert part.query_start_loc.tolist() == [0, 1, 6] and part.seq_lens.tolist() == [40, 48]


def test_tokens_of_other_requests_are_padding_after_a_slice_and_refused_before_it():
    meta = plain([2, 3, 1], [5, 11, 10])
    part = slice_requests(meta, 0, 1, 0, 6)
    assert part.slot_mapping.tolist() == [*meta.slot_mapping[:2].tolist(), -1, -1, -1, -1]
    assert part.num_actual_tokens == 2 and part.query_start_loc.tolist() == [0, 2]
    with pytest.raises(ValueError, match="token_start=0 is before the first token of request 1, 2"):
        slice_requests(meta, 1, 3, 0, 6)


@given(lengths())
def test_decodes_and_prefills_attend_as_the_whole_batch(batch):
    meta, (q, k, v) = padded(batch), pool()
    meta = apply_permutation(meta, reorder_batch_to_split_decodes_and_prefills(meta, 2)[0])
    split = split_decodes_and_prefills(meta, 2)
    parts = [x for x in (decode_metadata(meta, split), prefill_metadata(meta, split)) if x is not None]
    outs, first = [], 0
    for part in parts:
        outs.append(attend(part, q[first : first + part.num_tokens], k, v)[0])
        first += part.num_tokens
    whole = attend(meta, q, k, v)[0]
    total = split[2] + split[3]
    np.testing.assert_array_equal(np.concatenate([*outs, whole[:0]])[:total], whole[:total])


def test_a_half_that_is_not_there_is_none():
    decodes, prefills = plain([1, 1], [4, 4]), plain([3], [3])
    assert prefill_metadata(decodes, split_decodes_and_prefills(decodes)) is None
    assert decode_metadata(prefills, split_decodes_and_prefills(prefills)) is None


def test_the_decode_half_has_the_tight_static_bound_and_the_prefill_half_keeps_the_padding():
    meta = plain([1, 1, 30], [4, 4, 30]).padded(40, 5)
    split = split_decodes_and_prefills(meta)
    decodes, prefills = decode_metadata(meta, split), prefill_metadata(meta, split)
    assert decodes.max_query_len == 1 and decodes.num_tokens == 2
    assert prefills.num_tokens == 38 and prefills.max_num_reqs == 3 and prefills.num_actual_tokens == 30


@given(lengths(min_query=1), st.data())
def test_micro_batches_cut_anywhere_attend_as_the_whole(batch, data):
    total = sum(batch.query)
    points = sorted(data.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=3))) if total > 1 else []
    meta, (q, k, v) = padded(batch), pool()
    slices = ubatch_slices(meta, split_points=points)
    parts = split_attn_metadata(slices, meta)
    outs = [attend(part, q[s.token_slice], k, v) for part, s in zip(parts, slices, strict=True)]
    for whole, *cut in zip(attend(meta, q, k, v), *outs, strict=True):
        np.testing.assert_allclose(np.concatenate(cut), whole[:total], rtol=1e-12)
    assert sum(int(p.num_actual_tokens) for p in parts) == total


@pytest.mark.parametrize("point, first, second", [(12, 2, 1), (4, 1, 2)])
def test_a_prefill_is_cut_between_two_micro_batches(point, first, second):
    meta = plain([8, 8], [32, 40])
    a, b = split_attn_metadata(ubatch_slices(meta, split_points=[point]), meta)
    assert (a.num_reqs, b.num_reqs, a.num_tokens, b.num_tokens) == (first, second, point, 16 - point)
    cut = point // 8  # the request that is cut, its new tokens left and right
    assert a.seq_lens[-1] == [32, 40][cut] - (8 - point % 8) and b.seq_lens[0] == [32, 40][cut]


def test_micro_batches_are_of_about_equal_size():
    sizes = [s.token_slice.stop - s.token_slice.start for s in ubatch_slices(plain([1] * 7, [9] * 7), 3)]
    assert sizes == [3, 2, 2]


def test_inside_jit_the_token_bounds_are_given():
    meta = plain([1, 3, 2], [4, 5, 6])
    assert_same(
        jax.jit(lambda m: slice_requests(m, 1, 3, 1, 6))(meta).replace(max_query_len=1),
        slice_requests(meta, 1, 3).replace(max_query_len=1),
    )
    with pytest.raises(ValueError, match="this array is traced; give token_start and token_stop"):
        jax.jit(lambda m: slice_requests(m, 1, 3))(meta)


def test_wanted_logits_are_counted_from_the_slice_and_encoder_tokens_follow():
    meta = CommonAttentionMetadata.from_lengths(
        [3, 1], [3, 5], [[0, 1], [2, 3]], 4, encoder_seq_lens=[1, 2], cross_block_table=[[4], [5]]
    ).replace(logits_indices=np.array([2, 3], np.int32))
    part = slice_requests(meta, 1, 2)
    assert part.logits_indices.tolist() == [-1, 0] and part.cross.slot_mapping.tolist() == [20, 21]
    assert part.cross.query_start_loc.tolist() == [0, 2]


@pytest.mark.parametrize(
    "bounds, message",
    [
        ((2, 1), "start=2, stop=1 must be within the batch's 2 requests"),
        ((0, 3), "must be within the batch's 2 requests"),
        ((0, 2, 3, 99), "token_stop=99 must be within the 4 packed tokens"),
    ],
)
def test_bounds_outside_the_batch_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        slice_requests(plain([3, 1], [3, 5]), *bounds)


def test_split_points_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match="must ascend strictly between 0 and the 4 live tokens"):
        ubatch_slices(plain([3, 1], [3, 5]), split_points=[4])


def test_a_request_that_ends_before_the_tokens_has_none_of_them_and_keeps_its_length():
    part = slice_requests(plain([2, 4, 3], [5, 8, 3]), 0, 3, 3, 5)
    assert part.query_start_loc.tolist() == [0, 0, 2, 2] and part.seq_lens.tolist() == [5, 7, 3]


@pytest.mark.parametrize("causal", [False, [True, False]])
def test_a_request_that_sees_both_ways_is_never_cut(causal):
    meta = plain([2, 4], [2, 8], causal=causal)
    assert slice_requests(meta, 1, 2).seq_lens.tolist() == [8]
    with pytest.raises(ValueError, match="request 1 is not causal and cannot be cut at token 4"):
        slice_requests(meta, 1, 2, 2, 4)


def test_a_span_is_never_cut_and_one_that_is_left_whole_stays():
    meta = plain([2, 6], [2, 9], mm_prefix_ranges=[[], [(1, 3), (5, 7)]], rswa_prefix_lens=[1, 4])
    for stop, length in ((3, 4), (4, 5), (7, 8)):
        part = slice_requests(meta, 1, 2, 2, stop)
        assert part.seq_lens.tolist() == [length] and part.rswa_prefix_lens.tolist() == [4]
        assert part.mm_prefix_ranges.tolist() == [[[1, 3], [5, 7]]]
    for stop in (5, 6):
        with pytest.raises(ValueError, match=f"request 1 is cut at token {stop}, inside a span of mm_prefix_ranges"):
            slice_requests(meta, 1, 2, 2, stop)


def test_cutting_a_request_does_not_leave_stale_rank_lengths_behind():
    meta = plain([4], [8]).replace(dcp_local_seq_lens=np.array([4], np.int32))
    with pytest.raises(ValueError, match="cut first, then call get_dcp_local_seq_lens"):
        slice_requests(meta, 0, 1, 0, 2)
