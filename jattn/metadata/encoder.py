"""Whose tokens ask and whose keys answer, by attention type: the one place where `.cross` is routed.

    type              queries                   keys                     pages
    decoder           query_lens                seq_lens                 block_table
    encoder_only      query_lens                seq_lens                 block_table
    encoder           the encoder's own         the same                 none: packed k and v
    encoder_decoder   query_lens                the encoder's lengths    cross.block_table

A batch without encoder lengths is an encoder's own batch: ENCODER then reads it like ENCODER_ONLY.
"""

from jattn.errors import MissingMetadataError
from jattn.errors.arguments import short, takes
from jattn.metadata.common import BATCH, CommonAttentionMetadata
from jattn.types import AttentionType


def attention_type(value: AttentionType | str) -> AttentionType:
    """The type as an enum, or an error that names them all."""
    try:
        return AttentionType(value if isinstance(value, str) else "")
    except ValueError:
        seen, names = value if isinstance(value, str) else short(value), ", ".join(AttentionType)
        raise MissingMetadataError(f"Invalid attention type {seen}; use one of {names} as attn_type") from None


def _type(name: str, value: AttentionType | str) -> AttentionType:
    return value if type(value) is AttentionType else attention_type(value)


@takes(meta=BATCH, attn_type=_type)
def queries_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> CommonAttentionMetadata:
    """The batch of the queries: the encoder's own for ENCODER, where `meta` is a decoder's that carries it."""
    return meta.cross if attn_type is AttentionType.ENCODER and meta.cross is not None else meta


@takes(meta=BATCH, attn_type=_type)
def keys_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> CommonAttentionMetadata:
    """The batch whose tokens are the keys, hold the pages and are written: the encoder's for ENCODER_DECODER."""
    if attn_type is not AttentionType.ENCODER_DECODER:
        return queries_of(meta, attn_type)
    if meta.cross is None:
        raise MissingMetadataError(
            "Encoder/decoder cross-attention requires setting cross-attention metadata attributes: give from_lengths "
            "encoder_seq_lens= (and cross_block_table= where there is a cache)"
        )
    return meta.cross


@takes(meta=BATCH)
def is_all_encoder_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """True where encoder lengths are there."""
    return meta.encoder_seq_lens is not None


@takes(meta=BATCH)
def is_all_cross_attn_metadata_set(meta: CommonAttentionMetadata) -> bool:
    """True where encoder lengths, cross slots and cross pages are there."""
    return meta.cross is not None and meta.cross.block_table is not None


@takes(meta=BATCH, attn_type=_type)
def lens_for(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(q_lens, kv_lens), i32[R] each. For a decoder without context both are seq_lens."""
    kind = AttentionType(attn_type)
    return queries_of(meta, kind).query_lens(), keys_of(meta, kind).seq_lens


@takes(meta=BATCH, attn_type=_type)
def get_seq_len_block_table_args(meta: CommonAttentionMetadata, attn_type: AttentionType | str):
    """(kv lens i32[R], their static upper bound, block table or None)."""
    kind = AttentionType(attn_type)
    keys = keys_of(meta, kind)
    table = None if kind is AttentionType.ENCODER and meta.cross is not None else keys.block_table
    return keys.seq_lens, keys.max_seq_len, table
