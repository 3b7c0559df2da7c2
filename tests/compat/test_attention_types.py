"""Which lengths and pages an attention type uses."""

import numpy as np
import pytest

from jattn.compat.vllm import (
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    lens_for,
)
from jattn.metadata import CommonAttentionMetadata, keys_of, queries_of
from jattn.types import AttentionType
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


def test_an_encoders_own_batch_is_its_queries_and_its_keys():
    own = plain([3, 2], [3, 2], causal=False)
    assert queries_of(own, AttentionType.ENCODER) is keys_of(own, AttentionType.ENCODER) is own
    assert queries_of(CROSS, AttentionType.ENCODER) is keys_of(CROSS, AttentionType.ENCODER) is CROSS.cross
    assert queries_of(CROSS, AttentionType.ENCODER_DECODER) is CROSS


def test_what_is_missing_is_named():
    for door in (lens_for, get_seq_len_block_table_args):
        with pytest.raises(AttributeError, match="Encoder/decoder cross-attention requires setting cross-attention"):
            door(plain([1], [1]), "encoder_decoder")
        with pytest.raises(ValueError, match="Invalid attention type sideways; use one of decoder, encoder"):
            door(CROSS, "sideways")
