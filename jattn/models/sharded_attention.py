"""The attention of one layer in a program that XLA partitions; each rank has some of the heads.

ShardedAttention is for a cache of keys and values, ShardedLatentAttention for a latent one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jattn.attention import PagedAttention
from jattn.cache import KVCacheSpec, PagedKV
from jattn.metadata import CommonAttentionMetadata
from jattn.mla import MLAAttention
from jattn.mla_spec import MLAParams
from jattn.models.rank_sums import BY_XLA, RankSums
from jattn.models.sharded_products import REPLICATED, columns, shard_map, summed_linear
from jattn.ops.parallel import own_heads
from jattn.ops.rotation import Angles
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams

AnyAttention = PagedAttention | MLAAttention


@dataclasses.dataclass(frozen=True)
class ShardedAttention:
    """Takes and returns global arrays, as the PagedAttention of the whole layer would. Hashable.

    The plan is built once for all layers of a spec. Rotation, write and attention are one shard_map. Ranks with the
    same kv head write the same keys, each into its own part of the pool. Only context ranks communicate.
    """

    attn: PagedAttention  # of the heads that one rank attends with, over its part of the cache
    cache_spec: KVCacheSpec  # of the whole cache
    mesh: Mesh | AbstractMesh  # ranks are on its Auto axes
    pools: PartitionSpec  # of the cache's arrays
    kv_axes: tuple[str, ...]  # over which kv heads are distributed; query heads: over all ranks

    def build(self, meta: CommonAttentionMetadata) -> Any:
        """The plans of a batch, one for each context rank."""
        return _plans(self.attn, self.mesh, meta)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: PagedKV, m: Any, params: AttentionParams,
        angles: Angles | None,
    ) -> tuple[PagedKV, AttentionState]:  # fmt: skip
        """The arguments and the result of PagedAttention.__call__."""
        heads, kv_heads = PartitionSpec(None, self.mesh.auto_axes), PartitionSpec(None, self.kv_axes)

        def on_rank(q, k, v, cache, m, params, angles):
            q, cache, m = _entered(self.attn, q, cache, m)
            cache, state = self.attn(q, k, v, cache, m, params, angles)
            return _left(self.attn, self.cache_spec, cache, state)

        plans = _plan_partition(self.attn)
        places = (heads, kv_heads, kv_heads, self.pools, plans, self._params_partition(params), REPLICATED)
        return shard_map(self.mesh, on_rank, places, (self.pools, heads))(q, k, v, cache, m, params, angles)

    def multiply(
        self, weights: dict, names: tuple[str, ...], x: jax.Array, sums: RankSums = BY_XLA
    ) -> tuple[jax.Array, ...]:
        """The jattn.nn.attention_layer.Multiply: each rank has the columns of its heads; results of o are added up."""
        if names == ("o",):
            return (summed_linear(self.mesh, weights["o"], x, sums),)
        axes = {name: self.kv_axes if name in ("k", "v") else self.mesh.auto_axes for name in names}
        return columns(self.mesh, {name: weights[name] for name in names}, axes, x)

    def _params_partition(self, params: AttentionParams) -> AttentionParams:
        """The partition of each param. Scalars are replicated; arrays over heads are distributed like the heads."""
        of_heads = _attention_axes(self.attn, self.mesh)
        axes = dict.fromkeys(("alibi_slopes", "sinks", "q_scale", "distance_bias"), of_heads)
        axes |= dict.fromkeys(("k_scale", "v_scale"), self.kv_axes)
        given = {name: x for name, x in vars(params).items() if x is not None}
        places = {n: PartitionSpec(axes[n]) if n in axes and jnp.ndim(x) else REPLICATED for n, x in given.items()}
        return dataclasses.replace(params, **places)


@dataclasses.dataclass(frozen=True)
class ShardedLatentAttention:
    """The same for a latent cache: every rank writes all rows of its context rank into its own copy. Hashable."""

    attn: MLAAttention  # of the heads that one rank attends with
    cache_spec: KVCacheSpec  # of the whole cache
    mesh: Mesh | AbstractMesh  # ranks are on its Auto axes
    pools: PartitionSpec  # of the cache's arrays

    def build(self, meta: CommonAttentionMetadata) -> Any:
        """The plans of a batch, one for each context rank."""
        return _plans(self.attn, self.mesh, meta)

    def __call__(
        self, q: jax.Array, kv_c: jax.Array, k_pe: jax.Array, cache: PagedKV, m: Any, params: MLAParams
    ) -> tuple[PagedKV, AttentionState]:
        """The arguments and the result of MLAAttention.__call__."""
        heads, of_heads = PartitionSpec(None, self.mesh.auto_axes), PartitionSpec(_attention_axes(self.attn, self.mesh))
        given = {name: x for name, x in vars(params).items() if x is not None}
        of_params = {name: of_heads if jnp.ndim(x) else REPLICATED for name, x in given.items()}

        def on_rank(q, kv_c, k_pe, cache, m, params):
            q, cache, m = _entered(self.attn, q, cache, m)
            cache, state = self.attn(q, kv_c, k_pe, cache, m, params)
            return _left(self.attn, self.cache_spec, cache, state)

        plans, params_places = _plan_partition(self.attn), dataclasses.replace(params, **of_params)
        places = (heads, REPLICATED, REPLICATED, self.pools, plans, params_places)
        return shard_map(self.mesh, on_rank, places, (self.pools, heads))(q, kv_c, k_pe, cache, m, params)

    def multiply(
        self, weights: dict, names: tuple[str, ...], x: jax.Array, sums: RankSums = BY_XLA
    ) -> tuple[jax.Array, ...]:
        """As that of ShardedAttention. The projections that are whole on every rank are computed by every rank."""
        if names == ("o",):
            return (summed_linear(self.mesh, weights["o"], x, sums),)
        axes = {name: self.mesh.auto_axes if name in ("q", "q_b") else () for name in names}
        return columns(self.mesh, {name: weights[name] for name in names}, axes, x)


# ------------------------------------------------------------------ context ranks
def _attention_axes(attn: AnyAttention, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes over which the heads are distributed during attention: context ranks have the same ones."""
    return tuple(name for name in mesh.auto_axes if name != attn.parallel.dcp_axis)


def _plan_partition(attn: AnyAttention) -> PartitionSpec:
    """Of a plan's arrays, which have a first axis of context ranks if there are several."""
    axis = attn.parallel.dcp_axis
    return REPLICATED if axis is None else PartitionSpec(axis)


def _plans(attn: AnyAttention, mesh: Mesh | AbstractMesh, meta: CommonAttentionMetadata) -> Any:
    """The plan of a batch; with context ranks, the arrays of all of their plans, stacked."""
    attn.parallel.check_of_all_ranks(meta)

    def on_rank(meta: CommonAttentionMetadata) -> Any:
        plan = attn.build(meta)
        return plan if attn.parallel.dcp_axis is None else jax.tree.map(lambda x: jnp.asarray(x)[None], plan)

    return shard_map(mesh, on_rank, REPLICATED, _plan_partition(attn))(meta)


def _entered(attn: AnyAttention, q: jax.Array, cache: PagedKV, plan: Any) -> tuple[jax.Array, PagedKV, Any]:
    """On a rank: what it attends with. It gathers the queries of its context ranks, because each has other keys."""
    cache, axis = dataclasses.replace(cache, spec=attn.cache_spec), attn.parallel.dcp_axis
    if axis is None:
        return q, cache, plan
    return jax.lax.all_gather(q, axis, axis=1, tiled=True), cache, jax.tree.map(lambda x: x[0], plan)


def _left(
    attn: AnyAttention, cache_spec: KVCacheSpec, cache: PagedKV, state: AttentionState
) -> tuple[PagedKV, AttentionState]:
    """On a rank: what it returns. The states of its context ranks are merged; it keeps those of its own heads."""
    cache, axis = dataclasses.replace(cache, spec=cache_spec), attn.parallel.dcp_axis
    return cache, state if axis is None else jax.tree.map(lambda x: own_heads(x, axis, 1), state)
