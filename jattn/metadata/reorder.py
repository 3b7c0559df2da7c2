"""Ordering a batch so that decodes come first: a permutation, never a swap in place.

    region   0 decode          context, short, prompt finished      3 prefill   no context
             1 short extend    context, short, still in its prompt  4 padding   no tokens at all
             2 long extend     context, long

    new[i] = old[perm[i]]      rows already in the right region stay: perm moves as few as can be

Everything here works on numpy (host) and on traced arrays alike.
"""

import numpy as np

from jattn.errors.arguments import boolean, booleans, integer, integers, optional, takes
from jattn.metadata.common import BATCH, PER_REQUEST, CommonAttentionMetadata
from jattn.metadata.host import array_module, is_traced, segment_of, starts_of
from jattn.types import PAD_SLOT_ID

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
