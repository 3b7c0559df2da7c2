"""Where this program stands among those that share a context: static sizes and axis names, traced ranks."""

import dataclasses

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Mesh axes of decode (dcp) and prefill (pcp) context parallelism; None: that kind is off."""

    dcp_axis: str | None = None
    dcp_world_size: int = 1
    pcp_axis: str | None = None
    pcp_world_size: int = 1
    interleave: int = 1  # consecutive tokens of one rank

    def __post_init__(self):
        for kind in ("dcp", "pcp"):
            axis, size = getattr(self, f"{kind}_axis"), getattr(self, f"{kind}_world_size")
            if size < 1 or (axis is None) != (size == 1):
                raise ValueError(
                    f"{kind}_axis={axis!r} with {kind}_world_size={size}: a size > 1 needs an axis, 1 none"
                )
        if self.interleave < 1:
            raise ValueError(f"{self.interleave=} must be >= 1")

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
