"""Queries and weights rounded to 8 bits, as kernels round them that multiply in 8 bits.

Scales are powers of two, so that rounding does not depend on the keys or rows beside a number: a row of queries is
scaled until its largest element is in 2 ** 7 .. 2 ** 8, and weights exp(x - max) until the power of two above their
largest is 2 ** WEIGHT_BITS. float8_e4m3fn has 4 significant bits down to 2 ** -6, and nothing below 2 ** -10.

Hopper's kernel scales the first block's until that power is 2 ** 7, and keeps the scale while no weight exceeds 2 ** 8
(raise_shift in softmax_sm90.py). So the smallest weights, which have fewer bits, may be rounded otherwise than here.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.algebra import quant

FP8 = "float8_e4m3fn"
ROW_BITS = 8
WEIGHT_BITS = 8
LOG2E = math.log2(math.e)


def round_rows(x: jax.Array, dtype: str) -> jax.Array:
    """f32[..., D]: each row of x rounded to `dtype` at the largest power of two that keeps it below 2 ** ROW_BITS."""
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    exponent = jnp.where(jnp.isfinite(top), jnp.frexp(top)[1], 129)
    shift = ROW_BITS - jnp.clip(exponent, ROW_BITS - 125, 129)
    return jnp.ldexp(quant.to_dtype(jnp.ldexp(x, shift), dtype).astype(jnp.float32), -shift)


def round_weights(p: jax.Array, m: jax.Array, dtype: str) -> jax.Array:
    """f32 weights p = exp(x - m) of [..., C] rounded to `dtype`, for finite m of [..., 1]."""
    above = jnp.exp2(WEIGHT_BITS + m * LOG2E - jnp.ceil(m * LOG2E))
    return quant.to_dtype(p * above, dtype).astype(jnp.float32) / above
