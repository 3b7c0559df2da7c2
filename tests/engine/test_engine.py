"""The engine with the fast model: its tokens are those of the model without a cache, in every situation."""

import random

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from jattn.engine import Engine, SamplingParams
from jattn.text import ByteTokenizer
from tests.engine import fake

HYBRID = fake.FakeConfig(
    cache_groups=(fake.Group((0,)), fake.Group((1,), sliding_window=5), fake.Group((2,), chunk_size=8))
)
PLAIN = fake.FakeConfig()
SMALL = dict(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_burst=3)


def engine(config=PLAIN, params=fake.PARAMS, **options):
    return Engine(config, params, options.pop("tokenizer", None), forward=fake.forward, **SMALL | options)


def prompts_of(rng, count):
    shared = [rng.randint(2, 60) for _ in range(9)]
    return [shared[: rng.randint(0, 9)] + [rng.randint(2, 60) for _ in range(rng.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize(
    ("config", "options", "count"), [(PLAIN, {}, 500), (HYBRID, {"deterministic": True}, 60)], ids=["plain", "hybrid"]
)
def test_five_hundred_requests_are_the_model_and_compile_nothing_after_warm_up(config, options, count, compiles):
    rng, served = random.Random(1), engine(config, **options)
    told = []
    programs = served.warmup(progress=lambda *news: told.append(news))
    assert [news[:2] for news in told] == [(i, programs) for i in range(programs)]
    prompts = prompts_of(rng, count)
    lengths = [rng.randint(1, 24) for _ in prompts]
    # Some rows are sampled, penalised or have log-probabilities: these are computed by other branches.
    odd = dict(temperature=0.7, seed=3, top_k=5, top_p=0.9, logprobs=2, presence_penalty=0.5)
    params = [SamplingParams(max_tokens=n, **({"temperature": 0} if i % 10 else odd)) for i, n in enumerate(lengths)]
    with compiles() as seen:
        outputs = served.generate(prompts, params)
    assert seen.names == []
    for i, (prompt, n, output) in enumerate(zip(prompts, lengths, outputs, strict=True)):
        if i % 10:
            assert (list(output.token_ids), output.finish_reason) == fake.greedy(config, prompt, n)
    stats = served.stats
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and stats.steps > stats.dispatches
    assert stats.running == stats.waiting == stats.cache_usage == 0
    for pool in served.tables.pools:
        pool.check({})


class Serving(stateful.RuleBasedStateMachine):
    """Random adds, forks, steps and aborts, in a pool that is too small for all requests."""

    def __init__(self):
        super().__init__()
        self.engine = engine(HYBRID, deterministic=True)
        self.asked, self.said, self.done = {}, {}, {}

    def ask(self, prompt, max_tokens, n=1):
        # Only the most likely token, so that all n completions are equal; some have log-probabilities.
        options = dict(top_k=1, n=n) if n > 1 else dict(temperature=0)
        params = SamplingParams(max_tokens=max_tokens, logprobs=1 if max_tokens % 3 == 0 else None, **options)
        self.asked[self.engine.add_request(prompt, params)] = (prompt, max_tokens, n)

    @stateful.rule(data=st.data(), max_tokens=st.integers(1, 20), n=st.sampled_from([1, 1, 1, 2, 3]))
    def add(self, data, max_tokens, n):
        self.ask(data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=14)), max_tokens, n)

    @stateful.rule(data=st.data(), max_tokens=st.integers(1, 9), another=st.integers(2, 4))
    def fork(self, data, max_tokens, another):
        """The prompt and output of a running request, with other tokens at its end, so that it shares blocks."""
        if live := [id for id in self.said if id not in self.done]:
            tokens = [*self.said[data.draw(st.sampled_from(live))], another]
            if len(tokens) < self.engine.limits.max_model_len:
                self.ask(tokens, max_tokens)

    @stateful.rule()
    def step(self):
        for output in self.engine.step():
            prompt, max_tokens, n = self.asked[output.id]
            tokens, reason = fake.greedy(HYBRID, prompt, max_tokens, self.engine.limits.max_model_len)
            assert len(output.outputs) == n
            for done in output.outputs:
                assert list(done.token_ids) == tokens[: len(done.token_ids)]
                assert done.logprobs is None or len(done.logprobs) == len(done.token_ids)
                if done.finish_reason not in (None, "abort"):
                    assert (list(done.token_ids), done.finish_reason) == (tokens, reason)
            self.said[output.id] = [*prompt, *output.token_ids]
            if output.finished:
                self.done[output.id] = output

    @stateful.rule(data=st.data())
    def abort(self, data):
        if live := [id for id in self.asked if id not in self.done]:
            self.engine.abort(data.draw(st.sampled_from(live)))

    def teardown(self):
        for _ in range(400):
            if not self.engine.has_work:
                break
            self.step()
        assert self.done.keys() == self.asked.keys(), "a request was lost"
        for pool in self.engine.tables.pools:
            pool.check({})


TestServing = Serving.TestCase
TestServing.settings = hypothesis.settings(max_examples=25, stateful_step_count=25)


def test_a_poisoned_request_fails_alone_and_leaves_nothing_to_share():
    served = engine()
    bad = [fake.POISON, *range(10, 20)]
    fine = [*range(10, 20)]
    params = SamplingParams(temperature=0, max_tokens=6)
    long, empty, strange = list(range(2, 60)), [], [2, 61]
    served.generate([[5] * 9], SamplingParams(max_tokens=9))  # other content in the pool
    last_is_poison = [*fine, fake.POISON]
    outputs = served.generate([fine, bad, last_is_poison, long, empty, strange, "text", fine], params)
    reasons = [output.finish_reason for output in outputs]
    assert reasons == ["length", "length", "error", "error", "error", "error", "error", "length"]
    for output in (outputs[0], outputs[-1]):
        assert list(output.token_ids) == fake.greedy(PLAIN, fine, 6)[0]
    said = [output.error for output in outputs[2:7]]
    for words, error in zip(["NaN", "58 tokens", "empty", "vocabulary", "needs a tokenizer"], said, strict=True):
        assert words in error
    assert served.stats.failed == 5
    before = served.stats.cached_tokens
    served.generate([last_is_poison])
    assert served.stats.cached_tokens == before + 8  # of `fine`, not blocks that the failed request wrote


def test_a_seeded_draw_depends_on_nobody_else():
    prompt, params = [7, 8, 9], SamplingParams(seed=11, max_tokens=20, ignore_eos=True)
    alone = engine().generate([prompt], params)[0]
    crowd = engine(max_burst=1).generate([[3, 4]] * 5 + [prompt], [SamplingParams(max_tokens=30)] * 5 + [params])[-1]
    assert alone.token_ids == crowd.token_ids
    other = engine().generate([prompt], SamplingParams(seed=12, max_tokens=20, ignore_eos=True))[0]
    assert alone.token_ids != other.token_ids


def test_n_completions_are_draws_of_their_own_and_no_other_seeds():
    served = engine()
    many = served.generate([[5, 6]], SamplingParams(n=3, seed=20, max_tokens=8))[0]
    again = served.generate([[5, 6]], SamplingParams(n=3, seed=20, max_tokens=8))[0]
    assert many.outputs == again.outputs
    ones = [served.generate([[5, 6]], SamplingParams(seed=20 + i, max_tokens=8))[0].token_ids for i in range(3)]
    assert many.outputs[0].token_ids == ones[0]
    assert len({*ones, *(output.token_ids for output in many.outputs)}) == 5, "seed=s, n=2 is not seed=s+1"
    assert [output.index for output in many.outputs] == [0, 1, 2]
    stats, prompt = served.stats, [*range(10, 30)]
    served.generate([prompt], SamplingParams(n=3, seed=20, max_tokens=8))
    assert served.stats.cached_tokens - stats.cached_tokens == 2 * 16, "the prompt is computed once, but for its end"
    assert len(set(ones)) > 1


def test_the_engines_seed_makes_unseeded_requests_repeatable():
    draw = lambda seed: engine(seed=seed).generate([[5, 6]] * 2, SamplingParams(max_tokens=12))
    assert [o.token_ids for o in draw(1)] == [o.token_ids for o in draw(1)]
    assert [o.token_ids for o in draw(1)] != [o.token_ids for o in draw(2)]
    assert draw(1)[0].token_ids != draw(1)[1].token_ids


def test_logprobs_are_the_models():
    output = engine().generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, logprobs=3))[0]
    tokens = [5, 6, 7]
    for told in output.logprobs:
        logits = fake.next_logits(PLAIN, tokens).astype(np.float64)
        want = logits - np.log(np.exp(logits).sum())
        assert told.logprob == pytest.approx(want[told.token_id], abs=1e-5)
        assert sorted(told.top.values(), reverse=True) == pytest.approx(np.sort(want)[::-1][:3], abs=1e-5)
        tokens.append(told.token_id)
    assert tokens[3:] == list(output.token_ids)


def test_penalties_and_logprobs_take_several_steps_a_dispatch_and_the_same_bits():
    """In batches with greedy and with sampled requests, in bursts of one, three and eight."""
    told = dict(temperature=0.8, logprobs=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7)
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **options)
        for i, options in enumerate((told, dict(temperature=0), dict(temperature=0.9), told | dict(temperature=0)))
    ]
    found = []
    for burst in (1, 3, 8):
        served = engine(num_blocks=40, max_burst=burst, max_model_len=64)
        outputs = served.generate([[5, 6, 7], [8, 9], [5, 6], [20, 20, 21]], params)
        found.append([(output.token_ids, output.logprobs) for output in outputs])
        assert served.stats.dispatches <= 20 / burst + 3
    assert found[0] == found[1] == found[2]
    assert [len(told[1] or ()) for told in found[0]] == [20, 0, 0, 20]
    tokens, prompt = list(found[0][3][0]), [20, 20, 21]
    for i, token in enumerate(tokens):  # greedy, by the definition
        row = fake.next_logits(PLAIN, prompt + tokens[:i]).astype(np.float64)
        for t in set(prompt + tokens[:i]):
            row[t] = row[t] / 1.3 if row[t] > 0 else row[t] * 1.3
        for t in set(tokens[:i]):
            row[t] -= 0.5 + 0.7 * tokens[:i].count(t)
        assert row[token] == pytest.approx(row.max(), abs=1e-5)


def test_an_abort_frees_its_blocks_at_once_and_says_so():
    served = engine()
    id = served.add_request([4, 5, 6], SamplingParams(max_tokens=40, temperature=0))
    served.step()
    assert served.tables.usage > 0
    assert served.abort(id) and not served.abort(id)
    assert served.tables.usage == 0
    (output,) = served.step()
    assert output.finish_reason == "abort" and not served.has_work


TEXT = ByteTokenizer(num_special=2)
BYTES = fake.FakeConfig(vocab_size=258, max_positions=256)
BYTE_PARAMS = {"bias": np.zeros(258, np.float32)}


def test_stop_strings_end_the_text_and_are_never_streamed():
    served = engine(BYTES, BYTE_PARAMS, tokenizer=TEXT)
    free = served.generate("hello", SamplingParams(temperature=0, max_tokens=30))[0].text
    stop = free[4:7]
    assert free.find(stop) == 4
    for options, ending in (({}, ""), ({"include_stop_str_in_output": True}, stop)):
        params = SamplingParams(temperature=0, max_tokens=30, stop=[stop], **options)
        id = served.add_request("hello", params)
        seen = [output for output in iter_outputs(served)]
        assert all(output.id == id and free.startswith(output.text) for output in seen)
        assert seen[-1].text == free[:4] + ending
        assert seen[-1].finish_reason == "stop" and seen[-1].outputs[0].stop == stop
        assert all(len(output.text) <= 4 for output in seen[:-1])
        assert seen[-1].token_ids == tuple(TEXT.encode(free))[:7], "all of them ASCII: a token a character"


def iter_outputs(served):
    while served.has_work:
        yield from served.step()


def test_stop_tokens_end_a_sequence_and_eos_can_be_ignored():
    served, prompt = engine(), [5, 6, 7]
    free = served.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].token_ids
    token = free[3]
    output = served.generate([prompt], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[token]))[0]
    assert output.token_ids == free[: free.index(token) + 1]
    assert (output.finish_reason, output.outputs[0].stop) == ("stop", token)


def test_each_group_has_the_pool_that_it_can_use_and_says_how_full_it_is():
    served = engine(HYBRID, num_blocks=150, max_num_seqs=2, max_num_batched_tokens=4, prefix_caching=False)
    sizes = [pool.num_blocks for pool in served.tables.pools]
    assert sizes[0] == 150 and all(cache.spec.num_blocks == n for cache, n in zip(served.caches, sizes, strict=True))
    assert sizes[1:] == [2 * (3 + 2) + 1 + 1] * 2  # reach 5 and 8, two bursts of 3, in blocks of 4
    twice = engine(HYBRID, num_blocks=150, max_num_seqs=2, max_num_batched_tokens=4).tables.pools
    assert [pool.num_blocks - 1 for pool in twice[1:]] == [2 * (n - 1) for n in sizes[1:]]
    long = [7 + i % 50 for i in range(200)]
    wanted = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    ids = [served.add_request(prompt, wanted) for prompt in (long, long[3:])]
    held, found = [], {}
    while served.has_work:
        found |= {output.id: output.token_ids for output in served.step()}
        usage = dict(served.stats.group_usage)
        assert served.stats.cache_usage == max(usage.values()) and list(usage) == ["full", "window 5", "chunk 8"]
        assert all(
            f'jattn_group_usage{{group="{name}"}} {share}' in served.stats.prometheus() for name, share in usage.items()
        )
        held.append([pool.num_held for pool in served.tables.pools])
    assert np.max(held, axis=0)[0] > 60 and not served.stats.preemptions
    for id, prompt in zip(ids, (long, long[3:]), strict=True):
        tokens = list(prompt)
        for token in found[id]:
            assert token == int(np.argmax(fake.next_logits(HYBRID, tokens)))
            tokens.append(token)
    for pool in served.tables.pools:
        pool.check({})


def test_the_prometheus_text_has_every_counter():
    served = engine()
    served.generate([[3, 4]], SamplingParams(max_tokens=3, temperature=0))
    text = served.stats.prometheus()
    assert f"jattn_output_tokens_total {served.stats.output_tokens}" in text
    assert text.count("# TYPE") == text.count("# HELP") == 19
