"""Cascades: when a level of its own is faster, and that the levels merge into the result of the whole batch."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.metadata import CommonAttentionMetadata, cascade_levels, check_host, use_cascade_attention
from jattn.metadata.cascade import saved_us
from tests.metadata.batches import BLOCK, assert_same, attend, plain, pool

DECODES = dict(common_prefix_len=4096, query_lens=[1] * 64, num_query_heads=32, num_kv_heads=8, num_sms=100)


@pytest.mark.parametrize(
    "change, pays",
    [
        (dict(), True),
        (dict(common_prefix_len=255), False),
        (dict(query_lens=[1] * 7), False),
        (dict(use_alibi=True), False),
        (dict(use_sliding_window=True), False),
        (dict(use_local_attention=True), False),
        (dict(dcp_world_size=2), False),
        (dict(num_kv_heads=32, num_query_heads=32), True),
        (dict(query_lens=[2] * 8), True),
        (dict(query_lens=[1] * 8, num_sms=10_000), False),  # all tiles at once take less than a second launch
        (dict(num_query_heads=512), False),  # a request's own rows fill the tiles of its kv heads
    ],
)
def test_cascade_pays_for_long_prefixes_of_many_requests(change, pays):
    assert use_cascade_attention(**(DECODES | change)) is pays


MEASURED = {  # (requests, shared, own keys) -> microseconds with a level, and without: an H200, 32 / 8 heads of 128
    (256, 32768, 256): (364.4, 4478.2),
    (64, 8192, 512): (86.8, 308.4),
    (32, 2048, 256): (43.6, 52.8),
    (16, 1024, 1024): (44.4, 32.0),
    (8, 4096, 256): (26.5, 30.4),
}


@pytest.mark.parametrize("case", MEASURED)
def test_the_estimate_agrees_with_what_was_measured(case):
    (requests, shared, _), (levels, flat) = case, MEASURED[case]
    sizes = dict(query_lens=np.ones(requests, int), num_kv_heads=8)
    assert use_cascade_attention(shared, num_query_heads=32, num_sms=132, **sizes) is (levels < flat)
    assert abs(saved_us(shared, num_heads=32, **sizes) - (flat - levels)) < max(0.06 * flat, 6)


def test_an_estimate_grows_with_the_prefix_and_with_the_size_of_heads():
    lens, of = np.ones(64, int), lambda shared, dim: saved_us(shared, lens, 32, 8, dim)
    assert of(1024, 128) < of(2048, 128) < of(4096, 128) and of(4096, 64) < of(4096, 128) < of(4096, 256)


def merged(states):
    """Merge of (out, lse) pairs, written out."""
    lse = np.stack([s[1] for s in states])
    top = np.where(np.isneginf(lse.max(0)), 0, lse.max(0))
    weight = np.exp(lse - top)
    total = weight.sum(0)
    out = sum(w[..., None] * s[0] for w, s in zip(weight, states, strict=True))
    with np.errstate(divide="ignore"):
        return out / np.where(total == 0, 1, total)[..., None], np.where(total == 0, -np.inf, top + np.log(total))


@st.composite
def families(draw):
    """A batch whose requests all share `root` tokens, and those of a family some more; and its levels."""
    root = BLOCK * draw(st.integers(0, 2))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    more = [BLOCK * draw(st.integers(0, 2)) for _ in sizes]
    query, computed, tables, page = [], [], [], 2
    for n, extra in zip(sizes, more, strict=True):
        mine = list(range(page, page + extra // BLOCK))
        page += len(mine)
        for _ in range(n):
            query.append(draw(st.integers(0, 5)))
            computed.append(root + extra + draw(st.integers(0, 5)))
            rest = 10 - root // BLOCK - len(mine)
            tables.append([*range(root // BLOCK), *mine, *range(page, page + rest)])
            page += rest
    meta = CommonAttentionMetadata.from_lengths(
        query, np.add(query, computed), tables, BLOCK, num_tokens=48, num_reqs=8
    )
    return meta, [root, list(zip(sizes, more, strict=True))]


@given(families())
def test_levels_merge_into_flat_attention(case):
    meta, prefixes = case
    q, k, v = pool()
    flat = attend(meta, q, k, v, soft_cap=5.0)
    for levels in (cascade_levels(meta, prefixes[0], BLOCK), cascade_levels(meta, prefixes, BLOCK)):
        states = [attend(level, q, k, v, soft_cap=5.0) for level in levels]
        for ours, wanted in zip(merged(states), flat, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-11, atol=1e-12)
        for level in levels:
            check_host(level)


def test_three_levels_by_hand():
    table = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6]]
    meta = CommonAttentionMetadata.from_lengths([1, 2, 1], [14, 15, 16], table, 4)
    root, family, rest = cascade_levels(meta, [8, [(2, 4), (1, 0)]], 4)
    assert root.query_start_loc.tolist() == [0, 4] and root.seq_lens.tolist() == [8] and not root.causal
    assert root.block_table.tolist() == [[0, 1]] and root.slot_mapping.tolist() == [-1] * 4
    assert family.query_start_loc.tolist() == [0, 3, 4] and family.seq_lens.tolist() == [4, 0]
    assert family.block_table.tolist() == [[2], [0]]
    assert rest.seq_lens.tolist() == [2, 3, 8] and rest.block_table.tolist() == [[3, 3], [4, 4], [5, 6]]
    assert rest.slot_mapping.tolist() == meta.slot_mapping.tolist() and rest.causal


def test_the_prefix_may_reach_up_to_the_last_key():
    meta = plain([1, 1], [9, 9], 4).replace(block_table=np.array([[0, 1, 2], [0, 1, 3]], np.int32))
    root, rest = cascade_levels(meta, 8, 4)
    assert root.seq_lens.tolist() == [8] and rest.seq_lens.tolist() == [1, 1]
    assert rest.block_table.tolist() == [[2], [3]]


def test_inside_jit_levels_are_the_hosts():
    meta = plain([1, 2], [9, 10], 4).replace(block_table=np.array([[0, 1, 2], [0, 1, 3]], np.int32))
    assert_same(jax.jit(lambda m: cascade_levels(m, 8, 4))(meta), cascade_levels(meta, 8, 4))


@pytest.mark.parametrize(
    "prefixes, message",
    [
        (6, "a shared prefix of 6 tokens must be whole blocks of 4; share 4 of them"),
        (12, "request 0 has 8 computed tokens, fewer than the 12 shared ones of prefixes"),
        (8, "requests 0 and 1 have different blocks in the prefix"),
        ([[(1, 4)]], r"level 0: groups \[\(1, 4\)\] must cover the 2 live requests"),
    ],
)
def test_what_is_not_shared_is_refused(prefixes, message):
    meta = plain([1, 1], [9, 9], 4).replace(block_table=np.array([[0, 1, 2], [0, 5, 3]], np.int32))
    with pytest.raises(ValueError, match=message):
        cascade_levels(meta, prefixes, 4)


def test_a_batch_without_pages_has_no_levels():
    with pytest.raises(ValueError, match="cascade levels share pages of one cache"):
        cascade_levels(CommonAttentionMetadata.from_lengths([1], [9], None, 4), 8, 4)
