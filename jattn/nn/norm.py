"""Normalisation of the last axis: RMS norm or layer norm, with or without scale and bias.

A new kind of norm is a row of FORMULAS; a new option is a field of Norm, its weight in `weight_specs` and its step in
`__call__`. No other file lists the kinds or their weights.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import as_array, boolean, check_fields, check_kind, choice, is_float, number
from jattn.nn.weight_spec import WeightSpec


def _rms(x: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _layer(x: jax.Array, eps: float) -> jax.Array:
    return _rms(x - jnp.mean(x, axis=-1, keepdims=True), eps)


FORMULAS = {"rms": _rms, "layer": _layer}
"""Norm.kind -> function of x f32[..., n] and eps, before scale and bias."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """kind 'rms': x / sqrt(mean(x^2) + eps); 'layer': the same of x - mean(x). Then scale and bias, if it has them.

    one_plus: multiply by 1 + scale (Gemma).
    """

    kind: str = "rms"
    eps: float = 1e-6
    one_plus: bool = False
    has_scale: bool = True
    has_bias: bool = False

    def __post_init__(self):
        flags = dict.fromkeys(("one_plus", "has_scale", "has_bias"), boolean)
        choice(*FORMULAS)("norm kind", self.kind)
        check_fields(self, eps=number(least=0), **flags)

    def weight_specs(self, size: int, axis: str | None = None) -> dict[str, WeightSpec]:
        """Its weights [size]: 'scale' and 'bias', each if the norm has it. axis: their logical axis."""
        fills = {"scale": 0.0 if self.one_plus else 1.0} if self.has_scale else {}
        fills |= {"bias": 0.0} if self.has_bias else {}
        return {name: WeightSpec((size,), (axis,), fill) for name, fill in fills.items()}

    def __call__(self, weights: dict, x: jax.Array) -> jax.Array:
        """x [..., n] normalised over its last axis, computed in float32; weights: arrays as in `weight_specs`."""
        self._check(weights, x)
        y = FORMULAS[self.kind](x.astype(jnp.float32), self.eps)
        if self.has_scale:
            scaled = y * _broadcast(weights["scale"], y)
            y = scaled + y if self.one_plus else scaled
        if self.has_bias:
            y = y + _broadcast(weights["bias"], y)
        return y.astype(x.dtype)

    def _check(self, weights: dict, x: jax.Array) -> None:
        """ValueError or TypeError unless x is [..., n] of floats, and each weight of the norm is [n]."""
        check_kind("weights", weights, dict)
        check_kind("x", x, (jax.Array, np.ndarray))
        if not is_float(as_array("x", x).dtype) or not x.ndim:
            raise ValueError(f"x must be floats [..., n], got {x.dtype}{list(x.shape)}")
        for name in self.weight_specs(x.shape[-1]):
            shape = as_array(f"weights[{name!r}]", weights[name]).shape if name in weights else None
            if shape != x.shape[-1:]:
                raise ValueError(
                    f"weights[{name!r}].shape={shape} must be {x.shape[-1:]}, the last axis of x; weights has "
                    f"{sorted(map(str, weights))}"
                )


def _broadcast(weight: jax.Array, y: jax.Array) -> jax.Array:
    """The weight as float32 [1, ..., n] with the rank of y, so that no rank is promoted implicitly."""
    return weight.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
