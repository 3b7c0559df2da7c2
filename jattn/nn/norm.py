"""Normalisation of the last axis, described by data: RMS or layer norm, with or without weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import as_array, boolean, check_fields, check_kind, choice, is_float, number

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
        flags = dict.fromkeys(("one_plus", "has_scale", "has_bias"), boolean)
        choice(*KINDS)("norm kind", self.kind)
        check_fields(self, eps=number(least=0), **flags)

    def __call__(self, weights: dict, x: jax.Array) -> jax.Array:
        """In float32; weights = {'scale': [n], 'bias': [n]}, each if the norm has it."""
        self._check(weights, x)
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.has_scale:
            y = _over(y, weights["scale"]) + y if self.one_plus else _over(y, weights["scale"])
        if self.has_bias:
            y = y + _broadcast(weights["bias"], y)
        return y.astype(x.dtype)

    def _check(self, weights: dict, x: jax.Array) -> None:
        """x [..., n] of floats, and each weight [n] that the norm has."""
        check_kind("weights", weights, dict)
        check_kind("x", x, (jax.Array, np.ndarray))
        if not is_float(as_array("x", x).dtype) or not x.ndim:
            raise ValueError(f"x must be floats [..., n], got {x.dtype}{list(x.shape)}")
        for name in (name for name, there in (("scale", self.has_scale), ("bias", self.has_bias)) if there):
            shape = as_array(f"weights[{name!r}]", weights[name]).shape if name in weights else None
            if shape != x.shape[-1:]:
                raise ValueError(
                    f"weights[{name!r}].shape={shape} must be {x.shape[-1:]}, the last axis of x; weights has "
                    f"{sorted(map(str, weights))}"
                )


def _broadcast(weight: jax.Array, y: jax.Array) -> jax.Array:
    """The weight of the last axis beside y, whose rank it gets: rank promotion is never silent."""
    return weight.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))


def _over(y: jax.Array, scale: jax.Array) -> jax.Array:
    return y * _broadcast(scale, y)
