"""Arrays of numbers near N(0, 1) that a GPU fills in one pass and of which numpy computes any element alone.

An element is a hash of its index in the array: the sum of its four bytes, less their mean, over their deviation. So a
witness reads the rows that it needs without a copy of gigabytes, and without a program that gathers them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MEAN, DEVIATION = 510, 147.8
SEED_FACTOR = 0x85EBCA77


def _of_hash(xp, index, start):
    """f32 of u32 indices. xp: numpy or jax.numpy, which agree in every bit; start: u32, the seed times SEED_FACTOR."""
    u32 = xp.uint32
    x = index * u32(0x9E3779B1) + start
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = (x ^ (x >> u32(shift))) * u32(factor)
    x = x ^ (x >> u32(15))
    total: Any = sum((x >> u32(8 * k)) & u32(255) for k in range(4))
    return (total.astype(xp.int32) - MEAN).astype(xp.float32) * xp.float32(1 / DEVIATION)


def fill(seed, shape: tuple[int, ...], dtype) -> jax.Array:
    """The array. seed: a traced u32, so that nothing is computed while a program is compiled."""
    index = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return _of_hash(jnp, index, seed * jnp.uint32(SEED_FACTOR)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What `fill` made, on the host: indexing computes the elements, in the array's dtype."""

    seed: int
    shape: tuple[int, ...]
    dtype: object

    def __getitem__(self, leading) -> np.ndarray:
        """The rows at these leading indices, arrays that broadcast together."""
        leading = np.broadcast_arrays(*(np.asarray(i, np.uint32) for i in leading))
        index = np.zeros(leading[0].shape, np.uint32)
        for i, size in zip(leading, self.shape, strict=False):
            index = index * np.uint32(size) + i
        for size in self.shape[len(leading) :]:
            index = index[..., None] * np.uint32(size) + np.arange(size, dtype=np.uint32)
        return _of_hash(np, index, np.uint32(self.seed * SEED_FACTOR % 2**32)).astype(self.dtype)
