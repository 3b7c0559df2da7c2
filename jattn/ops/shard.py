"""Decode context parallelism: which of a request's keys a rank holds, where they lie there, where they stand.

Keys go round the N ranks in runs of I tokens. The block table is the same on every rank: one block id names N pages,
one a rank, which together hold N * S consecutive tokens.

    position p:  rank = p // I % N       local index j = p // (I * N) * I + p % I       page j // S, offset j % S
    local j:     position p = (j // I * N + rank) * I + j % I

        N = 2, I = 2, S = 4      page 0 of rank 0: 0 1 4 5      page 0 of rank 1: 2 3 6 7
"""

import jax
import jax.numpy as jnp

from jattn.metadata.batch import CommonAttentionMetadata
from jattn.metadata.parallel import get_dcp_local_seq_lens
from jattn.types import PAD_SLOT_ID, pytree, static
from pallas_kernels.algebra.paging import slots_of


@pytree
class KeyShard:
    """One rank's share; inside shard_map the rank is jax.lax.axis_index."""

    rank: jax.Array | int
    world: int = static()
    interleave: int = static(default=1)

    def positions(self, index: jax.Array) -> jax.Array:
        """Where local keys stand in their request."""
        run = self.interleave
        return (index // run * self.world + self.rank) * run + index % run

    def count_below(self, position: jax.Array) -> jax.Array:
        """Own keys before a position: the local index of the first own key at or after it; 0 for negative ones."""
        return get_dcp_local_seq_lens(jnp.maximum(position, 0), self.world, self.rank, self.interleave)

    def slot_mapping(self, meta: CommonAttentionMetadata, block_size: int) -> jax.Array:
        """i32[T] this rank's slots of the new tokens; -1 for those that other ranks write.

        `meta` counts whole requests; `block_size` is that of a rank's pages.
        """
        position = meta.positions()
        run = self.interleave
        mine = meta.token_is_live() & (position // run % self.world == self.rank)
        local = position // (run * self.world) * run + position % run
        slots = slots_of(jnp.asarray(meta.block_table), meta.token_to_req(), local, block_size)
        return jnp.where(mine, slots, PAD_SLOT_ID).astype(jnp.int32)
