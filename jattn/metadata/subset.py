"""Some requests of a batch, in any places, as a batch of their own. Shapes are static, so it works inside jit.

    query lens   1  6  1  0  3        keep = lens == 1   ->   1  1  0  0  0     tokens  0  7  T ...
    tokens       0  1..6  7  8..10    keep = lens > 1    ->   6  3  0  0  0     tokens  1 .. 6  8  9  10  T ...

jattn.compat.vllm.slice_requests needs neighbouring requests, and bounds on the host.
"""

import jax
import jax.numpy as jnp

from jattn.metadata.batch import PER_REQUEST, CommonAttentionMetadata
from jattn.metadata.host import segment_of, starts_of
from jattn.types import PAD_SLOT_ID


def subset(
    meta: CommonAttentionMetadata, keep: jax.Array, num_tokens: int, max_query_len: int
) -> tuple[CommonAttentionMetadata, jax.Array, jax.Array]:
    """(batch, tokens, requests): the requests with keep bool[R], in their order, then padding.

    Token i of the new batch is token tokens[i] of the old one (T: padding), and its request j is requests[j].
    num_tokens and max_query_len: static upper bounds for the kept requests. The encoder's tokens (`.cross`) are not
    written again.
    """
    keep = jnp.asarray(keep)
    requests = jnp.argsort(~keep, stable=True).astype(jnp.int32)
    live = keep[requests]

    def of_live(x, fill):
        rows = None if x is None else jnp.asarray(x)[requests]
        return None if rows is None else jnp.where(live.reshape(-1, *[1] * (rows.ndim - 1)), rows, fill)

    start = starts_of(of_live(meta.query_lens(), 0), jnp)
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    req = segment_of(start[1:], num_tokens, jnp)
    old = jnp.asarray(meta.query_start_loc)[:-1][requests][req] + row - start[:-1][req]
    tokens = jnp.where(row < start[-1], old, meta.num_tokens)
    part = meta.replace(
        query_start_loc=start,
        slot_mapping=jnp.asarray(meta.slot_mapping).at[tokens].get(mode="fill", fill_value=PAD_SLOT_ID),
        block_table=None if meta.block_table is None else jnp.asarray(meta.block_table)[requests],
        num_reqs=jnp.sum(live, dtype=jnp.int32),
        num_actual_tokens=start[-1],
        logits_indices=None,
        cross=None if meta.cross is None else _cached(meta.cross, requests, live),
        max_query_len=max_query_len,
        **{name: of_live(getattr(meta, name), fill) for name, fill in PER_REQUEST.items() if name != "block_table"},
    )
    return part, tokens, requests


def _cached(cross: CommonAttentionMetadata, requests, live) -> CommonAttentionMetadata:
    """The encoder's lengths and blocks of some requests, without tokens to write."""
    return cross.replace(
        query_start_loc=jnp.zeros_like(jnp.asarray(cross.query_start_loc)),
        seq_lens=jnp.where(live, jnp.asarray(cross.seq_lens)[requests], 0),
        block_table=None if cross.block_table is None else jnp.asarray(cross.block_table)[requests],
        slot_mapping=jnp.full_like(jnp.asarray(cross.slot_mapping), PAD_SLOT_ID),
        num_reqs=jnp.sum(live, dtype=jnp.int32),
        num_actual_tokens=jnp.zeros((), jnp.int32),
    )
