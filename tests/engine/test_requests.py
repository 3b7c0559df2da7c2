"""The forms of prompts and options. Each request gets its own output, and each output is returned once."""

import copy
import dataclasses
import pickle
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.engine import Engine, SamplingParams
from jattn.engine.batch import batch_of
from jattn.engine.request import Sequence
from jattn.text import ByteTokenizer
from tests.engine import fake

CONFIG = fake.FakeConfig(eos_token_ids=())
GREEDY = dict(temperature=0, ignore_eos=True)
SIZES = dict(num_blocks=30, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_burst=3)


def engine(**options):
    return Engine(CONFIG, fake.PARAMS, options.pop("tokenizer", None), forward=fake.forward, **SIZES | options)


def answer(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake.next_logits(CONFIG, tokens).argmax()))
    return tuple(tokens[len(prompt) :])


def test_generate_returns_its_own_outputs_and_leaves_the_others_to_the_next_step():
    served = engine()
    short = served.add_request([5, 6], SamplingParams(max_tokens=2, **GREEDY))
    long = served.add_request([7, 8], SamplingParams(max_tokens=40, **GREEDY))
    refused = served.add_request([])
    gone = served.add_request([9], SamplingParams(max_tokens=40, **GREEDY))
    served.abort(gone)
    outputs = served.generate([[20, 21], [22]], SamplingParams(max_tokens=9, **GREEDY))
    assert [output.token_ids for output in outputs] == [answer([20, 21], 9), answer([22], 9)]
    found = {}
    for output in served.drain():
        assert output.id not in found, "told once"
        found[output.id] = output
    assert found.keys() == {short, long, refused, gone}
    assert found[short].token_ids == answer([5, 6], 2) and found[long].token_ids == answer([7, 8], 40)


def test_a_drain_that_is_left_early_loses_no_output():
    """All four requests end in one step."""
    served = engine()
    ids = [served.add_request([5 + i, 6], SamplingParams(max_tokens=2, **GREEDY)) for i in range(4)]
    found = []
    for output in served.drain():
        found.append(output)
        break
    assert served.has_work
    found.append(next(served.drain()))
    with pytest.raises(KeyError):
        for output in served.drain():
            found.append(output)
            raise KeyError
    found += served.step()
    assert [output.id for output in found] == ids and not served.has_work
    assert [output.token_ids for output in found] == [answer([5 + i, 6], 2) for i in range(4)]


def test_a_prompt_may_be_any_sequence_of_integers():
    served, want = engine(), answer([5, 6, 7], 4)
    params = SamplingParams(max_tokens=np.int64(4), temperature=np.float32(0), ignore_eos=True, top_k=jnp.int32(3))
    one = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7], np.uint8), jnp.array([5, 6, 7]), range(5, 8)]
    one += [[np.int32(5), 6, 7], list(jnp.array([5, 6, 7])), [np.array(5), 6, 7]]
    for prompt in one:
        (output,) = served.generate(prompt, params)
        assert output.token_ids == want and output.prompt_token_ids == (5, 6, 7)
        assert all(type(token) is int for token in output.prompt_token_ids)
        assert [o.token_ids for o in served.generate([prompt, [7]], params)] == [want, answer([7], 4)]
    for many in (np.array([[5, 6, 7]] * 2), jnp.array([[5, 6, 7]] * 2), ([5, 6, 7], (5, 6, 7)), [range(5, 8)] * 2):
        assert [output.token_ids for output in served.generate(many, params)] == [want] * 2
    assert served.generate([], params) == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([[]], "empty"),
        ([[5.0]], "float64"),
        ([[True, False]], "bool"),
        ([[2**70]], "outside the vocabulary"),
        ([[2**64 - 1]], "outside the vocabulary"),
        ([[-1]], "outside the vocabulary"),
        ([[[5], [6]]], r"shape \(2, 1\)"),
        ([[[5], [6, 7]]], "."),
        ([None], "object"),
        ([5.5], r"shape \(\)"),
        ([{"a": 1}], "object"),
        (["text"], "needs a tokenizer"),
        ([b"bytes"], "decode it"),
        ([memoryview(b"bytes")], "a prompt of memoryview is neither text nor token ids"),
        ([[5] * 10**6], "1000000 tokens"),
    ],
)
def test_what_is_no_prompt_fails_alone_with_a_reason(prompt, words):
    served = engine()
    bad, good = served.generate([*prompt, [5, 6]], SamplingParams(max_tokens=3, **GREEDY))
    assert bad.finish_reason == "error" and good.token_ids == answer([5, 6], 3)
    assert re.search(words, bad.error), bad.error


WRONG_CALLS = {
    "a number": (5.5, None, "prompts must be a text, token ids, or a list of these, got float"),
    "none": (None, None, "prompts must be .*, got NoneType"),
    "bytes": (b"text", None, "prompts must be .*, got bytes"),
    "a view of bytes": (memoryview(b"text"), None, "prompts must be .*, got memoryview"),
    "a view of integers": (memoryview(np.arange(5, dtype=np.int32)), None, "prompts must be .*, got memoryview"),
    "a mapping": ({"prompt": [5]}, None, "prompts must be .*, got dict"),
    "a set": ({5, 6}, None, "prompts must be .*, got set"),
    "floats": ([3.5], None, "prompts must be .*, got a list of float"),
    "a float among ids": ([5, 6.5], None, "prompts must be .*, got a list of float and int"),
    "bools": ([True], None, "prompts must be .*, got a list of bool"),
    "nothing that is a prompt": ([None, b"x"], None, "prompts must be .*, got a list of NoneType and bytes"),
    "an array of floats": (np.array([[3.5]]), None, r"prompts must be .*, got float64\[1, 1\]"),
    "an array of text": (np.array(["5"]), None, r"prompts must be .*, got <U1\[1\]"),
    "one number": (jnp.array(5), None, r"prompts must be .*, got int32\[\]"),
    "a dict of params": ([[5]], dict(max_tokens=2), "params must be SamplingParams or NoneType, got dict"),
    "text of params": ([[5]], "greedy", "params must be SamplingParams or NoneType, got str"),
    "the class": ([[5]], SamplingParams, "params must be SamplingParams or NoneType, got type"),
    "one of the params": ([[5], [6]], [None, {}], r"params\[1\] must be SamplingParams or NoneType, got dict"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_call_of_wrong_types_raises_before_a_request_is_queued(name):
    """A request that fails alone has an empty text, in which its author would not see the error."""
    prompts, params, words = WRONG_CALLS[name]
    served = engine()
    with pytest.raises(TypeError, match=f"^{words}"):
        served.generate(prompts, params)
    assert not served.has_work and served.stats.requests == 0


def test_text_that_cannot_be_encoded_fails_alone():
    served = engine(tokenizer=ByteTokenizer(num_special=2))
    for prompt, salt in (("\ud800", ""), ([5], "\ud800"), ([5], 7), ([5], None)):
        served.add_request(prompt, salt=salt)
        (output,) = served.step()
        assert "surrogate" in output.error
    served.add_request([5], params="greedy")
    assert "SamplingParams" in served.step()[0].error
    assert served.generate([[5, 6]], SamplingParams(max_tokens=3, **GREEDY))[0].token_ids == answer([5, 6], 3)


class Index:
    """Python takes it for an integer; `first` is called before."""

    def __init__(self, value, first=lambda: None):
        self.value, self.first = value, first

    def __index__(self):
        self.first()
        return self.value


def test_an_object_with_an_index_is_no_token_id_and_is_not_asked_for_it():
    shrinking = [1, 5, 0]
    shrinking[1] = Index(5, shrinking.clear)
    prompts = [[Index(5)], [7, Index(1)], [Index(5, lambda: 1 / 0)], shrinking, [jnp.array([5]), jnp.array([6])]]
    *refused, good = engine().generate([*prompts, [5, 6]], SamplingParams(max_tokens=2, **GREEDY))
    assert all("must be text or a list of token ids" in output.error for output in refused)
    assert good.token_ids == answer([5, 6], 2) and len(shrinking) == 3


@pytest.mark.parametrize(
    "flag", [True, np.True_, np.array(True), jnp.array(True)], ids=lambda flag: type(flag).__name__
)
def test_a_bool_of_any_library_is_no_token_id(flag):
    (output,) = engine().generate([[7, flag]])
    assert "must be text or a list of token ids" in output.error


class Encoding(ByteTokenizer):
    """A tokenizer whose encode gives `wrap` of the tokens."""

    def __init__(self, wrap):
        super().__init__(0)
        self.wrap = wrap

    def encode(self, text, add_special_tokens=True):
        return self.wrap(super().encode(text))


@pytest.mark.parametrize("wrap", [list, tuple, iter, bytes, np.array, jnp.array, lambda ids: map(np.int64, ids)])
def test_a_tokenizer_may_give_any_iterable_of_integers(wrap):
    (output,) = engine(tokenizer=Encoding(wrap)).generate("\5\6\7", SamplingParams(max_tokens=2, **GREEDY))
    assert output.token_ids == answer([5, 6, 7], 2) and output.prompt_token_ids == (5, 6, 7)
    assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [(lambda _: None, "not iterable"), (lambda _: "text", "<U1"), (lambda ids: [ids], r"shape \(1, 3\)"),
     (lambda _: [1.5], "float64"), (lambda _: [True], "bool")],
)  # fmt: skip
def test_what_a_tokenizer_gives_wrongly_fails_its_request_alone(wrap, words):
    served = engine(tokenizer=Encoding(wrap))
    wrong, good = served.generate(["\5\6\7", [5, 6]], SamplingParams(max_tokens=2, **GREEDY))
    assert re.search(words, wrong.error) and good.token_ids == answer([5, 6], 2)


def test_many_refusals_before_a_step_take_linear_time():
    def seconds(count):
        times = []
        for _ in range(3):
            served = engine()
            begin = time.thread_time()
            for _ in range(count):
                served.add_request([])
            times.append(time.thread_time() - begin)
            assert len(served.step()) == count
        return min(times)

    assert seconds(6400) < 9 * seconds(1600), "16 times as long if it is quadratic"


def test_generate_takes_linear_time_where_each_step_ends_one_request(monkeypatch):
    def seconds(count):
        times = []
        for _ in range(3):
            served = engine()
            whole, outputs = served.step, []

            def step(whole=whole, outputs=outputs):
                outputs += reversed(whole())
                return [outputs.pop()]

            monkeypatch.setattr(served, "step", step)
            begin = time.thread_time()
            assert len(served.generate([[]] * count)) == count
            times.append(time.thread_time() - begin)
        return min(times)

    assert seconds(8000) < 6.5 * seconds(2000), "16 times as long if it is quadratic"


def test_ids_are_text_and_never_meet():
    served, params = engine(), SamplingParams(max_tokens=3, **GREEDY)
    assert served.add_request([5], params, request_id="request-1") == "request-1"
    assert served.add_request([6], params, request_id="0.0") == "0.0", "the engine's own names are no matter"
    ids = [served.add_request([7], params) for _ in range(3)]
    assert len({"request-1", "0.0", *ids}) == 5
    with pytest.raises(ValueError, match="still running"):
        served.add_request([5], params, request_id="request-1")
    for id in (5, "", None.__class__, b"x", np.int64(3)):
        with pytest.raises(ValueError, match="must be a string"):
            served.add_request([5], params, request_id=id)
    refused = served.add_request([], params, request_id="twice")
    with pytest.raises(ValueError, match="still running"):
        served.add_request([5], params, request_id=refused)
    found = {output.id: output.token_ids for output in served.drain()}
    assert found == {"request-1": answer([5], 3), "0.0": answer([6], 3), "twice": ()} | dict.fromkeys(
        ids, answer([7], 3)
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_k", [2**31, -2, 1.5, True, "3", None]),
        ("n", [0, 129, 300_000, 10**400]),
        ("max_tokens", [0, 2**31, None]),
        ("seed", [-1, 2**63, 1.0]),
        ("logprobs", [-1, 21, True]),
        ("temperature", [-1, 1e39, float("nan"), float("inf"), 10**400, "hot", None, np.array([1.0, 2.0])]),
        ("top_p", [0, 1.1, float("nan"), None]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, 1e-40, 1e9]),
        ("presence_penalty", [3, float("-inf")]),
        ("frequency_penalty", [-3, "x"]),
        ("stop", ["", [""], [5], 5, None, ["a"] * 65, ["a" * 4097], "\ud800", {"a": 1}.values()]),
        ("stop_token_ids", [5, [-1], [2**31], [1.5], None, [3] * 65, [[3]], "34"]),
        ("ignore_eos", [1, "no", None]),
        ("include_stop_str_in_output", [0]),
    ],
)
def test_every_number_and_text_is_bounded_at_the_door(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field) as refusal:
            SamplingParams(**{field: value})
        assert len(str(refusal.value)) < 300


def test_seeds_differ_between_engines_and_between_completions():
    draw = lambda **options: [
        output.token_ids
        for output in engine(**options).generate([[5, 6]] * 2, SamplingParams(max_tokens=12, ignore_eos=True))
    ]
    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    unseeded = [tuple(draw()) for _ in range(3)]
    assert len(set(unseeded)) == 3, "R-36: the same tokens after every restart"
    many = lambda seed, n: (
        engine().generate([[5, 6]], SamplingParams(max_tokens=12, n=n, seed=seed, ignore_eos=True))[0].outputs
    )
    draws = {seed: [output.token_ids for output in many(seed, 4)] for seed in range(10, 16)}
    assert len({tokens for four in draws.values() for tokens in four}) == 24
    assert draws[10][0] == many(10, 1)[0].token_ids


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 30, 31])
def test_r50_the_last_token_that_fits_is_returned(prompt_len):
    served = engine(max_model_len=32)
    prompt = [5 + i for i in range(prompt_len)]
    for asked in (32 - prompt_len, 32):
        (output,) = served.generate([prompt], SamplingParams(max_tokens=asked, **GREEDY))
        assert output.token_ids == answer(prompt, 32 - prompt_len) and output.finish_reason == "length"


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_finite():
    served = engine()
    for temperature in (1e-45, 1e-38, 1e-30):
        (output,) = served.generate([[5, 6]], SamplingParams(max_tokens=9, temperature=temperature, ignore_eos=True))
        assert output.token_ids == answer([5, 6], 9)
    never = {
        "bias": np.where(fake.PARAMS["bias"] < 0, -np.inf, 0).astype(np.float32)
    }  # at a temperature of 1e6, a logit of -1000 is nearly as likely
    served = Engine(CONFIG, never, forward=fake.forward, **SIZES)
    for options in (dict(temperature=1e6), dict(repetition_penalty=1e-2), dict(repetition_penalty=1e2)):
        (output,) = served.generate([[5, 6]], SamplingParams(max_tokens=9, ignore_eos=True, **options))
        assert len(output.token_ids) == 9 and not output.error


@pytest.mark.parametrize("is_read", [False, True], ids=["before its text is read", "after"])
def test_a_tokenizer_that_aborts_another_request_fails_none(is_read):
    """The other one has its last token in the same step."""
    calls = []

    class Aborting(ByteTokenizer):
        def decode(self, token_ids):
            calls.append(1)
            if steps and len(calls) > is_read:
                served.abort("other")
            return super().decode(token_ids)

    steps, served = [], engine(tokenizer=Aborting(num_special=2))
    requests = [("kept", [5, 6], 4), ("other", [7, 8], 1)]
    for id, prompt, count in reversed(requests) if is_read else requests:
        served.add_request(prompt, SamplingParams(max_tokens=count, **GREEDY), request_id=id)
    calls.clear()
    steps.append(1)
    found = {}
    while served.has_work:
        found |= {output.id: output for output in served.step()}
    assert found["kept"].finish_reason == "length" and found["kept"].token_ids == answer([5, 6], 4)
    assert served.stats.failed == 0


@pytest.mark.parametrize("raises", [None, RuntimeError, SystemExit])
@pytest.mark.parametrize("count", [1, 9], ids=["its last token", "not its last"])
@pytest.mark.parametrize("reads", ["gone", "kept"])
def test_a_tokenizer_may_abort_any_request_of_the_step_that_it_reads(reads, count, raises):
    """Also the request that it reads. An output has all of its text: the abort waits until the step is read."""

    class Aborting(ByteTokenizer):
        def decode(self, token_ids):
            if hooks and token_ids[-1] not in (6, 8) and (token_ids[:2] == [7, 8]) == (reads == "gone"):
                hooks.clear()
                assert served.abort("gone") and served.abort("gone") and not served.abort("nobody")
                if raises:
                    raise raises("after the abort")
            return super().decode(token_ids)

    code, hooks = ByteTokenizer(num_special=2), []
    served = engine(tokenizer=Aborting(num_special=2))
    for id, prompt, most in (("kept", [5, 6], 4), ("gone", [7, 8], count)):
        served.add_request(prompt, SamplingParams(max_tokens=most, **GREEDY), request_id=id)
    hooks.append(1)
    found, told = {}, []
    while served.has_work:
        try:
            outputs = served.step()
        except SystemExit:
            continue
        told += [output.id for output in outputs if output.id in found]
        found |= {output.id: output for output in outputs if output.finished}
    assert not hooks and not told, "nothing is told of a request that has ended"
    failed = reads if raises is RuntimeError else None
    for id, prompt, most in (("kept", [5, 6], 4), ("gone", [7, 8], count)):
        output = found[id]
        if id == failed:
            assert output.finish_reason == "error"
            continue
        assert output.token_ids == answer(prompt, most)[: len(output.token_ids)]
        assert output.text == code.decode(output.token_ids)
        assert output.finish_reason in (("length",) if id == "kept" else ("length", "abort"))
    stats = served.stats
    assert stats.failed == bool(failed) and stats.finished + stats.aborted + stats.failed == 2
    assert stats.running == stats.waiting == 0


@pytest.mark.parametrize("method", ["step", "sleep", "update_weights", "generate"])
def test_a_tokenizer_cannot_take_a_step_within_a_step(method):
    """It lost the text of the requests that were read. The tokenizer's own request fails, and the log says why."""

    class Calling(ByteTokenizer):
        def decode(self, token_ids):
            if hooks:
                hooks.pop()()
            return super().decode(token_ids)

    hooks, served = [], engine(tokenizer=Calling(num_special=2))
    calls = dict(
        step=served.step, sleep=served.sleep, update_weights=lambda: served.update_weights(fake.PARAMS),
        generate=lambda: served.generate([[9]], SamplingParams(max_tokens=2, **GREEDY)),
    )  # fmt: skip
    first, second = (served.add_request(prompt, SamplingParams(max_tokens=7, **GREEDY)) for prompt in ([5, 6], [7, 8]))
    hooks.append(calls[method])
    found = {output.id: output for output in served.drain()}
    assert "RuntimeError" in found[first].error
    assert found[second].token_ids == answer([7, 8], 7)
    assert found[second].text == ByteTokenizer(num_special=2).decode(answer([7, 8], 7))


def test_outputs_of_earlier_steps_are_copied_when_they_are_read_and_stay_what_they_were():
    """A copy in every step made a request of n tokens with log-probabilities take n * n / 2 copies of one."""
    served = engine()
    id = served.add_request([5, 6], SamplingParams(max_tokens=30, logprobs=1, **GREEDY))
    outputs = []
    while served.has_work:
        outputs += served.step()
    want, lengths = answer([5, 6], 30), []
    for output in outputs:
        (completion,) = output.outputs
        assert not {"token_ids", "logprobs"} & vars(completion).keys()
        lengths.append(len(completion.token_ids))
        assert output.id == id and completion.token_ids == want[: lengths[-1]]
        assert tuple(each.token_id for each in completion.logprobs) == completion.token_ids
        assert completion.token_ids is vars(completion)["token_ids"], "copied once"
    assert lengths == sorted(set(lengths)) and lengths[-1] == 30


def test_an_output_is_compared_copied_and_pickled_as_its_fields():
    served = engine()
    served.add_request([5, 6], SamplingParams(max_tokens=9, logprobs=1, **GREEDY))
    output, *_ = served.step()
    for made in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output)), output):
        assert made == output and repr(made) == repr(output)
    (completion,) = output.outputs
    assert dataclasses.replace(completion, text="x").token_ids == answer([5, 6], len(completion.token_ids))
    assert dataclasses.asdict(completion)["token_ids"] == completion.token_ids
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        _ = completion.tokens


def test_a_history_converts_each_token_once_and_follows_tokens_that_are_dropped():
    seq = Sequence("0.0", (5, 6, 7), SamplingParams())
    seq.tokens += [8, 9]
    assert seq.history().tolist() == [5, 6, 7, 8, 9]
    seq.drop_last(2)
    seq.tokens += [10, 11, 12]
    assert seq.history().tolist() == [5, 6, 7, 10, 11, 12]
    seq.tokens[0] = 99  # no token changes; this one shows what is read
    seq.tokens.append(13)
    assert seq.history().tolist() == [5, 6, 7, 10, 11, 12, 13]


def test_penalties_get_the_history_of_each_row():
    """Converting the lists of 64 sequences of 30,000 tokens took 32 ms a dispatch."""
    served = engine()
    params = SamplingParams(max_tokens=20, presence_penalty=0.5, **GREEDY)
    served.add_request([5, 6], params)
    served.step()
    (seq,) = served.scheduler.running
    seq.history()
    seq.tokens[0] = 99  # see above
    histories = []
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda *args: histories.append((made := batch_of(*args)).penalties.history) or made
        patch.setattr("jattn.engine.flights.batch_of", spy)
        served.step()
    assert histories and all(each[0, 0] == 5 for each in histories)
