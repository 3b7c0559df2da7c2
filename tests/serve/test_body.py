"""Bodies with too many values are refused before they are parsed or visited; large bodies do not delay small ones."""

import json
import threading
import time
import tracemalloc

import httpx
import pytest

from jattn import strict_json
from jattn.serve import body, fields
from jattn.serve.errors import BadRequestError
from jattn.text import ByteTokenizer
from tests.serve.running import PATIENCE, serving, wait_until

ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ROOM = 256


def raw_of(value):
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (raw_of({"messages": [{"role": "u", "content": ""}] * 28_000}), "more than 20000"),
        (raw_of(CHAT | {"chat_template_kwargs": {"x": [[]] * 240_000}}), "more than 20000"),
        (raw_of(CHAT | {"tools": [{}] * 300_000}), "more than 20000"),
        (raw_of({f"{i:x}": 1 for i in range(110_000)}), "more than 20000"),
        (raw_of({"prompt": [[{"x": [1] * 20_000}]]}), "more than 20000"),
        (raw_of({"prompt": [[1]] * 250_000}), "more than 20000"),
        (raw_of({"prompt": [1] * 500_000}), "more than 20000"),
        (raw_of({"prompt": [[1]] * 2000}), "2000 prompts, at most 64"),
        (raw_of({"prompt": [1] * 5000}), "5000 tokens"),
        (raw_of({"prompt": ["x", [1] * ROOM]}), "256 tokens"),
    ],
)
def test_too_many_values_are_refused_before_they_are_looked_at(raw, words, monkeypatch):
    looked = []
    check = strict_json._check
    monkeypatch.setattr(strict_json, "_check", lambda *of: looked.append(1) or check(*of))
    with pytest.raises(BadRequestError, match=words):
        body.parse(raw, 64, ROOM)
    assert len(looked) <= body.MAX_VALUES + 10


def test_lists_and_objects_beyond_the_bound_are_not_even_parsed(monkeypatch):
    monkeypatch.setattr(strict_json.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    for text in (b"[],", b"{},", b'"\\"x",[{},', b'1,1,"[{",'):
        with pytest.raises(BadRequestError, match="more than 20000"):
            body.parse(b'{"prompt": [' + text * 40_000 + b"1]}", 64, ROOM)


def test_marks_inside_a_text_are_no_values():
    text = '[{,"\\' * 100_000
    assert body.parse(raw_of({"prompt": text, "user": "\\"}), 64, ROOM)["prompt"] == text


def test_a_string_that_does_not_end_is_read_once():
    """A second reading from each of its quotes would take minutes of the GIL, in which nobody is served."""
    begin = time.process_time()
    for end in (b"", b"\\", b"[" * 100_000):
        with pytest.raises(BadRequestError, match="more than 20000"):
            body.parse(b"[" * 25_000 + b'"' + b'\\"' * 20_000 + end, 64, ROOM)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("text", ["[x" * 400_000, '["' * 200_000])
def test_marks_inside_a_text_are_counted_without_memory_for_each_of_its_bytes(text):
    """A program in a prompt of 1 MiB took 130 MiB, and up to a second of the GIL."""
    raw = raw_of({"prompt": text})
    tracemalloc.start()
    try:
        body._count_marks(raw, body.MAX_VALUES, 64 * ROOM)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(raw)
    finally:
        tracemalloc.stop()


def test_as_many_values_as_may_be_are_read():
    full = {"prompt": [[1] * (ROOM - 1)] * 64, "metadata": [0] * (body.MAX_VALUES - 2)}
    assert body.parse(raw_of(full), 64, ROOM) == full
    with pytest.raises(BadRequestError, match="more than 20000"):
        body.parse(raw_of(full | {"user": None}), 64, ROOM)


@pytest.mark.parametrize("digits", ["9" * 21, "-" + "9" * 20])
def test_long_integers_are_refused_wherever_they_stand(digits):
    with pytest.raises(BadRequestError, match="digits"):
        body.parse(b'{"prompt": [1, %s]}' % digits.encode(), 64, ROOM)
    assert body.parse(b'{"seed": %d, "user": "%s"}' % (10**19, digits.encode()), 64, ROOM)["seed"] == 10**19


def test_a_text_that_no_tokenizer_fits_in_is_refused_before_it_is_tokenised(monkeypatch):
    encoded = []
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text, **_: encoded.append(len(text)) or [40])
    with serving(max_body_bytes=1 << 17) as (engine, _, url):
        most = engine.limits.max_model_len * fields.MAX_CHARACTERS_PER_TOKEN
        for path, asked, param in (
            ("completions", {"prompt": ["x", "x" * (most + 1)]}, "prompt"),
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * most}]}, "messages"),
        ):
            answer = httpx.post(f"{url}/v1/{path}", json=asked)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
            assert f"more than {most}" in answer.json()["error"]["message"]
        assert not encoded
        assert httpx.post(f"{url}/v1/completions", json=ASK | {"prompt": "x" * most}).status_code == 200


def test_small_bodies_and_answers_do_not_wait_for_large_ones_and_too_many_are_told_so(monkeypatch):
    """With every thread for large bodies busy and their queue full."""
    monkeypatch.setattr(body, "MAX_PENDING_BYTES", 0)
    goes_on, held = threading.Event(), []
    parse = body.parse

    def slow(raw, *limits):
        if len(raw) > body.MAX_SMALL_BYTES:
            held.append(len(raw))
            assert goes_on.wait(PATIENCE)
        return parse(raw, *limits)

    monkeypatch.setattr(body, "parse", slow)
    large = raw_of(ASK) + b" " * 19_000
    with serving(max_body_bytes=len(large)) as (_, _, url):
        answers = []
        ask = lambda: answers.append(httpx.post(f"{url}/v1/completions", content=large))
        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 4 and len(held) == body.NUM_LARGE_THREADS)  # 8 are parsed or wait
        assert {answer.status_code for answer in answers} == {429}
        assert answers[0].headers["retry-after"] == "1" and "large" in answers[0].json()["error"]["message"]
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200
        goes_on.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(answer.status_code for answer in answers) == [200] * 8 + [429] * 4
        ask()
        assert answers[-1].status_code == 200


def test_a_variable_that_is_a_field_of_its_own_is_named_with_its_place():
    with serving() as (_, _, url):
        asked = CHAT | {"chat_template_kwargs": {"tools": []}}
        error = httpx.post(f"{url}/v1/chat/completions", json=asked).json()["error"]
    assert error["param"] == "chat_template_kwargs" and "tools" in error["message"]


def test_without_a_key_nothing_tells_which_paths_there_are():
    with serving(api_key="k") as (_, _, url):
        for method, path in (("GET", "/nowhere"), ("DELETE", "/v1/models"), ("GET", "/v1/completions"), ("GET", "/")):
            answer = httpx.request(method, url + path)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert httpx.request(method, url + path, headers={"Authorization": "Bearer k"}).status_code in (404, 405)
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/health").status_code == 405
