"""The states of context ranks, merged in one launch where the ranks can write to each other's memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jattn.backends.parallel import ContextParallel
from jattn.device import Chip
from jattn.ops.parallel import cp_lse_ag_out_ar
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from pallas_kernels.gpu.rank_merge_sm90 import RankMerge, exchange, merge_ranks

Peers = tuple[jax.Array, jax.Array, jax.Array]
"""What the launches of a step share: see `exchange` of rank_merge_sm90.py."""

VMAPS_SINCE = (0, 12)  # JAX's version. Before, vmap refuses these kernels, and custom_vmap functions that make a Ref


def peers_of(spec: AttentionSpec, tokens: int, parallel: ContextParallel, chip: Chip) -> Peers | None:
    """For the layers of a plan, inside shard_map; None where the states are merged by collectives."""
    if not parallel.one_memory or chip.generation != "sm_90":
        return None
    config = _config(spec.num_heads, spec.v_head_dim, tokens, parallel, "float32")
    return _exchanged(config) if config.fits else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(config: RankMerge) -> Peers:
    """`exchange`, into which neither a gradient nor vmap looks: vmap would tell the addresses of slices."""
    once = lambda axis_size, in_batched, unused: (exchange(config), (False, False, False))
    return _by_vmap(lambda unused: exchange(config), once)(jnp.int32(0))


_exchanged.defvjp(lambda config: (_exchanged(config), None), lambda config, saved, cotangent: ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def merged_by_launch(parallel: ContextParallel, dtype: str, state: AttentionState, peers: Peers) -> AttentionState:
    """cp_lse_ag_out_ar of a float32 state, with `out` in dtype, on every rank."""

    def launch(state: AttentionState, peers: Peers) -> AttentionState:
        tokens, heads, dim = state.out.shape
        out, lse = merge_ranks(_config(heads, dim, tokens, parallel, dtype), state.out, state.lse, peers)
        return AttentionState(out=out, lse=lse)

    def instead(axis_size: int, in_batched, state: AttentionState, peers: Peers):
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched[0])
        merge = functools.partial(_by_collectives, parallel)
        merged = jax.vmap(merge, (axes,), axis_size=axis_size)(state)
        merged = dataclasses.replace(merged, out=merged.out.astype(dtype))
        return merged, jax.tree.map(lambda _: True, merged)

    return _by_vmap(launch, instead)(state, peers)


def _forward(parallel: ContextParallel, dtype: str, state: AttentionState, peers: Peers):
    return merged_by_launch(parallel, dtype, state, peers), state


def _backward(parallel: ContextParallel, dtype: str, state: AttentionState, cotangent) -> tuple[Any, None]:
    merged, pull = jax.vjp(functools.partial(_by_collectives, parallel), state)
    return *pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangent, merged)), None


merged_by_launch.defvjp(_forward, _backward)


def _by_collectives(parallel: ContextParallel, state: AttentionState) -> AttentionState:
    assert parallel.dcp_axis is not None
    return cp_lse_ag_out_ar(state, axis=parallel.dcp_axis)


def _by_vmap(launch: Callable, instead: Callable) -> Callable:
    """launch(*args), and under vmap instead(axis_size, in_batched, *args), the rule of a custom_vmap."""
    if jax.__version_info__ < VMAPS_SINCE:
        return launch
    mapped = custom_vmap(launch)
    mapped.def_vmap(instead)
    return mapped


def _config(heads: int, dim: int, tokens: int, parallel: ContextParallel, dtype: str) -> RankMerge:
    return RankMerge(ranks=parallel.dcp_world_size, tokens=tokens, heads=heads, dim=dim, dtype=dtype)
