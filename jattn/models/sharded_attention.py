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
from jattn.ops.rotation import Angles
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams

REPLICATED = PartitionSpec()
"""Of an array that is whole on every rank."""


@dataclasses.dataclass(frozen=True)
class ShardedAttention:
    """Takes and returns global arrays, as the PagedAttention of the whole layer would. Hashable.

    The plan is built once for all layers of a spec and is replicated. Rotation, write and attention are one shard_map
    without communication. Ranks with the same kv head write the same keys, each into its own part of the pool.
    """

    attn: PagedAttention  # of one rank's heads, over its part of the cache
    cache_spec: KVCacheSpec  # of the whole cache
    mesh: Mesh | AbstractMesh  # ranks are on its Auto axes
    pools: PartitionSpec  # of the cache's arrays
    kv_axes: tuple[str, ...]  # over which kv heads are distributed; query heads: over all ranks

    def build(self, meta: CommonAttentionMetadata) -> Any:
        """The plan of a batch, replicated."""
        return _shard_map(self.mesh, self.attn.build, REPLICATED, REPLICATED)(meta)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: PagedKV, m: Any, params: AttentionParams,
        angles: Angles | None,
    ) -> tuple[PagedKV, AttentionState]:  # fmt: skip
        """The arguments and the result of PagedAttention.__call__."""
        heads, kv_heads = PartitionSpec(None, self.mesh.auto_axes), PartitionSpec(None, self.kv_axes)

        def on_rank(q, k, v, cache, m, params, angles):
            cache = dataclasses.replace(cache, spec=self.attn.cache_spec)
            cache, state = self.attn(q, k, v, cache, m, params, angles)
            return dataclasses.replace(cache, spec=self.cache_spec), state

        places = (heads, kv_heads, kv_heads, self.pools, REPLICATED, self._params_partition(params), REPLICATED)
        return _shard_map(self.mesh, on_rank, places, (self.pools, heads))(q, k, v, cache, m, params, angles)

    def _params_partition(self, params: AttentionParams) -> AttentionParams:
        """The partition of each param. Scalars are replicated; arrays over heads are distributed like the heads."""
        axes = dict.fromkeys(("alibi_slopes", "sinks", "q_scale", "distance_bias"), self.mesh.auto_axes)
        axes |= dict.fromkeys(("k_scale", "v_scale"), self.kv_axes)
        given = {name: x for name, x in vars(params).items() if x is not None}
        places = {n: PartitionSpec(axes[n]) if n in axes and jnp.ndim(x) else REPLICATED for n, x in given.items()}
        return dataclasses.replace(params, **places)


@dataclasses.dataclass(frozen=True)
class ShardedLatentAttention:
    """The same for a latent cache: every rank writes all rows into its own whole copy of the cache. Hashable."""

    attn: MLAAttention  # of one rank's heads
    mesh: Mesh | AbstractMesh  # ranks are on its Auto axes

    def build(self, meta: CommonAttentionMetadata) -> Any:
        """The plan of a batch, replicated."""
        return _shard_map(self.mesh, self.attn.build, REPLICATED, REPLICATED)(meta)

    def __call__(
        self, q: jax.Array, kv_c: jax.Array, k_pe: jax.Array, cache: PagedKV, m: Any, params: MLAParams
    ) -> tuple[PagedKV, AttentionState]:
        """The arguments and the result of MLAAttention.__call__."""
        heads = PartitionSpec(None, self.mesh.auto_axes)
        given = {name: x for name, x in vars(params).items() if x is not None}
        of_head = {name: PartitionSpec(self.mesh.auto_axes) if jnp.ndim(x) else REPLICATED for name, x in given.items()}
        places = (heads, REPLICATED, REPLICATED, REPLICATED, REPLICATED, dataclasses.replace(params, **of_head))
        return _shard_map(self.mesh, self.attn, places, (REPLICATED, heads))(q, kv_c, k_pe, cache, m, params)


def _shard_map(mesh: Mesh | AbstractMesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """A data axis is manual already where this is called."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(mesh.auto_axes), check_vma=False
    )
