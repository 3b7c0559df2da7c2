"""Dispatches that are sent before the previous one is read."""

import threading
import time

import jax
import numpy as np
import pytest

from jattn.engine import Engine, SamplingParams, flights
from jattn.engine.programs import Programs
from jattn.engine.scheduler import Scheduler
from jattn.text import ByteTokenizer
from tests.engine import fake

HYBRID = fake.FakeConfig(
    cache_groups=(fake.Group((0,)), fake.Group((1,), sliding_window=5), fake.Group((2,), chunk_size=8))
)


def engine(config, **options):
    sizes = dict(num_blocks=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_burst=3)
    return Engine(config, fake.PARAMS, forward=fake.forward, **sizes | options)


def continued(batch):
    """The number of rows that continue those of the dispatch before, whose tokens the host has not read."""
    return int((batch.source >= 0).sum())


@pytest.fixture
def sent(monkeypatch):
    """The batches that were dispatched, in order."""
    batches, real = [], Programs.__call__
    monkeypatch.setattr(Programs, "__call__", lambda *args: batches.append(args[-1].unpacked()) or real(*args))
    return batches


def test_the_next_burst_is_sent_before_this_one_is_read_and_dropped_where_the_host_ends_a_row(sent):
    served = engine(HYBRID)
    keep, drop = ([4, 5, 6], 20), ([7, 8], 30)
    ids = [served.add_request(prompt, SamplingParams(max_tokens=n, temperature=0)) for prompt, n in (keep, drop)]
    served.step()  # the prompts
    served.step()
    served.runner.wait_until_sent()
    assert [continued(batch) for batch in sent] == [0, 2, 2], "one of them is in flight"
    assert served.abort(ids[1])
    found = {output.id: output for output in served.drain()}
    assert (list(found[ids[0]].token_ids), found[ids[0]].finish_reason) == fake.greedy(HYBRID, *keep)
    told = list(found[ids[1]].token_ids)
    assert told == fake.greedy(HYBRID, *drop)[0][: len(told)] and found[ids[1]].finish_reason == "abort"
    for pool in served.tables.pools:
        pool.check({})


def test_an_idle_device_has_a_dispatch_before_the_next_one_is_planned(monkeypatch):
    """The thread that sends it needs Python's interpreter, which planning would take from it."""
    events, call, schedule = [], Programs.__call__, Scheduler.schedule

    def slow_call(*args):
        time.sleep(0.01)
        results = call(*args)
        events.append("sent")
        return results

    monkeypatch.setattr(flights, "HANDOVER_SECONDS", 60)
    monkeypatch.setattr(Programs, "__call__", slow_call)
    monkeypatch.setattr(Scheduler, "schedule", lambda *args, **kw: events.append("planned") or schedule(*args, **kw))
    served = engine(HYBRID)
    served.add_request([4, 5, 6], SamplingParams(max_tokens=20, temperature=0))
    served.step()
    assert events[:3] == ["planned", "sent", "planned"]
    assert len(list(served.drain())) == 1


def test_a_device_that_takes_a_dispatch_slowly_does_not_hold_the_plan_of_the_next_one(monkeypatch):
    """If XLA could not record the loop over steps, sending ends only when the last step begins."""
    planned, call, schedule = threading.Event(), Programs.__call__, Scheduler.schedule
    monkeypatch.setattr(Programs, "__call__", lambda *args: planned.wait(60) and call(*args))

    def plan(self, in_flight=False):
        if in_flight:
            planned.set()
        return schedule(self, in_flight)

    monkeypatch.setattr(Scheduler, "schedule", plan)
    served = engine(HYBRID)
    served.add_request([4, 5, 6], SamplingParams(max_tokens=20, temperature=0))
    assert len(list(served.drain())) == 1 and planned.is_set()


def test_r35_a_dispatched_batch_is_read_only_and_shares_no_memory(monkeypatch):
    """JAX may read a numpy array in place, while it computes."""
    packed, real = [], Programs.__call__
    monkeypatch.setattr(Programs, "__call__", lambda *args: packed.append(args[-1]) or real(*args))
    served = engine(HYBRID)
    greedy, penalised = dict(temperature=0), dict(presence_penalty=1.0)
    for options in (greedy, penalised):
        served.generate([[4, 5, 6], [7, 8]], SamplingParams(max_tokens=9, **options))
    assert len(packed) > 5
    for batch in packed:
        assert batch.words.base is None and all(isinstance(x, jax.Array) for x in batch.apart)
        with pytest.raises(ValueError, match="read-only"):
            batch.words[...] = 0


@pytest.mark.slow
def test_r35_a_pool_that_is_always_full_gives_the_models_tokens(sent):
    """Blocks are freed and allocated again while dispatches with the old block tables are in flight."""
    served = engine(HYBRID, num_blocks=10, max_model_len=34)
    prompts = [[2 + (7 * i + j) % 50 for j in range(3 + 5 * i % 9)] for i in range(24)]
    greedy = SamplingParams(max_tokens=17, temperature=0)
    outputs = [output for i in range(0, 24, 3) for output in served.generate(prompts[i : i + 3], greedy)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (list(output.token_ids), output.finish_reason) == fake.greedy(HYBRID, prompt, 17, 34)
    stats = served.stats
    assert stats.preemptions > 5 and stats.evictions > 20 and sum(map(bool, map(continued, sent))) > 3


def test_a_prompt_takes_the_place_of_a_sequence_whose_last_token_is_being_sampled(sent):
    served = engine(fake.FakeConfig(), max_num_seqs=1)
    for prompt in ([4, 5, 6], [7, 8, 9]):
        served.add_request(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert not any(output.finished for output in served.step())
    outputs = [output for output in served.step() if output.finished]
    served.runner.wait_until_sent()
    assert [continued(batch) for batch in sent[:3]] == [0, 1, 0]
    assert sent[2].token_ids[:3].tolist() == [7, 8, 9]
    outputs += served.drain()
    assert [list(output.token_ids) for output in outputs] == [
        fake.greedy(fake.FakeConfig(eos_token_ids=()), prompt, 4)[0] for prompt in ([4, 5, 6], [7, 8, 9])
    ]
    assert len(sent) == 4, "a prompt and a burst of three for each"


def test_the_chunks_of_a_prompt_are_sent_without_waiting(sent):
    served = engine(HYBRID)
    prompt = [2 + i % 50 for i in range(40)]
    served.add_request(prompt, SamplingParams(max_tokens=5, temperature=0))
    served.step()
    served.runner.wait_until_sent()
    assert [int(batch.metas[0].seq_lens[0]) for batch in sent][:3] == [16, 32, 40]
    (output,) = served.drain()
    assert (list(output.token_ids), output.finish_reason) == fake.greedy(HYBRID, prompt, 5)


def test_penalties_count_tokens_that_the_host_has_not_read(sent):
    """Bursts of one token: each dispatch is planned before the token of the one before is known."""
    config, bias = fake.FakeConfig(eos_token_ids=(), vocab_size=11), fake.PARAMS["bias"][:11]
    params = SamplingParams(max_tokens=12, temperature=0, presence_penalty=1.5, frequency_penalty=2.0)
    served = Engine(config, {"bias": bias}, forward=fake.forward, num_blocks=60, block_size=4,
                    max_num_seqs=2, max_num_batched_tokens=16, max_burst=1)  # fmt: skip
    wanted = [4, 5]
    for _ in range(12):
        counts = np.bincount(wanted[2:], minlength=11)
        logits = fake.scores(np.float32([total_of(wanted)]), 11, np)[0] + bias
        wanted.append(int(np.argmax(logits - 2.0 * counts - 1.5 * (counts > 0))))
    assert list(served.generate([[4, 5]], params)[0].token_ids) == wanted[2:]
    assert sum(map(continued, sent)) >= 10 and len(set(wanted[2:])) > 3


def total_of(tokens):
    """The hash of all tokens, which the fake model's logits depend on."""
    return np.sum(fake.mix(np.asarray(tokens), np.arange(len(tokens)), np)) % fake.MODULUS


def test_a_stop_string_ends_a_request_whose_next_tokens_are_being_sampled(sent):
    config = fake.FakeConfig(eos_token_ids=())
    served = Engine(config, fake.PARAMS, ByteTokenizer(0), forward=fake.forward, num_blocks=60, block_size=4,
                    max_num_seqs=2, max_num_batched_tokens=16, max_burst=3)  # fmt: skip
    prompts = [[4, 5, 6], [7, 8]]
    wanted = [fake.greedy(config, prompt, 20)[0] for prompt in prompts]
    stop = bytes(wanted[0][4:6]).decode()
    params = [SamplingParams(max_tokens=20, temperature=0, stop=stop), SamplingParams(max_tokens=20, temperature=0)]
    stopped, whole = served.generate(prompts, params)
    text = bytes(wanted[0]).decode()
    assert stopped.finish_reason == "stop" and stopped.text == text[: text.find(stop)]
    assert list(stopped.token_ids) == wanted[0][: text.find(stop) + 2]
    assert list(whole.token_ids) == wanted[1]
    assert served.stats.output_tokens == len(stopped.token_ids) + 20
    for pool in served.tables.pools:
        pool.check({})
