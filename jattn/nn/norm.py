"""Normalisation of the last axis, described by data: RMS or layer norm, with or without weights."""

import dataclasses

import jax
import jax.numpy as jnp

KINDS = ("rms", "layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """kind 'rms': x / sqrt(mean(x^2) + eps); 'layer': the same of x - mean(x). Then weights, if there are any.

    one_plus: the stored scale is what is added to one.
    """

    kind: str = "rms"
    eps: float = 1e-6
    one_plus: bool = False
    has_scale: bool = True
    has_bias: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"norm {self.kind=} is not known; use one of {', '.join(KINDS)}")

    def __call__(self, weights: dict, x: jax.Array) -> jax.Array:
        """In float32; weights = {'scale': [n], 'bias': [n]}, each if the norm has it."""
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.has_scale:
            y = _over(y, weights["scale"]) + y if self.one_plus else _over(y, weights["scale"])
        if self.has_bias:
            y = y + _broadcast(weights["bias"], y)
        return y.astype(x.dtype)


def _broadcast(weight: jax.Array, y: jax.Array) -> jax.Array:
    """The weight of the last axis beside y, whose rank it gets: rank promotion is never silent."""
    return weight.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))


def _over(y: jax.Array, scale: jax.Array) -> jax.Array:
    return y * _broadcast(scale, y)
