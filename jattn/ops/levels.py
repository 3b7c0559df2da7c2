"""A batch as one or more levels of keys: a plain batch has one, a cascade shares the early ones between requests.

Positions are absolute throughout: a level's key 0 stands where the level before it ended, so windows, ALiBi, chunks
and user functions mean the same in a cascade as in a flat batch. Attention over all keys is the merge of the levels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.metadata.batch import CommonAttentionMetadata, keys_of, queries_of
from jattn.metadata.mm_prefix import fill_mm_prefix_query_ranges
from jattn.ops.attend import AttentionCall, Path, attend
from jattn.ops.keys import KeySource, PagedKeys
from jattn.ops.layer import output_dtype
from jattn.ops.ragged import QueryRows, RaggedBatch
from jattn.ops.state import AttentionState, merge, with_sinks
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AnyArray, AttentionType, pytree, static
from pallas_kernels.algebra import quant


@pytree
class Level:
    """A batch over one level of keys; its requests may be groups of the requests of a later level."""

    batch: RaggedBatch
    block_table: AnyArray  # i32[R B]
    max_query_len: int = static()


def flat(meta: CommonAttentionMetadata, attn_type: AttentionType) -> Level:
    """The one level of an ordinary batch over a cache: its queries, its keys and their pages."""
    table = keys_of(meta, attn_type).block_table
    assert table is not None  # a builder gets a checked batch
    max_query_len = queries_of(meta, attn_type).max_query_len
    return Level(batch=batch_of(meta, attn_type), block_table=table, max_query_len=max_query_len)


def batch_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> RaggedBatch:
    """The queries and keys of a layer of this attention type: see queries_of and keys_of."""
    keys, meta = keys_of(meta, attn_type), queries_of(meta, attn_type)
    decoder = attn_type is AttentionType.DECODER
    kv_len = jnp.asarray(keys.seq_lens)
    return RaggedBatch(
        start=jnp.asarray(meta.query_start_loc)[:-1],
        query_len=meta.query_lens(),
        kv_len=kv_len,
        kv_offset=jnp.zeros_like(kv_len),
        rows=_rows(meta, meta.positions()) if decoder else QueryRows(position=meta.positions(), causal=None),
    )


def _rows(meta: CommonAttentionMetadata, position: jax.Array) -> QueryRows:
    """A decoder's tokens at these positions, with everything that some mask or bias may ask for."""
    lens, ranges, per_request = meta.rswa_prefix_lens, meta.mm_prefix_ranges, meta.causal_per_request
    req, token = meta.token_to_req(), jnp.arange(meta.num_tokens, dtype=jnp.int32)
    return QueryRows(
        position=position,
        causal=None if per_request is None else jnp.asarray(per_request)[req],
        context=position - (token - jnp.asarray(meta.query_start_loc)[req]),
        prefix=None if lens is None else jnp.asarray(lens)[req],
        span=None if ranges is None else tuple(fill_mm_prefix_query_ranges(meta, ranges, position).T),
    )


def shared_prefix(level: Level, prefix_len: int, block_size: int) -> tuple[Level, ...]:
    """Split off the pages that every request starts with: (prefix level, rest).

    Only whole blocks are shared; a remainder of prefix_len is read by each request as before. The prefix is read
    through the first request's table.
    """
    pages = prefix_len // block_size
    width = level.block_table.shape[1]
    if prefix_len < 0 or pages > width:
        raise ValueError(
            f"common_prefix_len={prefix_len} must be within the {width} blocks of {block_size} of the table"
        )
    if pages == 0:
        return (level,)
    batch, shared = level.batch, pages * block_size
    tokens = jnp.sum(batch.query_len, keepdims=True)
    zero = jnp.zeros_like(tokens)
    live = batch.query_len > 0
    prefix = dataclasses.replace(batch, start=zero, query_len=tokens, kv_len=zero + shared, kv_offset=zero)
    rest = dataclasses.replace(
        batch,
        kv_len=jnp.where(live, jnp.maximum(batch.kv_len - shared, 0), 0),
        kv_offset=jnp.where(live, shared, 0).astype(jnp.int32),
    )
    first = Level(
        batch=prefix,
        block_table=level.block_table[:1, :pages],
        max_query_len=max(batch.num_tokens, 1),
    )
    remaining = level.block_table[:, pages:] if pages < width else level.block_table[:, :1]
    return first, Level(batch=rest, block_table=remaining, max_query_len=level.max_query_len)


def nested(levels: tuple[CommonAttentionMetadata, ...]) -> tuple[Level, ...]:
    """Levels from metadata in which each level's requests lie within one request of the level before.

    seq_lens count that level's keys only; a token's position is its position in the last level plus all keys above.
    """
    if not levels:
        raise ValueError("a cascade needs at least one level")
    last = levels[-1]
    sizes = {level.num_tokens for level in levels}
    if len(sizes) > 1:
        raise ValueError(f"the levels must hold the same packed tokens, got T of {sorted(sizes)}")
    above = jnp.zeros(last.num_tokens, jnp.int32)  # keys before this level, per token
    offsets = []
    for level in levels:
        offsets.append(above)
        above = above + jnp.asarray(level.seq_lens)[level.token_to_req()]
    position = jnp.where(last.token_is_live(), offsets[-1] + last.positions(), 0)
    rows = _rows(last, position)
    made = []
    for level, offset in zip(levels, offsets, strict=True):
        start = jnp.asarray(level.query_start_loc)[:-1]
        batch = RaggedBatch(
            start=start,
            query_len=level.query_lens(),
            kv_len=jnp.asarray(level.seq_lens),
            kv_offset=offset[jnp.minimum(start, last.num_tokens - 1)] if last.num_tokens else jnp.zeros_like(start),
            rows=rows,
        )
        assert level.block_table is not None  # a builder gets checked batches
        made.append(Level(batch=batch, block_table=level.block_table, max_query_len=level.max_query_len))
    return tuple(made)


def attend_levels(
    spec: AttentionSpec,
    path: Path,
    is_causal: bool,
    q: jax.Array,
    cache,
    levels: tuple[Level, ...],
    params: AttentionParams | None,
    open_keys: Callable[[Any, AnyArray], KeySource] = PagedKeys.of,
    combine: Callable[[AttentionState], AttentionState] | None = None,
) -> AttentionState:
    """Attention over the union of the levels' keys; sinks are added once, after the merge.

    Several levels are merged in float32 and rounded once. open_keys(cache, block_table) makes the source of keys;
    combine merges the ranks' states where these are one rank's keys.
    """
    params = AttentionParams() if params is None else params
    several = len(levels) > 1 or combine is not None
    layer = dataclasses.replace(spec, has_sinks=False, output_dtype=None) if several else spec
    states = []
    for level in levels:
        call = AttentionCall(
            spec=layer,
            is_causal=is_causal,
            max_query_len=level.max_query_len,
            path=path,
            out_dtype="float32" if several else None,
        )
        states.append(attend(call, q, open_keys(cache, level.block_table), level.batch, params))
    if not several:
        return states[0]
    state = merge(*states) if combine is None else combine(merge(*states))
    if spec.has_sinks:
        assert params.sinks is not None
        state = with_sinks(state, params.sinks)
    scale = params.output_scale if spec.output_dtype else None
    return dataclasses.replace(state, out=quant.to_dtype(state.out, output_dtype(q.dtype, spec), scale))
