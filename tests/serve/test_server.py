"""The server with the official client: responses and streams, cancelled, refused and stopped requests."""

import re
import time

import httpx
import openai
import pytest

from jattn.engine import SamplingParams
from tests.engine import fake
from tests.serve.running import connection, is_idle, make_engine, post, serving, slow_engine, wait_until

KEY = "a-key"


@pytest.fixture(scope="module")
def running():
    with serving(api_key=KEY, max_body_bytes=5000, max_queue=3) as running:
        yield running


@pytest.fixture
def server(running):
    """(engine, base address, client); afterwards every place in the queue is free again."""
    engine, server, url = running
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield engine, url, client
    wait_until(lambda: is_idle(engine, server))


@pytest.fixture(scope="module")
def said():
    """The text that the engine itself generates."""
    served = make_engine()
    return lambda prompt, n: served.generate(prompt, SamplingParams(temperature=0, max_tokens=n))[0]


def test_a_completion_is_the_engines(server, said):
    _, _, client = server
    done = client.completions.create(model="fake", prompt="hello", max_tokens=9, temperature=0, logprobs=2)
    want = said("hello", 9)
    assert done.choices[0].text == want.text and done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 9)
    assert len(done.choices[0].logprobs.token_logprobs) == 9
    two = client.completions.create(model="fake", prompt=["hello", "there"], max_tokens=5, temperature=0)
    assert [choice.text for choice in two.choices] == [said("hello", 5).text, said("there", 5).text]
    assert [choice.index for choice in two.choices] == [0, 1]


def test_a_stream_adds_up_to_the_whole(server, said):
    _, _, client = server
    stream = client.completions.create(
        model="fake", prompt="stream me", max_tokens=96, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = list(stream)
    assert "".join(event.choices[0].text for event in events[:-1]) == said("stream me", 96).text
    assert len(events) > 3 and events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 96


def test_a_chat_goes_through_the_folders_template(server, said):
    _, _, client = server
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    done = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=7, temperature=0, logprobs=True, top_logprobs=1
    )
    assert done.choices[0].message.content == said("s:be\nu:hi\na:", 7).text
    assert len(done.choices[0].logprobs.content) == 7
    stream = client.chat.completions.create(model="fake", messages=messages, max_tokens=7, temperature=0, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in stream)
    assert text == done.choices[0].message.content


@pytest.fixture
def slow(server, monkeypatch):
    """No request ends by itself before the test has seen it run."""
    engine, step = server[0], server[0].step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.2) or step())


def test_leaving_a_stream_frees_its_blocks_at_once(server, slow):
    engine, _, client = server
    before = engine.stats.aborted
    stream = client.completions.create(model="fake", prompt="long", max_tokens=240, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: engine.stats.aborted > before and engine.stats.cache_usage == 0)


def test_leaving_a_request_that_is_not_streamed_frees_them_too(server, slow):
    engine, url, _ = server
    before = engine.stats.aborted
    body = {"prompt": "long", "max_tokens": 240, "temperature": 0}
    with connection(url, post("/v1/completions", body, f"Authorization: Bearer {KEY}\r\n")):
        wait_until(lambda: engine.stats.cache_usage > 0)
    wait_until(lambda: engine.stats.aborted > before and engine.stats.cache_usage == 0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "x", "temperature": -1, "top_p": 7}, "temperature=-1.*top_p=7"),
        ({"messages": []}, "the field 'messages' is unknown: it is a field of /v1/chat/completions"),
        ({"prompt": "x", "best_off": 1}, "the field 'best_off' is unknown: leave it out"),
        ({"prompt": "x", "echo": True, "suffix": "s"}, "echo=True is not supported: leave it out; suffix='s' is not"),
        ({"prompt": "x", "best_of": 3}, "best_of=3 is not supported: leave it out, or use n$"),
        ({"prompt": "x", "max_completion_tokens": 3}, "'max_completion_tokens' is unknown: use max_tokens$"),
        ({"prompt": "x", "top_logprobs": 3}, "'top_logprobs' is unknown: use logprobs$"),
        ({"prompt": "x", "functions": [{}]}, "is not supported: leave it out$"),  # a completion has no tools
        ({"prompt": "x" * 300}, "300 tokens"),
        ({"prompt": [1, 999]}, "vocabulary"),
        ({"prompt": ""}, "empty"),
        ({}, "prompt=None"),
    ],
)
def test_a_bad_body_is_refused_with_its_reasons(server, body, words):
    _, url, _ = server
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"]["message"])


def test_keys_sizes_and_paths_are_checked(server):
    _, url, client = server
    for header in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.get(f"{url}/v1/models", headers=header).status_code == 401
    with pytest.raises(openai.APIStatusError, match="larger than 5000 bytes: send less .*max_body_bytes") as refusal:
        client.completions.create(model="fake", prompt="x" * 6000)
    assert refusal.value.status_code == 413
    assert [model.id for model in client.models.list()] == ["fake"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    assert "jattn_output_tokens_total" in metrics


def test_a_full_queue_is_said_so(server, slow):
    engine, _, client = server
    ask = lambda: client.completions.create(model="fake", prompt="q", max_tokens=250, temperature=0, stream=True)
    open_streams = [ask() for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="try again later"):
        ask()
    for stream in open_streams:
        stream.close()
    wait_until(lambda: engine.stats.cache_usage == 0)


def test_a_poisoned_request_fails_alone(server, said):
    _, _, client = server
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.completions.create(model="fake", prompt=[40, fake.POISON], max_tokens=3, temperature=0)
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.completions.create(model="fake", prompt=[40, fake.POISON], max_tokens=3, stream=True))
    done = client.completions.create(model="fake", prompt="fine", max_tokens=3, temperature=0)
    assert done.choices[0].text == said("fine", 3).text


def test_a_server_that_stops_or_fails_ends_its_streams_with_an_error(said):
    for how, words in (("stop", "shutting down"), ("fail", "boom")):
        with (
            serving(slow_engine(0.2)) as (engine, server, url),
            openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        ):
            stream = iter(
                client.completions.create(model="fake", prompt="s", max_tokens=250, temperature=0, stream=True)
            )
            next(stream)
            if how == "stop":
                server.grace = 0
                server.handle_exit(15, None)
            else:
                engine.step = boom
            with pytest.raises(openai.APIError, match=words):
                list(stream)


def boom():
    raise RuntimeError("boom")
