"""product: rows times a weight matrix, by the first implementation of this platform that supports the operands.

A new one is an `Implementation` in IMPLEMENTATIONS; nothing else names them. The last one, XLA's dot, supports all.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn import device


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute x [T, in] @ kernel [in, out], or @ kernel [out, in] transposed, as float32."""

    platforms: tuple[str, ...]  # of jattn.device.Chip; empty: all
    supports: Callable[[jax.Array, jax.Array, bool], bool]  # (x, kernel, transposed), by shape and dtype
    compute: Callable[[jax.Array, jax.Array, bool], jax.Array]


def product(x: jax.Array, kernel: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x [T, in] @ kernel [in, out], summed in float32: f32[T, out]. transposed: the kernel is [out, in]."""
    platform = device.detect().platform
    chosen = next(
        way for way in IMPLEMENTATIONS
        if (not way.platforms or platform in way.platforms) and way.supports(x, kernel, transposed)
    )  # fmt: skip
    return chosen.compute(x, kernel, transposed)


def _dot(x: jax.Array, kernel: jax.Array, transposed: bool) -> jax.Array:
    """XLA's dot.

    On XLA:CPU (JAX 0.10), a bf16 product with a float32 result is up to five times faster than one with a bf16 result,
    and one bf16 row takes ten times as long as two. A single row is therefore duplicated.
    """
    duplicate = x.shape[0] == 1 and x.dtype == jnp.bfloat16
    rows, matrix = jnp.concatenate([x, x]) if duplicate else x, kernel.T if transposed else kernel
    y = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
    return y[:1] if duplicate else y


IMPLEMENTATIONS = (Implementation(platforms=(), supports=lambda x, kernel, transposed: True, compute=_dot),)
"""In order of preference."""
