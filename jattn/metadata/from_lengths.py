"""Metadata from lengths: on the host in numpy (plans), and its traced twin (device loops)."""

import jax.numpy as jnp
import numpy as np

from jattn.metadata.buckets import power_of_two, query_len_bound
from jattn.metadata.common import CommonAttentionMetadata
from jattn.metadata.ranges import compute_mm_prefix_range_tensor
from jattn.types import NULL_BLOCK_ID, PAD_SLOT_ID
from pallas_kernels.algebra.paging import cdiv, slots_of


def from_lengths(
    query_lens,
    seq_lens,
    block_table,
    block_size: int,
    *,
    num_tokens: int | None = None,
    num_reqs: int | None = None,
    max_blocks: int | None = None,
    causal=True,
    encoder_seq_lens=None,
    cross_block_table=None,
    num_encoder_tokens: int | None = None,
    mm_prefix_ranges=None,
    rswa_prefix_lens=None,
    final_seq_lens=None,
) -> CommonAttentionMetadata:
    """A ragged batch from host lengths, padded up to the static sizes given (None: as given).

    mm_prefix_ranges: pairs (first, last) for each request, or the array that compute_mm_prefix_range_tensor makes of
    them in a width of its own. rswa_prefix_lens: a number a request. final_seq_lens: the most
    tokens that each request will ever have, for rotary positions that depend on it (longrope, dynamic NTK).
    block_table may be None where no cache is used. encoder_seq_lens adds `.cross`, whose pages are cross_block_table
    and whose packed tokens are padded to num_encoder_tokens.
    """
    q = _lengths("query_lens", query_lens)
    s = _lengths("seq_lens", seq_lens, like=q)
    live, total = len(q), int(q.sum())
    width_r = _at_least("num_reqs", num_reqs, live)
    width_t = _at_least("num_tokens", num_tokens, total)
    per_request_causal = None if isinstance(causal, (bool, np.bool_)) else np.asarray(causal, bool)
    if per_request_causal is not None and per_request_causal.shape != (live,):
        raise ValueError(f"causal.shape={per_request_causal.shape} must be ({live},): one bool a request, or one bool")
    aligned = s if per_request_causal is None else np.where(per_request_causal, s, np.maximum(s, q))
    if causal is not False and (aligned < q).any() and block_table is not None:
        r = int(np.argmax(aligned < q))
        raise ValueError(
            f"request {r}: seq_len={s[r]} is less than query_len={q[r]}; seq_lens count computed AND new tokens"
        )
    start = np.zeros(width_r + 1, np.int32)
    np.cumsum(q, out=start[1 : live + 1])
    start[live + 1 :] = total
    table = _table(block_table, s, block_size, width_r, max_blocks)
    slots = np.full(width_t, PAD_SLOT_ID, np.int32)
    if table is not None and total:
        req = np.repeat(np.arange(live), q)
        position = np.arange(total) + np.repeat(s - q - start[:live], q)
        column = np.clip(position // block_size, 0, table.shape[1] - 1)
        slots[:total] = np.where(position >= 0, table[req, column] * block_size + position % block_size, PAD_SLOT_ID)
    if table is not None:
        longest = table.shape[1] * block_size
    else:
        longest = power_of_two(int(s.max(initial=1)))
    encoder = None
    if encoder_seq_lens is not None:
        e = _lengths("encoder_seq_lens", encoder_seq_lens, like=q)
        encoder = from_lengths(
            e, e, cross_block_table, block_size, num_tokens=num_encoder_tokens, num_reqs=width_r, causal=False
        )
    elif cross_block_table is not None or num_encoder_tokens is not None:
        raise ValueError("cross_block_table and num_encoder_tokens need encoder_seq_lens")
    return CommonAttentionMetadata(
        query_start_loc=start,
        seq_lens=_pad(s, width_r),
        block_table=table,
        slot_mapping=slots,
        num_reqs=np.asarray(live, np.int32),
        num_actual_tokens=np.asarray(total, np.int32),
        causal_per_request=None if per_request_causal is None else _pad(per_request_causal, width_r),
        encoder_seq_lens=None if encoder is None else encoder.seq_lens,
        cross=encoder,
        mm_prefix_ranges=None if mm_prefix_ranges is None else _ranges(mm_prefix_ranges, live, width_r),
        rswa_prefix_lens=None
        if rswa_prefix_lens is None
        else _pad(_lengths("rswa_prefix_lens", rswa_prefix_lens, like=q), width_r),
        final_seq_lens=None if final_seq_lens is None else _pad(_final(final_seq_lens, s), width_r),
        max_query_len=query_len_bound(int(q.max(initial=0)), width_t),
        max_seq_len=longest,
        is_causal=bool(causal) if per_request_causal is None else True,
    )


def from_traced(
    query_start_loc,
    seq_lens,
    block_table,
    block_size: int,
    *,
    num_tokens: int,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    causal=True,
    final_seq_lens=None,
) -> CommonAttentionMetadata:
    """The same from device arrays i32[R+1], i32[R], i32[R B]; static sizes must be said, nothing is checked.

    num_reqs counts up to the last request that has a token or a length.
    """
    start = jnp.asarray(query_start_loc, jnp.int32)
    seq_lens = jnp.asarray(seq_lens, jnp.int32)
    one = isinstance(causal, (bool, np.bool_))
    used = (start[1:] > start[:-1]) | (seq_lens > 0)
    last = jnp.max(jnp.where(used, jnp.arange(1, seq_lens.shape[0] + 1), 0))
    meta = CommonAttentionMetadata(
        query_start_loc=start,
        seq_lens=seq_lens,
        block_table=None if block_table is None else jnp.asarray(block_table, jnp.int32),
        slot_mapping=jnp.full(num_tokens, PAD_SLOT_ID, jnp.int32),
        num_reqs=last.astype(jnp.int32),
        num_actual_tokens=start[-1],
        causal_per_request=None if one else jnp.asarray(causal, bool),
        final_seq_lens=None if final_seq_lens is None else jnp.asarray(final_seq_lens, jnp.int32),
        max_query_len=num_tokens if max_query_len is None else max_query_len,
        max_seq_len=max_seq_len
        if max_seq_len is not None
        else num_tokens
        if block_table is None
        else block_table.shape[1] * block_size,
        is_causal=bool(causal) if one else True,
    )
    if block_table is None:
        return meta
    slots = slots_of(meta.block_table, meta.token_to_req(), meta.positions(), block_size)
    return meta.replace(slot_mapping=jnp.where(meta.token_is_live(), slots, PAD_SLOT_ID).astype(jnp.int32))


def _lengths(name: str, values, like=None) -> np.ndarray:
    x = np.asarray(values)
    if x.ndim != 1 or not (np.issubdtype(x.dtype, np.integer) or x.size == 0):
        raise ValueError(f"{name} must be a 1-D list of integers, got shape {x.shape} of {x.dtype}")
    if (x < 0).any():
        raise ValueError(f"{name}[{int(np.argmax(x < 0))}]={x.min()} must be >= 0")
    if like is not None and len(x) != len(like):
        raise ValueError(f"{name} has {len(x)} entries but query_lens has {len(like)}: one of each a request")
    return x.astype(np.int32)


def _final(values, seq_lens: np.ndarray) -> np.ndarray:
    x = _lengths("final_seq_lens", values, like=seq_lens)
    if (x < seq_lens).any():
        r = int(np.argmax(x < seq_lens))
        raise ValueError(
            f"final_seq_lens[{r}]={x[r]} is less than seq_lens[{r}]={seq_lens[r]}: "
            "it is the most tokens that the request will ever have"
        )
    return x


def _ranges(ranges, live: int, rows: int) -> np.ndarray:
    if len(ranges) != live:
        raise ValueError(f"mm_prefix_ranges has {len(ranges)} entries but query_lens has {live}: one list a request")
    known = isinstance(ranges, np.ndarray) and ranges.ndim == 3
    table = ranges.astype(np.int32) if known else compute_mm_prefix_range_tensor(ranges)
    return np.concatenate([table, np.zeros((rows - live, *table.shape[1:]), np.int32)])


def _at_least(name: str, size: int | None, n: int) -> int:
    if size is None:
        return n
    if size < n:
        raise ValueError(f"{name}={size} is less than the {n} given; pass None or a larger bucket")
    return size


def _pad(x: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate([x, np.zeros(n - len(x), x.dtype)])


def _table(block_table, seq_lens, block_size: int, rows: int, columns: int | None) -> np.ndarray | None:
    """The block table padded with NULL_BLOCK_ID; None stays None."""
    if block_table is None:
        return None
    if block_size < 1:
        raise ValueError(f"{block_size=} must be >= 1")
    table = np.asarray(block_table)
    if table.ndim != 2 or table.shape[0] != len(seq_lens) or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"block_table must be an integer array with one row a request, [{len(seq_lens)}, B]; "
            f"got shape {table.shape} of {table.dtype}"
        )
    needed = cdiv(int(seq_lens.max(initial=0)), block_size)
    if table.shape[1] < needed:
        r = int(np.argmax(seq_lens))
        raise ValueError(
            f"block_table has {table.shape[1]} columns but request {r} with seq_len={seq_lens[r]} "
            f"needs {needed} blocks of {block_size}"
        )
    if columns is not None and columns < needed:
        raise ValueError(f"max_blocks={columns} is less than the {needed} blocks that the longest request needs")
    width = table.shape[1] if columns is None else columns
    keep = min(width, table.shape[1])
    out = np.full((rows, max(width, 1)), NULL_BLOCK_ID, np.int32)
    out[: len(table), :keep] = np.clip(table[:, :keep], -(2**31), 2**31 - 1)
    return out
