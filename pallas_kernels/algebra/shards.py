"""Keys that several ranks take in turn: which of them one rank holds. See jattn/metadata/parallel.py."""

import dataclasses

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class ShardRule:
    """The static part; hashable. A request's keys on one rank have indices 0, 1, 2 .. in the order of positions."""

    world: int = 1  # ranks
    interleave: int = 1  # consecutive keys of a request on one rank

    def count_below(self, position, rank):
        """i32: how many keys before `position`, which is not negative, are on `rank`."""
        turn = self.world * self.interleave
        turns = lax.div(position, jnp.int32(turn))
        left = position - turns * turn - rank * self.interleave
        return turns * self.interleave + jnp.minimum(jnp.maximum(left, 0), self.interleave)
