"""Ordering a batch so that decodes come first, and counting the decodes and prefills of an ordered batch.

    region   0 decode          computed tokens, short query, prompt finished       3 prefill   no computed tokens
             1 short extend    computed tokens, short query, prompt not finished   4 padding   no tokens
             2 long extend     computed tokens, long query

    new[i] = old[perm[i]]      rows in the right region keep their place, so perm moves as few rows as possible

A batch can be ordered on the host and inside jit. It is counted on the host: the counts are Python ints, because they
become static bounds of slices (slices.py). jattn's own backends need neither.
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
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch with its decodes first.

    A decode has at most decode_threshold new tokens. require_uniform: the decodes are the first requests, as far as
    their query lengths are equal (or 0, for padding). treat_short_extends_as_decodes=False: a request with
    is_prefilling, bool[R], is a prefill even if it has few tokens.
    """
    query, seq = _live(common)
    is_prefill = query > decode_threshold
    if require_uniform and not is_prefill[:1].any():
        is_prefill = (query != query[:1]) & (query > 0)
    if not treat_short_extends_as_decodes:
        if is_prefilling is None:
            raise ValueError(
                "treat_short_extends_as_decodes=False needs is_prefilling, bool[R]: a length alone "
                "does not distinguish a short piece of a prompt from a decode"
            )
        is_prefill = is_prefill | (_per_request("is_prefilling", is_prefilling, common)[: len(query)] & (query > 0))
    first = _first(is_prefill)
    if not require_uniform:
        _refuse_decodes(~is_prefill & (query > 0) & (seq > query), first, query, decode_threshold)
    decode_tokens = int(query[:first].sum())
    return first, len(query) - first, decode_tokens, int(query.sum()) - decode_tokens


@takes(common=BATCH, decode_threshold=integer(0))
def split_decodes_prefills_and_extends(
    common: CommonAttentionMetadata, decode_threshold: int = 1
) -> tuple[int, int, int, int, int, int]:
    """(decodes, extends, prefills, and the numbers of tokens of each) of a batch in that order.

    A request with more than decode_threshold new tokens is an extend if it has computed tokens, else a prefill. All
    requests after the first prefill must be prefills.
    """
    query, seq = _live(common)
    is_long = query > decode_threshold
    first_long, first_prefill = _first(is_long), _first(is_long & (seq == query))
    has_context = (query > 0) & (seq > query)
    _refuse_decodes(~is_long & has_context, first_long, query, decode_threshold)
    misplaced = np.flatnonzero(has_context[first_prefill:])
    if misplaced.size:
        raise ValueError(
            f"request {first_prefill + misplaced[0]} has computed tokens but comes after the prefill of request "
            f"{first_prefill}; order the batch with reorder_batch_to_split_decodes_and_prefills"
        )
    bounds = [0, first_long, first_prefill, len(query)]
    decodes, extends, prefills = np.diff(bounds).tolist()
    tokens = np.concatenate([[0], np.cumsum(query)])[bounds]
    decode_tokens, extend_tokens, prefill_tokens = np.diff(tokens).astype(int).tolist()
    return decodes, extends, prefills, decode_tokens, extend_tokens, prefill_tokens


@takes(seq_lens=integers(1, host=_WAY_OUT), workspace_size=integer(0), request_offset=integer())
def split_prefill_chunks(seq_lens, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Ranges (first, last + 1) of neighbouring requests whose lengths add up to at most workspace_size; greedy."""
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
    """ValueError if a request from `first` on, the first prefill, is a decode."""
    misplaced = np.flatnonzero(is_decode[first:])
    if misplaced.size:
        r = first + int(misplaced[0])
        raise ValueError(
            f"request {r} with query_len={query[r]} is a decode (decode_threshold={threshold}) but comes "
            f"after the prefill of request {first} with query_len={query[first]}; "
            "order the batch with reorder_batch_to_split_decodes_and_prefills"
        )


DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL, PADDING = range(5)
_FLAGS = optional(booleans(1))


@takes(common=BATCH, decode_threshold=integer(0), is_prefilling=_FLAGS)
def reorder_batch_to_split_decodes_and_prefills(
    common: CommonAttentionMetadata, decode_threshold: int = 1, *, is_prefilling=None
):
    """(perm i32[R], modified): the permutation that orders the batch by region and moves the fewest requests.

    modified: does it change the order? A bool on the host, a traced bool[] inside jit. See apply_permutation.
    """
    xp = array_module(common.query_start_loc, common.seq_lens)
    query = common.query_start_loc[1:] - common.query_start_loc[:-1]
    region = batch_regions(query, common.seq_lens - query, decode_threshold, is_prefilling)
    perm = region_permutation(region)
    modified = (perm != xp.arange(perm.shape[0])).any()
    return perm, modified if is_traced(modified) else bool(modified)


@takes(query_lens=integers(1), num_computed_tokens=integers(1), decode_threshold=integer(0), is_prefilling=_FLAGS)
def batch_regions(query_lens, num_computed_tokens, decode_threshold: int = 1, is_prefilling=None):
    """i32[R] the region of each request. is_prefilling: bool[R] of short extends; None: there are none."""
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
    """i32[R] perm with region[perm] sorted. Only rows outside their region move, in stable order."""
    xp = array_module(region)
    region = xp.asarray(region)
    misplaced = region != xp.sort(region)
    source = xp.argsort(xp.where(misplaced, region, PADDING + 1), stable=True)
    rank = xp.cumsum(misplaced) - 1
    return xp.where(misplaced, source[rank], xp.arange(region.shape[0])).astype(xp.int32)


@takes(perm=integers(1))
def inverse_permutation(perm):
    """The inverse permutation: inverse[perm[i]] = i."""
    _check_values(perm)
    xp = array_module(perm)
    return xp.argsort(xp.asarray(perm), stable=True).astype(xp.int32)


@takes(meta=BATCH, perm=integers(1))
def token_permutation(meta: CommonAttentionMetadata, perm):
    """i32[T] the permutation of packed tokens: q of the reordered batch is q[token_permutation(meta, perm)].

    Its inverse restores the order of outputs: out[inverse_permutation(...)]. Padding tokens keep their places.
    """
    _check_perm(meta, perm)
    xp = array_module(meta.query_start_loc, perm)
    old = xp.asarray(meta.query_start_loc)
    new = starts_of((old[1:] - old[:-1])[perm], xp)
    token = xp.arange(meta.num_tokens, dtype=xp.int32)
    if not perm.shape[0]:
        return token
    req = segment_of(new[1:], meta.num_tokens, xp)
    moved = old[:-1][perm][req] + token - new[:-1][req]
    return xp.where(token < new[-1], moved, token)


@takes(meta=BATCH, perm=integers(1))
def apply_permutation(meta: CommonAttentionMetadata, perm) -> CommonAttentionMetadata:
    """The batch whose request i is request perm[i] of meta, with its tokens (and its encoder tokens in .cross).

    perm must keep padding after the other requests, as region_permutation does.
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
    """The most new tokens of a decode: `threshold`, or 1 + num_speculative_tokens if the backend supports that.

    With context parallelism it is 1, unless the backend supports longer queries. None: requests are not ordered.
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
    """ValueError unless perm is a permutation. Only numpy arrays are checked: others may not be computed yet."""
    if isinstance(perm, np.ndarray) and (np.sort(perm) != np.arange(len(perm))).any():
        raise ValueError(f"perm={perm} must hold each of 0 .. {len(perm) - 1} once")
