"""Where this program stands among those that share a context: static sizes and axis names, traced ranks."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax import lax

from jattn.cache import KVCacheSpec
from jattn.errors.arguments import check_fields, integer, optional, text
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.parallel import KeyShard
from jattn.ops.parallel import cp_lse_ag_out_ar
from jattn.ops.state import AttentionState
from jattn.types import Feature


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Mesh axes of decode (dcp) and prefill (pcp) context parallelism; None: that kind is off."""

    dcp_axis: str | None = None
    dcp_world_size: int = 1
    pcp_axis: str | None = None
    pcp_world_size: int = 1
    interleave: int = 1  # consecutive tokens of one rank

    def __post_init__(self):
        counts = ("dcp_world_size", "pcp_world_size", "interleave")
        check_fields(self, **dict.fromkeys(counts, integer(1)), dcp_axis=optional(text), pcp_axis=optional(text))
        for kind in ("dcp", "pcp"):
            axis, size = getattr(self, f"{kind}_axis"), getattr(self, f"{kind}_world_size")
            if (axis is None) != (size == 1):
                raise ValueError(
                    f"{kind}_axis={axis!r} with {kind}_world_size={size}: a size > 1 needs an axis, 1 none"
                )

    @property
    def needs(self) -> tuple[Feature, ...]:
        """What it asks of a backend."""
        asked = ((Feature.PCP, self.pcp_world_size), (Feature.DCP, self.dcp_world_size))
        return tuple(feature for feature, size in asked if size > 1)

    @property
    def total_cp_world_size(self) -> int:
        """pcp * dcp."""
        return self.pcp_world_size * self.dcp_world_size

    def dcp_rank(self) -> jax.Array | int:
        """Traced inside shard_map; 0 where dcp is off."""
        return 0 if self.dcp_axis is None else lax.axis_index(self.dcp_axis)

    def pcp_rank(self) -> jax.Array | int:
        """Traced inside shard_map; 0 where pcp is off."""
        return 0 if self.pcp_axis is None else lax.axis_index(self.pcp_axis)

    def total_cp_rank(self) -> jax.Array | int:
        """pcp_rank * dcp_world_size + dcp_rank."""
        return self.pcp_rank() * self.dcp_world_size + self.dcp_rank()

    def check(self, meta: CommonAttentionMetadata) -> None:
        """Lengths of one rank's keys mean something only where there are several ranks."""
        if meta.dcp_local_seq_lens is not None and self.dcp_world_size == 1:
            raise ValueError("meta.dcp_local_seq_lens is given, but parallel= says that this rank holds every key")

    def dcp_shard(self, cache_spec: KVCacheSpec) -> KeyShard | None:
        """The share of the keys that this rank's pages hold; None where dcp is off."""
        if self.dcp_world_size == 1:
            return None
        if cache_spec.block_size % self.interleave:
            raise ValueError(
                f"{self.interleave=} must divide {cache_spec.block_size=}: a block id names one page on every rank"
            )
        return KeyShard(rank=self.dcp_rank(), world=self.dcp_world_size, interleave=self.interleave)

    @property
    def combine(self) -> Callable[[AttentionState], AttentionState] | None:
        """Makes one state of the ranks' states, on each rank the same; None where dcp is off."""
        return None if self.dcp_axis is None else functools.partial(cp_lse_ag_out_ar, axis=self.dcp_axis)
