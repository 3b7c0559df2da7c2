"""Products of many rows with several weights in one launch on a Hopper GPU, where the Mosaic kernels support them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from pallas_kernels.gpu import many_rows_sm90 as kernels
from pallas_kernels.gpu.many_rows_config import ManyRowsConfig, choose

WAVES_ON_MESH = 4


def config_of(x: Any, weights: Sequence[Any], *, together: bool = False) -> ManyRowsConfig | None:
    """The launch for x and two or more weights; None if the kernels do not serve them. together: for `gated`."""
    processors = device.processors()
    if device.detect().generation != "sm_90" or processors is None or len(weights) < 2:
        return None
    if not all(isinstance(y, jax.Array) and y.ndim == 2 and y.dtype == jnp.bfloat16 for y in (x, *weights)):
        return None
    mesh = jax.sharding.get_abstract_mesh()
    is_one_of_many = any(mesh.shape[axis] > 1 for axis in mesh.manual_axes)  # then beside all-reduces
    widths = [w.shape[1] for w in weights]
    return choose(
        x.shape[0], x.shape[1], widths, processors, together=together, waves=WAVES_ON_MESH if is_one_of_many else 1
    )


# ---------------------------------------------------------------------- activation(x gate) * (x up)
GATES = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
"""The activations of a gate that kernels compute, the same as in pallas_kernels/gpu/gates.py; GELU is its tanh form."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def gated(x: jax.Array, gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """activation(x @ gate) * (x @ up), bf16[T, width], for operands for which `config_of` finds a launch.

    Its derivatives are those of XLA's products. Under vmap it is called once per element.
    """

    @jax.custom_batching.sequential_vmap
    def each(x, gate, up):
        config = config_of(x, (gate, up), together=True)
        assert config is not None  # the caller asked
        return kernels.gated_product(x, gate, up, config, activation)

    return each(x, gate, up)


@gated.defjvp
def _gated_jvp(activation: str, primals, tangents):
    return jax.jvp(functools.partial(gated_in_steps, activation=activation), primals, tangents)


def gated_in_steps(x: jax.Array, gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """The same by XLA's products."""
    of_gate, of_up = in_steps(x, (gate, up))
    return GATES[activation](of_gate) * of_up


# ---------------------------------------------------------------------- x [q k v]
@jax.custom_jvp
def joined(x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    """x @ each weight, side by side, bf16[T, sum of widths], for operands for which `config_of` finds a launch.

    Its derivatives are those of XLA's products. Under vmap it is called once per element.
    """
    return _each_joined(x, weights)


@joined.defjvp
def _joined_jvp(primals, tangents):
    return jax.jvp(lambda x, weights: jnp.concatenate(in_steps(x, weights), axis=1), primals, tangents)


@jax.custom_batching.sequential_vmap
def _each_joined(x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    config = config_of(x, weights)
    assert config is not None  # the caller asked
    return kernels.joined_product(x, weights, config)


def in_steps(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """x @ each weight by XLA's products, in the dtype of x."""
    return tuple(jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype) for w in weights)
