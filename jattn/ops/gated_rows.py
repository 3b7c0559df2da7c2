"""silu(x gate) * (x up) of many rows in one launch on a Hopper GPU, where the Mosaic kernel supports the operands."""

from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from pallas_kernels.gpu.gated_product_config import GatedProductConfig, choose
from pallas_kernels.gpu.gated_product_sm90 import gated_product as launch


def config_of(x: Any, gate: Any, up: Any) -> GatedProductConfig | None:
    """The launch for these operands; None if the kernel does not serve them."""
    processors = device.processors()
    if device.detect().generation != "sm_90" or processors is None:
        return None
    if not all(isinstance(y, jax.Array) and y.ndim == 2 and y.dtype == jnp.bfloat16 for y in (x, gate, up)):
        return None
    return choose(x.shape[0], x.shape[1], gate.shape[1], processors)


@jax.custom_jvp
def gated_rows(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """bf16[T, width] of x [T, inner] and weights [inner, width], for which `config_of` finds a launch.

    Its derivatives are those of XLA's products. Under vmap it is called once per element.
    """
    return _each(x, gate, up)


@gated_rows.defjvp
def _jvp(primals, tangents):
    return jax.jvp(in_steps, primals, tangents)


def in_steps(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The same by XLA's products."""
    of_gate, of_up = (jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype) for w in (gate, up))
    return jax.nn.silu(of_gate) * of_up


@jax.custom_batching.sequential_vmap
def _each(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    config = config_of(x, gate, up)
    assert config is not None  # the caller asked config_of
    return launch(x, gate, up, config)
