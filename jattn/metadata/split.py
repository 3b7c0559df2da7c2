"""Counting the decodes at the front of an ordered batch: host functions of the lengths.

    [ decode | decode | extend | prefill | prefill | padding ]
      short, has context | long, has context | no context

The counts are Python ints, because they become static bounds (slices.py). Inside jit no split is needed:
every backend masks by length.
"""

import numpy as np

from jattn.errors.arguments import as_array, boolean, integer, integers, takes
from jattn.metadata.common import BATCH, CommonAttentionMetadata
from jattn.metadata.host import on_host

_WAY_OUT = "split on the host, before jit, and pass the pieces in"


@takes(common=BATCH, decode_threshold=integer(0), require_uniform=boolean, treat_short_extends_as_decodes=boolean)
def split_decodes_and_prefills(
    common: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    is_prefilling=None,
) -> tuple[int, int, int, int]:
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch with its decodes in
    front.

    A decode has at most decode_threshold new tokens. require_uniform: the decodes are the leading requests as
    long as the first (a length of 0 is padding and fits anywhere). treat_short_extends_as_decodes=False
    counts a request whose bool[R] is_prefilling is set as a prefill, however few tokens it has.
    """
    query, seq = _live(common)
    late = query > decode_threshold
    if require_uniform and not late[:1].any():
        late = (query != query[:1]) & (query > 0)
    if not treat_short_extends_as_decodes:
        if is_prefilling is None:
            raise ValueError(
                "treat_short_extends_as_decodes=False needs is_prefilling, bool[R]: a length alone "
                "does not tell a short piece of a prompt from a decode"
            )
        late = late | (_per_request("is_prefilling", is_prefilling, common)[: len(query)] & (query > 0))
    first = _first(late)
    if not require_uniform:
        _refuse_decodes(~late & (query > 0) & (seq > query), first, query, decode_threshold)
    decode_tokens = int(query[:first].sum())
    return first, len(query) - first, decode_tokens, int(query.sum()) - decode_tokens


@takes(common=BATCH, decode_threshold=integer(0))
def split_decodes_prefills_and_extends(
    common: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """(decodes, extends, prefills, then the tokens of each) of a batch in that order.

    Longer than the threshold with context: extend; without: prefill. What stands after the first prefill is
    one.
    """
    query, seq = _live(common)
    is_long = query > decode_threshold
    first_long, first_prefill = _first(is_long), _first(is_long & (seq == query))
    has_context = (query > 0) & (seq > query)
    _refuse_decodes(~is_long & has_context, first_long, query, decode_threshold)
    behind = np.flatnonzero(has_context[first_prefill:])
    if behind.size:
        raise ValueError(
            f"request {first_prefill + behind[0]} has context but stands behind the prefill of request "
            f"{first_prefill}; order the batch with reorder_batch_to_split_decodes_and_prefills"
        )
    counts = np.diff([0, first_long, first_prefill, len(query)])
    ends = np.concatenate([[0], np.cumsum(query)])[[0, first_long, first_prefill, len(query)]]
    return (*(int(n) for n in counts), *(int(n) for n in np.diff(ends)))


@takes(seq_lens=integers(1, host=_WAY_OUT), workspace_size=integer(0), request_offset=integer())
def split_prefill_chunks(seq_lens, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Runs (first, last + 1) of requests that fit the workspace together, packed greedily in order."""
    lens = on_host(seq_lens, "split_prefill_chunks", _WAY_OUT)
    if (lens > workspace_size).any():
        r = int(np.argmax(lens > workspace_size))
        raise ValueError(f"seq_lens[{r}]={lens[r]} is above {workspace_size=}: enlarge it to the longest request")
    chunks, start, total = [], 0, 0
    for i, n in enumerate(lens.tolist()):
        if total + n > workspace_size:
            chunks.append((start + request_offset, i + request_offset))
            start, total = i, 0
        total += n
    return [*chunks, (start + request_offset, len(lens) + request_offset)] if len(lens) else []


def _live(common: CommonAttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
    """(query_lens, seq_lens) of the live requests."""
    start = on_host(common.query_start_loc, "a split into decodes and prefills", _WAY_OUT)
    live = int(common.num_reqs)
    return np.diff(start)[:live], np.asarray(common.seq_lens)[:live]


def _per_request(name: str, values, common: CommonAttentionMetadata) -> np.ndarray:
    x = np.asarray(as_array(name, values, "bools", (), _WAY_OUT))
    if x.ndim != 1 or len(x) < int(common.num_reqs):
        raise ValueError(f"{name}.shape={x.shape} must be [R]: one bool for each of {int(common.num_reqs)} requests")
    return x


def _first(flags: np.ndarray) -> int:
    """Index of the first True, or the length."""
    return int(np.argmax(flags)) if flags.any() else len(flags)


def _refuse_decodes(is_decode: np.ndarray, first: int, query: np.ndarray, threshold: int) -> None:
    behind = np.flatnonzero(is_decode[first:])
    if behind.size:
        r = first + int(behind[0])
        raise ValueError(
            f"request {r} with query_len={query[r]} is a decode (decode_threshold={threshold}) but stands "
            f"behind the prefill of request {first} with query_len={query[first]}; "
            "order the batch with reorder_batch_to_split_decodes_and_prefills"
        )
