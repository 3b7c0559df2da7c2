"""The steps between the dot product and the mask, in one fixed order, in float32.

    q.k * scale  ->  cap * tanh(x / cap)  ->  + slope * (kv_pos - q_pos)  ->  + bias  ->  score_fn

ALiBi uses the true distance kv_pos - q_pos, without a shift per row: the LSE and the weight of a sink depend on it.
With `alibi_sqrt` the distance is -sqrt(q_pos - kv_pos) for keys at or before the query and 0 for keys after it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LogitRule:
    """The static part of the steps; hashable."""

    scale: float
    soft_cap: float | None = None
    has_alibi: bool = False
    alibi_sqrt: bool = False
    score_fn: Callable | None = None  # (score, head, q_pos, kv_pos) -> score


def shape_logits(rule: LogitRule, dots: jax.Array, head, q_pos, kv_pos, alibi_slopes=None, bias=None) -> jax.Array:
    """Logits from dot products that include the scales of q and k, but not `rule.scale`.

    dots f32[..., M, C]; head, q_pos, alibi_slopes broadcast against [..., M, 1] and kv_pos against [..., 1, C].
    """
    logits = dots * rule.scale
    if rule.soft_cap:
        logits = rule.soft_cap * jnp.tanh(logits / rule.soft_cap)
    if rule.has_alibi:
        assert alibi_slopes is not None
        distance = (kv_pos - q_pos).astype(jnp.float32)
        logits = logits + alibi_slopes * (-jnp.sqrt(jnp.maximum(-distance, 0.0)) if rule.alibi_sqrt else distance)
    if bias is not None:
        logits = logits + bias
    if rule.score_fn is not None:
        logits = rule.score_fn(logits, head, q_pos, kv_pos)
    return logits
