"""Context parallelism inside shard_map: each rank computes attention over its own keys, then all states are merged.

    lse = log sum_r exp(lse_r)        out = sum_r exp(lse_r - lse) out_r         r over the axis

Three functions compute the same values. `cp_lse_ag_out_ar` returns all heads on each rank; `cp_lse_ag_out_rs` (by
reduce-scatter) and `dcp_a2a_lse_reduce` (by all-to-all) return each rank's share of the heads. Sinks are added
afterwards.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jattn.metadata.host import segment_of
from jattn.metadata.parallel import KeyShard
from jattn.ops.levels import Level
from jattn.ops.state import AttentionState, log2_lse_to_ln, merge
from jattn.types import AnyArray


def shard_level(level: Level, shard: KeyShard, local_lens: AnyArray | None = None) -> Level:
    """The same queries with the keys of one rank. The block table is the same on every rank."""
    batch = level.batch
    seq_lens = shard.count_below(batch.seq_lens) if local_lens is None else jnp.asarray(local_lens)
    return dataclasses.replace(level, batch=dataclasses.replace(batch, seq_lens=seq_lens, shard=shard))


GATHERED = 2**18
"""The most numbers of all ranks' states that are gathered whole: one exchange instead of two, of more bytes."""


def cp_lse_ag_out_ar(state: AttentionState, axis: str, *, is_lse_base_on_e: bool = True) -> AttentionState:
    """All heads on every rank: all-gather of the lse, all-reduce of the weighted outs; of few rows, one all-gather."""
    if state.out.size * lax.axis_size(axis) <= GATHERED:
        own = state.lse if is_lse_base_on_e else log2_lse_to_ln(state.lse)
        outs, lses = lax.all_gather((state.out.astype(jnp.float32), own), axis)
        merged = merge(*(AttentionState(out=out, lse=lse) for out, lse in zip(outs, lses, strict=True)))
        return dataclasses.replace(merged, out=merged.out.astype(state.out.dtype))
    part, lse = _weighted(state, axis, is_lse_base_on_e)
    return AttentionState(out=lax.psum(part, axis).astype(state.out.dtype), lse=lse)


def cp_lse_ag_out_rs(state: AttentionState, axis: str, *, is_lse_base_on_e: bool = True) -> AttentionState:
    """Each rank keeps its share of the heads: all-gather of the lse, reduce-scatter of the weighted outs."""
    part, lse = _weighted(state, axis, is_lse_base_on_e)
    lse = own_heads(lse, axis, 1)
    out = lax.psum_scatter(part, axis, scatter_dimension=1, tiled=True)
    return AttentionState(out=out.astype(state.out.dtype), lse=lse)


def dcp_a2a_lse_reduce(state: AttentionState, axis: str, *, is_lse_base_on_e: bool = True) -> AttentionState:
    """Each rank keeps its share of the heads: every rank's states of those heads, exchanged and merged here."""
    world = lax.axis_size(axis)
    _check_heads(state.lse.shape[1], world)
    lse = state.lse if is_lse_base_on_e else log2_lse_to_ln(state.lse)

    def exchange(x):
        by_rank = x.reshape(x.shape[0], world, x.shape[1] // world, *x.shape[2:])
        return lax.all_to_all(by_rank, axis, split_axis=1, concat_axis=0)

    outs, lses = exchange(state.out.astype(jnp.float32)), exchange(lse)
    merged = merge(*(AttentionState(out=out, lse=lse) for out, lse in zip(outs, lses, strict=True)))
    return dataclasses.replace(merged, out=merged.out.astype(state.out.dtype))


def mask_dcp_empty_shards(state: AttentionState, query_start_loc: jax.Array, local_lens: jax.Array) -> AttentionState:
    """The state with (0, -inf) in rows of padding, and of requests without a key on this rank."""
    tokens, start = state.lse.shape[0], jnp.asarray(query_start_loc)
    req = segment_of(start[1:], tokens, jnp)
    seen = ((jnp.arange(tokens) < start[-1]) & (jnp.asarray(local_lens)[req] > 0))[:, None]
    return AttentionState(
        out=jnp.where(seen[..., None], state.out, jnp.zeros((), state.out.dtype)),
        lse=jnp.where(seen, state.lse, -jnp.inf),
    )


def own_heads(x: jax.Array, axis: str, dimension: int) -> jax.Array:
    """This rank's share of the heads, which are the axis `dimension` of x."""
    world = lax.axis_size(axis)
    _check_heads(x.shape[dimension], world)
    share = x.shape[dimension] // world
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * share, share, dimension)


def _weighted(state: AttentionState, axis: str, base_e: bool) -> tuple[jax.Array, jax.Array]:
    """(this rank's term of the sum f32[T H V], the lse of all f32[T H]); an empty state adds 0, also if out is NaN."""
    own = state.lse if base_e else log2_lse_to_ln(state.lse)
    own = jnp.where(jnp.isposinf(own), -jnp.inf, own)
    everyone = lax.all_gather(own, axis)
    top = lax.stop_gradient(jnp.max(everyone, axis=0))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    total = jnp.sum(jnp.exp(everyone - shift[None]), axis=0)
    nothing = total == 0
    lse = jnp.where(nothing, -jnp.inf, shift + jnp.log(jnp.where(nothing, 1.0, total)))
    weight = jnp.exp(own - jnp.where(nothing, 0.0, lse))[..., None]
    return jnp.where(weight == 0, 0.0, state.out.astype(jnp.float32) * weight), lse


def _check_heads(heads: int, world: int) -> None:
    if heads % world:
        raise ValueError(f"{heads} heads cannot be shared evenly by {world} ranks; use cp_lse_ag_out_ar")
