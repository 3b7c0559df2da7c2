"""Speculative decoding: the batches of draft steps, and uniform batches in the shape [requests, tokens of each]."""

import jax
import jax.numpy as jnp

from jattn.errors.arguments import integer, integers, reals, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.batch_checks import check_block_size, check_grows
from jattn.types import PAD_SLOT_ID
from pallas_kernels.algebra.paging import slots_of


@takes(meta=BATCH, block_size=integer(1))
def next_decode(meta: CommonAttentionMetadata, block_size: int) -> CommonAttentionMetadata:
    """The decode step after any batch: one new token for each request with tokens; R packed tokens.

    It is the first step of a draft model, or the first decode step after a prefill. The block table must contain the
    new blocks already.
    """
    live = jnp.asarray(meta.seq_lens) > 0
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(live, dtype=jnp.int32)])
    step = meta.replace(
        query_start_loc=starts,
        slot_mapping=jnp.full(meta.max_num_reqs, PAD_SLOT_ID, jnp.int32),
        num_actual_tokens=starts[-1],
        logits_indices=None,
        max_query_len=1,
    )
    return draft_metadata(step, 1, block_size)


@takes(meta=BATCH, draft_index=integers(0), block_size=integer(1))
def draft_metadata(meta: CommonAttentionMetadata, draft_index, block_size: int) -> CommonAttentionMetadata:
    """The batch of draft step `draft_index`: meta.advanced applied that many times, computed at once.

    draft_index may be traced, e.g. in a lax.scan over draft steps.
    """
    if meta.max_query_len != 1:
        raise ValueError(f"{meta.max_query_len=} must be 1: drafts are decode batches; make the first with next_decode")
    check_block_size(meta, block_size)
    check_grows(meta)
    if not meta.max_num_reqs:
        return meta
    query = meta.query_lens()
    seq_lens = jnp.asarray(meta.seq_lens) + query * draft_index
    req = meta.token_to_req()
    slots = slots_of(jnp.asarray(meta.block_table), req, (seq_lens - 1)[req], block_size)
    return meta.replace(
        seq_lens=seq_lens, slot_mapping=jnp.where(meta.token_is_live(), slots, PAD_SLOT_ID).astype(jnp.int32)
    )


@takes(meta=BATCH, block_table=integers(2), slot_mapping=integers(1))
def update_block_table(meta: CommonAttentionMetadata, block_table, slot_mapping) -> CommonAttentionMetadata:
    """The same batch with another block table: for groups of layers with the same lengths and other blocks."""
    if slot_mapping.shape != meta.slot_mapping.shape:
        raise ValueError(f"{slot_mapping.shape=} must be {meta.slot_mapping.shape}, one slot for each packed token")
    if block_table.shape[0] != meta.max_num_reqs:
        raise ValueError(f"{block_table.shape=} must have {meta.max_num_reqs} rows, one for each request")
    return meta.replace(block_table=block_table, slot_mapping=slot_mapping)


@takes(query=reals(), batch_size=integer())
def reshape_query_for_spec_decode(query: jax.Array, batch_size: int) -> jax.Array:
    """[T H D] -> [batch, T // batch, H, D], for a batch whose requests all have the same number of tokens."""
    if query.ndim != 3:
        raise ValueError(f"{query.shape=} must be [T H D]")
    if batch_size < 1 or query.shape[0] % batch_size:
        raise ValueError(f"{query.shape[0]} tokens do not divide among {batch_size=} requests; only uniform batches do")
    return query.reshape(batch_size, query.shape[0] // batch_size, *query.shape[1:])


@takes(output=reals())
def reshape_attn_output_for_spec_decode(output: jax.Array) -> jax.Array:
    """[batch, tokens, H, V] -> [T H V]; a packed output is returned unchanged."""
    if output.ndim not in (3, 4):
        raise ValueError(f"{output.shape=} must be [batch, tokens, H, V] or packed [T H V]")
    return output if output.ndim == 3 else output.reshape(-1, *output.shape[2:])
