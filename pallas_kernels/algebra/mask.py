"""Which keys a query sees: one predicate and the key range that covers it.

Every path (dense, chunked, Pallas) decides with `visible` and skips with `key_range`, so they cannot disagree.
Positions are those of the request: query token i of a request with `q_len` new and `seq_len` total tokens
stands at seq_len - q_len + i; keys stand at 0 .. seq_len - 1.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """The static part of a mask: hashable, a good static argument."""

    causal: bool = True
    left: int = -1  # extra keys before the query, -1 = unlimited
    right: int = -1  # extra keys after the query, -1 = unlimited
    chunk: int = 0  # aligned chunks (Llama 4): only keys of the query's own chunk; 0 = off
    lookback: int = 0  # and of this many chunks before it
    prefix: bool = False  # R-SWA: `left` hides none of the request's first keys; how many is traced
    spans: bool = False  # the queries of a span see all its keys, both ways; where it lies is traced
    clamp_spans: bool = False  # but none further back than `left`
    mask_fn: Callable | None = None  # (head, q_pos, kv_pos) -> bool


def visible(rule: MaskRule, head, q_pos, kv_pos, causal=None, prefix=None, span=None) -> jax.Array:
    """True where the query at `q_pos` sees the key at `kv_pos`; the arguments broadcast.

    `causal`, when given, is a traced bool that overrules `rule.causal` (per-request causality). `prefix` counts the
    keys that `rule.prefix` keeps; `span` is the (first, last) position of the query's own span, (-1, -1) for none.
    mask_fn comes last: what it hides stays hidden.
    The caller masks keys at or past the request's length: they are not the mask's business.
    """
    seen = jnp.ones(jnp.broadcast_shapes(jnp.shape(q_pos), jnp.shape(kv_pos)), bool)
    if causal is not None:
        seen &= (kv_pos <= q_pos) | ~causal
    elif rule.causal:
        seen &= kv_pos <= q_pos
    near = True
    if rule.left >= 0:
        near = kv_pos >= q_pos - rule.left
        seen &= near | (kv_pos < prefix) if rule.prefix else near
    if rule.right >= 0:
        seen &= kv_pos <= q_pos + rule.right
    if rule.chunk > 0:
        # where chunks begin, and not their numbers: // takes a sign, for which a TPU kernel would have to know its chip
        behind = (q_pos - q_pos % rule.chunk) - (kv_pos - kv_pos % rule.chunk)
        seen &= (behind >= 0) & (behind <= rule.lookback * rule.chunk)
    if rule.spans:
        both_ways = (kv_pos >= span[0]) & (kv_pos <= span[1])
        seen |= both_ways & near if rule.clamp_spans else both_ways
    if rule.mask_fn is not None:
        seen = seen & rule.mask_fn(head, q_pos, kv_pos)
    return seen


def key_range(rule: MaskRule, q_first, q_last, kv_len, causal=None, span=None, xp=jnp):
    """Half-open range of keys outside which no query at q_first .. q_last sees anything.

    `span`, under rule.spans, is the hull of the queries' spans, its last < 0 for none. Keys that `rule.prefix` keeps
    are a range of their own, 0 .. min(prefix, stop) - 1: what lies between is neither read nor needed.
    It is the exact union when the queries are contiguous and there is no mask_fn; tiles are skipped by it and
    keys outside it are never allowed to reach the arithmetic (a stale page may hold NaN).
    xp is numpy for host plans.
    """
    start, stop = xp.zeros_like(kv_len), kv_len
    if causal is not None:
        stop = xp.where(causal, xp.minimum(stop, q_last + 1), stop)
    elif rule.causal:
        stop = xp.minimum(stop, q_last + 1)
    if rule.left >= 0:
        start = xp.maximum(start, q_first - rule.left)
    if rule.right >= 0:
        stop = xp.minimum(stop, q_last + rule.right + 1)
    if rule.chunk > 0:
        start = xp.maximum(start, (q_first // rule.chunk - rule.lookback) * rule.chunk)
        stop = xp.minimum(stop, (q_last // rule.chunk + 1) * rule.chunk)
    if rule.spans:
        first = xp.maximum(span[0], q_first - rule.left) if rule.clamp_spans and rule.left >= 0 else span[0]
        start = xp.where(span[1] >= 0, xp.minimum(start, xp.maximum(first, 0)), start)
        stop = xp.maximum(stop, xp.minimum(span[1] + 1, kv_len))
    return start, xp.maximum(stop, start)
