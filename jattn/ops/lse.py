"""Log-sum-exps from other libraries: ours is natural log, float32, [T H]."""

import math

import jax
import jax.numpy as jnp


def log2_lse_to_ln(lse: jax.Array) -> jax.Array:
    """Base 2 (FlashInfer, many kernels) -> natural log: x * ln 2; -inf stays -inf."""
    return lse.astype(jnp.float32) * math.log(2.0)


def head_major_to_token_major(lse: jax.Array) -> jax.Array:
    """[H T] (vLLM) -> [T H]."""
    return jnp.swapaxes(lse, -1, -2)
