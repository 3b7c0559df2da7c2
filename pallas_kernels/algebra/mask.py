"""Which keys a query sees: one predicate and the key range that covers it.

Every path (dense, chunked, Pallas) masks with `visible` and skips keys with `key_range`.
Positions count within the request: query token i of a request with `q_len` new and `seq_len` total tokens has
position seq_len - q_len + i; keys have positions 0 .. seq_len - 1.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

MOST_KEYS = 2**30
"""More keys than any request has. The sum of this and a position fits int32."""


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """The static part of a mask; hashable."""

    causal: bool = True
    left: int = -1  # extra keys before the query, -1 = unlimited
    right: int = -1  # extra keys after the query, -1 = unlimited
    chunk: int = 0  # aligned chunks (Llama 4): only keys of the query's own chunk of this many tokens; 0 = off
    lookback: int = 0  # with chunk: keys of this many chunks before it, too
    prefix: bool = False  # R-SWA: the request's first keys are visible beyond `left`; their number is traced
    spans: bool = False  # queries of a span see all keys of the span, causal or not; its bounds are traced
    clamp_spans: bool = False  # with spans: only keys within `left`
    mask_fn: Callable | None = None  # (head, q_pos, kv_pos) -> bool

    def __post_init__(self):
        # Wider limits hide no key, but added to a position they would leave int32 and hide all.
        for side in ("left", "right"):
            if getattr(self, side) >= MOST_KEYS:
                object.__setattr__(self, side, -1)
        if self.chunk > 0:
            object.__setattr__(self, "lookback", min(self.lookback, MOST_KEYS // self.chunk))


def most_keys(rule: MaskRule, num_queries: int, per_request_causal: bool = False) -> int | None:
    """The most keys in `key_range` for this many queries of consecutive positions; None: as many as the request has.

    per_request_causal: `causal` is given, so that rule.causal limits nothing.
    """
    if rule.prefix or rule.spans:
        return None
    back = [rule.left] if rule.left >= 0 else []
    ahead = [rule.right] if rule.right >= 0 else []
    if rule.causal and not per_request_causal:
        ahead.append(0)
    if rule.chunk > 0:
        back.append((rule.lookback + 1) * rule.chunk - 1)
        ahead.append(rule.chunk - 1)
    return min(back) + num_queries + min(ahead) if back and ahead else None


def visible(
    rule: MaskRule, head, q_pos, kv_pos, causal=None, prefix=None, span: tuple[jax.Array, jax.Array] | None = None
) -> jax.Array:
    """True where the query at `q_pos` sees the key at `kv_pos`; the arguments broadcast.

    `causal`, when given, is a traced bool that replaces `rule.causal` (per-request causality). `prefix` is the number
    of keys that `rule.prefix` keeps; `span` is the (first, last) position of the query's own span, (-1, -1) for none.
    mask_fn comes last: no other field shows a key that it hides.
    Keys at or past the request's length are not masked here; the caller masks them.
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
        # Compares first positions of chunks, not chunk numbers: // of signed integers lowers to a sign, and how a TPU
        # computes that depends on the chip, which is unknown while a kernel is only lowered.
        keys_back = (q_pos - q_pos % rule.chunk) - (kv_pos - kv_pos % rule.chunk)
        seen &= (keys_back >= 0) & (keys_back <= rule.lookback * rule.chunk)
    if rule.spans:
        assert span is not None
        both_ways = (kv_pos >= span[0]) & (kv_pos <= span[1])
        seen |= both_ways & near if rule.clamp_spans else both_ways
    if rule.mask_fn is not None:
        seen = seen & rule.mask_fn(head, q_pos, kv_pos)
    return seen


def key_range(
    rule: MaskRule,
    q_first,
    q_last,
    seq_len,
    causal=None,
    span: tuple[jax.Array, jax.Array] | None = None,
    xp=jnp,
):
    """Half-open range (start, stop) of keys that covers every key visible to a query at q_first .. q_last.

    `span`, under rule.spans, is the hull of the queries' spans; its last is < 0 where there is none. Keys that
    `rule.prefix` keeps are a second range, 0 .. min(prefix, stop) - 1, which is not part of the result.
    The range is exact when the queries are contiguous and there is no mask_fn. Keys outside it are skipped and must
    not enter the arithmetic: a stale page may hold NaN. xp: numpy for plans made on the host.
    """
    start, stop = xp.zeros_like(seq_len), seq_len
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
        assert span is not None
        first = xp.maximum(span[0], q_first - rule.left) if rule.clamp_spans and rule.left >= 0 else span[0]
        start = xp.where(span[1] >= 0, xp.minimum(start, xp.maximum(first, 0)), start)
        stop = xp.maximum(stop, xp.minimum(span[1] + 1, seq_len))
    return start, xp.maximum(stop, start)
