"""Rows of rules from lists of SamplingParams, as the engine makes them from its sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.engine import rules
from jattn.engine.sampling import Needs, Sampled, choose


def sampling_rows(params, seeds, positions, remaining, stop_ids, num_rows):
    """The rules of len(params) rows, padded to num_rows."""
    packed = [rules.rules_of(*each, 0) for each in zip(params, seeds, stop_ids[: len(params)], strict=True)]
    column = lambda values: np.asarray([*values, *[0] * (num_rows - len(values))], np.int32)
    return rules.sampling_rows(rules.rules_of_batch(packed, num_rows), column(positions), column(remaining))


def penalties_of(params, histories, prompt_lens, num_rows, width):
    """The penalties of len(params) rows with these tokens so far, padded to num_rows x width."""
    packed = [rules.rules_of(p, 0, (), count) for p, count in zip(params, prompt_lens, strict=True)]
    history = np.full((num_rows, width), -1, np.int32)
    for row, tokens in zip(history, histories, strict=False):
        row[: len(tokens)] = tokens
    return rules.penalties(rules.rules_of_batch(packed, num_rows), history)


def choose_once(logits, rows, penalties, said, needs_logprobs, needs_history=False, map_rows=None, choose=choose):
    """What `choose` samples in one step, without the axis of steps."""
    of_batch = [jnp.asarray(each) for each in (jnp.any(rows.temperature > 0), needs_history, needs_logprobs)]
    needs = Needs(**dict(zip(("draws", "history", "logprobs"), of_batch, strict=True)))
    nothing = Sampled.nothing(1, len(logits), logits.shape[1], -2)
    tokens, sampled = choose(logits, rows, penalties, said, nothing, np.int32(0), needs, map_rows)
    return jax.tree.map(lambda x: x[0], dataclasses.replace(sampled, tokens=tokens[None]))


def likeliest(logits, rows, penalties, recent, sampled, step, needs, map_rows=None):
    """In place of `choose`: the likeliest token and its log-probabilities. It compiles in less time than a model."""
    told = jax.nn.log_softmax(logits, axis=-1)
    top, tokens = jax.lax.top_k(told, 20)
    put = lambda every, one: jax.lax.dynamic_update_index_in_dim(every, one, step, 0)
    of_step = dict(logprobs=top[:, 0], top_tokens=tokens, top_logprobs=top)
    return tokens[:, 0], dataclasses.replace(
        sampled, **{name: put(getattr(sampled, name), one) for name, one in of_step.items()}
    )
