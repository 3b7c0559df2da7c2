"""The fuzzer and the load test, shortened; and that the fuzzer finds faults: the mutants are servers with one each."""

import numpy as np
import pytest

from jattn import strict_json
from jattn.engine import Engine, SamplingParams
from jattn.serve import errors, fields, logprobs
from jattn.serve.engine_loop import EngineLoop
from jattn.text import ByteTokenizer, ChatTemplate
from tests.engine import fake
from tests.serve import load
from tests.serve.fuzz import clients, expect, leaks
from tests.serve.fuzz.__main__ import GOOD, fuzz
from tests.serve.running import TEMPLATE


@pytest.fixture(scope="module")
def engine():
    """The fake model with the sizes of the embedded one; it has little to compile."""
    config = fake.FakeConfig(vocab_size=expect.VOCABULARY, max_positions=expect.LENGTH)
    params = {"bias": np.where(np.arange(expect.VOCABULARY) < 3, -1000, 0).astype(np.float32)}
    sizes = dict(num_blocks=129, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, deterministic=True)
    template = ChatTemplate(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "POISON", -1)  # no token that it fails at
        yield Engine(config, params, ByteTokenizer(), forward=fake.forward, chat_template=template, **sizes)


@pytest.fixture
def run(engine, monkeypatch):
    """The fuzzer with that model."""
    monkeypatch.setattr(leaks, "PATIENCE", clients.PATIENCE)  # a busy machine takes its time
    asked = {name: value for name, value in GOOD.items() if name != "prompt"}
    want = engine.generate(GOOD["prompt"], SamplingParams(**asked))[0].text
    yield lambda bodies, seed: fuzz(60, bodies, seed, engine, want)
    for id in list(engine._loop.requests._requests):  # a mutant may leave some
        engine.abort(id)
    engine.step()


def test_a_few_hundred_hostile_bodies_are_answered_rightly_and_nothing_is_left(run):
    assert run(200, 1) == 0


MUTANTS = {
    "a refusal is a 500": lambda patch: patch.setattr(errors.BadRequestError, "status", 500),
    "the first of two equal keys counts": lambda patch: patch.setattr(
        strict_json, "_object", lambda p: dict(reversed(p))
    ),
    "what is known and not served is taken": lambda patch: patch.setattr(fields, "_is_neutral", lambda a, b: True),
    "places do not come back": lambda patch: patch.setattr(EngineLoop, "_abort", lambda self, request: None),
    "the chosen token is not among the top": lambda patch: patch.setattr(logprobs, "_by_text", lambda t, _: {}),
    "errors are written in another way": lambda patch: patch.setattr(
        errors, "error_body", lambda message, *more: {"error": message}
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fuzzer_finds_a_server_that_is_wrong(mutant, run, monkeypatch, capsys):
    MUTANTS[mutant](monkeypatch)
    monkeypatch.setattr(clients, "PATIENCE", 5)
    monkeypatch.setattr(leaks, "PATIENCE", 2)
    assert run(3000, 2) == 1
    assert "WRONG" in capsys.readouterr().err


def test_r37_texts_under_load_are_those_of_quiet_runs_and_no_stream_is_lost(engine, monkeypatch):
    """R-37, shortened: 32 clients with random pauses, a quarter of which disconnect."""
    monkeypatch.setattr(load, "GROWTH", 10**6)  # too short to tell
    assert load.load(32, 2, 1, engine) == 0


def test_the_expectation_knows_what_is_right_and_wrong():
    """Cases written by hand, because the fuzzer relies on it."""
    good = b'{"prompt": "x"}'
    for raw, want in {
        good: {200}, b'{"prompt": "x", "prompt": "x"}': {400}, b'{"prompt": "x", "n": true}': {400}, b"[]": {400},
        b'{"prompt": "x", "model": "y"}': {404}, b'{"prompt": ""}': {400}, b'{"prompt": [383]}': {200},
        b'{"prompt": [384]}': {400}, b'{"prompt": "x", "tools": null}': {200}, b'{"prompt": "x", "tool": null}': {400},
        b'{"model": "y", "prompt": [' + b"1," * 1023 + b"1]}": {400},
        b'{"model": "y", "prompt": [' + b"1," * 1022 + b"1]}": {404},
        b'{"model": "y", "prompt": [' + b"[]," * 64 + b"[]]}": {400},
        b'{"model": "y", "prompt": "x", "messages": [' + b"0," * 20_000 + b"0]}": {400},
        b" " * (1 << 17): {413}, b'{"prompt": "x", "n": 2, "temperature": 0}': {400},
    }.items():  # fmt: skip
        assert expect.statuses("/v1/completions", raw) == want, raw[:80]
    assert expect.statuses("/v1/chat/completions", good) == {400}
