"""Decode context parallelism: which keys of a request are on which rank, and at which index there.

N ranks take the keys in turn, I consecutive keys each. The block table is the same on every rank: a block id names a
block on each rank, and these N blocks together have N * S consecutive tokens.

    key at position p:   rank = p // I % N,   local index j = p // (I * N) * I + p % I,   block j // S, offset j % S
    key at local j:      position p = (j // I * N + rank) * I + j % I

        N = 2, I = 2, S = 4:     positions in block 0 of rank 0: 0 1 4 5     of rank 1: 2 3 6 7
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
    """i32[R] the keys of each request on `rank`, or i32[R, dcp_size] for all ranks if rank is None.

        base = L // I // N * I        local = base + clip(L - base*N - rank*I, 0, I)

    They add up to L = seq_lens. rank may be traced, as jax.lax.axis_index inside shard_map is.
    """
    xp = array_module(seq_lens, rank)
    lens = xp.asarray(seq_lens, xp.int32)
    if rank is not None and not isinstance(rank, jax.Array) and not 0 <= rank < dcp_size:
        raise ValueError(f"rank={rank} must be one of the {dcp_size=} ranks, counted from 0")
    if rank is None and lens.ndim != 1:
        raise ValueError(f"seq_lens.shape={lens.shape} must be (R,), or rank must be given")
    if rank is None:
        lens, rank = lens[:, None], xp.arange(dcp_size, dtype=xp.int32)[None, :]
    base = lens // interleave // dcp_size * interleave
    return (base + xp.clip(lens - base * dcp_size - rank * interleave, 0, interleave)).astype(xp.int32)


@takes(meta=BATCH, dcp_size=integer(1), rank=_RANK, interleave=integer(1))
def with_dcp(meta: CommonAttentionMetadata, dcp_size: int, rank, interleave: int = 1) -> CommonAttentionMetadata:
    """The batch with the dcp_local_seq_lens of this rank."""
    return meta.replace(dcp_local_seq_lens=get_dcp_local_seq_lens(meta.seq_lens, dcp_size, rank, interleave))


@pytree
class KeyShard:
    """One rank's share of the keys."""

    rank: jax.Array | int  # inside shard_map: jax.lax.axis_index
    world: int = static()  # ranks, N
    interleave: int = static(default=1)  # consecutive keys on one rank, I

    def positions(self, index: jax.Array) -> jax.Array:
        """The positions of local keys in their request."""
        run = self.interleave
        return (index // run * self.world + self.rank) * run + index % run

    def count_below(self, position: jax.Array) -> jax.Array:
        """How many keys before `position` are on this rank; 0 for a negative position."""
        return get_dcp_local_seq_lens(jnp.maximum(position, 0), self.world, self.rank, self.interleave)

    def local_lens(self, meta: CommonAttentionMetadata) -> jax.Array:
        """i32[R] how many keys of each request are on this rank."""
        given = meta.dcp_local_seq_lens
        return self.count_below(jnp.asarray(meta.seq_lens)) if given is None else jnp.asarray(given)

    def slot_mapping(self, meta: CommonAttentionMetadata, block_size: int) -> jax.Array:
        """i32[T] the slots of the new tokens on this rank; -1 for tokens of other ranks, and where meta has no slot.

        The lengths of `meta` count the keys of all ranks. block_size: tokens of a block on one rank.
        """
        position = meta.positions()
        run = self.interleave
        written = meta.token_is_live() & (jnp.asarray(meta.slot_mapping) >= 0)
        mine = written & (position // run % self.world == self.rank)
        local = position // (run * self.world) * run + position % run
        slots = slots_of(jnp.asarray(meta.block_table), meta.token_to_req(), local, block_size)
        return jnp.where(mine, slots, PAD_SLOT_ID).astype(jnp.int32)
