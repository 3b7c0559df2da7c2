"""The MLP of a layer, plain or gated, as data and a pure function."""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.nn.attention_layer import linear, linears
from jattn.nn.weight_spec import WeightSpec, linear_weight_specs
from jattn.ops.product import GATES, gated_product

KERNEL_GATES = dict(
    silu="silu", swish="silu", gelu_pytorch_tanh="gelu_tanh", gelu_new="gelu_tanh", gelu_fast="gelu_tanh"
)
"""The activations of a gate that kernels compute, as config.json spells them -> their names in GATES."""

ACTIVATIONS = {name: GATES[gate] for name, gate in KERNEL_GATES.items()} | {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation function of this name, as config.json spells it."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """down(act(gate x) * up x), or down(act(up x)) without a gate.

    sparsity: before act, gate x becomes relu(gate x - (mean + q * std)), with the mean and the standard deviation of a
    token's row and the normal distribution's quantile q of `sparsity`: about that share of the gates is 0 (Gemma 3n).
    """

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    sparsity: float = 0.0

    def __post_init__(self):
        activation(self.activation)
        if not 0 <= self.sparsity < 1 or (self.sparsity and not self.gated):
            raise ValueError(f"MLP sparsity={self.sparsity!r} must be from 0 to below 1, and needs a gate if above 0")

    def weight_specs(self, hidden: int) -> dict[str, dict[str, WeightSpec]]:
        """The projections gate (if gated), up and down."""
        into = {"gate": self.gated, "up": True}
        tree = {
            n: linear_weight_specs(hidden, self.width, ("embed", "mlp"), self.bias) for n, used in into.items() if used
        }
        return tree | {"down": linear_weight_specs(self.width, hidden, ("mlp", "embed"), self.bias)}

    def __call__(self, weights: dict, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        return linear(weights["down"], self.inner(weights, x))

    def inner(self, weights: dict, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> what `down` multiplies, [T, width]."""
        act = activation(self.activation)
        if not self.gated:
            return act(linear(weights["up"], x))
        if self.activation in KERNEL_GATES and not self.bias and not self.sparsity:
            return gated_product(x, weights["gate"]["kernel"], weights["up"]["kernel"], KERNEL_GATES[self.activation])
        gate, up = linears((weights["gate"], weights["up"]), x)
        return act(_sparse(gate, self.sparsity) if self.sparsity else gate) * up


def _sparse(gate: jax.Array, sparsity: float) -> jax.Array:
    """relu(gate - (mean + q * std)) of each row; see MLP."""
    quantile = jnp.asarray(statistics.NormalDist().inv_cdf(sparsity), gate.dtype)
    cut = jnp.mean(gate, axis=-1, keepdims=True) + jnp.std(gate, axis=-1, keepdims=True) * quantile
    return jax.nn.relu(gate - cut)
