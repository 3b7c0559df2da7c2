"""dispatch: one compiled program that computes a batch, samples, and continues decoding without the host.

The first step computes any batch, also of prompts. Each later step computes the tokens that were just sampled. A row
that has ended writes to no slot until the others end. The number of steps is an array, so it causes no compilation.
Each row's last token stays on the device, so the next dispatch can be sent before the tokens of this one are read.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.engine.packing import Packed, PackedTree
from jattn.engine.sampling import BAD_TOKEN, MapRows, Needs, Penalties, Sampled, SamplingRows, choose
from jattn.engine.xla_options import PlatformJit
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.types import PAD_SLOT_ID, AnyArray, pytree, static
from pallas_kernels.algebra.paging import slots_of

NOT_SAMPLED = -2
"""In the tokens of a dispatch: the row had ended before this step, or the step was not computed."""

MAX_STEPS = 32
"""The most steps of a dispatch."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The model that a dispatch computes. Hashable: equal models share compiled programs."""

    # As jattn.models.forward: (config, params, token_ids, caches, meta, backend=, logits_at=) -> (caches, logits).
    # meta: a CommonAttentionMetadata, or a tuple of them if the model has several cache groups. With a model_mesh, also
    # model_mesh=.
    forward: Callable
    config: Any  # a jattn.models.ModelConfig, or one with the same attributes
    backend: str = "auto"  # attention backend
    model_mesh: Any = None  # a jattn.models.ModelMesh, if the model is distributed over several devices

    def __hash__(self) -> int:
        return self._hash  # each call of a jitted function needs it, and a config has hundreds of numbers

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.forward, self.config, self.backend, self.model_mesh))

    def last_logits(self, params, caches, token_ids, metas):
        """(caches, f32[R vocab] of each row's last token)."""
        meta = metas[0] if len(metas) == 1 else metas
        options = dict(backend=self.backend, logits_at=metas[0].logits_at_last_token())
        if self.model_mesh is not None:
            options["model_mesh"] = self.model_mesh
        caches, logits = self.forward(self.config, params, token_ids, caches, meta, **options)
        return caches, logits.astype(jnp.float32)

    @property
    def data_ranks(self) -> int:
        """The groups of devices that compute batches of their own."""
        return 1 if self.model_mesh is None else self.model_mesh.data_ranks

    @property
    def weight_axes(self) -> Any:
        """The in_axes of each_data_rank for params."""
        return None if self.model_mesh is None else self.model_mesh.weight_axes(self.config)

    @property
    def steps_together(self) -> bool:
        """Whether no data rank may end its steps before the others, because they share experts."""
        return self.model_mesh is not None and self.model_mesh.experts_over_data

    @property
    def map_rows(self) -> MapRows | None:
        """Computes some rows of a function on each device; None without a mesh."""
        return None if self.model_mesh is None else self.model_mesh.map_rows

    def replicated(self, tree):
        """The same arrays; with a mesh, whole on each of its devices."""
        return tree if self.model_mesh is None else self.model_mesh.replicated(tree)


@pytree
class Batch:
    """The input of a dispatch."""

    token_ids: AnyArray  # i32[T]; the value of a row's token does not matter if the row continues another
    source: AnyArray  # i32[R] the row of the dispatch before this one whose last token it computes; -1: none
    metas: tuple[CommonAttentionMetadata, ...]  # one for each cache group
    rows: SamplingRows  # the sampling rules of each row
    penalties: Penalties  # of each row
    needs_history: jax.Array | np.bool_  # some row has penalties
    needs_logprobs: jax.Array | np.bool_  # log-probabilities are requested
    steps: jax.Array | np.int32  # the most steps; MAX_STEPS at most
    block_size: int = static()  # tokens of a block


@pytree
class LoopState:
    """The state of the loop over steps."""

    step: jax.Array  # i32[] the next step
    alive: jax.Array  # bool[R] rows that have not ended
    token_ids: jax.Array  # i32[T] input of the next step
    metas: tuple[CommonAttentionMetadata, ...]  # of the next step, for each cache group
    sampled: Sampled  # of all steps so far: arrays [MAX_STEPS R ..]
    any_unfinished: jax.Array | None  # bool[] of all data ranks, if they compute their steps together


@pytree
class RowState:
    """What a dispatch leaves on the device for the rows that continue in the next one.

    All arrays have a column for each row of the largest batch.
    """

    last: jax.Array  # i32[R] the token that was sampled last
    remaining: jax.Array  # i32[R] tokens that may still be generated; 0: the row has ended
    recent: jax.Array  # i32[MAX_STEPS R] all tokens of the dispatch


ROW_AXES = RowState(last=0, remaining=0, recent=1)  # pyright: ignore[reportArgumentType]
"""The axis of rows of each array."""


def empty_row_state(num_rows: int) -> RowState:
    """The state before the first dispatch. num_rows: of the largest batch. Its arrays can be donated: each its own."""
    none = lambda: jnp.zeros(num_rows, jnp.int32)
    return RowState(last=none(), remaining=none(), recent=jnp.full((MAX_STEPS, num_rows), NOT_SAMPLED, jnp.int32))


@functools.cache
def _num_tokens(tree: PackedTree) -> int:
    """T of a packed Batch."""
    batch: Batch = jax.tree.unflatten(tree.structure, tree.leaves)
    (num_tokens,), _ = batch.token_ids  # its shape and dtype
    return num_tokens


@functools.partial(
    PlatformJit,
    num_tokens=lambda model, params, caches, before, packed: _num_tokens(packed.tree),
    is_on_mesh=lambda model, *_: model.model_mesh is not None and model.model_mesh.mesh.size > 1,
    static_argnames="model",
    donate_argnames=("caches", "before"),
)
def dispatch(model: Model, params, caches, before: RowState, packed: Packed):
    """(caches, Sampled with a first axis of MAX_STEPS, RowState).

    before: the RowState of the previous dispatch. packed: a Batch. tokens[i, r] is the token of row r in step i:
    BAD_TOKEN if its logits were NaN or infinite, NOT_SAMPLED if the row had ended before.

    With several data ranks, packed has a batch of each, and the results have the rows of all. Each rank computes its
    own, and ends its steps without waiting for the others, unless they share experts.
    """
    of_rank = functools.partial(_of_rank, model)
    if model.data_ranks == 1:
        return of_rank(params, caches, before, packed)
    mesh = model.model_mesh
    each_rank = mesh.each_data_rank(of_rank, in_axes=(model.weight_axes, 0, ROW_AXES, 0), out_axes=(0, 1, ROW_AXES))
    caches, sampled, row_state = each_rank(params, caches, before, packed)
    return caches, jax.lax.with_sharding_constraint(sampled, mesh.everywhere), row_state


def _of_rank(model: Model, params, caches, before: RowState, packed: Packed):
    """`dispatch` of one data rank."""
    batch: Batch = model.replicated(packed).unpacked()
    num_rows = batch.metas[0].max_num_reqs
    remaining, token_ids, metas, recent = _continued(before, batch)
    rows = dataclasses.replace(batch.rows, remaining=remaining)
    needs = Needs(
        draws=jnp.any(rows.temperature > 0),
        history=jnp.asarray(batch.needs_history),
        logprobs=jnp.asarray(batch.needs_logprobs),
    )

    def one_step(carry):
        caches, state = carry
        caches, logits = model.last_logits(params, caches, state.token_ids, state.metas)
        chosen, sampled = choose(
            logits, rows, batch.penalties, recent, state.sampled, state.step, needs, model.map_rows
        )
        tokens = jnp.where(state.alive, chosen, NOT_SAMPLED)
        tokens = jax.lax.dynamic_update_index_in_dim(sampled.tokens, tokens, state.step, 0)
        sampled = dataclasses.replace(sampled, tokens=tokens)
        ended = (chosen == BAD_TOKEN) | is_one_of(chosen, batch.rows.stop_ids)
        alive = state.alive & ~ended & (remaining > state.step + 1)
        metas = tuple(decode_after(meta, alive, batch.block_size) for meta in state.metas)
        token_ids = jnp.zeros_like(state.token_ids).at[:num_rows].set(jnp.maximum(chosen, 0))
        step, any_unfinished = state.step + 1, None
        if model.steps_together:
            any_unfinished = model.model_mesh.any_data_rank(is_unfinished(step, alive))
        return caches, LoopState(
            step=step, alive=alive, token_ids=token_ids, metas=metas, sampled=sampled, any_unfinished=any_unfinished
        )

    def is_unfinished(step, alive):
        return jnp.any(alive) & (step < jnp.minimum(batch.steps, MAX_STEPS))

    def has_next_step(carry):
        """Computed, also where `any_unfinished` is known. With an element of the carry itself as the condition, a CUDA
        graph on an H200 (XLA of JAX 0.11.2) accessed illegal addresses, as if steps had followed the last one."""
        state = carry[1]
        own = is_unfinished(state.step, state.alive) if state.any_unfinished is None else state.any_unfinished
        return (state.step == 0) | own

    start = LoopState(
        step=jnp.int32(0),
        alive=remaining > 0,
        token_ids=token_ids,
        metas=metas,
        sampled=Sampled.nothing(MAX_STEPS, num_rows, model.config.vocab_size, NOT_SAMPLED),
        any_unfinished=jnp.bool_(False) if model.steps_together else None,
    )
    caches, end = jax.lax.while_loop(has_next_step, one_step, (caches, start))
    wider = before.last.shape[0] - num_rows
    row_state = RowState(
        last=jnp.pad(end.token_ids[:num_rows], (0, wider)),
        remaining=jnp.pad(jnp.where(end.alive, remaining - end.step, 0), (0, wider)),
        recent=jnp.pad(end.sampled.tokens, ((0, 0), (0, wider)), constant_values=NOT_SAMPLED),
    )
    return caches, model.replicated(end.sampled), model.replicated(row_state)


def _continued(before: RowState, batch: Batch) -> tuple[jax.Array, jax.Array, tuple, jax.Array]:
    """(remaining i32[R], token_ids i32[T], metas, recent i32[MAX_STEPS R]) of the first step.

    A row that continues another gets its token, its remaining tokens and the recent ones from `before`; the host did
    not know them. If it had ended there, it writes to no slot.
    """
    source = jnp.asarray(batch.source)
    continues, at = source >= 0, jnp.maximum(source, 0)
    remaining = jnp.where(continues, before.remaining[at], batch.rows.remaining)
    first = jnp.where(continues, jnp.asarray(batch.metas[0].query_start_loc)[:-1], batch.metas[0].num_tokens)
    token_ids = jnp.asarray(batch.token_ids).at[first].set(before.last[at], mode="drop")
    ended = jnp.where(remaining > 0, batch.metas[0].num_tokens, first)
    write_none = lambda slots: jnp.asarray(slots).at[ended].set(PAD_SLOT_ID, mode="drop")
    metas = jax.tree.map(jnp.asarray, batch.metas)
    metas = tuple(meta.replace(slot_mapping=write_none(meta.slot_mapping)) for meta in metas)
    return remaining, token_ids, metas, jnp.where(continues, before.recent[:, at], NOT_SAMPLED)


def _decode_slots(meta: CommonAttentionMetadata, writes: jax.Array, block_size: int) -> jax.Array:
    """i32[T] the slot of each row's last token; PAD_SLOT_ID for rows that write none, and from R on. writes: bool[R]"""
    last = jnp.asarray(meta.seq_lens) - 1
    slots = slots_of(jnp.asarray(meta.block_table), jnp.arange(meta.max_num_reqs), last, block_size)
    slots = jnp.where(writes, slots, PAD_SLOT_ID).astype(jnp.int32)
    return jnp.concatenate([slots, jnp.full(meta.num_tokens - meta.max_num_reqs, PAD_SLOT_ID, jnp.int32)])


def is_one_of(tokens: jax.Array, ids: AnyArray) -> jax.Array:
    """bool[R]: is a token one of its row's ids i32[R n]? Column by column, which XLA computes with what follows, where
    jnp.any would be a kernel of its own."""
    columns = (tokens == ids[:, i] for i in range(ids.shape[1]))
    return functools.reduce(operator.or_, columns, jnp.zeros(tokens.shape, bool))


def decode_after(meta: CommonAttentionMetadata, alive: jax.Array, block_size: int) -> CommonAttentionMetadata:
    """The decode step after any batch: one token for each row with tokens. Rows that ended write nothing.

    Unlike `meta.advanced`, rows may end, and the batch may have prompts. T is unchanged: tokens from R on are padding.
    """
    had = meta.query_lens() > 0
    if meta.max_query_len > 1:
        start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(had, dtype=jnp.int32)])
        meta = meta.replace(query_start_loc=start, num_actual_tokens=start[-1])
    meta = meta.replace(seq_lens=meta.seq_lens + (alive & had), logits_indices=None)
    return meta.replace(slot_mapping=_decode_slots(meta, alive & had, block_size))
