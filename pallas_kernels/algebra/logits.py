"""What happens to a logit between the dot product and the mask, in one fixed order.

    q.k * scale  ->  cap * tanh(x / cap)  ->  + slope * (kv_pos - q_pos)  ->  + bias  ->  score_fn

in float32. ALiBi uses the true distance (kv - q), so that the LSE and the weight of a sink are those of the formula;
with `alibi_sqrt` it is -sqrt(q_pos - kv_pos) for the keys behind and 0 for those ahead.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LogitRule:
    """The static part: hashable."""

    scale: float
    soft_cap: float | None = None
    has_alibi: bool = False
    alibi_sqrt: bool = False
    score_fn: Callable | None = None  # (score, head, q_pos, kv_pos) -> score


def shape_logits(rule: LogitRule, dots: jax.Array, head, q_pos, kv_pos, slope=None, bias=None) -> jax.Array:
    """Logits from raw dot products (already times q and k scales, not yet times `rule.scale`).

    dots f32[..., M, C]; head, q_pos, slope broadcast against [..., M, 1] and kv_pos against [..., 1, C].
    """
    logits = dots * rule.scale
    if rule.soft_cap:
        logits = rule.soft_cap * jnp.tanh(logits / rule.soft_cap)
    if rule.has_alibi:
        distance = (kv_pos - q_pos).astype(jnp.float32)
        logits = logits + slope * (-jnp.sqrt(jnp.maximum(-distance, 0.0)) if rule.alibi_sqrt else distance)
    if bias is not None:
        logits = logits + bias
    if rule.score_fn is not None:
        logits = rule.score_fn(logits, head, q_pos, kv_pos)
    return logits
