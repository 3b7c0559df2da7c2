"""The states of context ranks, merged in one launch where the ranks can write to each other's memory."""

import functools
from typing import Any

import jax

from jattn.backends.parallel import ContextParallel
from jattn.device import Chip
from jattn.ops.parallel import cp_lse_ag_out_ar
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from pallas_kernels.gpu.rank_merge_sm90 import RankMerge, exchange, merge_ranks

Peers = tuple[jax.Array, jax.Array, jax.Array]
"""What the launches of a step share: see `exchange` of rank_merge_sm90.py."""


def peers_of(spec: AttentionSpec, tokens: int, parallel: ContextParallel, chip: Chip) -> Peers | None:
    """For the layers of a plan, inside shard_map; None where the states are merged by collectives."""
    if not parallel.one_memory or chip.generation != "sm_90":
        return None
    config = _config(spec.num_heads, spec.v_head_dim, tokens, parallel, "float32")
    return _exchanged(config) if config.fits else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(config: RankMerge) -> Peers:
    """`exchange`, into which a gradient does not look."""
    return exchange(config)


_exchanged.defvjp(lambda config: (exchange(config), None), lambda config, saved, cotangent: ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def merged_by_launch(parallel: ContextParallel, dtype: str, state: AttentionState, peers: Peers) -> AttentionState:
    """cp_lse_ag_out_ar of a float32 state, with `out` in dtype, on every rank."""
    tokens, heads, dim = state.out.shape
    out, lse = merge_ranks(_config(heads, dim, tokens, parallel, dtype), state.out, state.lse, peers)
    return AttentionState(out=out, lse=lse)


def _forward(parallel: ContextParallel, dtype: str, state: AttentionState, peers: Peers):
    return merged_by_launch(parallel, dtype, state, peers), state


def _backward(parallel: ContextParallel, dtype: str, state: AttentionState, cotangent) -> tuple[Any, None]:
    assert parallel.dcp_axis is not None
    merged, pull = jax.vjp(functools.partial(cp_lse_ag_out_ar, axis=parallel.dcp_axis), state)
    return *pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangent, merged)), None


merged_by_launch.defvjp(_forward, _backward)


def _config(heads: int, dim: int, tokens: int, parallel: ContextParallel, dtype: str) -> RankMerge:
    return RankMerge(ranks=parallel.dcp_world_size, tokens=tokens, heads=heads, dim=dim, dtype=dtype)
