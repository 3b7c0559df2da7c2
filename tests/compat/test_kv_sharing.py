"""Fast prefill: the batch of the tokens whose logits are needed."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import make_kv_sharing_fast_prefill_common_attn_metadata as fast_prefill
from tests.metadata.batches import TOKENS, assert_same, attend, lengths, padded, plain, pool


def test_the_worked_example():
    meta = plain([15, 5, 8], [41, 31, 40]).replace(logits_indices=np.array([14, 18, 19, 27, 19], np.int32))
    fast = fast_prefill(meta, num_logits_indices=4)
    assert fast.query_start_loc.tolist() == [0, 1, 3, 4] and fast.num_actual_tokens == 4
    assert fast.seq_lens.tolist() == [41, 31, 40] and fast.max_query_len == 8 and fast.num_tokens == 5
    assert fast.slot_mapping.tolist() == [*meta.slot_mapping[[14, 18, 19, 27]], -1]


def test_decodes_and_batches_that_want_nothing_in_particular_stay_as_they_are():
    decodes = plain([1, 1], [4, 5]).replace(logits_indices=np.array([0, 1], np.int32))
    prefill = plain([3, 1], [4, 5])
    assert fast_prefill(decodes) is decodes and fast_prefill(prefill) is prefill


@st.composite
def wanted(draw):
    """A batch, and how many last tokens of each request have logits_indices; padded to 12 indices."""
    batch = draw(lengths(max_query=6))
    counts = [draw(st.integers(0, min(q, 2))) for q in batch.query]
    ends = np.cumsum(batch.query)
    tokens = [t for e, n in zip(ends, counts, strict=True) for t in range(e - n, e)]
    return batch, np.array([*tokens, *[-1, TOKENS] * 6][:12], np.int32)


@given(wanted())
def test_attention_of_the_wanted_tokens_is_that_of_the_whole_batch_there(case):
    batch, indices = case
    meta, (q, k, v) = padded(batch).replace(logits_indices=indices, max_query_len=8), pool()
    fast = fast_prefill(meta)
    n = int(fast.num_actual_tokens)
    for ours, whole in zip(attend(fast, q[np.clip(indices, 0, TOKENS - 1)], k, v), attend(meta, q, k, v), strict=True):
        np.testing.assert_allclose(ours[:n], whole[indices[:n]], rtol=1e-12)
    assert (fast.slot_mapping[n:] == -1).all() and fast.logits_indices.tolist() == [*range(n), *[-1] * (12 - n)]


_in_jit = jax.jit(fast_prefill)


@given(wanted())
def test_inside_jit_it_is_the_hosts(case):
    meta = padded(case[0]).replace(logits_indices=case[1], max_query_len=8)
    assert_same(_in_jit(meta).replace(max_query_len=1), fast_prefill(meta).replace(max_query_len=1))


def test_a_token_that_is_not_among_the_last_is_refused():
    meta = plain([3, 2], [3, 5]).replace(logits_indices=np.array([1, 4], np.int32))
    with pytest.raises(ValueError, match=r"must be the last tokens of their requests, ascending, here \[2 4\]"):
        fast_prefill(meta)
