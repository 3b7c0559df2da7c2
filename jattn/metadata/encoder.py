"""Whose tokens ask and whose keys answer, by attention type: the one place where `.cross` is routed."""

from jattn.metadata.common import CommonAttentionMetadata
from jattn.types import AttentionType


def queries_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> CommonAttentionMetadata:
    """The batch of the queries: the encoder's own for ENCODER, where `meta` is a decoder's that carries it."""
    return meta.cross if attn_type is AttentionType.ENCODER and meta.cross is not None else meta


def keys_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> CommonAttentionMetadata:
    """The batch whose tokens are the keys, hold the pages and are written: the encoder's for ENCODER_DECODER."""
    if attn_type is not AttentionType.ENCODER_DECODER:
        return queries_of(meta, attn_type)
    if meta.cross is None:
        raise ValueError(
            "Encoder/decoder cross-attention requires setting cross-attention metadata attributes: give from_lengths "
            "encoder_seq_lens= (and cross_block_table= where there is a cache)"
        )
    return meta.cross
