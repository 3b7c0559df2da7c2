"""Cascade attention: keys that many requests share are read once for all of their queries.

    level 0   one request: its queries are all tokens, its keys are the common prefix; not causal
    level i   one request for each group of neighbouring requests that share more tokens
    last      each request with the rest of its keys

The merged states of the levels are the result of the whole batch. The lengths of a level count its own keys;
`cascade_attention` adds the lengths of the levels before it to get the positions of its keys.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import boolean, integer, integers, short, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.batch_checks import check_block_size
from jattn.metadata.host import array_module, is_traced
from jattn.types import NULL_BLOCK_ID, PAD_SLOT_ID, AnyArray
from pallas_kernels.algebra.paging import cdiv

Prefix = int | Sequence[tuple[int, int]]
MIN_PREFIX, MIN_REQS = 256, 8
"""The least shared tokens and requests for a level, as in vLLM."""

TILE, TILE_KEY_NS = 64, 8.4
"""Query rows that a product takes at once, and what such a tile takes to visit one key of 128 + 128 elements:
nanoseconds of one multiprocessor. An H200 takes as long whether its rows are one request's 4 or 64 of many requests."""

LEVEL_US, MERGED_ROW_US = 10, 0.01
"""A level costs a launch and a merge, and so much for each row of a query head that is merged. TILE_KEY_NS and these
reproduce the five measured batches of tests/metadata/test_cascade.py to 6 us and to 6 %."""

USUAL_SMS = 132
"""Multiprocessors of an H100 and of an H200."""


@takes(
    common_prefix_len=integer(0),
    query_lens=integers(1, host="call this before jit"),
    num_query_heads=integer(1),
    num_kv_heads=integer(1),
    use_alibi=boolean,
    use_sliding_window=boolean,
    use_local_attention=boolean,
    num_sms=integer(1),
    dcp_world_size=integer(1),
)
def use_cascade_attention(
    common_prefix_len: int,
    query_lens,
    num_query_heads: int,
    num_kv_heads: int,
    use_alibi: bool = False,
    use_sliding_window: bool = False,
    use_local_attention: bool = False,
    num_sms: int = USUAL_SMS,
    dcp_world_size: int = 1,
) -> bool:
    """Is it faster to read a shared prefix in a separate level? True if `saved_us` is above 0. Host only."""
    lens = np.asarray(query_lens)
    if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
        return False
    return saved_us(common_prefix_len, lens, num_query_heads, num_kv_heads, num_sms=num_sms) > 0


def saved_us(
    common_prefix_len: int, query_lens: np.ndarray, num_heads: int, num_kv_heads: int, head_dim: int = 128,
    num_sms: int = USUAL_SMS,
) -> float:  # fmt: skip
    """Microseconds of a layer that a level for the prefix saves; 0 for fewer than MIN_REQS requests or MIN_PREFIX keys.

    flat      K * sum(ceil(query_len * G / TILE)) tiles visit the prefix's keys
    a level   K * ceil(tokens * G / TILE) tiles, a launch, and a merge of tokens * H rows
    Both read each request's own keys once. head_dim: the mean of a key's and a value's.
    """
    lens = np.asarray(query_lens, np.int64)
    if common_prefix_len < MIN_PREFIX or len(lens) < MIN_REQS:
        return 0.0
    group, tokens = num_heads // num_kv_heads, int(lens.sum())
    tiles = num_kv_heads * (int(cdiv(lens * group, TILE).sum()) - cdiv(tokens * group, TILE))
    visits = tiles * common_prefix_len * TILE_KEY_NS * head_dim / 128 / num_sms / 1000
    return visits - LEVEL_US - MERGED_ROW_US * tokens * num_heads


@takes(meta=BATCH, block_size=integer(1))
def cascade_levels(
    meta: CommonAttentionMetadata, prefixes: int | Sequence[Prefix], block_size: int
) -> list[CommonAttentionMetadata]:
    """A batch for each level, over the same packed queries: the argument `levels` of cascade_attention.

    prefixes: the number of tokens that all requests share, or a list with an entry for each level. An entry is a number
    of further tokens that all requests share, or a list of (num_requests, tokens): groups of neighbouring requests, in
    order, and the further tokens that each group shares. Shared tokens must be computed already and fill whole blocks,
    the same ones in each request of a group. This is checked if the batch is on the host.
    """
    if meta.block_table is None or meta.cross is not None or meta.dcp_local_seq_lens is not None:
        raise ValueError(
            "cascade levels share pages of one cache: meta needs block_table, and no cross or dcp_local_seq_lens"
        )
    check_block_size(meta, block_size)
    num_live = meta.max_num_reqs if is_traced(meta.num_reqs) else int(meta.num_reqs)
    groups = _groups(prefixes, num_live)
    done = np.zeros(num_live, np.int64)  # tokens of each request in the levels so far
    out = []
    for i, level in enumerate(groups):
        _check_level(i, level, num_live, block_size)
        out.append(_shared_level(meta, level, done, block_size))
        done += np.repeat([n for _, n in level], [n for n, _ in level])
    _check_shared(meta, done, groups, block_size)
    return [*out, _last_level(meta, done, block_size)]


def prefix_levels(
    meta: CommonAttentionMetadata, prefix_len: AnyArray | int, block_size: int
) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata]:
    """The levels of a prefix of all requests whose number of tokens may be traced: (the prefix, the rest).

    Only whole blocks that every request has computed are shared. They are read through the blocks of the first request
    with queries: those of another one may be anything.
    """
    table, seq_lens, query_lens = jnp.asarray(meta.block_table), jnp.asarray(meta.seq_lens), meta.query_lens()
    live, width = query_lens > 0, table.shape[1]
    computed = jnp.min(jnp.where(live, seq_lens - query_lens, width * block_size))
    pages = jnp.maximum(jnp.minimum(prefix_len, computed), 0) // block_size
    shared = (pages * block_size).astype(jnp.int32)
    first = CommonAttentionMetadata(
        query_start_loc=jnp.stack([jnp.int32(0), jnp.sum(query_lens, dtype=jnp.int32)]),
        seq_lens=shared[None],
        block_table=table[jnp.argmax(live)][None],
        slot_mapping=jnp.full(meta.num_tokens, PAD_SLOT_ID, jnp.int32),
        num_reqs=jnp.int32(1),
        num_actual_tokens=jnp.asarray(meta.num_actual_tokens),
        max_query_len=meta.num_tokens,
        max_seq_len=width * block_size,
        is_causal=False,
        block_size=block_size,
    )
    column = jnp.minimum(pages + jnp.arange(width), width - 1)
    rest = meta.replace(seq_lens=jnp.where(live, seq_lens - shared, 0), block_table=table[:, column])
    return first, rest


def _groups(prefixes, num_live: int) -> list[list[tuple[int, int]]]:
    """The (num_requests, tokens) pairs of each level."""
    one = not isinstance(prefixes, (list, tuple))
    levels = [prefixes] if one else prefixes
    groups = []
    for i, level in enumerate(levels):
        name = "prefixes" if one else f"prefixes[{i}]"
        if not isinstance(level, (list, tuple)):
            tokens = integer(0)(name, level)
            if num_live:  # else the level has no group, and is left out
                groups.append([(num_live, tokens)])
            continue
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in level):
            raise ValueError(f"{name}={short(level)} must be a number of tokens, or pairs (num_requests, tokens)")
        groups.append([(integer(0)(name, n), integer()(name, tokens)) for n, tokens in level])
    return groups


def _shared_level(meta, level, done: np.ndarray, block_size: int) -> CommonAttentionMetadata:
    xp = array_module(meta.query_start_loc, meta.block_table)
    stops = np.cumsum([n for n, _ in level])
    leaders = stops - [n for n, _ in level]
    lens = np.asarray([n for _, n in level], np.int32)
    width = max(int(lens.max(initial=0)) // block_size, 1)
    column = np.minimum(done[leaders][:, None] // block_size + np.arange(width), meta.block_table.shape[1] - 1)
    used = np.arange(width) < lens[:, None] // block_size
    pages = xp.asarray(meta.block_table)[leaders[:, None], column]
    starts = xp.asarray(meta.query_start_loc)
    return CommonAttentionMetadata(
        query_start_loc=xp.concatenate([starts[:1], starts[stops]]),
        seq_lens=xp.asarray(lens),
        block_table=xp.where(used, pages, NULL_BLOCK_ID).astype(xp.int32),
        slot_mapping=xp.full(meta.num_tokens, PAD_SLOT_ID, xp.int32),
        num_reqs=xp.asarray(len(level), xp.int32),
        num_actual_tokens=meta.num_actual_tokens,
        max_query_len=meta.num_tokens,
        max_seq_len=width * block_size,
        is_causal=False,
        block_size=block_size,
    )


def _last_level(meta, done: np.ndarray, block_size: int) -> CommonAttentionMetadata:
    xp = array_module(meta.query_start_loc, meta.block_table)
    taken = np.zeros(meta.max_num_reqs, np.int32)
    taken[: len(done)] = done
    width = max(meta.block_table.shape[1] - int(done.min(initial=2**31)) // block_size, 1) if len(done) else 1
    column = np.minimum(taken[:, None] // block_size + np.arange(width), meta.block_table.shape[1] - 1)
    return meta.replace(
        seq_lens=xp.maximum(xp.asarray(meta.seq_lens) - taken, 0),
        block_table=xp.take_along_axis(xp.asarray(meta.block_table), xp.asarray(column), axis=1),
        max_seq_len=width * block_size,
        block_size=block_size,
    )


def _check_level(i: int, level, num_live: int, block_size: int) -> None:
    if sum(n for n, _ in level) != num_live or any(n < 1 for n, _ in level):
        raise ValueError(f"level {i}: groups {level} must cover the {num_live} live requests, each group at least one")
    for _, tokens in level:
        if tokens < 0 or tokens % block_size:
            raise ValueError(
                f"level {i}: a shared prefix of {tokens} tokens must be whole blocks of {block_size}; "
                f"share {max(tokens, 0) // block_size * block_size} of them"
            )


def _check_shared(meta, done: np.ndarray, groups, block_size: int) -> None:
    """ValueError if a prefix is not computed yet, or the blocks of a group differ. Checks a batch on the host only."""
    if is_traced(meta.query_start_loc, meta.seq_lens, meta.block_table):
        return
    computed = (np.asarray(meta.seq_lens) - np.diff(np.asarray(meta.query_start_loc)))[: len(done)]
    table = np.asarray(meta.block_table)
    if (done > computed).any():
        r = int(np.argmax(done > computed))
        raise ValueError(
            f"request {r} has {computed[r]} computed tokens, fewer than the {done[r]} shared ones of prefixes: "
            "its queries would see keys after them"
        )
    first = np.zeros(len(done), np.int64)
    for level in groups:
        leader = np.repeat(np.cumsum([n for n, _ in level]) - [n for n, _ in level], [n for n, _ in level])
        stop = first + np.repeat([t for _, t in level], [n for n, _ in level])
        column = np.arange(table.shape[1])
        inside = (column >= first[:, None] // block_size) & (column < stop[:, None] // block_size)
        bad = (inside & (table[: len(done)] != table[leader])).any(axis=1)
        if bad.any():
            r = int(np.argmax(bad))
            raise ValueError(
                f"requests {leader[r]} and {r} have different blocks in the prefix that they share by `prefixes`"
            )
        first = stop
