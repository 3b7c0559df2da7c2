"""A mixture of experts. Rows are sorted by expert, so that each expert multiplies only its own rows."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.models.mlp import MLP, activation
from jattn.nn.attention_layer import linear
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs

SCORES = ("softmax", "sigmoid_of_input")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """The `top_k` experts with the largest router logits, each a gated MLP, weighted by their scores.

    scores 'softmax': softmax over the chosen logits, multiplies the experts' outputs. 'sigmoid_of_input': sigmoid of
    each chosen logit, multiplies the experts' inputs. clamp (alpha, limit): the gated unit of gpt-oss,
    (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped to the limit.
    """

    num_experts: int
    top_k: int
    width: int
    activation: str = "silu"
    clamp: tuple[float, float] | None = None
    scores: str = "softmax"
    router_bias: bool = False
    bias: bool = False
    shared: MLP | None = None  # an expert that processes every token, in addition

    def __post_init__(self):
        activation(self.activation)
        if self.scores not in SCORES:
            raise ValueError(f"MoE scores={self.scores!r} is not known; use one of {', '.join(SCORES)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"MoE top_k={self.top_k!r} must be from 1 to num_experts={self.num_experts!r}")

    def weight_specs(self, hidden: int) -> dict:
        """router; gate, up and down of the experts with a leading expert axis; the shared MLP."""
        e, w = self.num_experts, self.width
        tree: dict = {"router": linear_weight_specs(hidden, e, ("embed", None), self.router_bias)}
        axes = dict(gate=("expert", "embed", "mlp"), up=("expert", "embed", "mlp"), down=("expert", "mlp", "embed"))
        for name, axis in axes.items():
            shape = (e, w, hidden) if name == "down" else (e, hidden, w)
            tree[name] = {"kernel": WeightSpec(shape, axis)}
            if self.bias:
                tree[name]["bias"] = WeightSpec((e, shape[-1]), (axis[0], axis[-1]), 0.0)
        return tree if self.shared is None else tree | {"shared": self.shared.weight_specs(hidden)}

    def __call__(self, weights: dict, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> [T, hidden]; the result of a token does not depend on the other tokens."""
        logits = linear(weights["router"], x).astype(jnp.float32)
        top, chosen = jax.lax.top_k(logits, self.top_k)  # [T k]
        score = jax.nn.softmax(top, axis=-1) if self.scores == "softmax" else jax.nn.sigmoid(top)
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)  # rows of one expert are contiguous
        rows, score = x[order // self.top_k], score.reshape(-1)[order, None].astype(x.dtype)
        on_input = self.scores == "sigmoid_of_input"
        sizes = jnp.bincount(flat, length=self.num_experts).astype(jnp.int32)
        y = self._experts(weights, rows * score if on_input else rows, sizes, flat[order])
        y = y if on_input else y * score
        y = y[jnp.argsort(order)].reshape(x.shape[0], self.top_k, -1).sum(axis=1)
        return y if self.shared is None else y + self.shared(weights["shared"], x)

    def _experts(self, weights: dict, rows: jax.Array, sizes: jax.Array, expert: jax.Array) -> jax.Array:
        """The experts' MLPs of rows [T * k, hidden], sorted by expert i32[T * k]; expert e has sizes[e] of the rows."""

        def dot(name: str, x: jax.Array) -> jax.Array:
            y = jax.lax.ragged_dot(x, weights[name]["kernel"], sizes)
            return y + weights[name]["bias"][expert] if self.bias else y

        gate, up = dot("gate", rows), dot("up", rows)
        if self.clamp is None:
            return dot("down", activation(self.activation)(gate) * up)
        alpha, limit = self.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return dot("down", (up + 1) * gate * jax.nn.sigmoid(alpha * gate))
