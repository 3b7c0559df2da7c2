"""Per-layer embeddings (Gemma 3n and 4): each layer gets a vector of its own for each token, and adds it, gated."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.models.mlp import activation
from jattn.nn.attention_layer import linear
from jattn.nn.norm import Norm
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """The vectors of all layers: (norm(projection(x) / sqrt(hidden)) + sqrt(width) * table[token]) / sqrt(2).

    x: the embedded token. A token outside the table's vocabulary has the vector of token 0.
    """

    vocab_size: int
    width: int
    norm: Norm

    def weight_specs(self, hidden: int, layers: int) -> dict[str, Any]:
        """embed [vocab, layers * width], projection and norm."""
        table = WeightSpec((self.vocab_size, layers * self.width), ("vocab", None))
        projection = linear_weight_specs(hidden, layers * self.width, ("embed", None), False)
        return dict(embed=table, projection=projection, norm=self.norm.weight_specs(self.width))

    def known(self, token_ids: jax.Array) -> jax.Array:
        """The row of the table for each token."""
        return jnp.where((token_ids >= 0) & (token_ids < self.vocab_size), token_ids, 0)

    def __call__(self, weights: dict, rows: jax.Array, x: jax.Array) -> jax.Array:
        """Rows of the table [T, layers * width] and embedded tokens x [T, hidden] -> [T, layers, width]."""
        by_layer = (x.shape[0], -1, self.width)
        y = linear(weights["projection"], x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        y = self.norm(weights["norm"], y.reshape(by_layer))
        rows = rows.reshape(by_layer).astype(x.dtype) * jnp.asarray(self.width**0.5, x.dtype)
        return (y + rows) * jnp.asarray(2**-0.5, x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInput:
    """What one layer does with its vector z: norm(down(act(gate x) * z)), which is added to x at its end."""

    width: int
    activation: str
    norm: Norm

    def weight_specs(self, hidden: int) -> dict[str, Any]:
        """gate [hidden, width], down [width, hidden] and norm."""
        gate = linear_weight_specs(hidden, self.width, ("embed", None), False)
        down = linear_weight_specs(self.width, hidden, (None, "embed"), False)
        return dict(gate=gate, down=down, norm=self.norm.weight_specs(hidden, "embed"))

    def __call__(self, weights: dict, x: jax.Array, z: jax.Array) -> jax.Array:
        """x [T, hidden] and z [T, width] -> what is added, [T, hidden]."""
        gate = activation(self.activation)(linear(weights["gate"], x))
        return self.norm(weights["norm"], linear(weights["down"], gate * z))
