"""Laws of the engine, each tested in a second. They catch the engine's mutants in tests/bite."""

import numpy as np

from jattn.engine import Engine, SamplingParams
from tests.engine import fake
from tests.engine.rows import choose_once, penalties_of, sampling_rows

PLAIN = fake.FakeConfig()
WINDOW = fake.FakeConfig(cache_groups=(fake.Group((0,), sliding_window=5),))
A, B = [3, 4, 5, 6], [7, 8, 9, 10]  # one block each


def engine(config=PLAIN, params=fake.PARAMS, **options):
    sizes = dict(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_burst=3)
    return Engine(config, params, forward=fake.forward, **sizes | options)


def outputs_of(served, requests, most_steps=60, **options):
    """The output of each request; AssertionError if steps make no progress. requests: (prompt, params, salt)."""
    ids = [served.add_request(prompt, params, salt=salt, **options) for prompt, params, salt in requests]
    found = {}
    for _ in range(most_steps):
        found |= {output.id: output for output in served.step() if output.finished}
        if not served.has_work:
            return [found[id] for id in ids]
    raise AssertionError(f"{len(ids) - len(found)} of {len(ids)} requests have not ended after {most_steps} steps")


def said(served, *prompts, salt="", **params):
    """The output tokens of each prompt."""
    params = SamplingParams(**dict(max_tokens=8, temperature=0) | params)
    return [list(output.token_ids) for output in outputs_of(served, [(prompt, params, salt) for prompt in prompts])]


def test_a_prompt_that_is_cached_whole_still_gets_its_tokens():
    """All its blocks are cached, but the last token is computed again: its logits are needed for sampling."""
    served = engine()
    first, again = said(served, A + B), said(served, A + B)
    assert first == again == [fake.greedy(PLAIN, A + B, 8)[0]]
    assert served.stats.cached_tokens == 4


def test_requests_of_different_salts_share_nothing_and_those_of_one_salt_do():
    served = engine()
    cached = []
    for salt in ("", "tenant", "tenant", "other"):
        before = served.stats.cached_tokens
        assert said(served, A + B + [11], salt=salt) == [fake.greedy(PLAIN, A + B + [11], 8)[0]]
        cached.append(served.stats.cached_tokens - before)
    assert cached == [0, 0, 8, 0]


def test_a_block_is_shared_only_behind_the_same_beginning():
    served = engine()
    for prompt in (A + B + [11], B + B + [11], B + A + [11], A + B + [12]):
        assert said(served, prompt) == [fake.greedy(PLAIN, prompt, 8)[0]]


def test_blocks_that_a_failed_request_wrote_are_not_shared():
    served, bad = engine(), [*A, *B, fake.POISON]
    (failed,) = outputs_of(served, [(bad, SamplingParams(temperature=0), "")])
    assert failed.finish_reason == "error"
    said(served, A + B + [11])
    assert served.stats.cached_tokens == 0


def test_a_window_gives_no_block_back_that_is_still_seen():
    """Other requests write to the freed blocks, so a block that is freed too early changes the result."""
    served = engine(WINDOW, max_num_seqs=2)
    for prompt, other in ((A + B + [11], A), (B + A + A, [20, 21])):
        got = said(served, prompt, other, max_tokens=14)
        assert got == [fake.greedy(WINDOW, tokens, 14)[0] for tokens in (prompt, other)]


def test_penalties_are_applied_to_the_generated_tokens():
    """Greedy, in bursts, compared with the definition token by token. Without penalties one token is repeated."""
    bias = 11.0 * (np.arange(PLAIN.vocab_size) == 9).astype(np.float32)
    served = engine(max_burst=8, params={"bias": fake.PARAMS["bias"] + bias})
    assert said(served, A, max_tokens=12, ignore_eos=True) == [[9] * 12]
    (tokens,) = said(served, A, max_tokens=12, ignore_eos=True, frequency_penalty=2.0, repetition_penalty=1.1)
    assert 1 <= tokens.count(9) < 10
    for i, token in enumerate(tokens):
        row = (fake.next_logits(PLAIN, A + tokens[:i]) + bias).astype(np.float64)
        for t in {*A, *tokens[:i]}:
            row[t] = row[t] / 1.1 if row[t] > 0 else row[t] * 1.1
        for t in set(tokens[:i]):
            row[t] -= 2.0 * tokens[:i].count(t)
        assert abs(row[token] - row.max()) < 1e-5, f"token {i}"


def test_a_seeded_request_draws_alike_in_bursts_of_any_length():
    drawn = dict(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    single, burst, long = (said(engine(max_burst=most), A, B, **drawn) for most in (1, 3, 8))
    assert single == burst == long


def test_flat_logits_are_drawn_differently_step_after_step():
    """At a temperature with nearly equal probabilities, twelve draws are not all the same token."""
    (tokens,) = said(engine(), A, temperature=30.0, seed=5, max_tokens=12, ignore_eos=True)
    assert len(tokens) == 12 and len(set(tokens)) >= 8


def test_the_draw_of_a_token_is_that_of_its_position():
    """The position counts from the first output token, across dispatches."""
    drawn = dict(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    (tokens,) = said(engine(), A, **drawn)
    logits = np.stack([fake.next_logits(PLAIN, A + tokens[:i]) for i in range(12)])
    rows = sampling_rows([SamplingParams(**drawn)] * 12, [5] * 12, range(12), [1] * 12, [()] * 12, 12)
    wanted = choose_once(logits, rows, penalties_of([], [], [], 12, 4), np.full((1, 12), -2, np.int32), False).tokens
    assert tokens == np.asarray(wanted).tolist()
