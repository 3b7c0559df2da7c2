"""CommonAttentionMetadata: int32 arrays from lengths, and no effect of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.cache import KVCacheSpec
from jattn.compat.vllm.decodes_and_prefills import apply_permutation
from jattn.compat.vllm.drafting import next_decode
from jattn.compat.vllm.local import make_local_attention_virtual_batches
from jattn.compat.vllm.slices import slice_requests
from jattn.metadata import Buckets, CommonAttentionMetadata, check_host
from jattn.metadata.subset import subset
from tests.metadata.batches import BLOCK, REQS, TOKENS, WIDTH, assert_same, lengths, padded, plain, reaching


@given(lengths())
def test_every_token_knows_its_request_position_and_slot(batch):
    meta = padded(batch)
    req, position = np.asarray(meta.token_to_req()), np.asarray(meta.positions())
    t = 0
    for r, (new, old) in enumerate(zip(batch.query, batch.computed, strict=True)):
        for i in range(new):
            where = old + i
            assert (req[t], position[t]) == (r, where)
            assert meta.slot_mapping[t] == meta.block_table[r, where // BLOCK] * BLOCK + where % BLOCK
            t += 1
    assert (meta.slot_mapping[t:] == -1).all() and (position[t:] == 0).all()
    assert not np.asarray(meta.token_is_live())[t:].any() and meta.num_actual_tokens == t
    np.testing.assert_array_equal(meta.num_computed_tokens()[: len(batch.query)], batch.computed)


@given(lengths())
def test_every_array_is_int32_on_the_host(batch):
    leaves = jax.tree.leaves(padded(batch))
    assert all(isinstance(x, np.ndarray) and x.dtype == np.int32 for x in leaves)


@given(lengths(), st.integers(0, 5), st.integers(0, 3))
def test_unpadding_undoes_padding(batch, more_tokens, more_reqs):
    meta = reaching(padded(batch, causal=np.arange(len(batch.query)) % 2 == 0))
    wide = meta.padded(meta.num_tokens + more_tokens, meta.max_num_reqs + more_reqs)
    assert wide.num_tokens == TOKENS + more_tokens and wide.max_num_reqs == REQS + more_reqs
    assert_same(wide.unpadded(TOKENS, REQS), meta)


def test_what_is_cut_off_is_neither_written_nor_counted():
    """Requests of 2, 3 and 1 new tokens: the first alone, and as many tokens as end within the second."""
    meta = CommonAttentionMetadata.from_lengths([2, 3, 1], [5, 11, 10], [[9, 8, 7], [1, 2, 3], [1, 2, 4]], 4)
    for batch in (meta, jax.tree.map(jnp.asarray, meta)):
        one, part = batch.unpadded(6, 1), batch.unpadded(4, 2)
        assert one.slot_mapping.tolist() == [39, 32, -1, -1, -1, -1] and one.num_actual_tokens == 2
        wanted = CommonAttentionMetadata.from_lengths([2, 2], [5, 10], [[9, 8, 7], [1, 2, 3]], 4)
        bounds = dict(max_query_len=part.max_query_len, max_seq_len=part.max_seq_len)
        assert part.max_query_len >= 2 and part.max_seq_len >= 10
        assert_same(part, wanted.replace(**bounds))
        none = batch.unpadded(1, 3)
        assert none.query_start_loc.tolist() == [0, 1, 1, 1] and none.seq_lens.tolist() == [4, 8, 9]
        with pytest.raises(ValueError, match="cuts a request whose metadata depends on all"):
            batch.replace(causal=False).unpadded(4, 2)


@given(lengths(), st.integers(0, 5))
def test_padding_at_once_or_afterwards_is_the_same(batch, more):
    wide = padded(batch).padded(TOKENS + more, REQS + more)
    pages = padded(batch).block_table[: len(batch.query)]
    at_once = CommonAttentionMetadata.from_lengths(
        batch.query, batch.seq, pages, BLOCK, num_tokens=TOKENS + more, num_reqs=REQS + more
    )
    assert_same(wide.replace(max_query_len=1), at_once.replace(max_query_len=1))


_traced = jax.jit(
    lambda start, seq, table: CommonAttentionMetadata.from_traced(start, seq, table, BLOCK, num_tokens=TOKENS)
)


@given(lengths(min_query=1))
def test_the_traced_twin_builds_the_same_batch(batch):
    host = padded(batch)
    twin = _traced(host.query_start_loc, host.seq_lens, host.block_table)
    assert_same(twin.replace(max_query_len=host.max_query_len), host)


_advance = jax.jit(lambda meta: meta.advanced(BLOCK))


@given(lengths(min_query=1, max_query=1, max_computed=WIDTH * BLOCK - 2))
def test_advancing_is_the_batch_of_one_token_later(batch):
    later = one_later(batch)
    assert_same(_advance(padded(batch)), later)


def one_later(batch):
    """The same requests with one more computed token."""
    return padded(type(batch)(batch.query, [c + 1 for c in batch.computed]))


def test_a_request_past_its_table_writes_nowhere():
    meta = plain([1, 1], [8, 3])
    assert meta.advanced(BLOCK).slot_mapping.tolist() == [-1, 2 * BLOCK + 3]


def test_only_decodes_advance_token_by_token():
    with pytest.raises(ValueError, match="must be 1; only a decode batch"):
        plain([2], [2]).advanced(BLOCK)


def test_the_last_tokens_are_where_logits_come_from():
    meta = plain([2, 0, 3], [5, 4, 3])
    assert meta.logits_at_last_token().tolist() == [1, 1, 4]


def test_causality_is_one_static_bool_or_one_traced_bool_a_request():
    one, each = plain([1], [4], causal=False), plain([1, 2], [4, 4], causal=[True, False])
    assert one.causal is False and one.causal_per_request is None
    assert each.causal.tolist() == [True, False]
    assert each.replace(causal=True).causal is True


def test_the_encoder_comes_along_as_a_batch_of_its_own():
    meta = CommonAttentionMetadata.from_lengths(
        [1, 2],
        [3, 2],
        [[0], [1]],
        4,
        num_reqs=3,
        encoder_seq_lens=[5, 2],
        cross_block_table=[[2, 3], [4, 5]],
        num_encoder_tokens=8,
    )
    assert meta.encoder_seq_lens.tolist() == [5, 2, 0] and meta.cross.is_causal is False
    assert meta.cross.slot_mapping.tolist() == [8, 9, 10, 11, 12, 16, 17, -1]
    assert_same(meta.padded(9, 5).unpadded(3, 3), meta)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(query_lens=[1, -2]), r"query_lens\[1\]=-2 must be >= 0"),
        (dict(query_lens=[[1]]), "must be a 1-D list of integers"),
        (dict(query_lens=[1.5, 1.0]), "query_lens.dtype=float64 must be an integer type"),
        (dict(seq_lens=[4]), "seq_lens has 1 entries but query_lens has 2"),
        (dict(seq_lens=[4, 0]), "request 1: seq_len=0 is less than query_len=2; seq_lens count computed and new"),
        (dict(block_table=[[0], [1]]), "has 1 columns but request 1 with seq_len=5 needs 2 blocks of 4"),
        (dict(block_table=[[0, 1]]), r"one row for each request, \[2, B\]"),
        (dict(block_size=0), "block_size=0 must be a positive integer"),
        (dict(num_tokens=2), "num_tokens=2 is less than the 3 given"),
        (dict(num_reqs=1), "num_reqs=1 is less than the 2 given"),
        (dict(max_blocks=1), "max_blocks=1 is less than the 2 blocks that the longest request needs"),
        (dict(causal=[True]), r"must be \(2,\): one bool for each request"),
        (dict(cross_block_table=[[0]]), "need encoder_seq_lens"),
    ],
)
def test_errors_say_what_was_seen_and_wanted(change, message):
    good = dict(query_lens=[1, 2], seq_lens=[4, 5], block_table=[[0, 1], [2, 3]], block_size=4)
    CommonAttentionMetadata.from_lengths(**good)
    with pytest.raises(ValueError, match=message):
        CommonAttentionMetadata.from_lengths(**{**good, **change})


def test_padding_only_grows_and_unpadding_only_shrinks():
    meta = plain([1, 2], [4, 5])
    with pytest.raises(ValueError, match="use unpadded"):
        meta.padded(2, 2)
    with pytest.raises(ValueError, match="use padded"):
        meta.unpadded(4, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(query_start_loc=np.array([1, 2, 3])), "must start at 0 and not descend"),
        (dict(query_start_loc=np.array([0, 2, 1])), "must start at 0 and not descend"),
        (dict(query_start_loc=np.array([0, 2, 9])), "past the 3 packed tokens"),
        (dict(seq_lens=np.array([4, 1])), "request 1: seq_len=1 is less than query_len=2"),
        (dict(seq_lens=np.array([4, 99])), "request 1: seq_len=99 is above max_seq_len=8"),
        (dict(final_seq_lens=np.array([4, 4])), "request 1: final_seq_len=4 is less than seq_len=5"),
        (dict(max_query_len=1), "request 1: query_len=2 is above max_query_len=1"),
        (dict(block_table=np.array([[0, -1], [2, 8]])), "request 1: block 8 is outside the pool of 8 blocks"),
        (dict(slot_mapping=np.array([1, 2, 32])), r"slot_mapping\[2\]=32 is outside the pool of 8 x 4 slots"),
    ],
)
def test_check_host_names_the_first_culprit(change, message):
    cache = KVCacheSpec(num_blocks=8, block_size=4, num_kv_heads=1, head_dim=4)
    meta = CommonAttentionMetadata.from_lengths([1, 2], [4, 5], [[0, -1], [2, 3]], 4)
    assert check_host(meta, cache) is meta
    with pytest.raises(ValueError, match=message):
        check_host(meta.replace(**change), cache)


@given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 20))
def test_a_bucket_is_the_smallest_that_fits_and_the_largest_is_the_maximum(tokens, reqs, blocks):
    buckets = Buckets.powers_of_two(100, 9, 20)
    sizes = buckets.sizes(tokens, reqs, blocks)
    assert sizes["num_tokens"] == min(s for s in buckets.tokens if s >= tokens)
    assert buckets.reqs == (1, 2, 4, 8, 9) and sizes["num_reqs"] >= reqs and sizes["max_blocks"] >= blocks
    with pytest.raises(ValueError, match="101 tokens do not fit the largest bucket 100"):
        buckets.sizes(101, 1, 1)


@given(lengths())
def test_a_bucketed_batch_has_one_of_the_budgeted_trace_keys(batch):
    buckets = Buckets.powers_of_two(TOKENS, REQS, WIDTH)
    sizes = buckets.sizes_for(batch.query, batch.seq, BLOCK)
    meta = CommonAttentionMetadata.from_lengths(
        batch.query, batch.seq, padded(batch).block_table[: len(batch.query)], BLOCK, **sizes
    )
    assert (meta.num_tokens, meta.max_num_reqs, meta.block_table.shape[1]) == tuple(sizes.values())
    assert meta.max_query_len in (1, 8, max(meta.num_tokens, 8))
    assert meta.max_seq_len == sizes["max_blocks"] * BLOCK


def test_final_lengths_go_wherever_their_requests_go():
    """Padded, cut, sliced, reordered, chosen, advanced, made local, split: request 0 ends at 40, request 1 at 50."""
    meta = CommonAttentionMetadata.from_lengths([1, 3], [5, 9], [[0, 1, 2], [3, 4, 5]], BLOCK, final_seq_lens=[40, 50])
    assert meta.final_lens().tolist() == [40, 50] and meta.replace(final_seq_lens=None).final_lens().tolist() == [5, 9]
    wide = meta.padded(8, 4)
    assert wide.final_seq_lens.tolist() == [40, 50, 0, 0] and wide.unpadded(4, 2).final_seq_lens.tolist() == [40, 50]
    at_once = CommonAttentionMetadata.from_lengths(
        [1, 3], [5, 9], meta.block_table, BLOCK, num_tokens=8, num_reqs=4, final_seq_lens=[40, 50]
    )
    assert_same(at_once.replace(max_query_len=4), wide.replace(max_query_len=4))
    assert slice_requests(meta, 1, 2).final_seq_lens.tolist() == [50]
    assert slice_requests(meta, 1, 2, 1, 3).final_seq_lens.tolist() == [50]  # a request that is cut ends where it did
    assert apply_permutation(meta, np.array([1, 0])).final_seq_lens.tolist() == [50, 40]
    part, _, _ = subset(meta, np.array([False, True]), 4, 4)
    assert part.final_seq_lens.tolist() == [50, 0]
    local, _ = make_local_attention_virtual_batches(4, wide, BLOCK)
    live = int(local.num_reqs)
    assert local.final_seq_lens.tolist()[:live] == [40, 50, 50] and not local.final_seq_lens[live:].any()
    decode = next_decode(meta, BLOCK)
    for step in (decode, decode.advanced(BLOCK), jax.jit(lambda m: m.advanced(BLOCK))(decode)):
        assert step.final_seq_lens.tolist() == [40, 50]
    traced = CommonAttentionMetadata.from_traced(
        meta.query_start_loc, meta.seq_lens, meta.block_table, BLOCK, num_tokens=4, final_seq_lens=[40, 50]
    )
    assert_same(traced.replace(max_query_len=4), meta.replace(max_query_len=4))
    for bad, words in (([40, 8], r"final_seq_lens\[1\]=8 is less than seq_lens\[1\]=9"), ([40], "one of each")):
        with pytest.raises(ValueError, match=words):
            CommonAttentionMetadata.from_lengths([1, 3], [5, 9], meta.block_table, BLOCK, final_seq_lens=bad)


@pytest.mark.parametrize("live", [0, 1, 3, 5])
def test_of_rows_with_a_token_each_positions_need_no_search(live):
    """token_is_row says what query_start_loc would show; the searched and the direct answers are equal."""
    lens, table = [4, 1, 9, 2, 7][:live], np.arange(15).reshape(5, 3)[:live]
    searched = CommonAttentionMetadata.from_lengths([1] * live, lens, table, 4, num_tokens=5, num_reqs=5, max_blocks=3)
    direct = searched.replace(token_is_row=True)
    for name in ("token_to_req", "positions"):
        np.testing.assert_array_equal(getattr(direct, name)(), getattr(searched, name)())
    assert direct.logits_at_last_token()[:live].tolist() == searched.logits_at_last_token()[:live].tolist()
    assert direct.advanced(4).token_is_row and not direct.padded(6, 5).token_is_row
    np.testing.assert_array_equal(direct.advanced(4).positions(), searched.advanced(4).positions())
    np.testing.assert_array_equal(direct.padded(6, 5).positions(), searched.padded(6, 5).positions())
    longer = dict(slot_mapping=np.full(7, -1, np.int32))
    np.testing.assert_array_equal(direct.replace(**longer).positions(), searched.replace(**longer).positions())


@pytest.mark.parametrize(("query_lens", "num_tokens"), [([2, 1], 3), ([1, 0, 1], 3), ([1, 1], 3)])
def test_check_host_finds_tokens_that_are_not_their_rows(query_lens, num_tokens):
    lens = [5] * len(query_lens)
    meta = CommonAttentionMetadata.from_lengths(query_lens, lens, None, 4, num_tokens=num_tokens)
    with pytest.raises(ValueError, match="token_is_row is True, but .* leave it False"):
        check_host(check_host(meta).replace(token_is_row=True))
