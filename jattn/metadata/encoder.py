"""Which lengths and pages belong to which type of attention.

type              queries          keys                pages
decoder           query_lens       seq_lens            block_table
encoder_only      query_lens       seq_lens            block_table
encoder           encoder lens     encoder lens        none: packed k and v
encoder_decoder   query_lens       encoder lens        cross.block_table
"""

from jattn.metadata.common import CommonAttentionMetadata
from jattn.types import AttentionType

_SELF = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)


def is_all_encoder_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """True where encoder lengths are there."""
    return meta.encoder_seq_lens is not None


def is_all_cross_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """True where encoder lengths, cross slots and cross pages are there."""
    cross = meta.cross
    return is_all_encoder_attn_metadata_set(meta) and cross is not None and cross.block_table is not None


def require_encoder(meta: CommonAttentionMetadata, attn_type: AttentionType | str) -> AttentionType:
    """The type as an enum; AttributeError where the batch lacks what it needs."""
    try:
        kind = AttentionType(attn_type)
    except ValueError:
        raise AttributeError(f"Invalid attention type {attn_type}; use one of {', '.join(AttentionType)}") from None
    way_out = "pass encoder_seq_lens and cross_block_table to CommonAttentionMetadata.from_lengths"
    if kind is AttentionType.ENCODER and not is_all_encoder_attn_metadata_set(meta):
        raise AttributeError(f"Encoder attention requires setting encoder metadata attributes. The way out: {way_out}")
    if kind is AttentionType.ENCODER_DECODER and not is_all_cross_attn_metadata_set(meta):
        raise AttributeError(
            "Encoder/decoder cross-attention requires setting cross-attention metadata attributes."
            f" The way out: {way_out}"
        )
    return kind


def lens_for(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(q_lens, kv_lens), i32[R] each.

    For a decoder without context both are seq_lens.
    """
    kind = require_encoder(meta, attn_type)
    if kind is AttentionType.ENCODER:
        return meta.encoder_seq_lens, meta.encoder_seq_lens
    return meta.query_lens(), meta.seq_lens if kind in _SELF else meta.encoder_seq_lens


def get_seq_len_block_table_args(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(kv lens i32[R], their static upper bound, block table or None)."""
    kind = require_encoder(meta, attn_type)
    if kind in _SELF:
        return meta.seq_lens, meta.max_seq_len, meta.block_table
    bound = meta.max_seq_len if meta.cross is None else meta.cross.max_seq_len
    table = None if kind is AttentionType.ENCODER or meta.cross is None else meta.cross.block_table
    return meta.encoder_seq_lens, bound, table
