"""Which lengths and pages an attention type uses."""

import numpy as np
import pytest

from jattn.metadata import (
    CommonAttentionMetadata,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    lens_for,
    require_encoder,
)
from tests.metadata.batches import plain

CROSS = CommonAttentionMetadata.from_lengths(
    [1, 2], [3, 2], [[0], [1]], 4, encoder_seq_lens=[5, 6], cross_block_table=[[2, 3], [4, 5]]
)
NO_PAGES = CommonAttentionMetadata.from_lengths([1, 2], [3, 2], [[0], [1]], 4, encoder_seq_lens=[5, 6])


@pytest.mark.parametrize(
    "attn_type, q_lens, kv_lens",
    [
        ("decoder", [1, 2], [3, 2]),
        ("encoder_only", [1, 2], [3, 2]),
        ("encoder", [5, 6], [5, 6]),
        ("encoder_decoder", [1, 2], [5, 6]),
    ],
)
def test_lengths_by_type(attn_type, q_lens, kv_lens):
    q, kv = lens_for(CROSS, attn_type)
    assert np.asarray(q).tolist() == q_lens and kv.tolist() == kv_lens


def test_without_context_a_decoder_has_as_many_queries_as_keys():
    q, kv = lens_for(plain([3, 2], [3, 2]), "decoder")
    np.testing.assert_array_equal(q, kv)


@pytest.mark.parametrize(
    "attn_type, lens, bound, table",
    [
        ("decoder", [3, 2], 4, [[0], [1]]),
        ("encoder_only", [3, 2], 4, [[0], [1]]),
        ("encoder", [5, 6], 8, None),
        ("encoder_decoder", [5, 6], 8, [[2, 3], [4, 5]]),
    ],
)
def test_pages_by_type(attn_type, lens, bound, table):
    seq_lens, max_seq_len, pages = get_seq_len_block_table_args(CROSS, attn_type)
    assert seq_lens.tolist() == lens and max_seq_len == bound
    assert pages is None if table is None else pages.tolist() == table


def test_cross_is_a_superset_of_encoder():
    pairs = [
        (is_all_encoder_attn_metadata_set(m), is_all_cross_attn_metadata_set(m))
        for m in (plain([1], [1]), NO_PAGES, CROSS)
    ]
    assert pairs == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    "meta, attn_type, message",
    [
        (plain([1], [1]), "encoder", "Encoder attention requires setting encoder metadata attributes."),
        (NO_PAGES, "encoder_decoder", "Encoder/decoder cross-attention requires setting cross-attention metadata"),
        (CROSS, "sideways", "Invalid attention type sideways"),
    ],
)
def test_what_is_missing_is_named(meta, attn_type, message):
    for door in (lens_for, get_seq_len_block_table_args, require_encoder):
        with pytest.raises(AttributeError, match=message):
            door(meta, attn_type)
