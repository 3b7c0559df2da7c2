"""The dispatch: one compiled program that computes a batch, samples, and goes on decoding without the host.

The first step takes any batch, prompts included; each later step takes the tokens just sampled. A row that has ended
writes to no slot and waits for the others. The number of steps is data, so it causes no compilation. The dispatch also
leaves its rows' state on the device, so that the next one can be sent before this one's tokens are read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.engine.params import MAX_LOGPROBS
from jattn.engine.sampling import BAD_TOKEN, Penalties, Sampled, SamplingRows, choose
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.types import PAD_SLOT_ID, pytree, static
from pallas_kernels.algebra.paging import slots_of

NOT_SAMPLED = -2
"""In a dispatch's output: the row had ended before this step, or there was no such step."""


MAX_STEPS = 32
"""Steps of the longest dispatch."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The function that a dispatch calls. Pure and hashable: equal models share compiled programs.

    forward(config, params, token_ids, caches, meta, backend=, logits_at=) -> (caches, logits), meta one
    CommonAttentionMetadata, or a tuple where the model has several cache groups: `jattn.models.forward`.
    """

    forward: Callable
    config: Any
    backend: str = "auto"

    def last_logits(self, params, caches, token_ids, metas):
        """(caches, f32[R vocab] of each row's last token)."""
        meta = metas[0] if len(metas) == 1 else metas
        last = metas[0].logits_at_last_token()
        caches, logits = self.forward(
            self.config, params, token_ids, caches, meta, backend=self.backend, logits_at=last
        )
        return caches, logits.astype(jnp.float32)


@pytree
class Batch:
    """The input of a dispatch; metas: one per cache group."""

    token_ids: jax.Array  # i32[T]
    metas: tuple[CommonAttentionMetadata, ...]
    rows: SamplingRows
    penalties: Penalties
    needs_history_or_logprobs: jax.Array  # bool[] some row has penalties, or wants log-probabilities
    steps: jax.Array  # i32[] at most this many, and at most MAX_STEPS
    until_any: jax.Array  # bool[] stop as soon as some row ends
    continues: jax.Array  # bool[] made from an RowState: slots are computed from the tables, which may have grown
    block_size: int = static()


@pytree
class LoopState:
    """The state of the loop."""

    step: jax.Array  # i32[]
    alive: jax.Array  # bool[R]
    token_ids: jax.Array  # i32[T]
    metas: tuple[CommonAttentionMetadata, ...]
    sampled: Sampled  # of every step so far: [MAX_STEPS R ..]


@pytree
class RowState:
    """The state of the rows after a dispatch, on the device: the next dispatch can start from it."""

    token_ids: jax.Array  # i32[T]
    metas: tuple[CommonAttentionMetadata, ...]
    position: jax.Array  # i32[R]
    remaining: jax.Array  # i32[R] 0: the row has ended


def continued_batch(batch: Batch, row_state: RowState, tables) -> Batch:
    """The decode batch after `batch`, whose tokens the host has not read; tables i32[R B], one per cache group."""
    metas = tuple(meta.replace(block_table=table) for meta, table in zip(row_state.metas, tables, strict=True))
    rows = dataclasses.replace(batch.rows, position=row_state.position, remaining=row_state.remaining)
    return dataclasses.replace(batch, token_ids=row_state.token_ids, metas=metas, rows=rows, continues=np.bool_(True))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="caches")
def dispatch(model: Model, params, caches, batch: Batch):
    """(caches, Sampled with a leading axis of MAX_STEPS, RowState).

    tokens[i, r] is what step i chose for row r, BAD_TOKEN where its logits were unusable, NOT_SAMPLED where the row had
    ended before.
    """
    num_rows = batch.metas[0].max_num_reqs

    def one(carry):
        caches, at = carry
        caches, logits = model.last_logits(params, caches, at.token_ids, at.metas)
        rows = dataclasses.replace(batch.rows, position=batch.rows.position + at.step)
        news = choose(logits, rows, batch.penalties, at.sampled.tokens, batch.needs_history_or_logprobs)
        chosen = news.tokens
        news = dataclasses.replace(news, tokens=jnp.where(at.alive, chosen, NOT_SAMPLED))
        put = lambda all, new: jax.lax.dynamic_update_index_in_dim(all, new, at.step, 0)
        sampled = jax.tree.map(put, at.sampled, news)
        ended = (chosen == BAD_TOKEN) | jnp.any(chosen[:, None] == batch.rows.stop_ids, axis=1)
        alive = at.alive & ~ended & (batch.rows.remaining > at.step + 1)
        metas = tuple(next_decode(meta, alive, batch.block_size) for meta in at.metas)
        token_ids = jnp.zeros_like(at.token_ids).at[:num_rows].set(jnp.maximum(chosen, 0))
        return caches, LoopState(step=at.step + 1, alive=alive, token_ids=token_ids, metas=metas, sampled=sampled)

    def is_unfinished(carry):
        at = carry[1]
        live = batch.rows.remaining > 0
        ended = jnp.any(live & ~at.alive)
        more = jnp.any(at.alive) & ~(batch.until_any & ended) & (at.step < jnp.minimum(batch.steps, MAX_STEPS))
        return (at.step == 0) | more

    start = LoopState(
        step=jnp.int32(0),
        alive=batch.rows.remaining > 0,
        token_ids=jnp.asarray(batch.token_ids),
        metas=tuple(_with_slots(meta, batch) for meta in jax.tree.map(jnp.asarray, batch.metas)),
        sampled=_nothing_sampled(num_rows, model.config.vocab_size),
    )
    caches, end = jax.lax.while_loop(is_unfinished, one, (caches, start))
    remaining = jnp.where(end.alive, batch.rows.remaining - end.step, 0)
    position = batch.rows.position + end.step
    row_state = RowState(token_ids=end.token_ids, metas=end.metas, position=position, remaining=remaining)
    return caches, end.sampled, row_state


def _with_slots(meta: CommonAttentionMetadata, batch: Batch) -> CommonAttentionMetadata:
    """The batch with its own slots, or, if it follows a dispatch, with slots computed from the tables."""
    slots = _decode_slots(meta, (batch.rows.remaining > 0) & (meta.query_lens() > 0), batch.block_size)
    return meta.replace(slot_mapping=jnp.where(batch.continues, slots, meta.slot_mapping))


def _decode_slots(meta: CommonAttentionMetadata, writes: jax.Array, block_size: int) -> jax.Array:
    """i32[T]: the slot of each row's last token; padding for rows that write nothing, and past R."""
    slots = slots_of(jnp.asarray(meta.block_table), jnp.arange(meta.max_num_reqs), meta.seq_lens - 1, block_size)
    slots = jnp.where(writes, slots, PAD_SLOT_ID).astype(jnp.int32)
    return jnp.concatenate([slots, jnp.full(meta.num_tokens - meta.max_num_reqs, PAD_SLOT_ID, jnp.int32)])


def next_decode(meta: CommonAttentionMetadata, alive: jax.Array, block_size: int) -> CommonAttentionMetadata:
    """The decode step after any batch: one token for each row that had tokens; rows not alive write nothing.

    Like `meta.advanced`, but rows may end, and the batch before may hold prompts: T stays, tokens past R are padding.
    """
    had = meta.query_lens() > 0
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(had, dtype=jnp.int32)])
    meta = meta.replace(
        query_start_loc=start, seq_lens=meta.seq_lens + (alive & had), num_actual_tokens=start[-1], logits_indices=None
    )
    return meta.replace(slot_mapping=_decode_slots(meta, alive & had, block_size))


def _nothing_sampled(num_rows: int, vocab_size: int) -> Sampled:
    top = jnp.zeros((MAX_STEPS, num_rows, min(MAX_LOGPROBS, vocab_size)), jnp.float32)
    return Sampled(
        tokens=jnp.full(top.shape[:2], NOT_SAMPLED, jnp.int32),
        logprobs=top[..., 0],
        top_tokens=top.astype(jnp.int32),
        top_logprobs=top,
    )
