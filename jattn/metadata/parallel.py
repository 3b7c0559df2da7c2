"""Decode context parallelism: which of a request's keys a rank holds, where they lie there, where they stand.

Keys go round the N ranks in runs of I tokens. The block table is the same on every rank: one block id names N pages,
one a rank, which together hold N * S consecutive tokens.

    position p:  rank = p // I % N       local index j = p // (I * N) * I + p % I       page j // S, offset j % S
    local j:     position p = (j // I * N + rank) * I + j % I

        N = 2, I = 2, S = 4      page 0 of rank 0: 0 1 4 5      page 0 of rank 1: 2 3 6 7
"""

import jax
import jax.numpy as jnp

from jattn.errors.arguments import integer, integers, optional, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.host import array_module
from jattn.types import PAD_SLOT_ID, pytree, static
from pallas_kernels.algebra.paging import slots_of

_RANK = integers(0)


@takes(seq_lens=integers(), dcp_size=integer(1), rank=optional(_RANK), interleave=integer(1))
def get_dcp_local_seq_lens(seq_lens, dcp_size: int = 1, rank=None, interleave: int = 1):
    """i32[R] keys that `rank` holds of each request, or i32[R, size] for all ranks (rank None).

        base = L // I // N * I        local = base + clip(L - base*N - rank*I, 0, I)

    The ranks' lengths sum to L. rank may be traced: jax.lax.axis_index inside shard_map.
    """
    xp = array_module(seq_lens, rank)
    lens = xp.asarray(seq_lens, xp.int32)
    if rank is None and lens.ndim != 1:
        raise ValueError(f"seq_lens.shape={lens.shape} must be (R,), or rank must be given")
    if rank is None:
        lens, rank = lens[:, None], xp.arange(dcp_size, dtype=xp.int32)[None, :]
    base = lens // interleave // dcp_size * interleave
    return (base + xp.clip(lens - base * dcp_size - rank * interleave, 0, interleave)).astype(xp.int32)


@takes(meta=BATCH, dcp_size=integer(1), rank=_RANK, interleave=integer(1))
def with_dcp(meta: CommonAttentionMetadata, dcp_size: int, rank, interleave: int = 1) -> CommonAttentionMetadata:
    """The batch with this rank's dcp_local_seq_lens filled in."""
    return meta.replace(dcp_local_seq_lens=get_dcp_local_seq_lens(meta.seq_lens, dcp_size, rank, interleave))


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
