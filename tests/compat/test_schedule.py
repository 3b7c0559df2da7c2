"""The work list: each visible (query, key) pair once and no other, the same on the host and inside jit."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.compat.vllm import get_scheduler_metadata, schedule_plan
from jattn.metadata import CommonAttentionMetadata
from jattn.spec import AttentionSpec
from tests.metadata.batches import assert_same, attend, lengths, padded, plain, pool
from tests.metadata.test_cascade import merged
from tests.oracle.attention import attend_one, visible_keys

MASKS = [
    dict(),
    dict(sliding_window=5),
    dict(sliding_window=(3, 2)),
    dict(sliding_window=(-1, 1)),
    dict(chunk_size=6),
    dict(sliding_window=4, chunk_size=6),
]
PLANS = [
    dict(num_workers=1),
    dict(num_workers=8, kv_tile=2, max_query_rows=1),
    dict(num_workers=5, kv_tile=3, max_query_rows=4, max_split_queries=4),
    dict(num_workers=8, kv_tile=1, max_query_rows=1, enable_kv_split=False),
    dict(kv_tile=2, max_query_rows=6, max_split_queries=3, fixed_split_tokens=4),
]


def spec(group=1, **options):
    return AttentionSpec(num_heads=group, num_kv_heads=1, head_dim=4, scale=1.0, **options)


def see(meta, layer):
    """bool [T, longest]: which keys each packed token sees, by the oracle."""
    start, seq = np.asarray(meta.query_start_loc), np.asarray(meta.seq_lens)
    out = np.zeros((meta.num_tokens, max(int(seq.max()), 1)), bool)
    causal = np.broadcast_to(np.asarray(meta.causal), seq.shape)
    for r in range(len(seq)):
        q = np.arange(seq[r] - (start[r + 1] - start[r]), seq[r])
        out[start[r] : start[r + 1], : seq[r]] = visible_keys(
            q, np.arange(seq[r]), causal=causal[r], window=layer.sliding_window, chunk_size=layer.chunk_size
        )
    return out


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@settings(max_examples=25)
@given(batch=lengths(max_query=9, max_computed=30), causal=st.sampled_from([True, False, None]))
def test_every_visible_pair_is_in_one_item_and_no_item_reads_an_invisible_key(mask, plan, batch, causal):
    each = np.arange(len(batch.query)) % 2 == 0
    meta, layer = padded(batch, causal=each if causal is None else causal), spec(2, **mask)
    work = get_scheduler_metadata(meta, layer, **plan)
    visible, count = see(meta, layer), np.zeros((meta.num_tokens, max(batch.seq) or 1), int)
    items = work.items
    for i in range(int(work.num_items)):
        tokens = slice(items.q_start[i], items.q_start[i] + items.q_num[i])
        keys = slice(items.kv_start[i], items.kv_end[i])
        count[tokens, keys] += 1
        tile = visible[tokens].any(axis=0)
        assert tile[keys].all()  # every key read is seen by some query of the tile
        assert items.seq_len[i] == batch.seq[items.req_id[i]]
    assert (count[visible] == 1).all() and count.max(initial=0) <= 1


@pytest.mark.parametrize("plan", PLANS, ids=str)
@given(batch=lengths(max_query=9))
def test_every_live_token_is_written_by_one_item_or_one_reduction(plan, batch):
    meta = padded(batch)
    work = get_scheduler_metadata(meta, spec(2), **plan)
    items, red = work.items, work.reductions
    writes, slots = np.zeros(meta.num_tokens, int), np.zeros(2 * len(red.req_id), int)
    for i in range(int(work.num_items)):
        assert items.q_num[i] >= 1
        if items.split_id[i] < 0:
            writes[items.q_start[i] : items.q_start[i] + items.q_num[i]] += 1
        else:
            slots[items.split_id[i]] += 1
    for i in range(int(work.num_reductions)):
        writes[red.q_start[i] : red.q_start[i] + red.q_num[i]] += 1
        ids = np.arange(red.split_start[i], red.split_start[i] + red.split_num[i])
        mine = np.isin(items.split_id, ids)
        assert red.split_num[i] > 1 and mine.sum() == len(ids)
        assert items.local_split_id[mine].tolist() == list(range(len(ids)))
        assert set(items.req_id[mine]) == {red.req_id[i]} and set(items.q_start[mine]) == {red.q_start[i]}
    total = int(meta.num_actual_tokens)
    assert (writes[:total] == 1).all() and not writes[total:].any()
    assert (slots[: work.num_splits] == 1).all() and not slots[work.num_splits :].any()


@pytest.mark.parametrize("plan", PLANS, ids=str)
@given(batch=lengths(max_query=9, max_computed=30))
def test_what_is_past_the_counts_is_empty(plan, batch):
    work = get_scheduler_metadata(padded(batch), spec(3), **plan)
    for arrays, count, marks in (
        (work.items, work.num_items, {"split_id": -1, "local_split_id": -1}),
        (work.reductions, work.num_reductions, {}),
    ):
        for name, x in vars(arrays).items():
            assert x.dtype == np.int32 and (x[count:] == marks.get(name, 0)).all(), name


@functools.cache
def _in_jit(layer, options):
    return jax.jit(lambda meta: get_scheduler_metadata(meta, layer, **dict(options)))


@pytest.mark.parametrize("mask, plan", [*((MASKS[0], p) for p in PLANS), (MASKS[5], PLANS[2])], ids=str)
@settings(max_examples=20)
@given(batch=lengths(max_query=9))
def test_inside_jit_the_work_list_is_the_hosts(mask, plan, batch):
    meta = padded(batch, causal=np.arange(len(batch.query)) % 2 == 0).replace(max_query_len=48)
    layer = spec(2, **mask)
    assert_same(_in_jit(layer, tuple(plan.items()))(meta), get_scheduler_metadata(meta, layer, **plan))


@pytest.mark.parametrize("plan", PLANS[1:], ids=str)
@settings(max_examples=25)
@given(batch=lengths(max_query=9))
def test_computing_by_the_work_list_is_attention(plan, batch):
    meta, (q, k, v) = padded(batch), pool(heads=1)
    work = get_scheduler_metadata(meta, spec(), **plan)
    items, red = work.items, work.reductions
    whole = attend(meta, q, k, v)
    out, lse = np.zeros_like(whole[0]), np.full_like(whole[1], -np.inf)
    parts = {}
    for i in range(int(work.num_items)):
        r = items.req_id[i]
        tokens = slice(items.q_start[i], items.q_start[i] + items.q_num[i])
        position = np.arange(items.q_start[i], items.q_start[i] + items.q_num[i])
        position += items.seq_len[i] - meta.query_start_loc[r + 1] - items.kv_start[i]
        rows = lambda pages, i=i, r=r: pages[meta.block_table[r]].reshape(-1, 1, 4)[items.kv_start[i] : items.kv_end[i]]
        part = attend_one(q[tokens], rows(k), rows(v), q_pos=position, scale=1.0)
        if items.split_id[i] < 0:
            out[tokens], lse[tokens] = part
        parts[int(items.split_id[i])] = part
    for i in range(int(work.num_reductions)):
        tokens = slice(red.q_start[i], red.q_start[i] + red.q_num[i])
        out[tokens], lse[tokens] = merged([parts[int(red.split_start[i]) + s] for s in range(red.split_num[i])])
    np.testing.assert_allclose(out, whole[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-11)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20), st.integers(1, 32), st.sampled_from([1, 16, 64]))
def test_split_pieces_are_balanced_and_worth_their_reduction(seq_lens, workers, kv_tile):
    n = len(seq_lens)
    meta = CommonAttentionMetadata.from_lengths([1] * n, seq_lens, np.zeros((n, 250), int), 16)
    work = get_scheduler_metadata(meta, spec(), num_workers=workers, kv_tile=kv_tile, max_query_rows=8)
    span = (work.items.kv_end - work.items.kv_start)[: work.num_items]
    tiles = -(-np.array(seq_lens) // kv_tile)
    budget = max(-(-tiles.sum() // workers), -(-32 // kv_tile))
    assert span.max() <= budget * kv_tile
    split = work.items.split_id[: work.num_items] >= 0
    inner = work.items.kv_start[: work.num_items][split]
    assert (inner % kv_tile == 0).all() and work.num_items <= n + workers
    for i in range(int(work.num_reductions)):
        mine = np.sort(-(-span[work.items.req_id[: work.num_items] == work.reductions.req_id[i]] // kv_tile))
        assert mine[-1] - mine[0] <= 1


def test_one_long_request_is_shared_by_all_workers_of_a_kv_head():
    meta = CommonAttentionMetadata.from_lengths([1], [32768], np.zeros((1, 2048), int), 16)
    layer = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=4)
    few = get_scheduler_metadata(meta, layer, num_workers=8)
    many = get_scheduler_metadata(meta, layer, num_workers=64)
    assert few.num_items == 1 and few.num_reductions == 0  # the kv heads keep 8 workers busy
    assert many.num_items == 8 and many.items.kv_end.tolist()[:8] == [4096 * (i + 1) for i in range(8)]
    assert get_scheduler_metadata(meta, layer, num_workers=64, enable_kv_split=False).num_items == 1


def test_enough_requests_are_not_split():
    meta = CommonAttentionMetadata.from_lengths([1] * 16, [512] * 16, np.zeros((16, 32), int), 16)
    assert get_scheduler_metadata(meta, spec(), num_workers=16).num_splits == 0


def test_only_short_tiles_are_split():
    meta = CommonAttentionMetadata.from_lengths([20, 1], [4096, 4096], np.zeros((2, 256), int), 16)
    work = get_scheduler_metadata(meta, spec(), num_workers=64, max_query_rows=8)
    assert set(work.reductions.req_id[: work.num_reductions]) == {1}


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 17, 32, 33, 64, 71])
def test_any_group_of_heads_is_packed(group):
    layer = AttentionSpec(num_heads=group * 2, num_kv_heads=2, head_dim=4)
    plan = schedule_plan(layer, num_workers=4, kv_tile=16, max_query_rows=32, max_split_queries=1)
    assert plan.q_tile == max(32 // group, 1)
    work = get_scheduler_metadata(plain([9, 1], [9, 30]), layer)
    assert work.items.q_num.sum() == 10 and work.items.q_num.max() <= plan.q_tile


@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_a_window_is_exact_at_the_edge_of_a_tile(edge):
    meta = plain([4], [32])  # positions 28 .. 31 in one tile
    work = get_scheduler_metadata(meta, spec(sliding_window=16 + edge), max_query_rows=4, kv_tile=16)
    assert (work.items.kv_start[0], work.items.kv_end[0]) == (28 - (16 + edge - 1), 32)


def test_fixed_splits_do_not_depend_on_the_rest_of_the_batch():
    build = lambda lens: get_scheduler_metadata(
        CommonAttentionMetadata.from_lengths([1] * len(lens), lens, np.zeros((len(lens), 64), int), 16),
        spec(),
        fixed_split_tokens=128,
    )
    ends = lambda work, r: work.items.kv_end[: work.num_items][work.items.req_id[: work.num_items] == r].tolist()
    assert ends(build([1000]), 0) == ends(build([17, 1000, 999]), 1) != [1000]


def test_a_cross_layer_reads_all_encoder_tokens():
    meta = CommonAttentionMetadata.from_lengths(
        [1, 2], [3, 2], [[0], [1]], 4, encoder_seq_lens=[5, 0], cross_block_table=[[2, 3], [4, 5]]
    )
    work = get_scheduler_metadata(meta, spec(attn_type="encoder_decoder"))
    assert work.items.kv_start.tolist()[:2] == [0, 0] and work.items.kv_end.tolist()[:2] == [5, 0]
    with pytest.raises(AttributeError, match="requires setting cross-attention metadata"):
        get_scheduler_metadata(plain([1], [3]), spec(attn_type="encoder_decoder"))


def test_sums_past_32_bits_only_round_the_budget_up():
    meta = CommonAttentionMetadata.from_lengths([1] * 64, [2**30] * 64, None, 1)
    work = get_scheduler_metadata(meta, spec(), num_workers=128, kv_tile=1)
    span = work.items.kv_end - work.items.kv_start
    assert (span >= 0).all() and span.astype(np.int64).sum() == 64 * 2**30 and work.num_items == 128


def test_a_batch_of_padding_has_no_work():
    work = get_scheduler_metadata(plain([0, 0], [0, 3]), spec(), num_workers=4)
    assert (work.num_items, work.num_reductions, work.num_splits) == (0, 0, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_workers=0), "num_workers=0 must be a positive integer"),
        (dict(kv_tile=0), "kv_tile=0 must be a positive integer"),
        (dict(max_query_rows=1.5), "max_query_rows=1.5 must be a positive integer"),
        (dict(fixed_split_tokens=20), "fixed_split_tokens=20 must be a positive multiple of kv_tile=16"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_scheduler_metadata(plain([1], [3]), spec(), **options)
