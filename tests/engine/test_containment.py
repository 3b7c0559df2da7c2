"""A failure in a step fails the rows of that step. All other requests get their usual result."""

import contextlib
import dataclasses
import logging
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.engine import Engine, SamplingParams, flights, interrupts
from jattn.engine.dispatch import NOT_SAMPLED
from jattn.engine.programs import Programs
from jattn.engine.tables import BlockTables
from jattn.errors import EngineDeadError, UnsupportedError
from jattn.text import ByteTokenizer
from tests.engine import fake

HYBRID = fake.FakeConfig(
    cache_groups=(fake.Group((0,)), fake.Group((1,), sliding_window=5), fake.Group((2,), chunk_size=8))
)
GREEDY = dict(temperature=0, ignore_eos=True)
LEAKY = RuntimeError("a detail of another request")
SIZES = dict(num_blocks=60, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_burst=3)


def engine(config=HYBRID, params=fake.PARAMS, **options):
    return Engine(config, params, forward=fake.forward, **SIZES | options)


def answer(prompt, count, config=HYBRID):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake.next_logits(config, tokens).argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(autouse=True)
def interruptible():
    """Python's own handler of Ctrl-C: a suite that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def failing(monkeypatch, caplog):
    """failing(when, before=True): the dispatches of these numbers raise, before or after the device has run."""
    caplog.set_level(logging.CRITICAL, "jattn.engine")
    real, count = Programs.__call__, iter(range(10**6))

    def install(when, error=LEAKY, before=True):
        def dispatch(*args):
            number = next(count)
            if number in when and before:
                raise error
            result = real(*args)
            if number in when:
                raise error
            return result

        monkeypatch.setattr(Programs, "__call__", dispatch)

    return install


@pytest.mark.parametrize("before", [True, False], ids=["before the device", "after donation"])
@pytest.mark.parametrize("number", range(6))
def test_a_dispatch_that_raises_fails_its_rows_and_nobody_else(failing, number, before):
    """Two rows run, two wait; whichever dispatch fails (prompts, decodes, one that was sent ahead)."""
    served = engine()
    prompts = [[5, 6, 7], [9, 8], [20, 21, 22, 23, 24], [5, 6, 7, 30]]
    failing({number}, before=before)
    outputs = served.generate(prompts, SamplingParams(max_tokens=12, **GREEDY))
    failed = [i for i, output in enumerate(outputs) if output.error]
    assert failed and len(failed) <= 2, "the rows of one step"
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if i in failed:
            assert output.finish_reason == "error" and "internal error (RuntimeError)" in output.error
            assert "another request" not in output.error, "an exception's text may speak of anybody"
            assert output.token_ids == answer(prompt, 12)[: len(output.token_ids)]
        else:
            assert output.token_ids == answer(prompt, 12)
    assert served.stats.failed == len(failed)
    for pool in served.tables.pools:
        pool.check({})
    again = served.generate(prompts, SamplingParams(max_tokens=5, **GREEDY))
    assert [output.token_ids for output in again] == [answer(prompt, 5) for prompt in prompts]


def test_a_scheduler_that_raises_fails_who_it_may_have_planned_for(monkeypatch, failing):
    failing(set())
    served, real, calls = engine(), BlockTables.admit, iter(range(99))
    monkeypatch.setattr(BlockTables, "admit", lambda *args: 1 / 0 if next(calls) == 1 else real(*args))
    outputs = served.generate([[5, 6], [7, 8], [9, 10]], SamplingParams(max_tokens=4, **GREEDY))
    assert [bool(output.error) for output in outputs] == [True, True, False]
    assert outputs[2].token_ids == answer([9, 10], 4)


def test_a_prefix_hit_that_leaves_nothing_to_compute_is_an_error_and_no_endless_loop(monkeypatch, failing):
    failing(set())
    served, real = engine(fake.FakeConfig()), BlockTables.admit

    def admit(tables, seq):
        hit = real(tables, seq)
        if hit:
            seq.num_computed = len(seq.tokens)
        return seq.num_computed

    prompt = list(range(5, 17))
    served.generate([prompt], SamplingParams(max_tokens=1, **GREEDY))
    monkeypatch.setattr(BlockTables, "admit", admit)
    (output,) = served.generate([prompt], SamplingParams(max_tokens=1, **GREEDY))
    assert "internal error (AssertionError)" in output.error


def test_a_step_that_moves_nobody_is_an_error(monkeypatch, failing):
    failing(set())
    served = engine()
    monkeypatch.setattr(BlockTables, "fits", lambda *args: False)
    (output,) = served.generate([[5, 6]])
    assert "internal error (AssertionError)" in output.error


def test_a_model_that_gives_no_token_fails_its_row(monkeypatch):
    real = Programs.__call__

    def silent(*args):
        caches, sampled, row_state = real(*args)
        return caches, dataclasses.replace(sampled, tokens=sampled.tokens.at[:, 0].set(NOT_SAMPLED)), row_state

    monkeypatch.setattr(Programs, "__call__", silent)
    first, second = engine().generate([[5, 6], [7, 8]], SamplingParams(max_tokens=4, **GREEDY))
    assert "gave no token" in first.error and second.token_ids[0] == answer([7, 8], 1)[0]


class Strict(ByteTokenizer):
    """A tokenizer that raises for some tokens."""

    def decode(self, token_ids):
        if 42 in token_ids:
            raise KeyError(42)
        return super().decode(token_ids)


def test_text_that_cannot_be_read_fails_its_request_alone(failing):
    failing(set())
    config = fake.FakeConfig(eos_token_ids=())
    served = engine(config, tokenizer=Strict())
    outputs = served.generate([[i, i + 1] for i in range(3, 23)], SamplingParams(max_tokens=6, **GREEDY))
    told = [answer(output.prompt_token_ids, 6, config) for output in outputs]
    assert [bool(output.error) for output in outputs] == [42 in tokens for tokens in told]
    assert 0 < sum(42 in tokens for tokens in told) < 20
    assert all(output.error or output.token_ids == tokens for output, tokens in zip(outputs, told, strict=True))


def test_a_prompt_that_the_tokenizer_cannot_read_fails_alone(failing):
    """A tokenizer of the user's own may raise anything, e.g. the KeyError of a table."""

    class Table(Strict):
        def encode(self, text, add_special_tokens=True):
            return [{"a": 5, "b": 6}[character] for character in text]

    failing(set())
    served = engine(tokenizer=Table())
    bad, unknown, good, text = served.generate([[42, 7], "aé", [5, 6], "ab"], SamplingParams(max_tokens=4, **GREEDY))
    assert bad.finish_reason == unknown.finish_reason == "error"
    assert good.token_ids == text.token_ids == answer([5, 6], 4)
    assert "an internal error (KeyError)" in bad.error and "cannot encode this text (KeyError: 'é')" in unknown.error
    assert served.stats.failed == 2 and served.stats.finished == 2 and not served.has_work


def test_only_a_device_that_no_longer_computes_ends_the_engine(monkeypatch, failing):
    failing(range(99))
    served = engine()
    served.add_request([5, 6])
    (output,) = served.step()
    assert output.error, "one failure, and the device computes: the engine goes on"

    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(Programs, "of", broken)
    served.add_request([5, 6])
    for call in (served.step, served.step, lambda: served.add_request([5]), served.sleep, served.warmup):
        with pytest.raises(EngineDeadError, match="no longer computes .* new engine"):
            call()


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_interrupt_loses_nothing(failing, number):
    failing({number}, KeyboardInterrupt(), before=False)
    served, params = engine(), SamplingParams(max_tokens=9, **GREEDY)
    ids = [served.add_request(prompt, params) for prompt in ([5, 6], [7, 8, 9])]
    found = {}
    with pytest.raises(KeyboardInterrupt):
        while True:
            found |= {output.id: output for output in served.step()}
    found |= {output.id: output for output in served.drain()}
    assert [found[id].token_ids for id in ids] == [answer([5, 6], 9), answer([7, 8, 9], 9)]


def test_an_interrupted_generate_leaves_nothing_of_its_own_behind(failing):
    failing({2}, KeyboardInterrupt())
    served = engine()
    other = served.add_request([9, 8], SamplingParams(max_tokens=9, **GREEDY))
    with pytest.raises(KeyboardInterrupt):
        served.generate([[5, 6]] * 3, SamplingParams(max_tokens=9, **GREEDY))
    outputs = [output for output in served.drain()]
    assert [(output.id, output.token_ids) for output in outputs] == [(other, answer([9, 8], 9))]


def test_no_thread_is_left_when_an_engine_is_dropped():
    before = threading.active_count()
    for _ in range(3):
        served = engine()
        served.generate([[5, 6]], SamplingParams(max_tokens=9, **GREEDY))
        del served
    ended = (time.sleep(0.01) or threading.active_count() <= before for _ in range(6000))  # they may still be ending
    assert any(ended)


def test_weights_that_somebody_deletes_are_named_as_the_cause(failing):
    failing(set())
    mine = {"bias": jnp.asarray(fake.PARAMS["bias"])}
    served = engine(params=mine)
    mine["bias"].delete()
    served.add_request([5, 6])
    with pytest.raises(EngineDeadError, match="the weights were deleted or donated"):
        served.step()


class Interrupting(ByteTokenizer):
    """A real SIGINT arrives while the n-th piece of text is decoded, in the reader's thread or the main thread."""

    def __init__(self, when):
        super().__init__()
        self.calls, self.when = 0, when

    def decode(self, token_ids):
        self.calls += 1
        if self.calls in self.when:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.002)
        return super().decode(token_ids)


@pytest.mark.parametrize("first", [3, 8, 17, 29])
def test_a_ctrl_c_in_a_step_changes_no_token_and_no_text(first):
    config = fake.FakeConfig(eos_token_ids=())
    tokenizer = Interrupting(())
    served = engine(config, tokenizer=tokenizer, max_num_seqs=4)
    prompts, params = [[5, 6], [7, 8, 9], [20, 21]], SamplingParams(max_tokens=24, **GREEDY)
    want = [(output.token_ids, output.text) for output in served.generate(prompts, params)]
    served.update_weights(fake.PARAMS)  # no block is cached
    ids = [served.add_request(prompt, params) for prompt in prompts]
    tokenizer.calls, tokenizer.when = 0, (first, first + 1, first + 6)
    found, interrupts_seen = {}, 0
    while served.has_work:
        try:
            found |= {output.id: output for output in served.step()}
        except KeyboardInterrupt:
            interrupts_seen += 1
    assert 1 <= interrupts_seen <= 3
    assert [(found[id].token_ids, found[id].text) for id in ids] == want
    again = served.generate(prompts, params)
    assert [(output.token_ids, output.text) for output in again] == want, "a later request found wrong keys"
    for pool in served.tables.pools:
        pool.check({})


def test_an_interrupt_is_held_until_a_change_is_whole():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_between_two_weights_serves_no_key_of_the_old_ones(monkeypatch):
    """The signal arrives at any point of update_weights, sleep and wake."""
    config, params = fake.FakeConfig(eos_token_ids=()), SamplingParams(max_tokens=6, **GREEDY)
    prompt = list(range(5, 30))
    served = engine(config)
    served.generate([prompt], params)
    for name in ("finish_in_flight", "restart"):
        real = getattr(served._loop, name)
        monkeypatch.setattr(
            served._loop, name, lambda *a, real=real, **k: (signal.raise_signal(signal.SIGINT), real(*a, **k))[1]
        )
    cached = served.stats.cached_tokens
    for change in (lambda: served.update_weights(fake.PARAMS), served.sleep, served.wake):
        with contextlib.suppress(KeyboardInterrupt):
            change()
    assert served.generate([prompt], params)[0].token_ids == answer(prompt, 6, config)
    assert served.stats.cached_tokens == cached and served.tables.weights_version == 1


def test_a_backend_that_cannot_is_refused_when_the_engine_is_made():
    with pytest.raises(UnsupportedError, match="does not support"):
        engine(fake.FakeConfig(), backend="pallas_tpu")
    with pytest.raises(ValueError, match="nope"):
        engine(fake.FakeConfig(), backend="nope")


@pytest.mark.parametrize(
    ("option", "value"),
    [("prefix_caching", "no"), ("deterministic", 1), ("num_blocks", "x"), ("block_size", 0), ("max_num_seqs", True),
     ("max_model_len", 1.5), ("seed", -1), ("seed", "x"), ("max_burst", 0), ("backend", None),
     ("cache_dtype", "int99"), ("forward", 3), ("chat_template", "{{ messages }}"), ("tokenizer", "folder")],
)  # fmt: skip
def test_every_option_of_an_engine_is_checked(option, value):
    with pytest.raises((ValueError, TypeError), match=option):
        Engine(fake.FakeConfig(), fake.PARAMS, **dict(forward=fake.forward) | SIZES | {option: value})
    assert engine(max_num_seqs=np.int64(4), block_size=np.int32(4)).limits.max_num_seqs == 4


@pytest.mark.parametrize("config", [None, {}, "folder", fake.FakeConfig()], ids=repr)
def test_what_is_no_config_is_refused_with_the_way_out(config):
    with pytest.raises(TypeError, match=r"config must be ModelConfig.*jattn\.models\.load.*forward="):
        Engine(config, fake.PARAMS, **SIZES)


@pytest.mark.parametrize("number", range(1, 9))
def test_tokens_whose_text_was_not_read_are_neither_lost_nor_returned_without_it(monkeypatch, failing, number):
    """The next batch is made, and may fail, between the acceptance of tokens and the reading of their text."""
    failing(set())
    calls, real = iter(range(1, 99)), flights.batch_of
    monkeypatch.setattr(flights, "batch_of", lambda *args: 1 / 0 if next(calls) == number else real(*args))
    served = Engine(HYBRID, fake.PARAMS, ByteTokenizer(0), forward=fake.forward, **SIZES | dict(max_burst=1))
    prompts, counts = [[5, 6, 7], [9, 8], [20, 21]], [4, 9, 6]
    ids = [served.add_request(p, SamplingParams(max_tokens=n, **GREEDY)) for p, n in zip(prompts, counts, strict=True)]
    found = {}
    for _ in range(40):
        found |= {output.id: output for output in served.step() if output.finished}
    assert sorted(found) == sorted(ids) and not served.has_work
    for id, prompt, count in zip(ids, prompts, counts, strict=True):
        tokens = answer(prompt, count)
        told = tokens if found[id].finish_reason == "length" else tokens[: len(found[id].token_ids)]
        assert found[id].token_ids == told and found[id].text == bytes(told).decode()
    assert served.stats.failed <= SIZES["max_num_seqs"]


class Exiting(ByteTokenizer):
    """A tokenizer that raises SystemExit once, at this call of decode."""

    def __init__(self, at):
        super().__init__(0)
        self.left = at

    def decode(self, token_ids):
        self.left -= 1
        if not self.left:
            raise SystemExit
        return super().decode(token_ids)


@pytest.mark.parametrize("stop", [(), ("no such text",)], ids=["whole", "token by token"])
@pytest.mark.parametrize("at", range(4, 20, 3))  # the first calls are for the prompts
def test_an_exit_while_text_is_read_loses_no_text(at, stop):
    tokenizer = Exiting(at + 10**6)
    served = Engine(HYBRID, fake.PARAMS, tokenizer, forward=fake.forward, **SIZES | dict(max_num_seqs=3))
    prompts, params = [[5, 6, 7], [9, 8], [20, 21]], SamplingParams(max_tokens=10, stop=stop, **GREEDY)
    ids = [served.add_request(prompt, params) for prompt in prompts]
    tokenizer.left, found = at, {}
    with contextlib.suppress(SystemExit):
        found |= {output.id: output for output in served.drain()}
    assert tokenizer.left <= 0
    found |= {output.id: output for output in served.drain()}
    assert [(found[id].token_ids, found[id].text) for id in ids] == [
        (answer(prompt, 10), bytes(answer(prompt, 10)).decode()) for prompt in prompts
    ]


@pytest.mark.parametrize("method", ["sleep", "update_weights"])
@pytest.mark.parametrize("at", range(1, 13))
def test_an_exit_while_dispatches_are_finished_loses_no_request(method, at):
    tokenizer = Exiting(10**6)
    served = Engine(HYBRID, fake.PARAMS, tokenizer, forward=fake.forward, **SIZES | dict(max_num_seqs=3))
    params = SamplingParams(max_tokens=3, **GREEDY)
    prompts = [[5, 6, 7], [9, 8], [20, 21]]
    ids = [served.add_request(prompt, params) for prompt in prompts]
    served._loop._send_ahead()
    tokenizer.left = at
    with contextlib.suppress(SystemExit):
        getattr(served, method)(*([fake.PARAMS] if method == "update_weights" else []))
    served.wake()
    found = {}
    for _ in range(20):
        found |= {output.id: output for output in served.step() if output.finished}
    assert not served.has_work and [found[id].token_ids for id in ids] == [answer(prompt, 3) for prompt in prompts]


def test_requests_that_nobody_schedules_end_with_an_error():
    """It cannot happen; if it does, the engine must not fail the same way for ever."""
    served = engine()
    id = served.add_request([5, 6], SamplingParams(max_tokens=3, **GREEDY))
    served.scheduler.waiting.clear()
    (output,) = served.step()
    assert output.id == id and output.outputs[0].finish_reason == "error" and not served.has_work
