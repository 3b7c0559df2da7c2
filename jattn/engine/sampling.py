"""Sampling on the device. Each row has its own rules, and its draws depend on its seed, position and logits only.

logits -> (log-probabilities) -> penalties -> / temperature -> min_p -> top_k -> top_p -> Gumbel noise -> argmax
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.engine.likeliest import likeliest
from jattn.engine.params import MAX_LOGPROBS
from jattn.engine.sampling_floor import has_kernels, ordered_bits, sampling_floor
from jattn.types import AnyArray, pytree
from pallas_kernels.cpu.native import library, ops
from pallas_kernels.gpu import draw_sm80 as gpu_draw
from pallas_kernels.gpu import sampling_floor_sm80 as gpu_floor
from pallas_kernels.gpu.logit_row_sm80 import Scaling

BAD_TOKEN = -1
"""The token of a row whose logits have a NaN or +inf, or no finite number. The row ends; the others continue."""

MIN_TEMPERATURE = 1e-30
"""Smaller temperatures are replaced by this one. The draw is the same, and float32 does not round it to 0."""

NOISE_SETTINGS = dict(
    jax_default_prng_impl="threefry2x32", jax_threefry_partitionable=True, jax_high_dynamic_range_gumbel=False
)
"""Settings of JAX, its defaults, with which jax.random.gumbel has the noise that the C++ function and the GPU's kernel
compute."""

IN_PROMPT = 1 << 30
"""The bit that marks a token of the prompt; the bits below it count the token in the output. One array i32[R vocab]
holds both, where two would be written and read."""

STOP_IDS = 8
"""The number of stop tokens of a row that the device checks. The host checks all of them."""


MapRows = Callable[..., Any]
"""(function, logits [R vocab], rules) -> function(logits, rules), arrays [R ..]. Each device computes some rows."""


@pytree
class SamplingRows:
    """The sampling rules of R rows. A row of padding is greedy and generates no token."""

    temperature: AnyArray  # f32[R] divides the logits; 0: greedy
    top_k: AnyArray  # i32[R] see SamplingParams; 0: off
    top_p: AnyArray  # f32[R] see SamplingParams; 1: off
    min_p: AnyArray  # f32[R] see SamplingParams; 0: off
    seed: AnyArray  # u32[R 2] the low and high 32 bits
    position: AnyArray  # i32[R] tokens generated so far
    remaining: AnyArray  # i32[R] tokens that may still be generated
    stop_ids: AnyArray  # i32[R STOP_IDS] tokens that end the row; -1: unused


@pytree
class Penalties:
    """The penalties of R rows, and the tokens that they apply to."""

    repetition: AnyArray  # f32[R] see SamplingParams; 1: off
    presence: AnyArray  # f32[R] see SamplingParams; 0: off
    frequency: AnyArray  # f32[R] see SamplingParams; 0: off
    history: AnyArray  # i32[R L] the prompt, then the output; negative: unused
    prompt_len: AnyArray  # i32[R] tokens of the prompt

    def after(self, sampled: jax.Array) -> "Penalties":
        """The same rows after sampling the tokens i32[S R], in any order; negative ones are unused."""
        return dataclasses.replace(self, history=jnp.concatenate([self.history, sampled.T], axis=1))


@pytree
class Sampled:
    """One token for each row and step, and its log-probability before any rule is applied."""

    tokens: jax.Array  # i32[S R]
    logprobs: jax.Array  # f32[S R] log-probability of the token
    top_tokens: jax.Array  # i32[S R MAX_LOGPROBS] the most likely tokens, most likely first
    top_logprobs: jax.Array  # f32[S R MAX_LOGPROBS] their log-probabilities

    @classmethod
    def nothing(cls, num_steps: int, num_rows: int, vocab_size: int, token: int) -> "Sampled":
        """Before the first step: each token is `token`, and all log-probabilities are 0."""
        top = jnp.zeros((num_steps, num_rows, min(MAX_LOGPROBS, vocab_size)), jnp.float32)
        tokens = jnp.full(top.shape[:2], token, jnp.int32)
        return cls(tokens=tokens, logprobs=top[..., 0], top_tokens=top.astype(jnp.int32), top_logprobs=top)


@pytree
class Needs:
    """What the rows of a batch need together. It is the same in every step, so it is computed before the first."""

    draws: AnyArray  # bool[] some row is not greedy
    history: AnyArray  # bool[] some row has penalties
    logprobs: AnyArray  # bool[] log-probabilities are requested

    def branch(self) -> jax.Array:
        """i32[]: 0, only the likeliest tokens; 1, draws too; 2, penalties or log-probabilities."""
        return jnp.where(self.history | self.logprobs, 2, jnp.asarray(self.draws).astype(jnp.int32))


@functools.partial(jax.jit, static_argnames="map_rows")  # programs with the same number of rows share one trace
def choose(
    logits: jax.Array,
    rows: SamplingRows,
    penalties: Penalties,
    recent: jax.Array,
    sampled: Sampled,
    step: jax.Array,
    needs: Needs,
    map_rows: MapRows | None = None,
) -> tuple[jax.Array, Sampled]:
    """(a token i32[R] for each row, `sampled` with the step's log-probabilities if those are needed), from logits
    f32[R vocab].

    rows: as they were in step 0. recent: i32[S R], tokens of the rows before step 0 that the history of `penalties`
    lacks; negative ones are unused. sampled: of the steps before this one.
    map_rows: if each device has a part of the vocabulary. No operation then gathers the logits: for a draw, and for the
    likeliest tokens, devices exchange them, so that each has some rows.

    What only some branches need is computed in them: XLA would compute it before the switch, in every step.
    """
    of_steps = (sampled.logprobs, sampled.top_tokens, sampled.top_logprobs)
    greedy = lambda logits: _greedy(logits, map_rows)
    drawn = lambda logits: _sample_on_devices(
        logits, dataclasses.replace(rows, position=rows.position + step), map_rows
    )

    def with_penalties_or_logprobs():
        history = lambda: penalties.after(recent).after(sampled.tokens)
        after = jax.lax.cond(needs.history, lambda: penalised(logits, history()), lambda: logits)
        tokens = jax.lax.cond(needs.draws, drawn, greedy, after)

        def with_this_step():
            of_step = _logprobs(logits, tokens, sampled.top_tokens.shape[-1], map_rows)
            put = lambda every, one: jax.lax.dynamic_update_index_in_dim(every, one, step, 0)
            return tuple(map(put, of_steps, of_step))

        return tokens, jax.lax.cond(needs.logprobs, with_this_step, lambda: of_steps)

    branches = (
        lambda: (greedy(logits), of_steps),
        lambda: (drawn(logits), of_steps),
        with_penalties_or_logprobs,
    )
    # One switch of three branches, not two nested ones: on a GPU each switch waits for its condition.
    tokens, (logprobs, top_tokens, top_logprobs) = jax.lax.switch(needs.branch(), branches)
    return tokens, dataclasses.replace(sampled, logprobs=logprobs, top_tokens=top_tokens, top_logprobs=top_logprobs)


def _logprobs(
    logits: jax.Array, tokens: jax.Array, top: int, map_rows: MapRows | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logprobs, top_tokens, top_logprobs) as in Sampled, of one step: without its first axis."""
    of_rows = lambda logits, _: likeliest(logits, top)
    values, top_tokens = of_rows(logits, None) if map_rows is None else map_rows(of_rows, logits, ())
    largest = values[:, :1]
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    logprobs = lambda values: (values - largest) - log_sum
    chosen = logprobs(jnp.take_along_axis(logits, tokens[:, None], axis=-1))[:, 0]
    return chosen, top_tokens, logprobs(values)


def _usable(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """BAD_TOKEN for rows of such logits, else their token, as the C++ function gives it by itself.

    On a CPU NaNs are made infinite: XLA:CPU's loops of vectors lose them in a maximum. Elsewhere the maximum of such a
    row is NaN.
    """
    largest = lambda x: jnp.max(x, axis=-1)
    with_nan = lambda x: largest(jnp.where(jnp.isnan(x), jnp.inf, x))
    usable = jnp.isfinite(jax.lax.platform_dependent(logits, cpu=with_nan, default=largest))
    return jnp.where(usable, tokens, BAD_TOKEN)


def _greedy(logits: jax.Array, map_rows: MapRows | None) -> jax.Array:
    """i32[R] the first of the largest of f32[R vocab], or BAD_TOKEN.

    If devices have parts of the vocabulary, XLA would gather the logits for the C++ function.
    """
    by_xla = lambda logits: _usable(logits, _first_largest(logits))
    if map_rows is not None or not _has_library():
        return by_xla(logits)
    return jax.lax.platform_dependent(logits, cpu=ops.first_largest, default=by_xla)


def _first_largest(x: jax.Array) -> jax.Array:
    """i32[R] the first of the largest of f32[R vocab]: jnp.argmax, but any token for a row that has a NaN.

    XLA:CPU compiles an argmax to one comparison at a time, and computes in the same scalar loop what it reduces: the
    noise of a draw then takes three times as long. A maximum and a minimum are loops of vectors.
    """

    def by_maximum(x):
        at, last = jnp.arange(x.shape[-1], dtype=jnp.int32)[None], x.shape[-1] - 1
        return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), at, last), axis=-1)

    by_argmax = lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    return jax.lax.platform_dependent(x, cpu=by_maximum, default=by_argmax)


@functools.partial(jax.jit, static_argnames="map_rows")  # two branches of `choose` share one trace
def _sample_on_devices(logits: jax.Array, rows: SamplingRows, map_rows: MapRows | None) -> jax.Array:
    return _sample(logits, rows) if map_rows is None else map_rows(_sample, logits, rows)


def penalised(logits: jax.Array, penalties: Penalties) -> jax.Array:
    """The logits after the repetition penalty (prompt and output), then those of frequency and presence (output)."""
    rows, width = penalties.history.shape
    live = penalties.history >= 0
    is_output = live & (jnp.arange(width)[None] >= penalties.prompt_len[:, None])
    tokens_in = lambda part: (jnp.arange(rows)[:, None], jnp.where(part, penalties.history, logits.shape[-1]))
    marks = jnp.zeros(logits.shape, jnp.int32).at[tokens_in(live & ~is_output)].max(IN_PROMPT, mode="drop")
    marks = marks.at[tokens_in(is_output)].add(1, mode="drop")
    seen, counts = marks > 0, marks & (IN_PROMPT - 1)
    factor = penalties.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - penalties.frequency[:, None] * counts
    return logits - penalties.presence[:, None] * (counts > 0)


def _sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """i32[R] a token drawn for each row; for a greedy row the likeliest; or BAD_TOKEN.

    The C++ function, the GPU's launches and XLA draw the same tokens, except where rounding decides: of two sums that
    are about equal either may be the largest, and a token at the edge of a cut may be kept or not.
    """
    args = logits, rows, jax.vmap(_row_key)(rows.seed, rows.position)
    if not _has_jax_noise():
        return _sample_by_xla(*args)
    if _has_library():
        return jax.lax.platform_dependent(*args, cpu=_sample_by_library, default=_sample_by_xla)
    if has_kernels():
        return jax.lax.platform_dependent(*args, cuda=_sample_by_launches, default=_sample_by_xla)
    return _sample_by_xla(*args)


def _has_jax_noise() -> bool:
    """Whether JAX's settings are those with which the C++ function and the GPU's kernel compute its noise."""
    return all(getattr(jax.config, name) == value for name, value in NOISE_SETTINGS.items())


def _has_library() -> bool:
    """Whether the default device is a CPU that has the C++ functions."""
    return device.detect().platform == "cpu" and library.status().available


def _temperature(rows: SamplingRows, greedy: float) -> jax.Array:
    """f32[R] MIN_TEMPERATURE or more; `greedy` for a greedy row."""
    return jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, MIN_TEMPERATURE), greedy)


def _sample_by_library(logits: jax.Array, rows: SamplingRows, keys: jax.Array) -> jax.Array:
    rules = _temperature(rows, greedy=0.0), rows.top_k, rows.top_p, rows.min_p
    return ops.draw(logits, *rules, jax.random.key_data(keys))[0]


def _sample_by_launches(logits: jax.Array, rows: SamplingRows, keys: jax.Array) -> jax.Array:
    """By two kernels of the GPU. Both scale the logits as they read them, so that no scaled logit is written."""
    scaling = _scaling(logits, rows)
    floor = gpu_floor.sampling_floor(logits, scaling, rows.top_k, rows.top_p)
    drawn = gpu_draw.draw(logits, scaling, floor, jax.random.key_data(keys))
    return _usable(logits, jnp.where(rows.temperature > 0, drawn, _first_largest(logits)))


def _sample_by_xla(logits: jax.Array, rows: SamplingRows, keys: jax.Array) -> jax.Array:
    """By XLA alone. Scaled logits are computed twice, for the floor and for the draw: XLA computes the second with the
    noise, and writes no array of R vocab numbers. The first is written, but only in a batch with top_k or top_p."""
    scaling = _scaling(logits, rows)
    floor = jax.lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1)),
        lambda: sampling_floor(scaling.scaled(logits), rows.top_k, rows.top_p),
        lambda: jnp.zeros(len(logits), jnp.uint32),
    )
    scaled = scaling.scaled(logits)
    scaled = jnp.where(_is_kept(scaled, floor), scaled, -jnp.inf)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    return _usable(logits, jnp.where(rows.temperature > 0, _first_largest(scaled + noise), _first_largest(logits)))


def _scaling(logits: jax.Array, rows: SamplingRows) -> Scaling:
    return Scaling(
        largest=jnp.max(logits, axis=-1),
        temperature=_temperature(rows, greedy=1.0),
        least=jnp.log(jnp.asarray(rows.min_p)),
    )


def _is_kept(scaled: jax.Array, floor: jax.Array) -> jax.Array:
    """bool[R vocab]: is a token at or above the sampling_floor u32[R]?"""
    return ordered_bits(scaled) >= floor[:, None]


def _row_key(seed: AnyArray, position: AnyArray) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(0), seed[0])
    return jax.random.fold_in(jax.random.fold_in(key, seed[1]), position)
