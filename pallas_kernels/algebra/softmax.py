"""The online softmax, and its rule for rows that have seen no key.

A state is (m, l, acc): running maximum f32[..., M, 1], sum of exp(s - m) f32[..., M, 1], and the weighted values
f32[..., M, V]. While a row has seen no key, its m is -inf and exponents are taken against 0: a fully masked tile then
adds 0, not NaN, and the first finite logit becomes the maximum.
The maximum cancels in the result, so no gradient flows through it.
"""

import jax
import jax.numpy as jnp

NEG_INF = float("-inf")


def start(rows: tuple[int, ...], value_dim: int):
    """The state of rows that have seen no key."""
    return (
        jnp.full((*rows, 1), NEG_INF, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, value_dim), jnp.float32),
    )


def finite_max(m):
    """The maximum to subtract: m, or 0 where no key was seen."""
    return jnp.where(m == NEG_INF, 0.0, m)


def weights(m, logits, exp=jnp.exp):
    """One tile's step of the recurrence: (new m, exp(old m - new m), exp(logits - new m)).

    logits f32[..., M, C], -inf where masked. With exp=jnp.exp2, logits and m are in base 2: multiplied by log2(e).
    """
    new_m = jnp.maximum(m, jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    shift = finite_max(new_m)
    return new_m, exp(m - shift), exp(logits - shift)


def finish(m, l, acc, sink=None) -> tuple[jax.Array, jax.Array]:  # noqa: E741
    """(out [..., M, V], lse [..., M]) of a state. A sink f32[..., M, 1] is one more logit without a value.

    A row that saw no key gives (0, -inf), sink or not.
    """
    empty = m == NEG_INF
    shift, total = m, l
    if sink is not None:
        shift = jnp.maximum(finite_max(m), jax.lax.stop_gradient(sink))
        total = l * jnp.exp(finite_max(m) - shift) + jnp.exp(sink - shift)
        acc = acc * jnp.exp(finite_max(m) - shift)
    total = jnp.where(empty, 1.0, total)
    out = jnp.where(empty, 0.0, acc / total)
    lse = jnp.where(empty, NEG_INF, jnp.where(empty, 0.0, shift) + jnp.log(total))
    return out, lse[..., 0]
