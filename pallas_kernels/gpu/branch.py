"""Conditions in a Mosaic GPU kernel, as numbers.

To convert a bool, Mosaic (JAX 0.11) starts `ptxas` to learn its version, which takes 6 to 13 ms. pl.when converts its
condition, and the kernels of a program have about 25: a quarter of the time to lower a program.
"""

import jax
import jax.numpy as jnp
from jax import lax


def as_number(condition: jax.Array) -> jax.Array:
    """i32: 1 if the scalar condition holds, else 0."""
    return jnp.where(condition, jnp.int32(1), jnp.int32(0))


def when(condition: jax.Array):
    """Decorator: run the function, which takes no arguments and returns nothing, if the traced condition holds."""
    return lambda function: lax.switch(as_number(condition), [lambda: None, function])


def when_in_warp(condition: jax.Array):
    """`when` inside plgpu.warp_map, where lax.switch does not lower: a loop of no turn or one."""
    return lambda function: lax.fori_loop(0, as_number(condition), lambda _, __: function(), None)
