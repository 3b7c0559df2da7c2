"""The residual streams of Gemma 3n: alternating updates (AltUp), and the low-rank Laurel branch of each layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.nn.attention_layer import linear
from jattn.nn.norm import Norm
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs

LEAST_SQUARE = 1e-5
"""Lower limit of the mean square by which a projected stream is divided."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp:
    """Several residual streams xs [N, T, hidden], of which a layer computes the stream `active`.

    m(x) = tanh(router(norm(x) / hidden)), N numbers
    predict   p[j] = xs[j] + sum_i (prediction m(xs[active]))[j, i] * xs[i]; the layer reads p[active] and gives y
    correct   p[j] + (1 + (correction m(y))[j]) * (y - p[active])
    Before the first layer, streams 1 .. N-1 are projections of the embeddings, with the embeddings' magnitude; after
    the last one they are projected back likewise, and the mean of all streams goes on.
    """

    streams: int
    active: int
    norm: Norm
    scales_active: bool = True  # per-layer embeddings read the corrected active stream times a weight [hidden]

    def __post_init__(self):
        if not 0 <= self.active < self.streams:
            raise ValueError(f"AltUp active={self.active!r} must be from 0 to streams - 1 = {self.streams - 1!r}")

    def weight_specs(self, hidden: int) -> dict[str, Any]:
        """The weights of one layer."""
        n = self.streams
        tree: dict[str, Any] = {
            "router": linear_weight_specs(hidden, n, ("embed", None), False),
            "norm": self.norm.weight_specs(hidden, "embed"),
            "prediction": linear_weight_specs(n, n * n, (None, None), False),
            "correction": linear_weight_specs(n, n, (None, None), False),
        }
        return tree | ({"active_scale": WeightSpec((hidden,), ("embed",), 0.0)} if self.scales_active else {})

    def model_weight_specs(self, hidden: int) -> dict[str, WeightSpec]:
        """The projections [N-1, hidden, hidden] before the first layer and after the last."""
        one = WeightSpec((self.streams - 1, hidden, hidden), (None, "embed", None))
        return dict(into=one, out=one)

    def begin(self, weights: dict, x: jax.Array) -> jax.Array:
        """Embedded tokens [T, hidden] -> xs."""
        return jnp.concatenate([x[None], _like(x, jnp.einsum("th,nhk->ntk", x, weights["into"]))])

    def end(self, weights: dict, xs: jax.Array) -> jax.Array:
        """xs -> [T, hidden]."""
        others = _like(xs[0], jnp.einsum("nth,nhk->ntk", xs[1:], weights["out"]))
        return jnp.concatenate([xs[:1], others]).mean(axis=0)

    def predict(self, weights: dict, xs: jax.Array) -> jax.Array:
        """The streams that the layer reads."""
        mixed = linear(weights["prediction"], self._modalities(weights, xs[self.active]))
        return xs + jnp.einsum("tji,ith->jth", mixed.reshape(-1, self.streams, self.streams), xs)

    def correct(self, weights: dict, predicted: jax.Array, y: jax.Array) -> jax.Array:
        """The streams after the layer, whose output is y."""
        factors = linear(weights["correction"], self._modalities(weights, y)) + jnp.asarray(1, y.dtype)
        return predicted + factors.T[:, :, None] * (y - predicted[self.active])[None]

    def active_of(self, weights: dict, xs: jax.Array) -> jax.Array:
        """The active stream as per-layer embeddings read it."""
        x = xs[self.active]
        return x * weights["active_scale"][None, :].astype(x.dtype) if self.scales_active else x

    def _modalities(self, weights: dict, x: jax.Array) -> jax.Array:
        routed = self.norm(weights["norm"], x) * jnp.asarray(1 / x.shape[-1], x.dtype)
        return jnp.tanh(linear(weights["router"], routed).astype(jnp.float32)).astype(x.dtype)


def _like(x: jax.Array, others: jax.Array) -> jax.Array:
    """The streams `others` with the magnitude of x, token by token."""
    square = jnp.maximum(jnp.mean(jnp.square(others), axis=-1, keepdims=True), LEAST_SQUARE)
    return others * jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))[None] / jnp.sqrt(square)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laurel:
    """A branch beside attention of the same normalised input n: (x + attention + n + norm(right(left n))) / sqrt(2)."""

    rank: int
    norm: Norm

    def weight_specs(self, hidden: int) -> dict[str, Any]:
        """left [hidden, rank], right [rank, hidden] and norm."""
        left = linear_weight_specs(hidden, self.rank, ("embed", None), False)
        right = linear_weight_specs(self.rank, hidden, (None, "embed"), False)
        return dict(left=left, right=right, norm=self.norm.weight_specs(hidden, "embed"))

    def __call__(self, weights: dict, n: jax.Array, attended: jax.Array) -> jax.Array:
        """n [T, hidden] and attended = x + attention -> the layer's hidden states after attention."""
        branch = n + self.norm(weights["norm"], linear(weights["right"], linear(weights["left"], n)))
        return (attended + branch) * jnp.asarray(2**-0.5, n.dtype)
