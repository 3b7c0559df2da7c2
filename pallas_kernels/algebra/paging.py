"""Where a token lies in the pool: slots, blocks, offsets, and gathers through a block table.

    slot = block * S + offset        page j of a request holds its positions j*S .. j*S + S - 1

Pools are indexed by (block, offset) pairs: an int32 element index would overflow in a large pool.
"""

import jax
import jax.numpy as jnp


def cdiv(a, b):
    """Ceiling division of non-negative integers (ints, numpy or JAX)."""
    return (a + b - 1) // b


def split_slot(slot: jax.Array, num_blocks: int, block_size: int):
    """(block, offset) of a slot; a slot outside 0 .. N*S-1 becomes block N, which a scatter with mode="drop" ignores.

    JAX wraps a negative index: slot -1 would overwrite the last slot of the pool.
    """
    inside = (slot >= 0) & (slot < num_blocks * block_size)
    return jnp.where(inside, slot // block_size, num_blocks), jnp.where(inside, slot % block_size, 0)


def page_ids(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Page ids clipped to those of pool[N, ...]. Unused table columns may hold anything; the mask hides their pages."""
    return jnp.clip(pages, 0, pool.shape[0] - 1)


def gather_pages(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """pool[N, ...] at pages i32[P] -> [P, ...]."""
    return pool.at[page_ids(pool, pages)].get(mode="promise_in_bounds")


def slots_of(block_table: jax.Array, req: jax.Array, position: jax.Array, block_size: int) -> jax.Array:
    """Slot of each (request, position) pair; -1 where the position is negative or past the table's end."""
    column = position // block_size
    ok = (position >= 0) & (column < block_table.shape[1])
    block = block_table[req, jnp.clip(column, 0, block_table.shape[1] - 1)]
    return jnp.where(ok & (block >= 0), block * block_size + position % block_size, -1)
