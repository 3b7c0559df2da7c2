"""ModelMesh: a model that is distributed over the devices of a mesh."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jattn import device
from jattn.attention import PagedAttention
from jattn.backends import ContextParallel
from jattn.cache import KVCacheSpec, PagedKV, empty_cache
from jattn.errors.arguments import boolean, takes
from jattn.mla import MLAAttention
from jattn.mla_spec import MLASpec
from jattn.models import mesh_axes
from jattn.models.config import ModelConfig
from jattn.models.mesh_axes import CONTEXT
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
from jattn.models.rank_sums import BY_XLA, RankSums, rank_sums
from jattn.models.sharded_attention import ShardedAttention, ShardedLatentAttention
from jattn.models.sharded_products import REPLICATED, over_vocabulary, shard_map, sharded_mlp, shared_partition
from jattn.models.weight_tree import weight_paths, weight_specs
from jattn.nn.weight_spec import WeightSpec, is_weight_spec
from jattn.ops.quantised import table_rows
from jattn.parallel import head_partition, rank_spec
from jattn.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ModelMesh:
    """The devices (ranks) over which a model's heads, MLPs, experts and vocabulary are distributed. Make it with `of`.

    XLA's partitioner divides the products and adds the all-reduces; attention and experts run in shard_map. Where
    layers have fewer kv heads than ranks, the mesh has several axes: the kv heads are distributed over the first of
    them and replicated over the others. 8 ranks and 2 kv heads: axes of 2 and 4, ranks 0..3 have kv head 0. Of a latent
    layer the query heads are distributed, and every rank has the whole cache.

    If the vocabulary's size is no multiple of the number of ranks, the vocabulary is replicated; for heads, MLP widths
    and experts that is an error.

    With decode context parallelism the mesh also has an axis "context", the last. Weights and query heads are
    distributed over its ranks too, kv heads are not: of each block, a context rank has the keys of every
    context_ranks-th token. In attention it gets the queries of the others, and the results are merged.

    With data parallelism the mesh also has an axis "data", the first. Each data rank has all ranks of the above, whole
    weights, and tokens and blocks of its own: `each_data_rank` calls a function for each of them, and a forward pass is
    correct only inside that function. There data ranks do not communicate; `dispatch` gathers their tokens after it.
    With `experts_over_data` they share one set of experts and do communicate: each computes its experts for the tokens
    of all, so all must call a forward pass equally often.
    """

    mesh: Mesh  # axes: data, tensor, context; all Auto. Made by `without_devices` it is an AbstractMesh
    experts_over_data: bool = False  # each expert is on one data rank; False: each data rank has all of them

    @classmethod
    @takes(expert_parallel=boolean)
    def of(cls, config: ModelConfig, mesh: Mesh, expert_parallel: bool = False) -> "ModelMesh":
        """For a model and a mesh with the axis "tensor", and perhaps the axes "data" and "context".

        expert_parallel: distribute the experts over all devices, also those of other data ranks.
        """
        devices = mesh_axes.ranks_of(mesh)
        sizes, names = mesh_axes.axes_of(config, devices.shape, expert_parallel)
        return cls(Mesh(devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes)), expert_parallel)

    @classmethod
    @takes(expert_parallel=boolean)
    def without_devices(
        cls, config: ModelConfig, sizes: Mapping[str, int], expert_parallel: bool = False
    ) -> "ModelMesh":
        """The same for a mesh of these sizes, with the same errors, to plan for devices that are not here."""
        sizes_of_axes, names = mesh_axes.axes_of(config, mesh_axes.checked_sizes(sizes), expert_parallel)
        mesh = AbstractMesh(sizes_of_axes, names, axis_types=(AxisType.Auto,) * len(names))
        return cls(cast(Mesh, mesh), expert_parallel)  # shardings and the parts of ranks need only its axes

    @property
    def size(self) -> int:
        """The number of ranks, of each data rank."""
        return self.mesh.size // self.data_ranks

    @property
    def data_ranks(self) -> int:
        """The number of data ranks; 1: there is no axis for them."""
        return self.mesh.shape.get("data", 1)

    @property
    def context_ranks(self) -> int:
        """The number of ranks that share the keys of a request; 1: there is no axis for them."""
        return self.mesh.shape.get(CONTEXT, 1)

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks over which kv heads are distributed or replicated."""
        return self.size // self.context_ranks

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, by data rank and rank."""
        return tuple(self.mesh.devices.flat)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the ranks' axes, outermost first."""
        return self.inner_mesh.auto_axes

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The same without "context"."""
        return tuple(name for name in self.axes if name != CONTEXT)

    @property
    def inner_mesh(self) -> Mesh | AbstractMesh:
        """The mesh in a forward pass, which is of one data rank."""
        if self.data_ranks == 1:
            return self.mesh
        return self.mesh.abstract_mesh.update_axis_types({"data": AxisType.Manual})

    @property
    def has_one_memory(self) -> bool:
        """Can a launch on one rank write to the memory of all?"""
        return self.data_ranks == 1 and isinstance(self.mesh, Mesh) and device.are_peers(self.devices)

    def kv_axes(self, num_kv_heads: int) -> tuple[str, ...]:
        """The axes over which `num_kv_heads` heads are distributed: the first ones."""
        axes, ranks = [], 1
        for name in self.tensor_axes:
            if ranks < min(num_kv_heads, self.tensor_ranks):
                axes.append(name)
                ranks *= self.mesh.shape[name]
        if ranks != min(num_kv_heads, self.tensor_ranks):
            raise ValueError(
                f"{num_kv_heads} kv heads do not lie on the first axes of {dict(self.mesh.shape)}: this ModelMesh is "
                "of another model; make one with ModelMesh.of and this model's config"
            )
        return tuple(axes)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts are distributed."""
        return ("data", *self.axes) if self.experts_over_data else self.axes

    # ------------------------------------------------------------------ weights
    def weight_shardings(self, config: ModelConfig) -> Any:
        """The NamedSharding of each weight, in the tree of jattn.models.weight_specs."""
        specs, is_leaf = weight_specs(config), is_weight_spec
        outside = functools.partial(self._of_weight, kv_axes=())  # weights outside the layers have no kv heads
        tree = {name: jax.tree.map(outside, part, is_leaf=is_leaf) for name, part in specs.items() if name != "layers"}
        layers = []
        for layer, weights in zip(config.layers, specs["layers"], strict=True):
            of_layer = functools.partial(self._of_weight, kv_axes=self.kv_axes(layer.attention.num_kv_heads))
            layers.append(jax.tree.map(of_layer, weights, is_leaf=is_leaf))
        return tree | {"layers": tuple(layers)}

    def weight_sharding(self, config: ModelConfig) -> Callable[[str, WeightSpec], NamedSharding]:
        """The same as a function (path, weight) -> NamedSharding: the argument `sharding` of jattn.models.load."""
        shardings = jax.tree.leaves(self.weight_shardings(config))
        by_path = dict(zip(weight_paths(weight_specs(config)), shardings, strict=True))
        return lambda path, weight: by_path[path]

    def _of_weight(self, weight: WeightSpec, kv_axes: tuple[str, ...]) -> NamedSharding:
        """At most one axis of a weight is distributed: the first whose name is in axes_of."""
        axes_of = dict.fromkeys(("heads", "mlp", "vocab"), self.axes)
        axes_of |= dict(kv_heads=kv_axes, attention_heads=self.tensor_axes, expert=self.expert_axes)
        entries: list[Any] = [None] * len(weight.axes)
        for i, (name, size) in enumerate(zip(weight.axes, weight.shape, strict=True)):
            if name in axes_of:
                divides = name != "vocab" or size % self.size == 0
                entries[i] = _entry(axes_of[name]) if divides else None
                break
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    # ------------------------------------------------------------------ one rank
    def rank_spec(self, spec: AttentionSpec | MLASpec) -> AttentionSpec | MLASpec:
        """The spec of a layer with the heads that one rank attends with: those of all its context ranks."""
        if isinstance(spec, MLASpec):
            return dataclasses.replace(spec, num_heads=spec.num_heads // self.tensor_ranks)
        # If ranks share a kv head, each counts it as its own.
        shared = dataclasses.replace(spec, num_kv_heads=max(spec.num_kv_heads, self.tensor_ranks))
        return rank_spec(shared, self.tensor_axes, self.tensor_ranks)

    def rank_cache_spec(self, cache_spec: KVCacheSpec) -> KVCacheSpec:
        """One rank's part of a cache."""
        block_size, rest = divmod(cache_spec.block_size, self.context_ranks)
        if rest:
            raise ValueError(
                f"block_size={cache_spec.block_size} must be a multiple of the {self.context_ranks} ranks of the axis "
                "'context', which share the tokens of a block"
            )
        kv_heads = max(cache_spec.num_kv_heads // self.tensor_ranks, 1)
        return dataclasses.replace(cache_spec, num_kv_heads=kv_heads, block_size=block_size)

    @property
    def parallel(self) -> ContextParallel:
        """The part of the mesh that attention itself must know."""
        ranks = self.context_ranks
        if ranks == 1:
            return ContextParallel()
        one_memory = ranks == self.mesh.size and self.has_one_memory
        return ContextParallel(dcp_axis=CONTEXT, dcp_world_size=ranks, one_memory=one_memory)

    # ------------------------------------------------------------------ caches
    def cache_partition(self, cache_spec: KVCacheSpec) -> PartitionSpec:
        """The PartitionSpec of all arrays of a data rank's cache."""
        heads = _entry(self.kv_axes(cache_spec.num_kv_heads))
        if self.context_ranks == 1:
            return REPLICATED if heads is None else head_partition(cache_spec, heads)
        by_name = dict(N=None, H=heads, S=CONTEXT)
        axes = "NHS" if cache_spec.heads_first else "NSH"
        return PartitionSpec(*(by_name[axis] for axis in axes))

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, REPLICATED)

    def empty_caches(self, cache_specs: Iterable[KVCacheSpec]) -> tuple[PagedKV, ...]:
        """An empty cache of each spec. Each rank makes its part.

        The specs are those of one data rank. The caches have the blocks of all data ranks, one rank after the other.
        """
        return tuple(_empty_cache(self, spec) for spec in cache_specs)

    # ------------------------------------------------------------------ data ranks
    def over_data(self, axis: int) -> NamedSharding:
        """The sharding of an array whose axis `axis` is distributed over the data ranks."""
        return NamedSharding(self.mesh, self._over_data(axis))

    def _over_data(self, axis: int | None) -> PartitionSpec:
        return REPLICATED if axis is None or self.data_ranks == 1 else PartitionSpec(*[None] * axis, "data")

    def each_data_rank(self, function: Callable, in_axes: tuple, out_axes: tuple) -> Callable:
        """Inside jit: `function` as each data rank calls it, with its parts of the arguments.

        in_axes, out_axes: as those of jax.vmap; the axes are distributed, not removed. None: whole on each data rank.
        A PagedKV is a cache of all data ranks outside, and of one inside.
        """
        if self.data_ranks == 1:
            return function

        @jax.jit  # so that it has no constants: XLA of JAX 0.11.2 crashes if shard_map closes over one without elements
        def on_rank(*args):
            return _of_blocks(function(*_of_blocks(args, 1, self.data_ranks)), self.data_ranks, 1)

        specs = [jax.tree.map(self._over_data, axes, is_leaf=lambda axis: axis is None) for axes in (in_axes, out_axes)]
        return jax.shard_map(
            on_rank, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], axis_names={"data"}, check_vma=False
        )

    def weight_axes(self, config: ModelConfig) -> Any:
        """The in_axes of each_data_rank for a model's weights: 0 for experts that are distributed over data ranks."""
        if not self.experts_over_data:
            return None
        is_over_data = lambda place: any(isinstance(entry, tuple) and "data" in entry for entry in place.spec)
        return jax.tree.map(lambda place: 0 if is_over_data(place) else None, self.weight_shardings(config))

    def any_data_rank(self, flag: jax.Array) -> jax.Array:
        """On a data rank: whether the flag is true on any of those that must go on together."""
        return jax.lax.pmax(flag.astype(jnp.int32), "data") > 0 if self.experts_over_data else flag

    # ------------------------------------------------------------------ in a forward pass
    def context(self) -> contextlib.AbstractContextManager:
        """Active while a forward pass is traced: `jattn.ops.product` then uses only products that XLA can divide."""
        if self.data_ranks > 1 and "data" not in jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(f"this model has {self.data_ranks} data ranks: call forward inside each_data_rank")
        return jax.sharding.use_abstract_mesh(self.inner_mesh.abstract_mesh)

    def attention(
        self, spec: AttentionSpec | MLASpec, cache_spec: KVCacheSpec, backend: str = "auto", dtype: Any = None
    ) -> ShardedAttention | ShardedLatentAttention:
        """The attention of a layer. It has the methods build and __call__ of a PagedAttention, or an MLAAttention."""
        of_rank, part, parallel = self.rank_spec(spec), self.rank_cache_spec(cache_spec), self.parallel
        pools = self.cache_partition(cache_spec)
        if isinstance(of_rank, MLASpec):
            attn = MLAAttention(of_rank, part, backend, parallel=parallel)
            return ShardedLatentAttention(attn, cache_spec, self.inner_mesh, pools)
        attn = PagedAttention(of_rank, part, backend, dtype=dtype, parallel=parallel)
        return ShardedAttention(attn, cache_spec, self.inner_mesh, pools, self.kv_axes(spec.num_kv_heads))

    def sums(self, tokens: int, hidden: int) -> RankSums:
        """In a forward pass: what adds up arrays of at most [tokens, hidden] over the ranks."""
        if self.size == 1 or not self.has_one_memory:
            return BY_XLA
        make = functools.partial(rank_sums, self.size, tokens, hidden)
        return shard_map(self.inner_mesh, make, (), REPLICATED)()

    def mlp(
        self, mlp: MLP | MoE, sums: RankSums = BY_XLA, is_live: jax.Array | None = None
    ) -> Callable[..., jax.Array]:
        """The function (weights, x) -> y of a layer's MLP or experts; of experts also (weights, x, routed_by) -> y.

        is_live bool[T]: see MoE.__call__.
        Each rank computes its own experts for all tokens; an all-reduce adds the results of the ranks. Data ranks that
        share experts gather their tokens first, and then a reduce-scatter gives each the results of its own tokens.
        """
        if isinstance(mlp, MLP):
            return functools.partial(sharded_mlp, self.inner_mesh, mlp, sums)
        count = mlp.num_experts // math.prod(self.mesh.shape[name] for name in self.expert_axes)  # of one rank

        def body(weights: dict, sums: RankSums, x: jax.Array, routed_by, is_live) -> jax.Array:
            first, own = jax.lax.axis_index(self.expert_axes) * count, x
            if self.experts_over_data:
                gathered = lambda each: jax.lax.all_gather(each, "data", tiled=True)
                x, routed_by, is_live = jax.tree.map(gathered, (x, routed_by, is_live))
            y = mlp.routed(weights, x, first, count, routed_by, is_live)
            if self.experts_over_data:
                y = jax.lax.psum_scatter(y, "data", tiled=True)
            y = y + mlp.of_shared(weights, own) if "shared" in weights else y
            return sums(y, self.axes)

        def distributed(weights: dict, x: jax.Array, routed_by: jax.Array | None = None) -> jax.Array:
            places = {name: PartitionSpec(self.axes) for name in weights} | {"router": REPLICATED}
            shared = mlp.shared and shared_partition(self.inner_mesh, mlp.shared, weights["shared"])
            places |= {"shared": shared, "shared_gate": REPLICATED}
            used = [name for name in weights if shared is not None or name not in ("shared", "shared_gate")]
            of_used = lambda tree: {name: tree[name] for name in used}
            y = jax.shard_map(
                body, mesh=self.inner_mesh, in_specs=(of_used(places), *(REPLICATED,) * 4),
                out_specs=REPLICATED, axis_names=set(self.axes), check_vma=False,
            )(of_used(weights), sums, x, routed_by, is_live)  # fmt: skip
            return y if mlp.shared is None or shared is not None else y + mlp.of_shared(weights, x)

        return distributed

    def table_rows(self, sums: RankSums, table: Any, ids: jax.Array) -> jax.Array:
        """jattn.ops.quantised.table_rows of a table whose rows are distributed, if the ranks divide them."""
        if sums.config is None or table.shape[0] % self.size:
            return table_rows(table, ids)

        def on_rank(part: Any, ids: jax.Array, sums: RankSums) -> jax.Array:
            count = part.shape[0]
            own = jnp.clip(ids.astype(jnp.int32), 0, table.shape[0] - 1) - jax.lax.axis_index(self.axes) * count
            has = (own >= 0) & (own < count)
            return sums(jnp.where(has[:, None], table_rows(part, own), 0), self.axes)

        places = PartitionSpec(self.axes), REPLICATED, REPLICATED
        return shard_map(self.inner_mesh, on_rank, places, REPLICATED)(table, ids, sums)

    def product_with_head(self, x: jax.Array, kernel: Any, *, transposed: bool) -> jax.Array:
        """The jattn.ops.product.product of hidden states and the head, or of a table of embeddings, transposed."""
        return over_vocabulary(self.inner_mesh, x, kernel, transposed)

    def replicated(self, tree: Any) -> Any:
        """Inside jit: the same arrays, whole on every rank."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.inner_mesh, REPLICATED))

    def over_vocabulary(self, logits: jax.Array) -> jax.Array:
        """Inside jit: logits [L vocab], distributed over the vocabulary; replicated if the ranks do not divide it."""
        if logits.shape[-1] % self.size:
            return self.replicated(logits)
        return jax.lax.with_sharding_constraint(logits, NamedSharding(self.inner_mesh, PartitionSpec(None, self.axes)))

    def map_rows(self, function: Callable, logits: jax.Array, rules: Any) -> Any:
        """Inside jit: function(logits [R vocab], rules), whole on every rank. Each rank computes some rows.

        rules, and the result: trees of arrays [R ..]. The result of a row must depend on that row only.
        """
        count = logits.shape[0]
        padded = lambda x: jnp.pad(x, [(0, -count % self.size)] + [(0, 0)] * (x.ndim - 1), mode="edge")
        # Placed before and after the exchange, so that XLA does not distribute rows elsewhere in the program.
        logits, rules = self.over_vocabulary(padded(logits)), self.replicated(jax.tree.map(padded, rules))
        of_rank = PartitionSpec(self.axes)
        results = self.replicated(shard_map(self.inner_mesh, function, of_rank, of_rank)(logits, rules))
        return jax.tree.map(lambda result: result[:count], results)

    def kept_caches(self, caches: Iterable[PagedKV]) -> tuple[PagedKV, ...]:
        """Inside jit: the same caches, placed as `empty_caches` places them."""
        place = lambda cache: NamedSharding(self.inner_mesh, self.cache_partition(cache.spec))
        return tuple(jax.lax.with_sharding_constraint(cache, place(cache)) for cache in caches)


def _entry(axes: tuple[str, ...]) -> Any:
    """The axes as an entry of a PartitionSpec."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty_cache(model_mesh: ModelMesh, spec: KVCacheSpec) -> PagedKV:
    part, count = model_mesh.rank_cache_spec(spec), model_mesh.data_ranks
    whole = dataclasses.replace(spec, num_blocks=spec.num_blocks * count)
    make = lambda: dataclasses.replace(empty_cache(part), spec=whole)
    partition = model_mesh.cache_partition(spec)
    if count > 1:
        partition = PartitionSpec("data", *partition[1:])
    return jax.shard_map(make, mesh=model_mesh.mesh, in_specs=(), out_specs=partition, check_vma=False)()


def _of_blocks(tree: Any, times: int, over: int) -> Any:
    """The tree, with num_blocks * times // over in the spec of each cache in it."""

    def resized(x: Any) -> Any:
        if not isinstance(x, PagedKV):
            return x
        return dataclasses.replace(x, spec=dataclasses.replace(x.spec, num_blocks=x.spec.num_blocks * times // over))

    return jax.tree.map(resized, tree, is_leaf=lambda x: isinstance(x, PagedKV))
