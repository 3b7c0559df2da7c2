"""Sampling compared with a few lines of numpy; and the errors of its parameters."""

import dataclasses
import functools
import pickle
import re

import jax
import numpy as np
import pytest

from jattn.engine import SamplingParams
from jattn.engine.params import SamplingParamsError
from jattn.engine.sampling import BAD_TOKEN, Needs, Sampled, choose, penalised
from tests.engine.rows import choose_once, penalties_of, sampling_rows

R, V, DRAWS = 4, 13, 4000
LOGITS = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32) * 2
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.6),
    SamplingParams(temperature=1.0, min_p=0.2, top_k=5, top_p=0.9),
]
NO_PENALTIES = penalties_of([], [], [], R, 8)
NOTHING_SAID = np.full((2, R), -2, np.int32)


@jax.jit
def draws(logits, rows):
    """i32[DRAWS R], one row for each position."""
    at = lambda i: (
        choose_once(
            logits, dataclasses.replace(rows, position=rows.position + i), NO_PENALTIES, NOTHING_SAID, False
        ).tokens
    )
    return jax.lax.map(at, np.arange(DRAWS))


def rows_of(params, seeds=(1, 2, 3, 2**40 + 5), positions=(0, 0, 0, 0)):
    return sampling_rows(params, list(seeds)[: len(params)], list(positions)[: len(params)], [1] * R, [()] * R, R)


def wanted(logits, p):
    """Probabilities by the definition, in the order min_p, top_k, top_p."""
    prob = np.exp(logits / p.temperature - (logits / p.temperature).max())
    prob[prob < p.min_p * prob.max()] = 0
    order = np.argsort(-prob)
    if p.top_k:
        prob[order[p.top_k :]] = 0
    prob /= prob.sum()
    if p.top_p < 1:
        before = np.cumsum(prob[order]) - prob[order]
        prob[order[before >= p.top_p]] = 0
    return prob / prob.sum()


def test_draws_have_the_probabilities_of_the_definition():
    tokens = np.asarray(draws(LOGITS, rows_of(PARAMS)))
    for r, p in enumerate(PARAMS):
        want = wanted(LOGITS[r].astype(np.float64), p)
        seen = np.bincount(tokens[:, r], minlength=V) / DRAWS
        assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(want)), "a token that its rules exclude"
        assert np.abs(seen - want).max() < 4 * np.sqrt(0.25 / DRAWS)


def test_a_draw_depends_on_seed_and_position_not_on_the_row():
    tokens = np.asarray(draws(LOGITS[[0, 0, 0, 0]], rows_of([PARAMS[0]] * R, seeds=(7, 7, 8, 2**32 + 7))))
    assert (tokens[:, 0] == tokens[:, 1]).all()
    assert (tokens[:, 0] != tokens[:, 2]).any() and (tokens[:, 0] != tokens[:, 3]).any()
    later = np.asarray(
        draws(LOGITS[[0, 0, 0, 0]], rows_of([PARAMS[0]] * R, seeds=(7, 7, 7, 7), positions=(5, 0, 0, 0)))
    )
    assert (later[:-5, 0] == tokens[5:, 0]).all()


def test_greedy_rows_and_rows_without_logits():
    logits = LOGITS.copy()
    logits[1, 3], logits[2] = np.nan, -np.inf
    params = [SamplingParams(temperature=0), PARAMS[0], PARAMS[0], SamplingParams(temperature=0)]
    tokens = np.asarray(draws(logits, rows_of(params)))
    assert (tokens[:, 0] == LOGITS[0].argmax()).all() and (tokens[:, 3] == LOGITS[3].argmax()).all()
    assert (tokens[:, 1:3] == BAD_TOKEN).all()


def test_of_equal_logits_the_first_token_is_greedy():
    logits = np.zeros((R, V), np.float32)
    logits[1, 4:7], logits[2, [3, V - 1]], logits[3, 2:] = 1.5, 2.5, -np.inf
    rows = rows_of([SamplingParams(temperature=0)] * R)
    for logprobs in (False, True):
        assert choose_once(logits, rows, NO_PENALTIES, NOTHING_SAID, logprobs).tokens.tolist() == [0, 4, 3, 0]


def test_on_a_cpu_no_argmax_over_the_vocabulary_is_compiled():
    """XLA:CPU makes of an argmax a loop of single numbers, in which it also computes the noise."""
    args = LOGITS, rows_of(PARAMS), NO_PENALTIES, NOTHING_SAID, np.bool_(False)
    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(choose_once).lower(*args).compile().as_text()
    reductions = re.findall(r"= (\S+|\([^)]*\)) reduce\(", text)
    assert reductions and not [result for result in reductions if result.startswith("(")]


def test_no_nan_is_lost_in_programs_compiled_as_those_of_users():
    """The vector loops of XLA:CPU lose a NaN in a maximum over many numbers; the suite compiles without them."""
    rows, vocab = 8, 1000
    logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)
    for row, column in enumerate((0, 1, 294, 640, 812, vocab - 1)):
        logits[row, column] = np.nan
    penalties, before = penalties_of([], [], [], rows, 8), np.full((2, rows), -2, np.int32)
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0)):
        chosen = sampling_rows([params] * rows, [1] * rows, [0] * rows, [1] * rows, [()] * rows, rows)
        once = functools.partial(choose_once, choose=choose.__wrapped__)
        lowered = jax.jit(once).lower(logits, chosen, penalties, before, np.bool_(False))
        program = lowered.compile(options)
        for logprobs in (False, True):
            tokens = np.asarray(program(logits, chosen, penalties, before, np.bool_(logprobs)).tokens)
            assert (tokens[:6] == BAD_TOKEN).all() and (tokens[6:] >= 0).all()


def test_penalties_are_the_definition():
    params = [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
        SamplingParams(),
        SamplingParams(repetition_penalty=2.0, frequency_penalty=-1.0),
    ]
    histories, prompts = [[0, 1, 2, 2], [4, 4, 5, 5, 5], [1, 1], [7, 0, 7]], [2, 1, 1, 3]
    whole = penalties_of(params, histories, prompts, R, 8)
    got = np.asarray(penalised(LOGITS, whole))
    said = np.asarray(
        [[2, 5, -2, -2], [-2, 5, -2, -2]], np.int32
    )  # the last tokens of the same histories, sampled since
    parts = penalties_of(params, [[0, 1, 2], [4, 4, 5], [1, 1], [7, 0, 7]], prompts, R, 8)
    np.testing.assert_array_equal(penalised(LOGITS, parts.after(said)), got)
    for r, (p, history, prompt) in enumerate(zip(params, histories, prompts, strict=True)):
        row = LOGITS[r].astype(np.float64)
        for t in set(history):
            row[t] = row[t] / p.repetition_penalty if row[t] > 0 else row[t] * p.repetition_penalty
        for t in set(history[prompt:]):
            row[t] -= p.presence_penalty + p.frequency_penalty * history[prompt:].count(t)
        np.testing.assert_allclose(got[r], row, rtol=1e-6, atol=1e-6)


def test_log_probabilities_are_those_before_every_rule():
    told = choose_once(LOGITS, rows_of(PARAMS), NO_PENALTIES, NOTHING_SAID, True)
    want = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(told.logprobs, want[np.arange(R), told.tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(told.top_tokens, np.argsort(-LOGITS, axis=1, kind="stable"))
    untold = choose_once(LOGITS, rows_of(PARAMS), NO_PENALTIES, NOTHING_SAID, False)
    np.testing.assert_array_equal(untold.tokens, told.tokens)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_penalties_and_log_probabilities_are_computed_where_they_are_needed(temperature):
    """Each by itself gives what both together give, and without log-probabilities none is written."""
    params = [SamplingParams(temperature=temperature, repetition_penalty=5.0, presence_penalty=2.0)] * R
    rows, histories = rows_of(params), [[0, *tokens] for tokens in np.argsort(-LOGITS, axis=1)[:, :5].tolist()]
    penalties, said = penalties_of(params, histories, [1] * R, R, 8), np.full((1, R), 3, np.int32)
    once = lambda logits, history, logprobs: choose_once(logits, rows, penalties, said, logprobs, history)
    both, only_history, only_logprobs = once(LOGITS, True, True), once(LOGITS, True, False), once(LOGITS, False, True)
    np.testing.assert_array_equal(only_history.tokens, both.tokens)
    after = once(np.asarray(penalised(LOGITS, penalties.after(said))), False, False)
    np.testing.assert_array_equal(both.tokens, after.tokens)
    np.testing.assert_array_equal(only_logprobs.tokens, once(LOGITS, False, False).tokens)
    assert (both.tokens != only_logprobs.tokens).any(), "the penalties tell nothing apart"
    for name in ("top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(getattr(only_logprobs, name), getattr(both, name))
        assert not getattr(only_history, name).any()


def test_a_step_writes_its_own_log_probabilities_only():
    """Those of other steps stay, and penalties count the tokens of the steps before."""
    rows, nothing = rows_of(PARAMS), Sampled.nothing(3, R, V, -2)
    before = dataclasses.replace(nothing, logprobs=nothing.logprobs + 7, tokens=nothing.tokens.at[0].set(5))
    params = [SamplingParams(frequency_penalty=1.0)] * R
    penalties, none = penalties_of(params, [[], [], [], []], [0] * R, R, 4), NOTHING_SAID
    needs = Needs(draws=np.bool_(True), history=np.bool_(True), logprobs=np.bool_(True))
    tokens, after = choose(LOGITS, rows, penalties, none, before, np.int32(1), needs)
    want = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(after.logprobs[1], want[np.arange(R), tokens], rtol=1e-5, atol=1e-5)
    assert (after.logprobs[np.array([0, 2])] == 7).all() and not after.top_logprobs[np.array([0, 2])].any()
    np.testing.assert_array_equal(after.tokens, before.tokens)
    lowered = LOGITS - (np.arange(V) == 5)
    position = dataclasses.replace(rows, position=rows.position + 1)
    np.testing.assert_array_equal(tokens, choose_once(lowered, position, penalties, none, False).tokens)


def test_an_error_says_in_data_which_fields_are_wrong():
    """The server names the field to its client."""
    for wrong, fields in (
        (dict(temperature=0, n=2), ("n",)),
        (dict(stop=["x"] * 65), ("stop",)),
        (dict(stop=["\ud800"], max_tokens=0), ("max_tokens", "stop")),
        (dict(stop_token_ids=[-1], ignore_eos=3), ("stop_token_ids", "ignore_eos")),
        (dict(stop_token_ids=b"ab", stop=bytearray(b"ab")), ("stop", "stop_token_ids")),
        (dict(stop_token_ids=[1] * 65, top_p=0, logprobs=21), ("top_p", "logprobs", "stop_token_ids")),
    ):
        with pytest.raises(SamplingParamsError) as refusal:
            SamplingParams(**wrong)
        assert refusal.value.fields == fields == pickle.loads(pickle.dumps(refusal.value)).fields


def test_every_mistake_is_named_at_once():
    with pytest.raises(ValueError) as refusal:
        SamplingParams(temperature=-1, top_p=0, min_p=2, top_k=-2, n=0, max_tokens=0, seed=-1, logprobs=21, stop=[""])
    for name in ("temperature", "top_p", "min_p", "top_k", "n", "max_tokens", "seed", "logprobs", "stop"):
        assert f"{name}=" in str(refusal.value)
    for bad, sentence in (
        (dict(temperature=float("nan")), "temperature=nan must be a number from 0"),
        (dict(temperature=0, n=2), "n=2 with temperature=0"),
        (dict(temperature=0, n=0), "n=0 must be an integer from 1 up to 128$"),
        (dict(temperature=0, n=None), "n=None must be an integer from 1 up to 128$"),
        (dict(repetition_penalty=0), "repetition_penalty=0 must be a number from 0.01"),
        (dict(max_tokens=1.5), "max_tokens=1.5 must be an integer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            SamplingParams(**bad)
    assert SamplingParams(top_k=-1, stop="x").top_k == 0 and SamplingParams(stop="x").stop == ("x",)
    assert hash(SamplingParams()) == hash(SamplingParams())
