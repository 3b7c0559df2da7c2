"""Decodes first: ordering a batch by a permutation, and counting what stands at the front of an ordered batch.

    region   0 decode          context, short, prompt finished      3 prefill   no context
             1 short extend    context, short, still in its prompt  4 padding   no tokens at all
             2 long extend     context, long

    new[i] = old[perm[i]]      rows already in the right region stay: perm moves as few rows as possible

The order works on numpy (host) and on traced arrays. The counts are Python ints, because they become static bounds
(slices.py), so they need host arrays. jattn's own backends need neither: they mask by length.
"""

import numpy as np

from jattn.errors.arguments import as_array, boolean, booleans, integer, integers, optional, takes
from jattn.metadata.batch import BATCH, PER_REQUEST, CommonAttentionMetadata
from jattn.metadata.host import array_module, is_traced, on_host, segment_of, starts_of
from jattn.types import PAD_SLOT_ID

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


DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL, PADDING = range(5)
_FLAGS = optional(booleans(1))


@takes(common=BATCH, decode_threshold=integer(0), is_prefilling=_FLAGS)
def reorder_batch_to_split_decodes_and_prefills(
    common: CommonAttentionMetadata, decode_threshold: int = 1, *, is_prefilling=None
):
    """(perm i32[R], modified): the smallest move that puts the batch's regions in order.

    modified is a bool on the host and a traced bool[] inside jit. Apply with apply_permutation.
    """
    xp = array_module(common.query_start_loc, common.seq_lens)
    query = common.query_start_loc[1:] - common.query_start_loc[:-1]
    region = batch_regions(query, common.seq_lens - query, decode_threshold, is_prefilling)
    perm = region_permutation(region)
    modified = (perm != xp.arange(perm.shape[0])).any()
    return perm, modified if is_traced(modified) else bool(modified)


@takes(query_lens=integers(1), num_computed_tokens=integers(1), decode_threshold=integer(0), is_prefilling=_FLAGS)
def batch_regions(query_lens, num_computed_tokens, decode_threshold: int = 1, is_prefilling=None):
    """i32[R] the region of each request; is_prefilling bool[R] tells short extends from decodes (None: all
    decodes).
    """
    for name, x in (("num_computed_tokens", num_computed_tokens), ("is_prefilling", is_prefilling)):
        if x is not None and x.shape != query_lens.shape:
            raise ValueError(f"{name}.shape={x.shape} must be {query_lens.shape}, as query_lens")
    xp = array_module(query_lens, num_computed_tokens, is_prefilling)
    query, computed = xp.asarray(query_lens), xp.asarray(num_computed_tokens)
    short = DECODE if is_prefilling is None else xp.where(xp.asarray(is_prefilling, bool), SHORT_EXTEND, DECODE)
    region = xp.where(query <= decode_threshold, short, LONG_EXTEND)
    region = xp.where(computed > 0, region, PREFILL)
    return xp.where((query == 0) & (computed <= 0), PADDING, region).astype(xp.int32)


@takes(region=integers(1))
def region_permutation(region):
    """i32[R] perm with region[perm] sorted: misplaced rows trade places in stable order, all others keep
    theirs.
    """
    xp = array_module(region)
    region = xp.asarray(region)
    misplaced = region != xp.sort(region)
    source = xp.argsort(xp.where(misplaced, region, PADDING + 1), stable=True)
    rank = xp.cumsum(misplaced) - 1
    return xp.where(misplaced, source[rank], xp.arange(region.shape[0])).astype(xp.int32)


@takes(perm=integers(1))
def inverse_permutation(perm):
    """The permutation that undoes perm: inverse[perm[i]] = i."""
    _check_values(perm)
    xp = array_module(perm)
    return xp.argsort(xp.asarray(perm), stable=True).astype(xp.int32)


@takes(meta=BATCH, perm=integers(1))
def token_permutation(meta: CommonAttentionMetadata, perm):
    """i32[T] for packed arrays: q of the reordered batch is q[token_permutation(meta, perm)]; pad tokens
    stay.

    Outputs go back with its inverse: attend(reordered)[inverse_permutation(...)] equals attend(as given).
    """
    _check_perm(meta, perm)
    xp = array_module(meta.query_start_loc, perm)
    old = xp.asarray(meta.query_start_loc)
    new = starts_of((old[1:] - old[:-1])[perm], xp)
    token = xp.arange(meta.num_tokens, dtype=xp.int32)
    req = segment_of(new[1:], meta.num_tokens, xp)
    moved = old[:-1][perm][req] + token - new[:-1][req]
    return xp.where(token < new[-1], moved, token)


@takes(meta=BATCH, perm=integers(1))
def apply_permutation(meta: CommonAttentionMetadata, perm) -> CommonAttentionMetadata:
    """The batch with request i replaced by old request perm[i], tokens along with it (encoder tokens too, in
    .cross).

    perm must leave padding behind the live requests, as region_permutation does.
    """
    xp = array_module(meta.query_start_loc, meta.seq_lens, perm)
    tokens = token_permutation(meta, perm)
    logits = meta.logits_indices
    if logits is not None:
        inside = (logits >= 0) & (logits < meta.num_tokens)
        where = inverse_permutation(tokens)[xp.where(inside, logits, 0)]
        logits = xp.where(inside, where, PAD_SLOT_ID)
    start = xp.asarray(meta.query_start_loc)
    return meta.replace(
        query_start_loc=starts_of((start[1:] - start[:-1])[perm], xp),
        slot_mapping=xp.asarray(meta.slot_mapping)[tokens],
        logits_indices=logits,
        cross=None if meta.cross is None else apply_permutation(meta.cross, perm),
        **{name: None if (x := getattr(meta, name)) is None else xp.asarray(x)[perm] for name in PER_REQUEST},
    )


@takes(
    threshold=optional(integer(0)),
    num_speculative_tokens=optional(integer(0)),
    dcp_size=integer(1),
    supports_spec_as_decode=boolean,
    supports_dcp_with_varlen=boolean,
)
def decode_threshold(
    threshold: int | None = 1,
    num_speculative_tokens: int | None = None,
    dcp_size: int = 1,
    *,
    supports_spec_as_decode: bool = False,
    supports_dcp_with_varlen: bool = False,
) -> int | None:
    """The longest query that a backend wants in front: 1, or 1 + speculated tokens; context parallelism
    clamps last.

    None means that the backend does not ask for an order.
    """
    if threshold is not None and supports_spec_as_decode and num_speculative_tokens is not None:
        threshold = max(threshold, 1 + num_speculative_tokens)
    if dcp_size > 1 and not supports_dcp_with_varlen:
        threshold = 1
    return threshold


def _check_perm(meta: CommonAttentionMetadata, perm) -> None:
    if perm.shape != (meta.max_num_reqs,):
        raise ValueError(
            f"perm.shape={perm.shape} must be ({meta.max_num_reqs},): a permutation of the batch's requests"
        )
    _check_values(perm)


def _check_values(perm) -> None:
    """Only numpy's values are looked at: another array's would have to be waited for."""
    if isinstance(perm, np.ndarray) and (np.sort(perm) != np.arange(len(perm))).any():
        raise ValueError(f"perm={perm} must hold each of 0 .. {len(perm) - 1} once")
