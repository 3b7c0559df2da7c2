"""ContextParallel: the mesh axes over which the keys of a request are distributed."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax import lax

from jattn.cache import KVCacheSpec
from jattn.errors.arguments import boolean, check_fields, integer, optional, text
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.parallel import KeyShard
from jattn.ops.parallel import cp_lse_ag_out_ar
from jattn.ops.state import AttentionState
from jattn.types import Feature


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Decode (dcp) and prefill (pcp) context parallelism. The sizes are static; ranks are traced inside shard_map."""

    dcp_axis: str | None = None  # mesh axis of dcp; None: off
    dcp_world_size: int = 1  # ranks of that axis
    pcp_axis: str | None = None  # mesh axis of pcp; None: off
    pcp_world_size: int = 1  # ranks of that axis
    interleave: int = 1  # consecutive tokens of a request on one rank, before those on the next rank
    one_memory: bool = False  # dcp's ranks are all devices of the mesh, and a kernel can write to the others' memory

    def __post_init__(self):
        counts = ("dcp_world_size", "pcp_world_size", "interleave")
        axes = dict.fromkeys(("dcp_axis", "pcp_axis"), optional(text))
        check_fields(self, **dict.fromkeys(counts, integer(1)), **axes, one_memory=boolean)
        for kind in ("dcp", "pcp"):
            axis, size = getattr(self, f"{kind}_axis"), getattr(self, f"{kind}_world_size")
            if (axis is None) != (size == 1):
                raise ValueError(
                    f"{kind}_axis={axis!r} with {kind}_world_size={size}: a size > 1 needs an axis, 1 needs None"
                )

        if self.one_memory and self.dcp_axis is None:
            raise ValueError("one_memory=True says how the ranks of dcp_axis merge, but dcp_axis=None: leave it out")

    @property
    def needs(self) -> tuple[Feature, ...]:
        """The features that a backend must support."""
        sizes = ((Feature.PCP, self.pcp_world_size), (Feature.DCP, self.dcp_world_size))
        return tuple(feature for feature, size in sizes if size > 1)

    @property
    def total_cp_world_size(self) -> int:
        """pcp_world_size * dcp_world_size."""
        return self.pcp_world_size * self.dcp_world_size

    def dcp_rank(self) -> jax.Array | int:
        """This device's rank, traced inside shard_map; 0 without dcp."""
        return 0 if self.dcp_axis is None else lax.axis_index(self.dcp_axis)

    def pcp_rank(self) -> jax.Array | int:
        """This device's rank, traced inside shard_map; 0 without pcp."""
        return 0 if self.pcp_axis is None else lax.axis_index(self.pcp_axis)

    def total_cp_rank(self) -> jax.Array | int:
        """pcp_rank * dcp_world_size + dcp_rank."""
        return self.pcp_rank() * self.dcp_world_size + self.dcp_rank()

    def check(self, meta: CommonAttentionMetadata) -> None:
        """ValueError if the batch has lengths of one rank's keys, but there is one rank only."""
        if meta.dcp_local_seq_lens is not None and self.dcp_world_size == 1:
            raise ValueError(
                "meta.dcp_local_seq_lens is given, but with dcp_world_size=1 in parallel= this rank has every key"
            )

    @staticmethod
    def check_of_all_ranks(meta: CommonAttentionMetadata) -> None:
        """ValueError if the batch has lengths of one rank's keys, but every rank gets this batch."""
        if meta.dcp_local_seq_lens is not None:
            raise ValueError(
                "meta.dcp_local_seq_lens is of one rank, and each rank here computes its own from meta.seq_lens: leave "
                "with_dcp out"
            )

    def check_interleave(self, cache_spec: KVCacheSpec) -> None:
        """ValueError unless each rank's part of a block is whole runs of `interleave` tokens."""
        if self.dcp_world_size > 1 and cache_spec.block_size % self.interleave:
            raise ValueError(
                f"interleave={self.interleave} must divide {cache_spec.block_size=}: a block id names one block a rank"
            )

    def dcp_shard(self, cache_spec: KVCacheSpec) -> KeyShard | None:
        """This rank's share of the keys; None without dcp."""
        if self.dcp_world_size == 1:
            return None
        self.check_interleave(cache_spec)
        if (ranks := lax.axis_size(self.dcp_axis)) != self.dcp_world_size:
            raise ValueError(
                f"dcp_world_size={self.dcp_world_size}, but the axis {self.dcp_axis!r} has {ranks} ranks: some keys "
                "would be on none, or on two"
            )
        return KeyShard(rank=self.dcp_rank(), world=self.dcp_world_size, interleave=self.interleave)

    @property
    def combine(self) -> Callable[[AttentionState], AttentionState] | None:
        """A function that merges the states of all ranks, with the same result on each; None without dcp."""
        return None if self.dcp_axis is None else functools.partial(cp_lse_ag_out_ar, axis=self.dcp_axis)
