"""The batch of the tokens whose logits are needed, for layers that read another layer's cache."""

import numpy as np

from jattn.errors.arguments import integers, optional, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.buckets import query_len_bound
from jattn.metadata.host import array_module, starts_of
from jattn.types import PAD_SLOT_ID


@takes(common=BATCH, num_logits_indices=optional(integers(0)))
def make_kv_sharing_fast_prefill_common_attn_metadata(
    common: CommonAttentionMetadata, num_logits_indices=None
) -> CommonAttentionMetadata:
    """The batch whose L queries are q[logits_indices]. A batch of decodes, or without logits_indices, is unchanged.

    seq_lens are unchanged, so the tokens must be the last ones of their requests to keep their positions. Indices from
    num_logits_indices on, and indices of padding tokens, are padding.

        logits_indices [14 18 19 27], query_start_loc [0 15 20 28]  ->  query_start_loc [0 1 3 4]
    """
    if common.max_query_len == 1 or common.logits_indices is None:
        return common
    xp = array_module(common.query_start_loc, common.logits_indices, num_logits_indices)
    token = xp.asarray(common.logits_indices, xp.int32)
    count, total = token.shape[0], xp.asarray(common.query_start_loc)[-1]
    live = (token >= 0) & (token < total)
    if num_logits_indices is not None:
        live = live & (xp.arange(count) < num_logits_indices)
    ends = xp.asarray(common.query_start_loc)[1:]
    req = xp.searchsorted(ends, token, side="right")
    hits = live[:, None] & (req[:, None] == xp.arange(common.max_num_reqs)[None, :])
    query = xp.sum(hits, axis=0, dtype=xp.int32)
    if xp is np:
        _check_last(token[live], query, ends)
    slots = xp.asarray(common.slot_mapping)[xp.where(live, token, 0)]
    starts = starts_of(query, xp)
    longest = int(query.max(initial=0)) if xp is np else common.max_query_len
    return common.replace(
        query_start_loc=starts,
        slot_mapping=xp.where(live, slots, PAD_SLOT_ID).astype(xp.int32),
        num_actual_tokens=starts[-1],
        logits_indices=xp.where(live, xp.arange(count, dtype=xp.int32), PAD_SLOT_ID),
        max_query_len=min(common.max_query_len, query_len_bound(longest, count)),
    )


def _check_last(token: np.ndarray, query: np.ndarray, ends: np.ndarray) -> None:
    """ValueError unless the tokens are the last ones of their requests, in order."""
    wanted = np.concatenate([np.arange(e - n, e) for e, n in zip(ends, query, strict=True)] or [[]])
    if not np.array_equal(token, wanted):
        raise ValueError(
            f"logits_indices={token} must be the last tokens of their requests, ascending, "
            f"here {wanted.astype(int)}: "
            "any other token would get a wrong position; compute the full batch instead"
        )
