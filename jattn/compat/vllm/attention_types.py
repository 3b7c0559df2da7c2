"""vLLM's questions about a batch by attention type: which lengths, which pages."""

from jattn.errors.arguments import takes
from jattn.metadata.batch import ATTENTION_TYPE, BATCH, CommonAttentionMetadata, keys_of, queries_of
from jattn.types import AttentionType


@takes(meta=BATCH)
def is_all_encoder_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """True where encoder lengths are there."""
    return meta.encoder_seq_lens is not None


@takes(meta=BATCH)
def is_all_cross_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """True where encoder lengths, cross slots and cross pages are there."""
    return meta.cross is not None and meta.cross.block_table is not None


@takes(meta=BATCH, attn_type=ATTENTION_TYPE)
def lens_for(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(q_lens, kv_lens), i32[R] each. For a decoder without context both are seq_lens."""
    kind = AttentionType(attn_type)
    return queries_of(meta, kind).query_lens(), keys_of(meta, kind).seq_lens


@takes(meta=BATCH, attn_type=ATTENTION_TYPE)
def get_seq_len_block_table_args(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(kv lens i32[R], their static upper bound, block table or None)."""
    kind = AttentionType(attn_type)
    keys = keys_of(meta, kind)
    table = None if kind is AttentionType.ENCODER and meta.cross is not None else keys.block_table
    return keys.seq_lens, keys.max_seq_len, table
