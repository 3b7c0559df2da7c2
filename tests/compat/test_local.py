"""Chunked-local attention as a batch of chunks."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import make_local_attention_virtual_batches, max_local_attention_virtual_batches
from jattn.metadata import CommonAttentionMetadata, check_host
from tests.metadata.batches import BLOCK, REQS, TOKENS, assert_same, attend, lengths, padded, plain, pool

CASES = {  # (new, total, chunk, block), virtual (new, total), their tables; request r owns blocks r*width ..
    "worked example": (
        ([4, 10, 5], [6, 17, 9], 4, 2),
        ([2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1]),
        [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]],
    ),
    "whole chunks": (([8], [12], 4, 2), ([4, 4], [4, 4]), [[2, 3], [4, 5]]),
    "from the middle of a chunk": (([7], [10], 4, 2), ([1, 4, 2], [4, 4, 2]), [[0, 1], [2, 3], [4, 4]]),
    "one chunk holds everything": (([4], [6], 10, 2), ([4], [6]), [[0, 1, 2, 2, 2]]),
    "a chunk is a block": (([6, 6], [8, 8], 4, 4), ([2, 4, 2, 4], [4, 4, 4, 4]), [[0], [1], [2], [3]]),
    "a decode opens a chunk": (([1], [5], 4, 2), ([1], [1]), [[2, 2]]),
}


@pytest.mark.parametrize("case", CASES)
def test_virtual_batches_are_the_worked_example(case):
    (query, seq, chunk, block), (q_wanted, k_wanted), tables = CASES[case]
    meta = plain(query, seq, block)
    arrays = (np.asarray(x) for x in (meta.query_start_loc, meta.seq_lens, meta.block_table))
    q_local, starts, k_local, table = make_local_attention_virtual_batches(chunk, *arrays, block)
    assert q_local.tolist() == q_wanted and k_local.tolist() == k_wanted and table.tolist() == tables
    assert starts.tolist() == [0, *np.cumsum(q_wanted)]
    local, remap = make_local_attention_virtual_batches(chunk, meta, block_size=block)
    n = int(local.num_reqs)
    assert n == len(q_wanted) and local.block_table[:n].tolist() == tables
    assert np.diff(local.query_start_loc)[:n].tolist() == q_wanted and local.seq_lens[:n].tolist() == k_wanted
    assert not np.diff(local.query_start_loc)[n:].any() and not local.seq_lens[n:].any()
    np.testing.assert_array_equal(remap(meta.block_table + 100)[:n], np.asarray(tables) + 100)


@pytest.mark.parametrize(
    "query, seq, chunk, count",
    [
        ([1000], [1000], 256, 4),
        ([1000], [1255], 256, 5),
        ([300, 700, 90], [300, 1400, 90], 128, 10),
        ([64, 64], [64, 64], 256, 2),
        ([1, 1, 1, 1], [16, 32, 48, 64], 16, 4),
    ],
)
def test_the_number_of_virtual_batches_by_hand(query, seq, chunk, count):
    local, _ = make_local_attention_virtual_batches(chunk, plain(query, seq, 16), 16)
    assert local.num_reqs == count <= max_local_attention_virtual_batches(chunk, len(query), sum(query))


@given(lengths(max_query=20, max_computed=30), st.sampled_from([4, 8, 12]))
def test_capacity_is_never_exceeded(batch, chunk):
    virtual = sum(len({p // chunk for p in range(c, c + q)}) for q, c in zip(batch.query, batch.computed, strict=True))
    if sum(batch.query):
        meta = CommonAttentionMetadata.from_lengths(
            batch.query, batch.seq, np.zeros((len(batch.query), 16), int), BLOCK
        )
        assert make_local_attention_virtual_batches(chunk, meta, BLOCK)[0].num_reqs == virtual
        assert virtual <= max_local_attention_virtual_batches(chunk, len(batch.query), sum(batch.query))


@given(lengths(), st.sampled_from([4, 8, 12]), st.booleans())
def test_attention_of_the_virtual_batches_is_chunked_attention(batch, chunk, causal):
    meta, (q, k, v) = padded(batch, causal=causal), pool()
    local, _ = make_local_attention_virtual_batches(chunk, meta, BLOCK)
    for ours, wanted in zip(attend(local, q, k, v), attend(meta, q, k, v, chunk_size=chunk), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-12)
    assert local.num_tokens == TOKENS and local.max_seq_len == chunk
    check_host(local)
    np.testing.assert_array_equal(local.slot_mapping, meta.slot_mapping)


_in_jit = jax.jit(lambda chunk, meta: make_local_attention_virtual_batches(chunk, meta, BLOCK), static_argnums=0)


@given(lengths(), st.sampled_from([4, 12]))
def test_inside_jit_the_virtual_batches_are_the_hosts(batch, chunk):
    meta = padded(batch, causal=np.arange(len(batch.query)) % 2 == 0).replace(max_query_len=8)
    assert_same(_in_jit(chunk, meta), make_local_attention_virtual_batches(chunk, meta, BLOCK))


@given(lengths())
def test_a_request_without_new_tokens_has_no_virtual_batch(batch):
    meta = padded(batch)
    local, remap = make_local_attention_virtual_batches(8, meta, BLOCK)
    query = np.diff(meta.query_start_loc)
    assert (np.diff(local.query_start_loc)[: local.num_reqs] > 0).all() and (remap.column >= 0).all()
    assert set(remap.req[: local.num_reqs]) == set(np.flatnonzero(query))


def test_queries_before_the_first_key_see_nothing():
    meta = CommonAttentionMetadata.from_lengths([5], [2], [[0, 1]], 4, causal=False).replace(causal=True)
    local, _ = make_local_attention_virtual_batches(4, meta, 4)
    assert np.diff(local.query_start_loc)[:2].tolist() == [3, 2] and local.seq_lens[:2].tolist() == [0, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(chunk=6), "attn_chunk_size 6 is not divisible by block_size 4; choose a block size"),
        (dict(block_size=0), "block_size=0 must be >= 1: pass the cache's block size"),
        (dict(block_table=None), "use the mask instead"),
        (dict(dcp_local_seq_lens=np.zeros(REQS, np.int32)), "the keys of a chunk are distributed over ranks"),
        (dict(mm_prefix_ranges=np.zeros((REQS, 1, 2), np.int32)), "a span may be in several chunks"),
        (dict(rswa_prefix_lens=np.zeros(REQS, np.int32)), "a prefix may be in an earlier chunk"),
    ],
)
def test_what_cannot_be_cut_into_chunks_is_refused(change, message):
    meta, options = plain([2], [9]), dict(chunk=4, block_size=4)
    options |= {k: v for k, v in change.items() if k in options}
    meta = meta.replace(**{k: v for k, v in change.items() if k not in options})
    with pytest.raises(ValueError, match=message):
        make_local_attention_virtual_batches(options["chunk"], meta, options["block_size"])
