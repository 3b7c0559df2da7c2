"""Context parallelism: which rank has which keys. And batches with queries of equal length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode
from jattn.metadata import get_dcp_local_seq_lens, with_dcp
from tests.metadata.batches import plain

lens = st.lists(st.integers(0, 200), min_size=1, max_size=5)


@given(lens, st.integers(1, 8), st.integers(1, 9))
def test_ranks_hold_the_keys_that_go_round_in_runs(seq_lens, size, interleave):
    local = get_dcp_local_seq_lens(np.array(seq_lens), size, interleave=interleave)
    for r, n in enumerate(seq_lens):
        owner = np.arange(n) // interleave % size
        assert local[r].tolist() == np.bincount(owner, minlength=size).tolist()
    assert local.sum(axis=1).tolist() == seq_lens and local.dtype == np.int32
    for rank in range(size):
        assert get_dcp_local_seq_lens(np.array(seq_lens), size, rank, interleave).tolist() == local[:, rank].tolist()


@pytest.mark.parametrize("rank", [-1, 2, np.int64(3)])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(ValueError, match=r"rank=-?\d must be one of the dcp_size=2 ranks, counted from 0"):
        get_dcp_local_seq_lens([5, 6], 2, rank)


_local = jax.jit(lambda lens, rank: get_dcp_local_seq_lens(lens, 3, rank, 4))


@given(st.lists(st.integers(0, 200), min_size=4, max_size=4), st.integers(0, 2))
def test_a_traced_rank_gives_the_same_lengths(seq_lens, rank):
    host = get_dcp_local_seq_lens(np.array(seq_lens), 3, rank, 4)
    assert _local(np.array(seq_lens, np.int32), rank).tolist() == host.tolist()


def test_each_member_of_an_axis_finds_its_own_length():
    rank = lambda n: get_dcp_local_seq_lens(n, 4, jax.lax.axis_index("rank"), 2)
    per_rank = jax.vmap(rank, axis_name="rank", axis_size=4, in_axes=None, out_axes=1)(jnp.array([9, 1]))
    assert per_rank.tolist() == get_dcp_local_seq_lens(np.array([9, 1]), 4, None, 2).tolist()


def test_one_rank_holds_everything_and_the_batch_carries_its_share():
    assert get_dcp_local_seq_lens(np.array([5, 0])).tolist() == [[5], [0]]
    assert with_dcp(plain([1, 1], [5, 8]), 2, 1, 4).dcp_local_seq_lens.tolist() == [1, 4]
    with pytest.raises(ValueError, match="dcp_size=0 must be a positive integer"):
        get_dcp_local_seq_lens(np.array([1]), 0)


def test_uniform_queries_reshape_and_come_back():
    q = jnp.arange(24.0).reshape(6, 2, 2)
    by_request = reshape_query_for_spec_decode(q, 2)
    assert by_request.shape == (2, 3, 2, 2) and (by_request[1, 0] == q[3]).all()
    assert (reshape_attn_output_for_spec_decode(by_request) == q).all()
    assert reshape_attn_output_for_spec_decode(q) is q
    with pytest.raises(ValueError, match="6 tokens do not divide among batch_size=4 requests"):
        reshape_query_for_spec_decode(q, 4)
    with pytest.raises(ValueError, match=r"must be \[T H D\]"):
        reshape_query_for_spec_decode(q[0], 1)
    with pytest.raises(ValueError, match=r"or packed \[T H V\]"):
        reshape_attn_output_for_spec_decode(q[0])
