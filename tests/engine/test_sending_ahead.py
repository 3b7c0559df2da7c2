"""Dispatches that are sent before the previous one is read."""

import jax
import numpy as np
import pytest

from jattn.engine import Engine, SamplingParams, runner
from tests.engine import fake

HYBRID = fake.FakeConfig(
    cache_groups=(fake.Group((0,)), fake.Group((1,), sliding_window=5), fake.Group((2,), chunk_size=8))
)


def engine(config, **options):
    sizes = dict(num_blocks=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_burst=3)
    return Engine(config, fake.PARAMS, forward=fake.forward, **sizes | options)


@pytest.fixture
def sent(monkeypatch):
    """The batches that were dispatched, in order."""
    batches, real = [], runner.dispatch
    monkeypatch.setattr(runner, "dispatch", lambda *args: batches.append(args[-1]) or real(*args))
    return batches


def test_the_next_burst_is_sent_before_this_one_is_read_and_dropped_where_the_host_ends_a_row(sent):
    served = engine(HYBRID)
    keep, drop = ([4, 5, 6], 20), ([7, 8], 30)
    ids = [served.add_request(prompt, SamplingParams(max_tokens=n, temperature=0)) for prompt, n in (keep, drop)]
    served.step()  # the prompts
    served.step()
    assert [bool(batch.continues) for batch in sent] == [
        False,
        False,
        True,
    ]  # the third is sent ahead
    served.step()
    assert len(sent) == 4 and sent[-1].continues
    assert served.abort(ids[1])
    found = {output.id: output for output in served.drain()}
    assert (list(found[ids[0]].token_ids), found[ids[0]].finish_reason) == fake.greedy(HYBRID, *keep)
    told = list(found[ids[1]].token_ids)
    assert told == fake.greedy(HYBRID, *drop)[0][: len(told)] and found[ids[1]].finish_reason == "abort"
    for pool in served.tables.pools:
        pool.check({})


def test_r35_what_was_dispatched_can_no_longer_be_written_to(sent):
    """Neither in the first dispatch nor in later ones: JAX may read a numpy array in place."""
    served = engine(HYBRID)
    greedy, penalised = dict(temperature=0), dict(presence_penalty=1.0)
    for options in (greedy, penalised):
        served.generate([[4, 5, 6], [7, 8]], SamplingParams(max_tokens=9, **options))
    arrays = [x for batch in sent for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray)]
    assert any(batch.continues for batch in sent) and len(arrays) > 5 * len(sent)
    for array in arrays:
        while isinstance(array, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            array = array.base


def test_r35_a_pool_that_is_always_full_gives_the_models_tokens(sent):
    """Blocks are freed and allocated again while dispatches with the old block tables are in flight."""
    served = engine(HYBRID, num_blocks=10, max_model_len=34)
    prompts = [[2 + (7 * i + j) % 50 for j in range(3 + 5 * i % 9)] for i in range(24)]
    greedy = SamplingParams(max_tokens=17, temperature=0)
    outputs = [output for i in range(0, 24, 3) for output in served.generate(prompts[i : i + 3], greedy)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (list(output.token_ids), output.finish_reason) == fake.greedy(HYBRID, prompt, 17, 34)
    stats = served.stats
    assert stats.preemptions > 5 and stats.evictions > 20 and sum(bool(batch.continues) for batch in sent) > 3


def test_nobody_runs_ahead_while_somebody_waits_or_is_about_to_end(sent):
    served = engine(fake.FakeConfig(), max_num_seqs=1)
    for _ in range(2):
        served.add_request([4, 5, 6], SamplingParams(max_tokens=10, temperature=0))
    while served.stats.waiting:
        served.step()
    assert not any(batch.continues for batch in sent)
    list(served.drain())
    assert [int(batch.steps) for batch in sent if batch.continues] == [3, 3]  # 10 tokens: 1 with the prompt, 3 + 3 + 3
