"""The batches of a device loop: the next decode step, draft step i, another block table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.compat.vllm import draft_metadata, next_decode, update_block_table
from jattn.metadata import CommonAttentionMetadata, with_dcp
from tests.metadata.batches import BLOCK, REQS, assert_same, lengths, padded, plain

_draft = jax.jit(lambda meta, i: draft_metadata(meta, i, BLOCK))
_next = jax.jit(lambda meta: next_decode(meta, BLOCK))


@given(lengths(min_query=1, max_query=1), st.integers(0, 4))
def test_draft_i_is_the_batch_advanced_i_times(batch, i):
    meta = padded(batch)
    later = padded(type(batch)(batch.query, [c + i for c in batch.computed]))
    assert_same(_draft(meta, i), later)


def test_drafts_run_in_a_scan():
    meta = plain([1, 1], [3, 6], num_reqs=3, num_tokens=4)
    step = lambda _, i: (None, draft_metadata(meta, i, BLOCK))
    _, drafts = jax.lax.scan(step, None, jnp.arange(2))
    for i in range(2):
        assert_same(jax.tree.map(lambda x, i=i: x[i], drafts), draft_metadata(meta, i, BLOCK))


@given(lengths(min_query=1))
def test_after_any_batch_every_request_decodes_one_token(batch):
    meta = padded(batch)
    live = len(batch.query)
    direct = CommonAttentionMetadata.from_lengths(
        [1] * live, [n + 1 for n in batch.seq], meta.block_table[:live], BLOCK, num_tokens=REQS, num_reqs=REQS
    )
    step = _next(meta)
    np.testing.assert_array_equal(step.block_table[:live], direct.block_table[:live])
    assert_same(step.replace(block_table=None), direct.replace(block_table=None))


def test_drafts_start_from_a_decode_batch():
    with pytest.raises(ValueError, match="drafts are decode batches; make the first with next_decode"):
        draft_metadata(plain([2], [4]), 1, BLOCK)


def test_the_keys_of_a_rank_are_not_those_of_the_next_step():
    """The lengths grew and dcp_local_seq_lens did not, so the newest keys were on no rank."""
    meta = with_dcp(plain([1, 1], [5, 8]), 2, 0)
    for advance in (meta.advanced, lambda size: draft_metadata(meta, 1, size), lambda size: next_decode(meta, size)):
        with pytest.raises(ValueError, match="counts this step's keys"):
            advance(BLOCK)


def test_another_groups_pages_change_nothing_else():
    meta = plain([1, 2], [3, 6])
    other = update_block_table(meta, meta.block_table + 7, meta.slot_mapping + 28)
    assert_same(update_block_table(other, meta.block_table, meta.slot_mapping), meta)
    with pytest.raises(ValueError, match="one slot for each packed token"):
        update_block_table(meta, meta.block_table, meta.slot_mapping[:2])
    with pytest.raises(ValueError, match="must have 2 rows"):
        update_block_table(meta, meta.block_table[:1], meta.slot_mapping)
