"""Responses are what the `openai` package expects, and streamed ones add up to the same."""

import json

import httpx
import openai
import pytest

from jattn.engine import Completion, FinishReason, RequestOutput, SamplingParams, TokenLogprob
from jattn.serve.errors import encode
from jattn.serve.fields import ParsedBody
from jattn.serve.responses import ResponseBuilder
from jattn.serve.token_texts import TextOffsets, TokenTexts
from jattn.text.detokenizer import Detokenizer
from tests.engine.test_stream_text import BYTES, KINDS
from tests.serve.running import serving, wait_until

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client():
    with serving() as (_, _, url), openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


class Words:
    """A tokenizer with a few tokens; 7 and 8 together are one character, 7 and 9 another."""

    TEXTS = {0: "", 1: "a", 2: " bc", 3: "X", 4: "Y", 5: "Z", 6: "a"}

    def encode(self, text):
        raise NotImplementedError

    def decode(self, token_ids):
        text, ids = "", list(token_ids)
        while ids:
            token = ids.pop(0)
            if token == 7 and ids[:1] in ([8], [9]):
                text += {8: "é", 9: "ö"}[ids.pop(0)]
            else:
                text += self.TEXTS.get(token, "\ufffd")
        return text


def outputs_of(token_ids, visible, text, reason=FinishReason.STOP, tops=None):
    """The outputs of a request, one for each token; visible[i]: characters of text after i + 1 tokens."""
    tops = tops or [{token: -0.5} for token in token_ids]
    told = tuple(TokenLogprob(token, -0.5, top) for token, top in zip(token_ids, tops, strict=True))
    for i, shown in enumerate(visible, start=1):
        last = i == len(token_ids)
        done = Completion(0, text[:shown], tuple(token_ids[:i]), told[:i], reason if last else None)
        yield RequestOutput("id", (1, 2), (done,))


def asked(chat=False, **more):
    return ParsedBody(("p",), SamplingParams(logprobs=1), chat, **more)


def whole(outputs, tokenizer=None, chat=False):
    """The response of these outputs."""
    return ResponseBuilder(asked(chat), "id", "m", TokenTexts(tokenizer or Words())).whole(outputs)


def streamed(outputs, chat=False):
    """The choices of every event."""
    answer = ResponseBuilder(asked(chat), "id", "m", TokenTexts(Words()))
    return [event["choices"][0] for output in outputs for event in answer.events(0, output)]


CASES = {  # tokens, characters visible after each, the final text, where each token begins
    "plain": ([1, 2, 1], [1, 4, 5], "a bca", [0, 1, 4]),
    "a character of two tokens": ([1, 7, 8, 1], [1, 1, 2, 3], "aéa", [0, 1, 1, 2]),
    "an end token without text": ([1, 2, 0], [1, 4, 4], "a bc", [0, 1, 4]),
    "a stop string over two tokens, cut": ([1, 3, 4], [1, 1, 1], "a", [0, 1, 1]),
    "a beginning of a stop string that was none": ([1, 3, 5], [1, 1, 3], "aXZ", [0, 1, 2]),
    "a stop string inside a token": ([1, 2], [1, 2], "a ", [0, 1]),
    "bytes that are no character": ([9, 1, 8, 8, 1], [0, 2, 2, 2, 5], "\ufffda\ufffd\ufffda", [0, 1, 2, 3, 4]),
    "half a character at the end": ([1, 7], [1, 2], "a\ufffd", [0, 1]),
    "nothing to see": ([3, 4], [0, 0], "", [0, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_text_offset_is_where_a_tokens_text_begins_and_a_stream_tells_the_same(case):
    tokens, visible, text, want = CASES[case]
    outputs = list(outputs_of(tokens, visible, text))
    told = whole(outputs[-1:])["choices"][0]
    assert told["logprobs"]["text_offset"] == want and told["text"] == text
    choices = streamed(outputs)
    assert "".join(choice["text"] for choice in choices) == text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for choice in choices for x in choice["logprobs"][name]] == told["logprobs"][name], name


@pytest.mark.parametrize("kind", ["byte fallback", "metaspace, a space before the first", "WordPiece", "byte level"])
@pytest.mark.parametrize("output", [[4, 3, 4, 3], [4, 0, 3, 1, 1, 4, 3]], ids=["words", "special tokens between them"])
def test_text_offsets_count_in_the_text_that_follows_the_prompts(kind, output):
    """Decoded alone, the first word of some tokenizers has no space before it; after a prompt it has."""
    code, prompt = KINDS[kind](), (3, 4)
    detokenizer, offsets, ends = Detokenizer(code, prompt), TextOffsets(TokenTexts(code), prompt), [0]
    for token in output:
        ends.append(ends[-1] + len(detokenizer.add([token])))
        offsets.add([token])
    assert offsets.bounds == ends and ends[-1] > 0
    told = tuple(TokenLogprob(token, -0.5, {}) for token in output)
    done = Completion(0, detokenizer.text, tuple(output), told, FinishReason.LENGTH)
    built = whole([RequestOutput("id", prompt, (done,))], code)["choices"][0]
    assert built["logprobs"]["text_offset"] == ends[:-1]
    assert "".join(built["logprobs"]["tokens"]) == built["text"]


def test_an_invalid_byte_does_not_move_the_offsets_of_the_text_after_it():
    """Byte fallback makes U+FFFD of a whole run of bytes with an invalid one, also of its whole characters."""
    code, prompt = KINDS["byte fallback"](), (3, 4)
    first, second = (BYTES[f"<0x{byte:02X}>"] for byte in "é".encode())
    detokenizer, offsets, output = Detokenizer(code, prompt), TextOffsets(TokenTexts(code), prompt), [first, second] * 2
    for token in [*output, first, 3, 4]:
        detokenizer.add([token])
        offsets.add([token])
    assert detokenizer.text == "éé\ufffd one two"
    assert offsets.bounds == [0, 0, 1, 1, 2, 3, 7, 11]


def test_a_token_is_told_with_its_text_not_before():
    """A stop string may still cut text that is held back, so neither it nor its tokens are sent."""
    choices = streamed(list(outputs_of([1, 3, 5], [1, 1, 3], "aXZ"))[:2])
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a"]]


def test_a_late_reader_gets_the_same_as_a_quick_one():
    """Outputs coalesce: a client that skips some of them misses nothing."""
    outputs = list(outputs_of([1, 2, 7, 8, 1], [1, 4, 4, 5, 6], "a bcéa"))
    for kept in (outputs, outputs[1:], outputs[::2], outputs[-1:]):
        choices = streamed(kept)
        assert "".join(choice["text"] for choice in choices) == "a bcéa"
        assert sum((choice["logprobs"]["text_offset"] for choice in choices), []) == [0, 1, 4, 4, 5]


def test_the_chosen_token_is_among_its_top_logprobs():
    """Also if another token of the same text is likelier, and if no other tokens are asked for."""
    tops = [{6: -0.1}, {3: -0.1}, {}]
    (output,) = list(outputs_of([1, 2, 3], [1, 4, 5], "a bcX", tops=tops))[-1:]
    told = whole([output])["choices"][0]["logprobs"]
    assert [top[token] for top, token in zip(told["top_logprobs"], told["tokens"], strict=True)] == [-0.5] * 3
    assert told["top_logprobs"][0] == {"a": -0.5, "token_id:6": -0.1}
    chat = whole([output], chat=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["token"] in [top["token"] for top in entry["top_logprobs"]] for entry in chat)


def test_a_tokens_text_is_decoded_once(monkeypatch):
    """Among 5 likely tokens for each of many, the same come again and again."""
    code, calls = Words(), []
    monkeypatch.setattr(Words, "decode", lambda self, ids, real=Words.decode: calls.append(1) or real(self, ids))
    texts, tokens = TokenTexts(code), [1, 2] * 50
    for chat in (False, True):
        tops = [{1: -0.5, 2: -1.5, 3: -2.0, 4: -2.5, 5: -3.0}] * len(tokens)
        answer = ResponseBuilder(asked(chat), "id", "m", texts)
        for output in outputs_of(
            tokens, [len(code.decode(tokens[: i + 1])) for i in range(100)], "a bc" * 50, tops=tops
        ):
            calls.clear()
            list(answer.events(0, output))
            assert len(calls) <= (16 if len(output.token_ids) < 3 else 2)


def test_part_of_a_character_has_no_bytes_and_no_probability_is_beyond_json():
    tops = [{7: float("-inf")}, {8: -0.5}]
    (output,) = list(outputs_of([7, 8], [0, 1], "é", tops=tops))[-1:]
    first = json.loads(encode(whole([output], chat=True)))["choices"][0]["logprobs"]["content"][0]
    assert first["bytes"] is None and first["token"] == "\ufffd"
    lowest = [{7: float("-inf")}, {8: -0.5}]
    (output,) = list(outputs_of([1, 2], [1, 4], "a bc", tops=lowest))[-1:]
    told = json.loads(encode(whole([output])))["choices"][0]["logprobs"]
    assert told["top_logprobs"][0] == {"a": -0.5, "\ufffd": -9999.0}


def test_the_work_of_an_event_does_not_grow_with_the_output():
    """R-37: an event reads only what is new, counted in characters and tokens, not in seconds."""
    read = []

    class Counted(tuple):
        def __getitem__(self, at):
            found = tuple.__getitem__(self, at)
            read.append(len(found) if isinstance(at, slice) else 1)
            return found

    class Text(str):
        def __getitem__(self, at):
            found = str.__getitem__(self, at)
            read.append(len(found))
            return found

        def __eq__(self, other):
            raise AssertionError("a comparison of whole texts")

        __hash__ = str.__hash__

    answer, costs = ResponseBuilder(asked(), "id", "m", TokenTexts(Words())), []
    for count in range(1, 300):
        told = Counted(TokenLogprob(1, -0.5, {1: -0.5}) for _ in range(count))
        done = Completion(0, Text("a" * count), Counted([1] * count), told)
        read.clear()
        (event,) = answer.events(0, RequestOutput("id", (1,), (done,)))
        assert event["choices"][0]["text"] == "a"
        costs.append(sum(read))
    assert max(costs) == costs[0] <= 4


# ---------------------------------------------------------------------- by the client
def test_the_role_comes_in_a_choices_first_chunk_only(client):
    ask = dict(model="fake", messages=HI, max_tokens=9, n=3, temperature=1, seed=1)
    roles = {}
    for event in client.chat.completions.create(**ask, stream=True):
        for choice in event.choices:
            roles.setdefault(choice.index, []).append(choice.delta.role)
    assert set(roles) == {0, 1, 2}
    assert all(seen[0] == "assistant" and set(seen[1:]) <= {None} for seen in roles.values())


def test_ids_times_and_usage_agree_over_a_stream(client):
    for ask in (
        lambda **more: client.completions.create(model="fake", prompt="hi", max_tokens=30, temperature=0, **more),
        lambda **more: client.chat.completions.create(model="fake", messages=HI, max_tokens=30, temperature=0, **more),
    ):
        *events, last = ask(stream=True, stream_options={"include_usage": True})
        assert len({(event.id, event.created, event.model, event.object) for event in [*events, last]}) == 1
        assert all(event.usage is None and len(event.choices) == 1 for event in events)
        assert last.choices == [] and last.usage == ask().usage.model_copy(
            update=dict(prompt_tokens_details=last.usage.prompt_tokens_details)
        )
        assert [event.choices[0].finish_reason for event in events].count("length") == 1
        assert all("usage" not in event.model_fields_set for event in ask(stream=True))


def test_the_id_is_the_same_in_the_answer_its_header_the_engine_and_the_log(caplog):
    with serving() as (engine, _, url), caplog.at_level("INFO", logger="jattn.serve"):
        seen, add = [], engine.add_request
        engine.add_request = lambda *a, request_id, **k: seen.append(request_id) or add(*a, request_id=request_id, **k)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2, "user": "u\n1"})
        id = answer.json()["id"]
        assert id.startswith("cmpl-") and answer.headers["x-request-id"] == id and seen == [id]
        httpx.post(f"{url}/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 2})
        assert seen[1].rpartition(".")[0] == seen[2].rpartition(".")[0] and seen[1] != seen[2]
        refused = httpx.get(f"{url}/v1/nowhere").headers["x-request-id"]
        wait_until(lambda: any(refused in record.getMessage() for record in caplog.records))
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"{id} POST '/v1/completions' 200") for line in lines)
    assert f"{id} is of user 'u\\n1'" in lines
    assert any(line.startswith(f"{refused} GET '/v1/nowhere' 404") for line in lines)


def test_an_event_is_one_line_also_for_readers_that_split_at_unicodes_line_ends():
    """httpx's iter_lines and str.splitlines do; a text may have such characters, and so may the model's name."""
    name = "a\u2028b\u2029c\x85d"
    with serving(model_name=name) as (_, _, url):
        ask = {"prompt": "x", "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=ask) as answer:
            *events, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert done == "[DONE]" and {json.loads(event)["model"] for event in events} == {name}


def test_the_clients_own_stream_helper_reads_a_chat(client):
    ask = dict(model="fake", messages=HI, max_tokens=20, temperature=0)
    ask["stop"] = client.chat.completions.create(**ask).choices[0].message.content[8:10]
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**ask)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert whole._request_id == whole.id and whole.choices[0].message.refusal is None


def test_an_answer_can_be_sent_back_as_a_message(client):
    ask = dict(model="fake", max_tokens=3, temperature=0)
    message = client.chat.completions.create(messages=HI, **ask).choices[0].message
    for form in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        assert client.chat.completions.create(messages=[*HI, form, *HI], **ask).choices[0].finish_reason == "length"


def test_logprobs_of_a_stream_are_those_of_the_whole(client):
    ask = dict(model="fake", prompt="hello", max_tokens=40, temperature=1, seed=3, logprobs=2)
    whole = client.completions.create(**ask).choices[0]
    events = [event.choices[0] for event in client.completions.create(**ask, stream=True)]
    assert "".join(event.text for event in events) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for event in events for x in getattr(event.logprobs, name)] == getattr(whole.logprobs, name)
    offsets = whole.logprobs.text_offset
    assert len(offsets) == 40 and offsets == sorted(offsets) and offsets[-1] <= len(whole.text)
    plain = [i for i, token in enumerate(whole.logprobs.tokens) if token.isascii()]
    assert plain and all(whole.text.startswith(whole.logprobs.tokens[i], offsets[i]) for i in plain)
