"""Which batch has the queries, and which the keys, of each type of attention."""

from jattn.errors import MissingMetadataError
from jattn.errors.arguments import short, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.types import AttentionType


def ATTENTION_TYPE(name: str, value: AttentionType | str) -> AttentionType:
    """A rule of jattn.errors.arguments: an AttentionType or its name, as an AttentionType."""
    try:
        return AttentionType(value if isinstance(value, str) else "")
    except ValueError:
        seen, names = value if isinstance(value, str) else short(value), ", ".join(AttentionType)
        raise MissingMetadataError(f"Invalid attention type {seen}; use one of {names} as attn_type") from None


@takes(meta=BATCH, attn_type=ATTENTION_TYPE)
def queries_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> CommonAttentionMetadata:
    """The batch of the queries: meta.cross for ENCODER, else meta.

        type              lengths of queries        lengths of keys          blocks of keys
        decoder           query_lens                seq_lens                 block_table
        encoder_only      query_lens                seq_lens                 block_table
        encoder           the encoder's             the encoder's            none: packed k and v
        encoder_decoder   query_lens                the encoder's            cross.block_table

    If meta.cross is None, meta is the encoder's own batch, and ENCODER is like ENCODER_ONLY.
    """
    return meta.cross if attn_type is AttentionType.ENCODER and meta.cross is not None else meta


@takes(meta=BATCH, attn_type=ATTENTION_TYPE)
def keys_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> CommonAttentionMetadata:
    """The batch of the keys, whose blocks are read and whose slots are written: meta.cross for ENCODER_DECODER."""
    if attn_type is not AttentionType.ENCODER_DECODER:
        return queries_of(meta, attn_type)
    if meta.cross is None:
        raise MissingMetadataError(
            "Encoder/decoder cross-attention requires setting cross-attention metadata attributes: give from_lengths "
            "encoder_seq_lens= (and cross_block_table= with a cache)"
        )
    return meta.cross
