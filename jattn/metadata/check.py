"""check_host: checks the values of a batch on the host, before device_put."""

import numpy as np

from jattn.errors.arguments import integers, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.batch_checks import check_block_size
from pallas_kernels.algebra.paging import cdiv

_HOST = integers(1, host="call check_host before device_put, never inside jit")


def _with_pages(name: str, cache_spec):
    if cache_spec is not None and not (hasattr(cache_spec, "block_size") and hasattr(cache_spec, "num_blocks")):
        raise TypeError(f"{name} must be the cache's KVCacheSpec or None, got {type(cache_spec).__name__}")
    return cache_spec


@takes(meta=BATCH, cache_spec=_with_pages)
def check_host(meta: CommonAttentionMetadata, cache_spec=None) -> CommonAttentionMetadata:
    """Raise ValueError unless query_start_loc ascends, lengths fit the block table and used blocks are in the pool; or
    if token_is_row is True though it does not hold.

    Returns meta. cache_spec: None leaves out the checks of blocks and slots.
    """
    start = np.asarray(_HOST("meta.query_start_loc", meta.query_start_loc))
    seq = np.asarray(_HOST("meta.seq_lens", meta.seq_lens))
    if start.shape != (len(seq) + 1,):
        raise ValueError(f"meta.query_start_loc.shape={start.shape} must be (R + 1,) with {seq.shape=}")
    check_per_request(meta)
    query = np.diff(start)
    if start[0] != 0 or (query < 0).any():
        raise ValueError(f"query_start_loc={start} must start at 0 and not descend")
    if start[-1] > meta.num_tokens:
        raise ValueError(f"query_start_loc ends at {start[-1]}, past the {meta.num_tokens} packed tokens")
    if meta.token_is_row and not (len(seq) == meta.num_tokens and (query[: start[-1]] == 1).all()):
        raise ValueError(
            f"meta.token_is_row is True, but the {meta.num_tokens} tokens of requests with query_lens={query} are not "
            "one for each of the first requests; leave it False, and requests are searched for"
        )
    causal = np.broadcast_to(np.asarray(meta.causal), seq.shape)
    _first(causal & (seq < query), lambda r: f"request {r}: seq_len={seq[r]} is less than query_len={query[r]}")
    if meta.final_seq_lens is not None:
        end = np.asarray(meta.final_seq_lens)
        _first(end < seq, lambda r: f"request {r}: final_seq_len={end[r]} is less than seq_len={seq[r]}")
    for name, values, bound in (("query_len", query, meta.max_query_len), ("seq_len", seq, meta.max_seq_len)):
        _first(values > bound, lambda r, n=name, v=values, b=bound: f"request {r}: {n}={v[r]} is above max_{n}={b}")
    if meta.block_table is not None and cache_spec is not None:
        _check_pages(meta, seq, cache_spec)
    if meta.cross is not None:
        check_host(meta.cross, cache_spec)
    return meta


def _check_pages(meta, seq, cache_spec) -> None:
    size, blocks = check_block_size(meta, cache_spec.block_size, "cache_spec.block_size"), cache_spec.num_blocks
    table, slots = np.asarray(meta.block_table), np.asarray(meta.slot_mapping)
    used = cdiv(seq, size)
    _first(
        used > table.shape[1],
        lambda r: f"request {r}: seq_len={seq[r]} needs {used[r]} blocks of {size}, its table has {table.shape[1]}",
    )
    bad = (np.arange(table.shape[1]) < used[:, None]) & ((table < 0) | (table >= blocks))
    _first(bad.any(1), lambda r: f"request {r}: block {table[r][bad[r]][0]} is outside the pool of {blocks} blocks")
    _first(
        slots >= blocks * size,
        lambda t: f"slot_mapping[{t}]={slots[t]} is outside the pool of {blocks} x {size} slots",
    )


def _first(bad: np.ndarray, message) -> None:
    if bad.any():
        raise ValueError(message(int(np.argmax(bad))))


def check_per_request(meta: CommonAttentionMetadata) -> None:
    """ValueError unless `causal`, if it is an array, and final_seq_lens have one entry for each of the R requests."""
    for name, value in (("causal", meta.causal_per_request), ("final_seq_lens", meta.final_seq_lens)):
        if value is not None and np.shape(value) != (meta.max_num_reqs,):
            raise ValueError(
                f"meta.{name}.shape={np.shape(value)} must be ({meta.max_num_reqs},): one for each request, as seq_lens"
            )
