"""Sublayers of the residual stream (self-attention, cross attention, MLP) and where their norms are placed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.nn.norm import Norm
from jattn.nn.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualNorms:
    """The norms of one sublayer: of_sum(x + factor * after(sublayer(before(x)))). None: no norm at that place.

    A sublayer `attn` has the weights attn_norm (before), attn_norm_after and attn_norm_sum.
    """

    before: Norm | None = None
    after: Norm | None = None
    of_sum: Norm | None = None
    factor: float = 1.0

    def weight_specs(self, name: str, size: int) -> dict[str, dict[str, WeightSpec]]:
        """The WeightSpecs of the norms of sublayer `name`, over `size` hidden dimensions."""
        norms = {f"{name}_norm": self.before, f"{name}_norm_after": self.after, f"{name}_norm_sum": self.of_sum}
        return norm_weight_specs(size, norms)


def norm_weight_specs(size: int, norms: dict[str, Norm | None]) -> dict[str, dict[str, WeightSpec]]:
    """The WeightSpecs of each norm that is not None and has weights, by name."""
    specs = {name: norm.weight_specs(size, "embed") for name, norm in norms.items() if norm is not None}
    return {name: spec for name, spec in specs.items() if spec}


def normed(norm: Norm | None, weights: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
    """norm(x) with the weights of this name; x itself if norm is None."""
    return x if norm is None else norm(weights.get(name, {}), x)


def residual(
    norms: ResidualNorms, name: str, weights: dict[str, Any], x: jax.Array, sublayer: Callable, base: Any = None
) -> tuple:
    """(cache, x after sublayer `name` and its residual connection); sublayer(x) -> (cache, y).

    base: y is added to it; None: to x.
    """
    cache, y = sublayer(normed(norms.before, weights, f"{name}_norm", x))
    return cache, plus(norms, name, weights, x if base is None else base, y)


def plus(norms: ResidualNorms, name: str, weights: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """of_sum(x + factor * after(y))"""
    y = normed(norms.after, weights, f"{name}_norm_after", y)
    y = y if norms.factor == 1.0 else y * jnp.asarray(norms.factor, y.dtype)
    return normed(norms.of_sum, weights, f"{name}_norm_sum", x + y)
