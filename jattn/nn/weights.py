"""What weights a part has: trees of shape, logical axes and first values, read by loading, sharding and the layers."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jattn.nn.layer import AttentionLayer
from jattn.nn.norm import Norm


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array: its shape, a logical name for each axis (for sharding rules), and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fill: float | None = None  # None: normal, of variance 1 / inputs

    def draw(self, key: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """A first value."""
        if self.fill is not None:
            return jnp.full(self.shape, self.fill, dtype)
        inputs = self.shape[-2] if len(self.shape) > 1 else 1
        return (jax.random.normal(key, self.shape, jnp.float32) / math.sqrt(inputs)).astype(dtype)


def is_weight(x: Any) -> bool:
    """For tree.map over trees of Weights."""
    return isinstance(x, Weight)


def linear_weights(inputs: int, outputs: int, axes: tuple[str | None, str | None], bias: bool) -> dict[str, Weight]:
    """A projection's."""
    weights = {"kernel": Weight((inputs, outputs), axes)}
    return weights | ({"bias": Weight((outputs,), axes[1:], 0.0)} if bias else {})


def norm_weights(size: int, axis: str | None, **norms: Norm | None) -> dict[str, Any]:
    """Those of each norm that is there and has any, by name."""
    tree = {}
    for name, norm in norms.items():
        if norm is not None and (norm.has_scale or norm.has_bias):
            kept = {"scale": norm.has_scale, "bias": norm.has_bias}
            fill = {"scale": 0.0 if norm.one_plus else 1.0, "bias": 0.0}
            tree[name] = {part: Weight((size,), (axis,), fill[part]) for part, there in kept.items() if there}
    return tree


def attention_weights(layer: AttentionLayer) -> dict[str, Any]:
    """An attention layer's, projections and all."""
    hidden, widths = layer.hidden_size, layer.widths
    if layer.fused_qkv:
        tree: dict[str, Any] = {"qkv": linear_weights(hidden, sum(widths.values()), ("embed", "qkv"), layer.qkv_bias)}
    else:
        axes = dict(q="heads", k="kv_heads", v="kv_heads")
        tree = {n: linear_weights(hidden, width, ("embed", axes[n]), layer.qkv_bias) for n, width in widths.items()}
    tree["o"] = linear_weights(layer.out_width, hidden, ("heads", "embed"), layer.out_bias)
    tree |= norm_weights(layer.spec.head_dim, None, q_norm=layer.qk_norm, k_norm=layer.qk_norm)
    if layer.spec.has_sinks:
        tree["sinks"] = Weight((layer.spec.num_heads,), ("heads",), 0.0)
    return tree
