"""Spans of a prompt whose tokens see each other both ways (images in a prefix-LM)."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import integer, integers, optional, sequence_of, takes
from jattn.metadata.common import BATCH, CommonAttentionMetadata


def _pairs(name: str, value) -> tuple[tuple[int, int], ...]:
    """The (first, last) pairs of one request."""
    pairs = integers(1, 2, host="spans are laid out on the host")(name, value)
    if pairs.size and pairs.shape[1:] != (2,):
        raise ValueError(f"{name} must be pairs (first, last), got shape {pairs.shape}")
    return tuple((int(a), int(b)) for a, b in np.asarray(pairs).reshape(-1, 2))


@takes(ranges=sequence_of(_pairs), num_reqs=optional(integer(0)), max_ranges=optional(integer(0)))
def compute_mm_prefix_range_tensor(ranges, num_reqs: int | None = None, max_ranges: int | None = None) -> np.ndarray:
    """i32[R, max_ranges, 2] of inclusive (first, last) positions, from a list of pairs for each request.

    Unused places hold (0, 0): a pair is valid where first < last. The static sizes None mean 'as given'.
    """
    rows = len(ranges) if num_reqs is None else num_reqs
    width = max(map(len, ranges), default=0) if max_ranges is None else max_ranges
    if len(ranges) > rows or any(len(r) > width for r in ranges):
        raise ValueError(
            f"ranges: {len(ranges)} requests with {[len(r) for r in ranges]} ranges "
            f"do not fit [{rows}, {width}, 2], num_reqs and max_ranges"
        )
    out = np.zeros((rows, width, 2), np.int32)
    for r, pairs in enumerate(ranges):
        for i, (first, last) in enumerate(pairs):
            if not 0 <= first <= last:
                raise ValueError(f"request {r}: range ({first}, {last}) must be 0 <= first <= last, both inclusive")
            out[r, i] = first, last
        if any(a[1] >= b[0] for a, b in pairwise(sorted(pairs))):
            raise ValueError(f"request {r}: ranges {sorted(pairs)} overlap; a token lies in one span at most")
    return out


@takes(meta=BATCH, ranges=integers(3), position=optional(integers(1)))
def fill_mm_prefix_query_ranges(meta: CommonAttentionMetadata, ranges, position=None):
    """i32[T, 2] the inclusive range that holds each token's position (None: meta's own), or (-1, -1).

    A query sees key j also where first <= j <= last, whatever causality and window say. A span that is prefilled in
    pieces shows each piece what is cached by then.
    """
    position, live = meta.positions() if position is None else position, meta.token_is_live()
    if ranges.shape[1] == 0:
        return jnp.full((meta.num_tokens, 2), -1, jnp.int32)
    if position.shape != (meta.num_tokens,) or ranges.shape[0] != meta.max_num_reqs or ranges.shape[2] != 2:
        raise ValueError(
            f"position.shape={position.shape} must be [T] with T={meta.num_tokens}, and ranges.shape={ranges.shape} "
            f"[R, n, 2] with R={meta.max_num_reqs}"
        )
    mine = jnp.asarray(ranges, jnp.int32)[meta.token_to_req()]  # [T, max_ranges, 2]
    first, last = mine[..., 0], mine[..., 1]
    inside = (first < last) & (first <= position[:, None]) & (position[:, None] <= last) & live[:, None]
    chosen = jnp.take_along_axis(mine, jnp.argmax(inside, axis=1)[:, None, None], axis=1)[:, 0]
    return jnp.where(inside.any(axis=1)[:, None], chosen, -1)
