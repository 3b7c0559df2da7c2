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
    mask_fn: Callable | None = None  # (head, q_pos, kv_pos) -> bool


def visible(rule: MaskRule, head, q_pos, kv_pos, causal=None) -> jax.Array:
    """True where the query at `q_pos` sees the key at `kv_pos`; the arguments broadcast.

    `causal`, when given, is a traced bool that overrules `rule.causal` (per-request causality).
    The caller masks keys at or past the request's length: they are not the mask's business.
    """
    seen = jnp.ones(jnp.broadcast_shapes(jnp.shape(q_pos), jnp.shape(kv_pos)), bool)
    if causal is not None:
        seen &= (kv_pos <= q_pos) | ~causal
    elif rule.causal:
        seen &= kv_pos <= q_pos
    if rule.left >= 0:
        seen &= kv_pos >= q_pos - rule.left
    if rule.right >= 0:
        seen &= kv_pos <= q_pos + rule.right
    if rule.chunk > 0:
        # where a chunk begins, and not its number: // takes a sign, for which a TPU kernel would have to know its chip
        seen &= kv_pos - kv_pos % rule.chunk == q_pos - q_pos % rule.chunk
    if rule.mask_fn is not None:
        seen = seen & rule.mask_fn(head, q_pos, kv_pos)
    return seen


def key_range(rule: MaskRule, q_first, q_last, kv_len, causal=None, xp=jnp):
    """Half-open range of keys outside which no query at q_first .. q_last sees anything.

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
        start = xp.maximum(start, q_first // rule.chunk * rule.chunk)
        stop = xp.minimum(stop, (q_last // rule.chunk + 1) * rule.chunk)
    return start, xp.maximum(stop, start)
