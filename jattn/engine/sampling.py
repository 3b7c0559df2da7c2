"""Choosing tokens on the device: every row by its own rules, with a draw that depends on its seed and position only.

logits -> penalties -> / temperature -> min_p -> top_k -> top_p -> Gumbel noise -> argmax
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.engine.params import MAX_LOGPROBS, SamplingParams
from jattn.types import pytree

BAD_TOKEN = -1
"""Sampled where a row's logits hold NaN or nothing finite: that row cannot go on, the others can."""

STOP_IDS = 8
"""Stop tokens a row that the device looks for; the host looks for all of them."""


@pytree
class SamplingRows:
    """The rules of R rows; rows of padding are greedy and may generate nothing."""

    temperature: jax.Array  # f32[R] 0: greedy
    top_k: jax.Array  # i32[R] 0: off
    top_p: jax.Array  # f32[R] 1: off
    min_p: jax.Array  # f32[R] 0: off
    seed: jax.Array  # u32[R 2]
    position: jax.Array  # i32[R] output tokens so far
    remaining: jax.Array  # i32[R] output tokens still allowed
    stop_ids: jax.Array  # i32[R STOP_IDS] -1: none


@pytree
class Penalties:
    """What earlier tokens do to the logits of R rows."""

    repetition: jax.Array  # f32[R] 1: off
    presence: jax.Array  # f32[R]
    frequency: jax.Array  # f32[R]
    history: jax.Array  # i32[R L] prompt, then output; -1: none
    prompt_len: jax.Array  # i32[R]


@pytree
class Sampled:
    """One token a row, and how likely it was before any rule was applied."""

    tokens: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R] of the token
    top_tokens: jax.Array  # i32[R MAX_LOGPROBS] most likely first
    top_logprobs: jax.Array  # f32[R MAX_LOGPROBS]


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """i32[R] from f32[R vocab]; work that no row asks for is skipped."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chosen = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _draw(logits, rows), greedy),
        lambda: greedy,
    )
    usable = jnp.isfinite(jnp.max(logits, axis=-1))  # the maximum of a row with a NaN is NaN
    return jnp.where(usable, chosen, BAD_TOKEN)


@functools.partial(jax.jit, static_argnames="num_top")
def sample_and_tell(
    logits: jax.Array, rows: SamplingRows, penalties: Penalties, num_top: int = MAX_LOGPROBS
) -> Sampled:
    """The same with penalties, and the log-probabilities of what could have been chosen."""
    raw = jax.nn.log_softmax(logits, axis=-1)
    top = min(num_top, logits.shape[-1])
    top_logprobs, top_tokens = jax.lax.top_k(raw, top)
    tokens = sample(penalised(logits, penalties), rows)
    chosen = jnp.take_along_axis(raw, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return Sampled(tokens=tokens, logprobs=chosen, top_tokens=top_tokens, top_logprobs=top_logprobs)


def penalised(logits: jax.Array, penalties: Penalties) -> jax.Array:
    """Repetition (a factor, prompt and output), then frequency and presence (a difference, output only)."""
    rows, width = penalties.history.shape
    live = penalties.history >= 0
    is_output = live & (jnp.arange(width)[None] >= penalties.prompt_len[:, None])
    at = (jnp.arange(rows)[:, None], jnp.where(live, penalties.history, logits.shape[-1]))
    none = jnp.zeros(logits.shape, jnp.int32)
    seen = none.at[at].add(1, mode="drop") > 0
    counts = none.at[at].add(is_output.astype(jnp.int32), mode="drop")
    factor = penalties.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - penalties.frequency[:, None] * counts
    return logits - penalties.presence[:, None] * (counts > 0)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    below = scaled < jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(rows.min_p)[:, None]
    scaled = jnp.where(below, -jnp.inf, scaled)
    restricted = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    scaled = jax.lax.cond(restricted, lambda: _restrict(scaled, rows), lambda: scaled)
    keys = jax.vmap(_row_key)(rows.seed, rows.position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _restrict(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Only the top_k most likely tokens, then the fewest of those that reach top_p; ties stay in."""
    vocab = scaled.shape[-1]
    order = jnp.sort(scaled, axis=-1, descending=True)
    keep = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    kth = jnp.take_along_axis(order, keep[:, None] - 1, axis=-1)
    order = jnp.where(jnp.arange(vocab)[None] < keep[:, None], order, -jnp.inf)
    before = jnp.cumsum(jax.nn.softmax(order, axis=-1), axis=-1) - jax.nn.softmax(order, axis=-1)
    count = jnp.sum((before < rows.top_p[:, None]) & jnp.isfinite(order), axis=-1)
    last = jnp.take_along_axis(order, jnp.maximum(count, 1)[:, None] - 1, axis=-1)
    floor = jnp.maximum(kth, jnp.where(rows.top_p < 1, last[:, 0], -jnp.inf)[:, None])
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def _row_key(seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(0), seed[0])
    return jax.random.fold_in(jax.random.fold_in(key, seed[1]), position)


def sampling_rows(params: list[SamplingParams], seeds, positions, remaining, stop_ids, num_rows: int) -> SamplingRows:
    """On the host: the rules of len(params) rows, padded to num_rows."""
    column = lambda values, fill, dtype: np.asarray([*values, *[fill] * (num_rows - len(params))], dtype)
    stops = np.full((num_rows, STOP_IDS), -1, np.int32)
    for row, ids in zip(stops, stop_ids, strict=False):
        row[: len(ids[:STOP_IDS])] = ids[:STOP_IDS]
    return SamplingRows(
        temperature=column([p.temperature for p in params], 0, np.float32),
        top_k=column([p.top_k for p in params], 0, np.int32),
        top_p=column([p.top_p for p in params], 1, np.float32),
        min_p=column([p.min_p for p in params], 0, np.float32),
        seed=np.stack([column([s >> shift & 0xFFFFFFFF for s in seeds], 0, np.uint32) for shift in (0, 32)], axis=1),
        position=column(positions, 0, np.int32),
        remaining=column(remaining, 0, np.int32),
        stop_ids=stops,
    )


def penalties_of(params: list[SamplingParams], histories, prompt_lens, num_rows: int, width: int) -> Penalties:
    """On the host: the penalties of len(params) rows and what they have said, padded to num_rows x width."""
    column = lambda values, fill, dtype: np.asarray([*values, *[fill] * (num_rows - len(params))], dtype)
    history = np.full((num_rows, width), -1, np.int32)
    for row, p, tokens in zip(history, params, histories, strict=False):
        if p.is_penalised:
            row[: len(tokens)] = tokens
    return Penalties(
        repetition=column([p.repetition_penalty for p in params], 1, np.float32),
        presence=column([p.presence_penalty for p in params], 0, np.float32),
        frequency=column([p.frequency_penalty for p in params], 0, np.float32),
        history=history,
        prompt_len=column(prompt_lens, 0, np.int32),
    )
