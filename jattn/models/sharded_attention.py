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
from jattn.models.mlp import MLP
from jattn.nn.attention_layer import linear, multiply
from jattn.ops.parallel import own_heads
from jattn.ops.product import product
from jattn.ops.quantised import is_quantised
from jattn.ops.rotation import Angles
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams

REPLICATED = PartitionSpec()
"""Of an array that is whole on every rank."""

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
        return _shard_map(self.mesh, on_rank, places, (self.pools, heads))(q, k, v, cache, m, params, angles)

    def multiply(self, weights: dict, names: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        """The jattn.nn.attention_layer.Multiply: each rank has the columns of its heads; results of o are added up."""
        if names == ("o",):
            return (summed_linear(self.mesh, weights["o"], x),)
        own = {name: weights[name] for name in names}
        if _are_quantised(own) or not _is_divided(self.mesh):
            return multiply(own, names, x)
        axes = {name: self.kv_axes if name in ("k", "v") else self.mesh.auto_axes for name in names}
        columns = {name: PartitionSpec(None, axes[name]) for name in names}
        places = {n: {"kernel": columns[n], "bias": PartitionSpec(axes[n])} for n in names}
        places = {n: {part: places[n][part] for part in own[n]} for n in names}
        on_rank = lambda weights, x: multiply(weights, names, x)
        return _shard_map(self.mesh, on_rank, (places, REPLICATED), tuple(columns.values()))(own, x)

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
        return _shard_map(self.mesh, on_rank, places, (self.pools, heads))(q, kv_c, k_pe, cache, m, params)


# ------------------------------------------------------------------ products
def _is_divided(mesh: Mesh | AbstractMesh) -> bool:
    """Does the mesh have several ranks? With one a data rank, a sum over ranks would exchange nothing."""
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def _are_quantised(weights: Any) -> bool:
    """XLA divides these products itself: the groups of a quantised weight may be whole on each rank."""
    return any(map(is_quantised, jax.tree.leaves(weights, is_leaf=is_quantised)))


def summed_linear(mesh: Mesh | AbstractMesh, weights: dict, x: jax.Array) -> jax.Array:
    """jattn.nn.attention_layer.linear of x [T, in], whose columns are distributed, as the rows of the kernel are.

    Each rank rounds its sums before they are added, unless there is a bias.
    """
    if _are_quantised(weights) or not _is_divided(mesh):
        return linear(weights, x)
    axes, bias = mesh.auto_axes, weights.get("bias")

    def on_rank(kernel, x):
        y = product(x, kernel, dtype=x.dtype if bias is None else jnp.float32)
        return jax.lax.psum(y, axes)

    places = PartitionSpec(axes), PartitionSpec(None, axes)
    y = _shard_map(mesh, on_rank, places, REPLICATED)(weights["kernel"], x)
    return y if bias is None else (y + bias[None, :]).astype(x.dtype)


def sharded_mlp(mesh: Mesh | AbstractMesh, mlp: MLP, weights: dict, x: jax.Array) -> jax.Array:
    """mlp(weights, x), each rank with a part of its width."""
    if mlp.sparsity or _are_quantised(weights) or not _is_divided(mesh):  # sparsity needs the mean over the whole width
        return mlp(weights, x)
    axes = mesh.auto_axes
    into = {name: part for name, part in weights.items() if name != "down"}
    of_part = {"kernel": PartitionSpec(None, axes), "bias": PartitionSpec(axes)}
    places = {name: {leaf: of_part[leaf] for leaf in part} for name, part in into.items()}
    y = _shard_map(mesh, mlp.inner, (places, REPLICATED), PartitionSpec(None, axes))(into, x)
    return summed_linear(mesh, weights["down"], y)


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

    def on_rank(meta: CommonAttentionMetadata) -> Any:
        plan = attn.build(meta)
        return plan if attn.parallel.dcp_axis is None else jax.tree.map(lambda x: jnp.asarray(x)[None], plan)

    return _shard_map(mesh, on_rank, REPLICATED, _plan_partition(attn))(meta)


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


def _shard_map(mesh: Mesh | AbstractMesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """A data axis is manual already where this is called."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(mesh.auto_axes), check_vma=False
    )
