"""vLLM's functions for the lengths and the block table of an attention type."""

from jattn.errors.arguments import takes
from jattn.metadata.attention_type import ATTENTION_TYPE, keys_of, queries_of
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.types import AttentionType


@takes(meta=BATCH)
def is_all_encoder_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """Does the batch have encoder lengths?"""
    return meta.encoder_seq_lens is not None


@takes(meta=BATCH)
def is_all_cross_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """Does the batch have encoder lengths, and a slot mapping and block table of the encoder's tokens?"""
    return meta.cross is not None and meta.cross.block_table is not None


@takes(meta=BATCH, attn_type=ATTENTION_TYPE)
def lens_for(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(lengths of the queries, lengths of the keys), i32[R] each."""
    kind = AttentionType(attn_type)
    return queries_of(meta, kind).query_lens(), keys_of(meta, kind).seq_lens


@takes(meta=BATCH, attn_type=ATTENTION_TYPE)
def get_seq_len_block_table_args(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(lengths of the keys i32[R], their static upper bound, their block table or None)."""
    kind = AttentionType(attn_type)
    keys = keys_of(meta, kind)
    table = None if kind is AttentionType.ENCODER and meta.cross is not None else keys.block_table
    return keys.seq_lens, keys.max_seq_len, table
