"""Sparse latent attention on Hopper: from the keys that each token lists to what the kernel reads."""

import jax
import jax.numpy as jnp

from jattn.ops.levels import Level
from pallas_kernels.algebra.paging import cdiv, slots_of
from pallas_kernels.gpu.mla_config import BLOCK_KV

NO_KEY = jnp.iinfo(jnp.int32).max


def listed_rows(level: Level, is_causal: bool, topk_indices: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """i32[T n] positions in the token's request -> (i32[T n'] rows of the pool, i32[T] entries before the last one).

    Positions ascend, so that the order of a list changes no bit. -1: a repeated entry, or one past the last. n' is n,
    rounded up to whole blocks of the kernel. An entry is a key if the token would see it without the list.
    """
    batch, table = level.batch, jnp.asarray(level.block_table)
    req, live = batch.req_of_token()
    causal = is_causal if batch.rows.causal is None else batch.rows.causal
    last = jnp.where(causal, jnp.minimum(batch.rows.position, batch.seq_lens[req] - 1), batch.seq_lens[req] - 1)
    last = jnp.where(live, last, -1)[:, None]
    listed = jnp.sort(jnp.where((topk_indices >= 0) & (topk_indices <= last), topk_indices, NO_KEY), axis=1)
    is_key = listed < NO_KEY
    is_first = jnp.pad(listed[:, 1:] != listed[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    slots = slots_of(table, req[:, None], jnp.where(is_key, listed, 0), block_size)
    width = cdiv(topk_indices.shape[1], BLOCK_KV) * BLOCK_KV
    rows = jnp.where(is_key & is_first, slots, -1)
    rows = jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)
    return rows, jnp.sum(is_key, axis=1, dtype=jnp.int32)
