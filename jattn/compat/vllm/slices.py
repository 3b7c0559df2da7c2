"""Parts of a batch: neighbouring requests, or neighbouring tokens, as batches of their own.

Bounds are static Python ints, so the parts have static shapes. Their query_start_loc begins at 0. The queries of a part
are `q[token_start:token_stop]`. `.padded(...)` pads a part to a bucket.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jattn.errors.arguments import check_kind, integer, integers, kind, optional, sequence_of, short, takes
from jattn.metadata.batch import BATCH, PER_REQUEST, CommonAttentionMetadata
from jattn.metadata.buckets import query_len_bound
from jattn.metadata.host import array_module, is_traced, on_host
from jattn.types import PAD_SLOT_ID
from pallas_kernels.algebra.paging import cdiv

Split = tuple[int, int, int, int]


def _split(name: str, value) -> Split:
    if not isinstance(value, (tuple, list)) or len(value) != 4:
        raise ValueError(f"{name} must be the four numbers that split_decodes_and_prefills returns, got {short(value)}")
    decodes, prefills, decode_tokens, prefill_tokens = (integer(0)(name, n) for n in value)
    return decodes, prefills, decode_tokens, prefill_tokens


@dataclasses.dataclass(frozen=True)
class UbatchSlice:
    """One micro-batch. A request may be divided between two micro-batches."""

    request_slice: slice  # of its requests
    token_slice: slice  # of its packed tokens


@takes(meta=BATCH, start=integer(), stop=integer(), token_start=optional(integer()), token_stop=optional(integer()))
def slice_requests(
    meta: CommonAttentionMetadata,
    start: int,
    stop: int,
    token_start: int | None = None,
    token_stop: int | None = None,
) -> CommonAttentionMetadata:
    """Requests start .. stop-1 with tokens token_start .. token_stop-1 (None: all their tokens) as a batch.

    A request that ends after token_stop loses its last tokens, and its seq_len decreases. The other tokens keep
    their positions and see the same keys. Inside jit the token bounds must be given.
    """
    if not 0 <= start <= stop <= meta.max_num_reqs:
        raise ValueError(f"{start=}, {stop=} must be within the batch's {meta.max_num_reqs} requests, in order")
    if token_start is None or token_stop is None:
        host = on_host(meta.query_start_loc, "slice_requests", "give token_start and token_stop")
        token_start = int(host[start]) if token_start is None else token_start
        token_stop = int(host[stop]) if token_stop is None else token_stop
    if not 0 <= token_start <= token_stop <= meta.num_tokens:
        raise ValueError(f"{token_start=}, {token_stop=} must be within the {meta.num_tokens} packed tokens, in order")
    xp = array_module(meta.query_start_loc, meta.seq_lens, meta.slot_mapping)
    bounds = meta.query_start_loc[start : stop + 1]
    if not is_traced(bounds) and token_start < bounds[0] and start < stop:
        raise ValueError(f"{token_start=} is before the first token of request {start}, {int(bounds[0])}")
    inside = xp.clip(bounds, token_start, token_stop)
    slots = meta.slot_mapping[token_start:token_stop]  # tokens of later requests are padding
    slots = xp.where(xp.arange(token_start, token_stop) < inside[-1], slots, np.int32(PAD_SLOT_ID))
    lost = xp.where(bounds[:-1] < token_stop, bounds[1:] - inside[1:], 0)
    rows = slice(start, stop)
    part = {name: None if (x := getattr(meta, name)) is None else x[rows] for name in PER_REQUEST}
    part["seq_lens"] = part["seq_lens"] - xp.maximum(lost, 0)
    if not is_traced(lost, part["seq_lens"]):
        _check_cut(meta, rows, np.asarray(lost) > 0, np.asarray(part["seq_lens"]), token_stop)
    return meta.replace(
        query_start_loc=inside - token_start,
        slot_mapping=slots,
        num_reqs=_int32(xp.clip(meta.num_reqs - start, 0, stop - start), xp),
        num_actual_tokens=_int32(inside[-1] - token_start, xp),
        logits_indices=_rebased(meta.logits_indices, token_start, token_stop),
        cross=None if meta.cross is None else slice_requests(meta.cross, start, stop),
        max_query_len=_query_bound(meta, inside, token_stop - token_start),
        **part,
    )


@takes(meta=BATCH, split=_split)
def decode_metadata(meta: CommonAttentionMetadata, split: Split) -> CommonAttentionMetadata | None:
    """The decodes of split = split_decodes_and_prefills(meta); None if there are none."""
    decodes, _, tokens, _ = split
    return slice_requests(meta, 0, decodes, 0, tokens) if tokens else None


@takes(meta=BATCH, split=_split)
def prefill_metadata(meta: CommonAttentionMetadata, split: Split) -> CommonAttentionMetadata | None:
    """The prefills of split, with the batch's padding; None if there are none."""
    decodes, _, tokens, prefill_tokens = split
    return slice_requests(meta, decodes, meta.max_num_reqs, tokens, meta.num_tokens) if prefill_tokens else None


@takes(query_start_loc=integers(1), request_slice=kind(slice))
def slice_query_start_locs(query_start_loc, request_slice: slice):
    """i32[n+1] the starts of neighbouring requests, counted from the first of them."""
    if not query_start_loc.shape[0]:
        raise ValueError("query_start_loc must have R + 1 entries, got none")
    first, last = _bounds("request_slice", request_slice, query_start_loc.shape[0] - 1)
    return query_start_loc[first : last + 1] - query_start_loc[first]


@takes(meta=BATCH, num_ubatches=integer(1))
def ubatch_slices(meta: CommonAttentionMetadata, num_ubatches: int = 2, split_points=None) -> tuple[UbatchSlice, ...]:
    """Micro-batches with about equal numbers of tokens, or divided at the packed tokens `split_points`. Host only."""
    bounds = on_host(meta.query_start_loc, "ubatch_slices", "choose the slices before jit")
    total = int(bounds[-1])
    if split_points is None:
        split_points = [cdiv(total * i, num_ubatches) for i in range(1, num_ubatches)]
    cuts = [0, *np.atleast_1d(np.asarray(_POINTS("split_points", split_points))).tolist(), total]
    if any(a >= b for a, b in zip(cuts, cuts[1:], strict=False)):
        raise ValueError(f"{split_points=} must ascend strictly between 0 and the {total} live tokens of the batch")
    live = bounds[: int(meta.num_reqs) + 1]
    return tuple(
        UbatchSlice(
            slice(int(np.searchsorted(live, a, side="right")) - 1, int(np.searchsorted(live, b, side="left"))),
            slice(a, b),
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    )


@takes(meta=BATCH)
def split_attn_metadata(slices: Sequence[UbatchSlice], meta: CommonAttentionMetadata) -> list[CommonAttentionMetadata]:
    """The batch of each micro-batch."""
    parts = []
    for i, s in enumerate(sequence_of(kind(UbatchSlice))("slices", slices)):
        start, stop = _bounds(f"slices[{i}].request_slice", s.request_slice, meta.max_num_reqs)
        parts.append(
            slice_requests(meta, start, stop, *_bounds(f"slices[{i}].token_slice", s.token_slice, meta.num_tokens))
        )
    return parts


_POINTS = integers(0, 1, host="choose the slices before jit")


def _bounds(name: str, part: slice, size: int) -> tuple[int, int]:
    """(start, stop) of a slice of step 1."""
    check_kind(name, part, slice)
    if part.step not in (None, 1):
        raise ValueError(f"{name}={part} must have step 1")
    for bound in (part.start, part.stop):
        if bound is not None:
            integer()(name, bound)
    return part.indices(size)[:2]


def _check_cut(meta: CommonAttentionMetadata, rows: slice, cut: np.ndarray, left: np.ndarray, token_stop: int) -> None:
    """ValueError if a request that is cut has metadata that depends on the lost tokens. left: tokens that remain."""
    if not cut.any():
        return
    if meta.dcp_local_seq_lens is not None:
        raise ValueError(
            "cutting a request changes its dcp_local_seq_lens: cut first, then call get_dcp_local_seq_lens"
        )
    if meta.mm_prefix_ranges is not None:
        first, last = np.moveaxis(np.asarray(meta.mm_prefix_ranges)[rows], 2, 0)
        inside = (cut[:, None] & (first < left[:, None]) & (left[:, None] <= last)).any(axis=1)
        if inside.any():
            raise ValueError(
                f"request {rows.start + int(np.argmax(inside))} is cut at token {token_stop}, inside a span of "
                "mm_prefix_ranges: its first tokens see its last keys; cut between spans"
            )
    both_ways = cut & ~np.broadcast_to(np.asarray(meta.causal), (meta.max_num_reqs,))[rows]
    if both_ways.any():
        raise ValueError(
            f"request {rows.start + int(np.argmax(both_ways))} is not causal and cannot be cut at token {token_stop}: "
            "its first tokens see its last keys; cut between requests"
        )


def _int32(x, xp):
    return xp.asarray(x, xp.int32)


def _rebased(indices, token_start: int, token_stop: int):
    """Token indices counted from token_start; -1 for those outside the part."""
    if indices is None:
        return None
    xp = array_module(indices)
    return xp.where((indices >= token_start) & (indices < token_stop), indices - token_start, -1)


def _query_bound(meta: CommonAttentionMetadata, starts, num_tokens: int) -> int:
    """The part's max_query_len: from its lengths if they are on the host, else the batch's."""
    if is_traced(starts):
        return meta.max_query_len
    longest = int(np.diff(np.asarray(starts)).max(initial=0))
    return min(meta.max_query_len, query_len_bound(longest, num_tokens))
