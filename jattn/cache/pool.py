"""Allocates pools on 2 MiB OS pages to reduce TLB misses."""

import functools
import math

import jax
import jax.numpy as jnp

from jattn.device import Chip
from pallas_kernels.cpu.native import library, ops

MIN_LARGE_BYTES = 8 * 2**20
"""Bytes. Smaller pools use ordinary OS pages."""


def filled(shape: tuple[int, ...], value: jax.Array, chip: Chip) -> jax.Array:
    """An array of one value. On a CPU with the native library, from MIN_LARGE_BYTES on it uses 2 MiB pages."""
    large = math.prod(shape) * value.dtype.itemsize >= MIN_LARGE_BYTES
    if large and chip.platform == "cpu" and library.status().available:
        return _on_large_pages(value, shape)
    return jnp.full(shape, value)


@functools.partial(jax.jit, static_argnames="shape")
def _on_large_pages(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.platform_dependent(
        value, cpu=lambda x: ops.full(shape, x), default=lambda x: jnp.full(shape, x)
    )  # fmt: skip
