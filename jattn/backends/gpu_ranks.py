"""The states of context ranks, merged in one launch where the ranks can write to each other's memory."""

import dataclasses
import functools
from typing import Any

import jax

from jattn.backends.parallel import ContextParallel
from jattn.device import Chip
from jattn.ops.parallel import cp_lse_ag_out_ar
from jattn.ops.rank_launches import Peers, by_vmap, exchanged
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from pallas_kernels.gpu.rank_merge_sm90 import RankMerge, exchange, merge_ranks


def peers_of(spec: AttentionSpec, tokens: int, parallel: ContextParallel, chip: Chip) -> Peers | None:
    """For the layers of a plan, inside shard_map; None where the states are merged by collectives."""
    if not parallel.one_memory or chip.generation != "sm_90":
        return None
    config = _config(spec.num_heads, spec.v_head_dim, tokens, parallel, "float32")
    return exchanged(exchange, config) if config.fits else None


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

    return by_vmap(launch, instead)(state, peers)


def _forward(parallel: ContextParallel, dtype: str, state: AttentionState, peers: Peers):
    return merged_by_launch(parallel, dtype, state, peers), state


def _backward(parallel: ContextParallel, dtype: str, state: AttentionState, cotangent) -> tuple[Any, None]:
    merged, pull = jax.vjp(functools.partial(_by_collectives, parallel), state)
    return *pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangent, merged)), None


merged_by_launch.defvjp(_forward, _backward)


def _by_collectives(parallel: ContextParallel, state: AttentionState) -> AttentionState:
    assert parallel.dcp_axis is not None
    return cp_lse_ag_out_ar(state, axis=parallel.dcp_axis)


def _config(heads: int, dim: int, tokens: int, parallel: ContextParallel, dtype: str) -> RankMerge:
    return RankMerge(ranks=parallel.dcp_world_size, tokens=tokens, heads=heads, dim=dim, dtype=dtype)
