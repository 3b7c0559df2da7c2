"""WeightSpec: the shape, sharding axes and initial value of a weight, for loading, sharding and initialisation."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jattn.errors.arguments import dtype_name, short
from pallas_kernels.algebra import quant


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One array: its shape, a logical name for each axis (for sharding rules), and its initial value."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fill: float | None = None  # None: normal, with variance 1 / inputs

    def draw(self, key: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """The initial value."""
        if self.fill is not None:
            return jnp.full(self.shape, self.fill, dtype)
        inputs = self.shape[-2] if len(self.shape) > 1 else 1
        return (jax.random.normal(key, self.shape, jnp.float32) / math.sqrt(inputs)).astype(dtype)


def check_param_dtype(value: Any) -> str:
    """The name of a dtype that weights can be initialised in; ValueError for any other."""
    name = dtype_name("param_dtype", value)
    if name not in quant.FLOATS:
        raise ValueError(f"param_dtype={short(value)} must be one of {', '.join(quant.FLOATS)}")
    return name


def is_weight_spec(x: Any) -> bool:
    """The `is_leaf` of tree.map over trees of WeightSpecs."""
    return isinstance(x, WeightSpec)


def weight_path(path: tuple[Any, ...]) -> str:
    """The name of a leaf of params, as "layers.0.attn.q.kernel"; path: as jax.tree.leaves_with_path gives it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def linear_weight_specs(
    inputs: int, outputs: int, axes: tuple[str | None, str | None], bias: bool
) -> dict[str, WeightSpec]:
    """The kernel [inputs, outputs] of a linear projection, and its bias."""
    weights = {"kernel": WeightSpec((inputs, outputs), axes)}
    return weights | ({"bias": WeightSpec((outputs,), axes[1:], 0.0)} if bias else {})
