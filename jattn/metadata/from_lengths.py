"""Metadata from lengths: on the host in numpy, and its traced twin for loops on the device."""

import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import INT32, as_array, integer, integers, optional, short, takes
from jattn.metadata.buckets import power_of_two, query_len_bound
from jattn.metadata.common import CommonAttentionMetadata
from jattn.metadata.ranges import compute_mm_prefix_range_tensor
from jattn.types import NULL_BLOCK_ID, PAD_SLOT_ID
from pallas_kernels.algebra.paging import cdiv, slots_of

_WAY_OUT = "inside jit use CommonAttentionMetadata.from_traced"
_SIZE = optional(integer(0))


@takes(block_size=integer(1), num_tokens=_SIZE, num_reqs=_SIZE, max_blocks=_SIZE, num_encoder_tokens=_SIZE)
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
    them. rswa_prefix_lens: a number per request. final_seq_lens: the most tokens that each request will have, for
    rotary angles that depend on it (longrope, dynamic NTK). block_table may be None without a cache. encoder_seq_lens
    adds `.cross`, with the pages cross_block_table and packed tokens padded to num_encoder_tokens.
    """
    q = _lengths("query_lens", query_lens)
    s = _lengths("seq_lens", seq_lens, like=q)
    live, total = len(q), int(q.sum(dtype=np.int64))
    if total > INT32:
        raise ValueError(f"query_lens add up to {total} tokens, which is outside int32; split the batch")
    width_r = _at_least("num_reqs", num_reqs, live)
    width_t = _at_least("num_tokens", num_tokens, total)
    per_request_causal = _causal(causal, live)
    is_causal = bool(causal) if per_request_causal is None else True
    if block_table is not None and is_causal:
        _check_new(q, s, per_request_causal)
    start = np.zeros(width_r + 1, np.int32)
    np.cumsum(q, out=start[1 : live + 1])
    start[live + 1 :] = total
    table = _table(block_table, s, block_size, width_r, max_blocks)
    slots = np.full(width_t, PAD_SLOT_ID, np.int32)
    if table is not None and total:
        slots[:total] = _slots(q, s, start[:live], table, block_size)
    if table is not None:
        longest = table.shape[1] * block_size
    else:
        longest = power_of_two(int(s.max(initial=1)))
    encoder = None
    if encoder_seq_lens is not None:
        e = _lengths("encoder_seq_lens", encoder_seq_lens, like=q)
        encoder = _encoder(e, cross_block_table, block_size, num_encoder_tokens, width_r)
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
        is_causal=is_causal,
        block_size=None if table is None else block_size,
    )


@takes(
    query_start_loc=integers(1),
    seq_lens=integers(1),
    block_table=optional(integers(2)),
    block_size=integer(1),
    num_tokens=integer(0),
    max_query_len=optional(integer(0)),
    max_seq_len=optional(integer(0)),
    final_seq_lens=optional(integers(1)),
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
    """The same from device arrays i32[R+1], i32[R], i32[R B]; static sizes must be given, no value is checked.

    num_reqs counts up to the last request that has a token or a length.
    """
    start = jnp.asarray(query_start_loc, jnp.int32)
    seq_lens = jnp.asarray(seq_lens, jnp.int32)
    rows = seq_lens.shape[0]
    if start.shape != (rows + 1,):
        raise ValueError(f"query_start_loc.shape={start.shape} must be (R + 1,) beside seq_lens.shape=({rows},)")
    if block_table is not None and block_table.shape[0] != rows:
        raise ValueError(f"block_table.shape={block_table.shape} must have one row a request, {rows}")
    one = isinstance(causal, (bool, np.bool_))
    each = None if one else as_array("causal", causal, "bools", (1,))
    if each is not None and each.shape != (rows,):
        raise ValueError(f"causal.shape={each.shape} must be ({rows},): one bool a request, or one bool")
    if final_seq_lens is not None and final_seq_lens.shape != (rows,):
        raise ValueError(f"final_seq_lens.shape={final_seq_lens.shape} must be ({rows},): one length a request")
    used = (start[1:] > start[:-1]) | (seq_lens > 0)
    last = jnp.max(jnp.where(used, jnp.arange(1, rows + 1), 0), initial=0)
    meta = CommonAttentionMetadata(
        query_start_loc=start,
        seq_lens=seq_lens,
        block_table=None if block_table is None else jnp.asarray(block_table, jnp.int32),
        slot_mapping=jnp.full(num_tokens, PAD_SLOT_ID, jnp.int32),
        num_reqs=last.astype(jnp.int32),
        num_actual_tokens=start[-1],
        causal_per_request=None if each is None else jnp.asarray(each),
        final_seq_lens=None if final_seq_lens is None else jnp.asarray(final_seq_lens, jnp.int32),
        max_query_len=num_tokens if max_query_len is None else max_query_len,
        max_seq_len=max_seq_len
        if max_seq_len is not None
        else num_tokens
        if block_table is None
        else block_table.shape[1] * block_size,
        is_causal=bool(causal) if one else True,
        block_size=None if block_table is None else block_size,
    )
    if block_table is None or not rows:
        return meta
    slots = slots_of(meta.block_table, meta.token_to_req(), meta.positions(), block_size)
    return meta.replace(slot_mapping=jnp.where(meta.token_is_live(), slots, PAD_SLOT_ID).astype(jnp.int32))


def _lengths(name: str, values, like=None) -> np.ndarray:
    x = np.asarray(as_array(name, values, "integers", (), _WAY_OUT))
    if x.ndim != 1:
        raise ValueError(f"{name} must be a 1-D list of integers, got shape {x.shape} of {x.dtype}")
    if (x < 0).any():
        raise ValueError(f"{name}[{int(np.argmax(x < 0))}]={x[x < 0][0]} must be >= 0")
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


def _encoder(lens: np.ndarray, table, block_size: int, num_tokens: int | None, rows: int) -> CommonAttentionMetadata:
    try:
        return from_lengths(lens, lens, table, block_size, num_tokens=num_tokens, num_reqs=rows, causal=False)
    except ValueError as error:
        given = "encoder_seq_lens" if table is None else "encoder_seq_lens with cross_block_table"
        raise ValueError(f"{given} (num_tokens: num_encoder_tokens): {error}") from None


def _causal(causal, live: int) -> np.ndarray | None:
    """bool[R], or None for one bool."""
    if isinstance(causal, (bool, np.bool_)):
        return None
    each = np.asarray(as_array("causal", causal, "bools", (), _WAY_OUT))
    if each.shape != (live,):
        raise ValueError(f"causal.shape={each.shape} must be ({live},): one bool a request, or one bool")
    return each


def _check_new(q: np.ndarray, s: np.ndarray, causal: np.ndarray | None) -> None:
    short = s < q if causal is None else (s < q) & causal
    if short.any():
        r = int(np.argmax(short))
        raise ValueError(
            f"request {r}: seq_len={s[r]} is less than query_len={q[r]}; seq_lens count computed AND new tokens"
        )


def _slots(q: np.ndarray, s: np.ndarray, start: np.ndarray, table: np.ndarray, block_size: int) -> np.ndarray:
    """Where each new token is written; a block whose slots would not be int32 is refused."""
    total = int(q.sum())
    req = np.repeat(np.arange(len(q)), q)
    position = np.arange(total) + np.repeat(s - q - start, q)
    column = np.clip(position // block_size, 0, table.shape[1] - 1)
    block = table[req, column]
    if (largest := int(block.max())) >= 2**31 // block_size:
        raise ValueError(f"block_table holds block {largest} of {block_size} tokens: its slots are outside int32")
    return np.where(position >= 0, block * block_size + position % block_size, PAD_SLOT_ID)


def _ranges(ranges, live: int, rows: int) -> np.ndarray:
    shaped = isinstance(ranges, (list, tuple)) or getattr(ranges, "ndim", 0)
    if not shaped or len(ranges) != live:
        raise ValueError(
            f"mm_prefix_ranges={short(ranges)} must have {live} entries, as query_lens: one list a request"
        )
    known = isinstance(ranges, np.ndarray) and ranges.ndim == 3
    table = as_array("mm_prefix_ranges", ranges, "integers") if known else compute_mm_prefix_range_tensor(ranges)
    if table.shape[2] != 2:
        raise ValueError(f"mm_prefix_ranges.shape={table.shape} must be [{live}, n, 2]: pairs (first, last)")
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
    """The block table padded with NULL_BLOCK_ID; None stays None. Unused entries may be any integer."""
    if block_table is None:
        return None
    table = _host_table(block_table, len(seq_lens))
    needed = cdiv(int(seq_lens.max(initial=0)), block_size)
    if table.shape[1] < needed:
        r = int(np.argmax(seq_lens))
        raise ValueError(
            f"block_table has {table.shape[1]} columns but request {r} with seq_len={seq_lens[r]} "
            f"needs {needed} blocks of {block_size} (block_size)"
        )
    if columns is not None and columns < needed:
        raise ValueError(f"max_blocks={columns} is less than the {needed} blocks that the longest request needs")
    width = table.shape[1] if columns is None else columns
    table = table[:, :width]
    if table.size and (table.min() < 0 or table.max() > INT32):  # maybe only in unused columns
        used = np.arange(table.shape[1]) < cdiv(seq_lens.astype(np.int64), block_size)[:, None]
        bad = used & ((table < 0) | (table > INT32))
        if bad.any():
            r, column = (int(x) for x in np.argwhere(bad)[0])
            raise ValueError(f"block_table[{r}, {column}]={table[r, column]} must be a block id >= 0, within int32")
        table = np.clip(table, -(2**31), INT32)
    out = np.full((rows, max(width, 1)), NULL_BLOCK_ID, np.int32)
    out[: len(table), : table.shape[1]] = table
    return out


def _host_table(block_table, rows: int) -> np.ndarray:
    """As numpy, in the integers that it came in."""
    table = block_table
    if not (isinstance(table, np.ndarray) and table.dtype.kind in "iu"):
        table = np.asarray(as_array("block_table", block_table, "integers", (), _WAY_OUT))
    if table.ndim == 1 and not table.size and not rows:
        table = table.reshape(0, 0)
    if table.ndim != 2 or table.shape[0] != rows:
        raise ValueError(
            f"block_table must be an integer array with one row a request, [{rows}, B]; got shape {table.shape} of "
            f"{table.dtype}"
        )
    return table
