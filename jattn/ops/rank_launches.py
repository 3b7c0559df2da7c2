"""Launches that write to the memory of other ranks, inside programs that JAX transforms."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Peers = tuple[jax.Array, jax.Array, jax.Array]
"""What the launches of a step share: see `exchange` of rank_merge_sm90.py and rank_sum_sm90.py."""

VMAPS_SINCE = (0, 12)  # JAX's version. Before, vmap refuses these kernels, and custom_vmap functions that make a Ref


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchanged(exchange: Callable, config: object) -> Peers:
    """exchange(config), into which neither a gradient nor vmap looks: vmap would tell the addresses of slices."""
    once = lambda axis_size, in_batched, unused: (exchange(config), (False, False, False))
    return by_vmap(lambda unused: exchange(config), once)(jnp.int32(0))


exchanged.defvjp(
    lambda exchange, config: (exchanged(exchange, config), None), lambda exchange, config, saved, cotangent: ()
)


def by_vmap(launch: Callable, instead: Callable) -> Callable:
    """launch(*args), and under vmap instead(axis_size, in_batched, *args), the rule of a custom_vmap."""
    if jax.__version_info__ < VMAPS_SINCE:
        return launch
    mapped = custom_vmap(launch)
    mapped.def_vmap(instead)
    return mapped
