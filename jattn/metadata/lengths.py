"""The parts of CommonAttentionMetadata.from_lengths: checked numpy arrays of lengths, blocks and slots."""

from itertools import pairwise

import numpy as np

from jattn.errors.arguments import INT32, as_array, integer, integers, optional, sequence_of, short, takes
from jattn.types import NULL_BLOCK_ID, PAD_SLOT_ID
from pallas_kernels.algebra.paging import cdiv

TRACED_WAY_OUT = "inside jit use CommonAttentionMetadata.from_traced"


def lengths_of(name: str, values, like=None) -> np.ndarray:
    """i32[n] of lengths >= 0; like: an array with the same number of them."""
    x = np.asarray(as_array(name, values, "integers", (), TRACED_WAY_OUT))
    if x.ndim != 1:
        raise ValueError(f"{name} must be a 1-D list of integers, got shape {x.shape} of {x.dtype}")
    if (x < 0).any():
        raise ValueError(f"{name}[{int(np.argmax(x < 0))}]={x[x < 0][0]} must be >= 0")
    if like is not None and len(x) != len(like):
        raise ValueError(f"{name} has {len(x)} entries but query_lens has {len(like)}: one of each for each request")
    return x.astype(np.int32)


def final_lengths_of(values, seq_lens: np.ndarray) -> np.ndarray:
    """i32[n] of lengths that are at least seq_lens."""
    x = lengths_of("final_seq_lens", values, like=seq_lens)
    if (x < seq_lens).any():
        r = int(np.argmax(x < seq_lens))
        raise ValueError(
            f"final_seq_lens[{r}]={x[r]} is less than seq_lens[{r}]={seq_lens[r]}: "
            "it must be the most tokens that the request will ever have"
        )
    return x


def causal_of(causal, num_live: int) -> np.ndarray | None:
    """bool[R]; None if `causal` is one bool."""
    if isinstance(causal, (bool, np.bool_)):
        return None
    each = np.asarray(as_array("causal", causal, "bools", (), TRACED_WAY_OUT))
    if each.shape != (num_live,):
        raise ValueError(f"causal.shape={each.shape} must be ({num_live},): one bool for each request, or one bool")
    return each


def check_new_tokens(query_lens: np.ndarray, seq_lens: np.ndarray, causal: np.ndarray | None) -> None:
    """ValueError if a causal request has fewer tokens than new tokens."""
    bad = seq_lens < query_lens if causal is None else (seq_lens < query_lens) & causal
    if bad.any():
        r = int(np.argmax(bad))
        raise ValueError(
            f"request {r}: seq_len={seq_lens[r]} is less than query_len={query_lens[r]}; "
            "seq_lens count computed and new tokens"
        )


def slots_of_tokens(
    query_lens: np.ndarray, seq_lens: np.ndarray, start: np.ndarray, table: np.ndarray, block_size: int
) -> np.ndarray:
    """The slot of each new token; ValueError for a block whose slots do not fit int32. start: query_start_loc[:-1]."""
    total, columns = int(query_lens.sum()), table.shape[1]
    row = np.repeat(np.arange(len(query_lens), dtype=np.int64) * columns, query_lens)
    position = np.arange(total, dtype=np.int32) + np.repeat(seq_lens - query_lens - start, query_lens)
    column = position // block_size
    place = position - column * block_size
    block = table.reshape(-1)[row + np.clip(column, 0, columns - 1)]
    if (largest := int(block.max())) >= 2**31 // block_size:
        raise ValueError(f"block_table holds block {largest} of {block_size} tokens: its slots are outside int32")
    slots = block * block_size + place
    return slots if position.min() >= 0 else np.where(position >= 0, slots, PAD_SLOT_ID)


def mm_prefix_ranges_of(ranges, num_live: int, rows: int) -> np.ndarray:
    """i32[rows n 2] of the ranges of `num_live` requests; see compute_mm_prefix_range_tensor."""
    shaped = isinstance(ranges, (list, tuple)) or getattr(ranges, "ndim", 0)
    if not shaped or len(ranges) != num_live:
        raise ValueError(
            f"mm_prefix_ranges={short(ranges)} must have {num_live} entries, as query_lens: one list for each request"
        )
    if getattr(ranges, "ndim", 0):
        table = np.asarray(as_array("mm_prefix_ranges", ranges, "integers", (3,), TRACED_WAY_OUT))
        if table.shape[2] != 2:
            raise ValueError(f"mm_prefix_ranges.shape={table.shape} must be [{num_live}, n, 2]: pairs (first, last)")
        _check_spans([[(int(a), int(b)) for a, b in row if a < b] for row in table])
    else:
        table = compute_mm_prefix_range_tensor(ranges)
    return np.concatenate([table, np.zeros((rows - num_live, *table.shape[1:]), np.int32)])


def at_least(name: str, size: int | None, n: int) -> int:
    """The static size to pad n entries to; None: n."""
    if size is None:
        return n
    if size < n:
        raise ValueError(f"{name}={size} is less than the {n} given; pass None or a larger bucket")
    return size


def padded_to(x: np.ndarray, n: int) -> np.ndarray:
    """x with zeros up to n entries."""
    return np.concatenate([x, np.zeros(n - len(x), x.dtype)])


def table_of(block_table, seq_lens, block_size: int, rows: int, columns: int | None) -> np.ndarray | None:
    """i32[rows columns], padded with NULL_BLOCK_ID; None stays None. Unused entries may be any integers."""
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
    if table.size and (table.min() < 0 or table.max() > INT32):  # an error only in a used entry
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
    """As a numpy array, of its own integer dtype."""
    table = block_table
    if not (isinstance(table, np.ndarray) and table.dtype.kind in "iu"):
        table = np.asarray(as_array("block_table", block_table, "integers", (), TRACED_WAY_OUT))
    if table.ndim == 1 and not table.size and not rows:
        table = table.reshape(0, 0)
    if table.ndim != 2 or table.shape[0] != rows:
        raise ValueError(
            f"block_table must be an integer array with one row for each request, [{rows}, B]; "
            f"got shape {table.shape} of {table.dtype}"
        )
    return table


def _pairs(name: str, value) -> tuple[tuple[int, int], ...]:
    """The (first, last) pairs of one request."""
    pairs = integers(1, 2, host="give the spans as numbers on the host")(name, value)
    if pairs.size and pairs.shape[1:] != (2,):
        raise ValueError(f"{name} must be pairs (first, last), got shape {pairs.shape}")
    return tuple((int(a), int(b)) for a, b in np.asarray(pairs).reshape(-1, 2))


@takes(ranges=sequence_of(_pairs), num_reqs=optional(integer(0)), max_ranges=optional(integer(0)))
def compute_mm_prefix_range_tensor(ranges, num_reqs: int | None = None, max_ranges: int | None = None) -> np.ndarray:
    """i32[num_reqs, max_ranges, 2] of inclusive (first, last) positions, from a list of pairs for each request.

    Unused entries are (0, 0): only pairs with first < last are spans. A size of None means no padding.
    """
    rows = len(ranges) if num_reqs is None else num_reqs
    width = max(map(len, ranges), default=0) if max_ranges is None else max_ranges
    if len(ranges) > rows or any(len(r) > width for r in ranges):
        raise ValueError(
            f"ranges: {len(ranges)} requests with {[len(r) for r in ranges]} ranges "
            f"do not fit [{rows}, {width}, 2], num_reqs and max_ranges"
        )
    _check_spans(ranges)
    out = np.zeros((rows, width, 2), np.int32)
    for r, pairs in enumerate(ranges):
        for i, pair in enumerate(pairs):
            out[r, i] = pair
    return out


def _check_spans(ranges) -> None:
    """ValueError unless the (first, last) pairs of each request are spans of positions that do not overlap."""
    for r, pairs in enumerate(ranges):
        for first, last in pairs:
            if not 0 <= first <= last:
                raise ValueError(f"request {r}: range ({first}, {last}) must be 0 <= first <= last, both inclusive")
        if any(a[1] >= b[0] for a, b in pairwise(sorted(pairs))):
            raise ValueError(f"request {r}: ranges {sorted(pairs)} overlap; a token may be in one span only")
