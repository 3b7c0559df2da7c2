"""A batch as levels of keys: a plain batch has one level; in a cascade, requests share the keys of the first levels.

Positions are absolute: key 0 of a level has the position after the last key of the level before. So windows, ALiBi,
chunks and user functions give the same result in a cascade as in a plain batch. Attention over all keys is the merge
of the levels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
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


def single_level(meta: CommonAttentionMetadata, attn_type: AttentionType) -> Level:
    """The one level of a plain batch of this attention type: its queries, its keys and their blocks."""
    block_table = keys_of(meta, attn_type).block_table
    assert block_table is not None  # a builder gets a checked batch
    max_query_len = queries_of(meta, attn_type).max_query_len
    return Level(batch=batch_of(meta, attn_type), block_table=block_table, max_query_len=max_query_len)


def batch_of(meta: CommonAttentionMetadata, attn_type: AttentionType) -> RaggedBatch:
    """The queries and keys of a layer of this attention type: see queries_of and keys_of."""
    keys, meta = keys_of(meta, attn_type), queries_of(meta, attn_type)
    decoder = attn_type is AttentionType.DECODER
    seq_lens = jnp.asarray(keys.seq_lens)
    return RaggedBatch(
        start=jnp.asarray(meta.query_start_loc)[:-1],
        query_lens=meta.query_lens(),
        seq_lens=seq_lens,
        kv_offset=jnp.zeros_like(seq_lens),
        rows=_rows(meta, meta.positions()) if decoder else QueryRows(position=meta.positions(), causal=None),
    )


def _rows(meta: CommonAttentionMetadata, position: jax.Array) -> QueryRows:
    """The tokens of a decoder at these positions, with the values that masks and biases depend on."""
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
    """(the level of the first prefix_len keys, which all requests share, the level of the rest).

    Only whole blocks are shared; each request reads the remainder of prefix_len. The prefix is read through the block
    table of the first request with queries: that of another one may hold anything.
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
    tokens = jnp.sum(batch.query_lens, keepdims=True, dtype=jnp.int32)
    zero = jnp.zeros_like(tokens)
    live = batch.query_lens > 0
    prefix = dataclasses.replace(batch, start=zero, query_lens=tokens, seq_lens=zero + shared, kv_offset=zero)
    rest = dataclasses.replace(
        batch,
        seq_lens=jnp.where(live, jnp.maximum(batch.seq_lens - shared, 0), 0),
        kv_offset=jnp.where(live, shared, 0).astype(jnp.int32),
    )
    first = Level(
        batch=prefix,
        block_table=jnp.asarray(level.block_table)[jnp.argmax(live)][None, :pages],
        max_query_len=max(batch.num_tokens, 1),
    )
    remaining = level.block_table[:, pages:] if pages < width else level.block_table[:, :1]
    return first, Level(batch=rest, block_table=remaining, max_query_len=level.max_query_len)


def levels_of_cascade(levels: tuple[CommonAttentionMetadata, ...]) -> tuple[Level, ...]:
    """The levels of a cascade, from a batch for each level: see jattn.cascade_attention.

    The position of a token is its position in the last level plus the number of its keys in the levels before.
    """
    if not levels:
        raise ValueError("a cascade needs at least one level")
    last = levels[-1]
    sizes = {level.num_tokens for level in levels}
    if len(sizes) > 1:
        raise ValueError(f"the levels must have the same packed tokens, got T of {sorted(sizes)}")
    before = jnp.zeros(last.num_tokens, jnp.int32)  # keys of each token in the levels before
    offsets = []
    for level in levels:
        offsets.append(before)
        before = before + jnp.asarray(level.seq_lens)[level.token_to_req()]
    position = jnp.where(last.token_is_live(), offsets[-1] + last.positions(), 0)
    rows = _rows(last, position)
    made = []
    for level, offset in zip(levels, offsets, strict=True):
        start = jnp.asarray(level.query_start_loc)[:-1]
        batch = RaggedBatch(
            start=start,
            query_lens=level.query_lens(),
            seq_lens=jnp.asarray(level.seq_lens),
            kv_offset=offset[jnp.minimum(start, last.num_tokens - 1)] if last.num_tokens else jnp.zeros_like(start),
            rows=rows,
        )
        assert level.block_table is not None  # a builder gets checked batches
        made.append(Level(batch=batch, block_table=level.block_table, max_query_len=level.max_query_len))
    return tuple(made)


def merged(states: list[AttentionState], combine: Callable[[AttentionState], AttentionState] | None) -> AttentionState:
    """`merge` of the states of this rank and, if `combine` is given, of all ranks by it; it marks empty rows itself."""
    state = states[0] if combine is not None and len(states) == 1 else merge(*states)
    return state if combine is None else combine(state)


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
    """Attention over the keys of all levels. Sinks are added once, after the merge.

    Several levels are merged in float32 and rounded once. open_keys(cache, block_table) makes the source of keys.
    combine: merges the states of all ranks; None: this rank has all keys.
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
            in_order=len(levels) == 1,
        )
        states.append(attend(call, q, open_keys(cache, level.block_table), level.batch, params))
    if not several:
        return states[0]
    state = merged(states, combine)
    if spec.has_sinks:
        assert params.sinks is not None
        state = with_sinks(state, params.sinks)
    scale = params.output_scale if spec.output_dtype else None
    return dataclasses.replace(state, out=quant.to_dtype(state.out, output_dtype(q.dtype, spec), scale))
