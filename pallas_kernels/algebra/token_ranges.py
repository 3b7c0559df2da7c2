"""The keys that each token sees, as one range each, and the hull of some tokens' ranges."""

import jax.numpy as jnp

from pallas_kernels.algebra.mask import MaskRule, key_range

_ANY = 2**30  # more than any position


def token_ranges(query_start_loc, seq_lens, num_tokens: int, rule: MaskRule, causal=None, spans=None, prefix_lens=None):
    """i32[T, 2] (first key that each token sees, key after the last); (0, 0) of padding.

    spans i32[T, 2]: with rule.spans, the first and last position of each token's span, or (-1, -1). prefix_lens i32[R],
    if given: instead, the keys of each request's prefix that are before that range.
    """
    starts, reqs = query_start_loc.astype(jnp.int32), seq_lens.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    req = jnp.sum(starts[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
    is_live, req = req < reqs, jnp.minimum(req, reqs - 1)
    seq = jnp.where(is_live, seq_lens.astype(jnp.int32)[req], 0)
    position = seq + token - starts[req + 1]
    own = None if causal is None else causal[req]
    start, stop = key_range(rule, position, position, seq, own, None if spans is None else (spans[:, 0], spans[:, 1]))
    start = jnp.maximum(start, 0)
    if prefix_lens is not None:
        start, stop = jnp.zeros_like(start), jnp.minimum(prefix_lens[req], start)
    return jnp.where(is_live[:, None], jnp.stack([start, stop], axis=1), 0)


def bounds_of_tokens(ranges, first, last):
    """i32[tiles] each, of tokens first .. last: smallest start, largest stop, largest start, smallest stop."""
    token = jnp.arange(ranges.shape[0], dtype=jnp.int32)[None, :]
    inside = (token >= first[:, None]) & (token <= last[:, None])
    least = lambda k: jnp.min(jnp.where(inside, ranges[None, :, k], _ANY), axis=1)
    most = lambda k: jnp.max(jnp.where(inside, ranges[None, :, k], 0), axis=1)
    # A token that sees no key begins nowhere: its start must not stretch the range.
    some = inside & (ranges[:, 1] > ranges[:, 0])[None, :]
    start = jnp.min(jnp.where(some, ranges[None, :, 0], _ANY), axis=1)
    return jnp.where(start == _ANY, 0, start), most(1), most(0), least(1)
