"""The bias among a request's new tokens (a token tree's): f32[Q, Q], for query i and key j of the new tokens, i, j < Q.

It lies in GMEM after the numbers of the heads, in rows of two: the kernels then have no argument more without it.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.gather_sm90 import gather


def bias_rows(bias: jax.Array) -> jax.Array:
    """f32[n, 2] of f32[Q, Q]; a row of an odd Q ends with a 0."""
    return jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, bias.shape[0] % 2))).reshape(-1, 2)


def bias_of(cfg: GpuKernelConfig, per_head, token, key, layout):
    """f32: the bias of the new token `token` for the new token `key`, i32 fragments of one shape; 0 for other keys."""
    size = math.isqrt(2 * (per_head.shape[0] - cfg.num_heads))
    row = size + size % 2
    inside = (key >= 0) & (key < size) & (token < size)
    place = 2 * cfg.num_heads + token * row + key
    return gather(per_head, jnp.where(inside, place, -1), layout)
