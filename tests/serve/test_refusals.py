"""An invalid body gets a 4xx in OpenAI's JSON that names the field, and the server continues."""

import json
import time

import httpx
import pytest

from jattn.serve import fields, readers
from jattn.serve.errors import BadRequestError
from jattn.text import ByteTokenizer, ChatTemplate
from tests.serve.running import PATIENCE, connection, serving, until_closed

GOOD = {"model": "fake", "prompt": "hello", "max_tokens": 3, "temperature": 0}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
CLIENT = httpx.Client(timeout=PATIENCE)
LONE = '"\\ud800"'  # JSON for an unpaired surrogate


@pytest.fixture(scope="module")
def url():
    with serving(max_queue=200) as (_, _, url):
        yield url


@pytest.fixture(autouse=True)
def server_still_serves(url):
    """Checked after every refusal."""
    yield
    answer = CLIENT.post(f"{url}/v1/completions", json=GOOD)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    assert CLIENT.get(f"{url}/health").status_code == 200


def refused(answer, status=400, param=...):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert answer.headers["x-request-id"]
    assert param is ... or error["param"] == param
    return error


def send(url, body, path="completions"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CLIENT.post(f"{url}/v1/{path}", content=raw)


def spliced(body, **raw_values):
    """JSON of a body with fields whose values are given as JSON text."""
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items() if name not in raw_values]
    fields += [f'"{name}": {value}' for name, value in raw_values.items()]
    return ("{" + ", ".join(fields) + "}").encode()


RAW = {
    "an unpaired surrogate as salt": spliced(GOOD, cache_salt=LONE),
    "an unpaired surrogate in a prompt": spliced(GOOD, prompt=LONE),
    "an unpaired surrogate in a list of prompts": spliced(GOOD, prompt=f'["x", {LONE}]'),
    "an unpaired surrogate in a stop string": spliced(GOOD, stop=f"[{LONE}]"),
    "an unpaired surrogate as model": spliced(GOOD, model=LONE),
    "an unpaired surrogate as user": spliced(GOOD, user=LONE),
    "an unpaired surrogate as key": b'{"prompt": "x", "\\udfff": 1}',
    "an unpaired surrogate in a key of an object": spliced(GOOD, metadata='{"\\ud800": "x"}'),
    "an integer of 400 digits": spliced(GOOD, temperature="9" * 400),
    "an integer of 5000 digits": spliced(GOOD, seed="9" * 5000),
    "a token of 400 digits": spliced(GOOD, prompt=f"[{'9' * 400}]"),
    "a number beyond a double": spliced(GOOD, temperature="1e400"),
    "NaN": spliced(GOOD, temperature="NaN"),
    "Infinity": spliced(GOOD, presence_penalty="-Infinity"),
    "100,000 nested lists": b"[" * 100_000,
    "100,000 nested lists as a prompt": spliced(GOOD, prompt="[" * 100_000 + "]" * 100_000),
    "100,000 nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "50 nested lists": spliced(GOOD, metadata="[" * 50 + "]" * 50),
    "a key twice": b'{"prompt": "x", "prompt": "y"}',
    "a key twice further in": spliced(
        GOOD, stream="true", stream_options='{"include_usage": true, "include_usage": 1}'
    ),
    "bytes that are not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "nothing": b"",
    "half an object": b'{"prompt": "x"',
    "two objects": b"{} {}",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "text": b'"x"',
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("what", RAW)
def test_a_body_that_is_no_plain_json_object_is_refused(url, what, path):
    refused(send(url, RAW[what], path))


WRONG = [  # (field, values of a wrong type or out of range)
    ("max_tokens", [0, -1, 2**31, 2**63, 1.0, "3", True, [], {}]),
    ("temperature", [-0.1, 101, 1e-300, "1", True, []]),
    ("top_p", [0, -1, 1.1, "1", True]),
    ("min_p", [-1, 1.1, "0", True]),
    ("n", [0, -1, 129, 300_000, 2**31, 1.5, "2", True]),
    ("seed", [-1, 2**63, 1.5, "1", True]),
    ("top_k", [-2, 2**31, 2**63, 1.5, "1", True]),
    ("presence_penalty", [-2.1, 2.1, "0", True]),
    ("frequency_penalty", [-2.1, 2.1, "0", True]),
    ("repetition_penalty", [0, -1, 1e308, "1", True]),
    ("stop", [[""], "", [1], 1, {"a": 1}, True, ["x"] * 65, ["x" * 5000]]),
    ("stop_token_ids", [[-1], [2**31], [1.0], [True], "1", 1, [[1]], [40] * 65]),
    ("ignore_eos", [1, 0, "true", []]),
    ("include_stop_str_in_output", [1, "true"]),
    ("stream", [1, 0, "true", "false", []]),
    ("stream_options", ["x", 1, [], {}, {"include_usage": True}, True]),  # the last need stream=true
    ("cache_salt", [1, True, ["x"], {}]),
    ("user", [1, ["x"]]),
    ("echo", [1, True, "x", 0]),
    ("best_of", [True, 2, "1", 1.0]),
    ("logit_bias", [{"50256": -100}, [], 1]),
    ("tools", [["x"], {}, 0]),
    ("response_format", [{"type": "json_object"}, "text", {"type": "text", "x": 1}]),
    ("store", [True, 0]),
    ("metadata", [{"a": "b"}, []]),
]


@pytest.mark.parametrize(("field", "values"), WRONG, ids=[field for field, _ in WRONG])
def test_a_field_of_another_type_or_out_of_range_is_refused_by_name(url, field, values):
    for path, good in (("completions", GOOD), ("chat/completions", CHAT)):
        for value in values:
            error = refused(send(url, good | {field: value}, path))
            assert field in error["message"], (path, value, error)


@pytest.mark.parametrize(
    "options", ["x", 1, [], True, {"include_usage": 1}, {"include_usage": "true"}, {"usage": True}]
)
def test_stream_options_are_an_object_of_booleans(url, options):
    refused(send(url, GOOD | {"stream": True, "stream_options": options}), param="stream_options")


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 1, True, [[]], [None], [1, "x"], ["x", 1], [[1], 2], [1.5], [True], [[["x"]]], [-1], [2**31], [258]],
)
def test_a_prompt_is_text_tokens_or_a_list_of_either(url, prompt):
    refused(send(url, GOOD | {"prompt": prompt}), param="prompt")


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "hi", 1, [1], ["hi"], [None], [[]], [{}], [{"content": "x"}], [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 1}], [{"role": "user", "content": {}}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [1]}], [{"role": "user", "content": [None]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "x", "tool_calls": ["1"]}], [{"role": "user", "content": "x", "name": 1}],
        [{"role": "user", "content": "x", "colour": "red"}],
    ],
)  # fmt: skip
def test_messages_are_objects_with_a_role_and_text(url, messages):
    refused(send(url, CHAT | {"messages": messages}, "chat/completions"), param="messages")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_fields_of_a_chat_that_do_not_go_together_are_refused(url, more, param):
    refused(send(url, CHAT | more, "chat/completions"), param=param)


def test_a_body_of_very_many_keys_is_read_in_a_moment(url):
    """The search for a duplicate key once took time quadratic in the number of keys."""
    names = [f'"{i}":1' for i in range(80_000)]
    begin = time.monotonic()
    refused(send(url, ("{" + ",".join([*names, names[-1]]) + "}").encode()))
    assert time.monotonic() - begin < 20


def test_a_null_is_a_field_left_out(url):
    names = ("top_p", "n", "seed", "stop", "top_k", "stream", "stream_options", "logprobs", "user", "echo", "tools")
    want = send(url, GOOD).json()["choices"]
    assert send(url, GOOD | {name: None for name in names}).json()["choices"] == want


def test_a_body_of_more_sequences_than_places_is_refused_for_good(url):
    error = refused(send(url, GOOD | {"prompt": ["x"] * 3, "n": 100, "temperature": 1}), param="n")
    assert "3 prompts x n=100" in error["message"]


@pytest.mark.parametrize("name", ["other", "", "fake2", "a/b", "ö"])
def test_a_model_that_is_not_served_is_not_found(url, name):
    error = refused(send(url, GOOD | {"model": name}), 404, "model")
    assert error["code"] == "model_not_found"
    refused(send(url, CHAT | {"model": name}, "chat/completions"), 404, "model")
    refused(CLIENT.get(f"{url}/v1/models/{name}"), 404)


def test_a_body_without_a_model_means_the_one_that_is_served(url):
    body = {name: value for name, value in GOOD.items() if name != "model"}
    assert send(url, body).json()["model"] == "fake" == send(url, body | {"model": None}).json()["model"]


def test_a_model_tells_of_itself(url):
    (listed,) = CLIENT.get(f"{url}/v1/models").json()["data"]
    assert listed == CLIENT.get(f"{url}/v1/models/fake").json() == CLIENT.get(f"{url}/v1/models").json()["data"][0]
    assert listed["id"] == "fake" and listed["object"] == "model" and listed["max_model_len"] > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/v1", 404), ("POST", "/v1/complete", 404), ("GET", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405), ("DELETE", "/v1/chat/completions", 405), ("POST", "/health", 405),
        ("PUT", "/v1/models", 405), ("POST", "/v1/models/fake", 405), ("PATCH", "/metrics", 405),
    ],
)  # fmt: skip
def test_an_unknown_path_and_method_are_told_in_json_too(url, method, path, status):
    answer = CLIENT.request(method, url + path)
    message = refused(answer, status)["message"]
    assert "/v1/completions, /v1/chat/completions" in message if status == 404 else answer.headers["allow"] in message


def test_what_is_no_http_is_told_in_json_too(url):
    for raw in (b"hello\r\n\r\n", b"GET /" + b"x" * 100_000, b"\x16\x03\x01\x02\x00" * 9):
        with connection(url, raw) as peer:
            head, _, body = until_closed(peer).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 4") and json.loads(body)["error"]["message"], raw[:20]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", ["illegal request line", "http://"]),
        (b"GET / HTTP/1.1\r\n\r\n", ["Host", "http://"]),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000, ["16384 bytes", "shorter"]),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * 20_000,
            ["trailers", "16384 bytes", "shorter"],
        ),
    ],
)
def test_what_is_not_valid_http_is_named_with_the_way_out(url, sent, words):
    with connection(url, sent) as raw:
        said = until_closed(raw).decode()
    assert said.startswith("HTTP/1.1 400 ") and all(word in said for word in words), said


def test_an_announced_body_that_is_too_large_is_refused_before_it_comes(url):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %s\r\n\r\n"
    for length in (b"1048577", b"9" * 15):
        with connection(url, head % length) as peer:
            assert peer.recv(100).startswith(b"HTTP/1.1 413")


def test_a_template_that_stumbles_over_messages_refuses_them(url):
    with serving() as (engine, _, other):

        def render(messages, **options):
            raise TypeError("can only concatenate str")

        engine.chat_template = type("Template", (), {"render": staticmethod(render)})
        assert "concatenate" in refused(send(other, CHAT, "chat/completions"), param="messages")["message"]


def test_an_answer_that_cannot_be_written_is_one_whole_error(monkeypatch):
    """Not a part of a response: JSON has no NaN."""
    with serving() as (engine, _, url):
        monkeypatch.setattr("jattn.serve.logprobs._finite", lambda logprob: float("nan"))
        refused(send(url, GOOD | {"logprobs": 1}), 500)
        with CLIENT.stream("POST", f"{url}/v1/completions", json=GOOD | {"logprobs": 1, "stream": True}) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert "error" in json.loads(events[-1].removeprefix("data: "))
        assert send(url, GOOD).status_code == 200


def test_an_error_names_the_field_that_is_wrong(url):
    for more, field in (
        ({"stop_token_ids": [2000]}, "stop_token_ids"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"prompt": [2000]}, "prompt"),
    ):
        assert field in refused(send(url, GOOD | more), param=field)["message"] or field == "prompt"


def test_tools_are_passed_to_the_template_unless_none_may_be_called(url):
    tools = [{"type": "function", "function": {"name": "add"}}]
    with serving() as (engine, _, other):
        engine.chat_template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}")
        counts = [
            send(other, CHAT | {"tools": tools} | more, "chat/completions").json()["usage"]["prompt_tokens"]
            for more in ({}, {"tool_choice": "auto"})
        ]
        assert counts[0] == counts[1]
        engine.chat_template = ChatTemplate("{% if tools %}{{ raise_exception('tools') }}{% endif %}x")
        assert send(other, CHAT | {"tools": tools, "tool_choice": "none"}, "chat/completions").status_code == 200
        told = refused(send(other, CHAT | {"tools": tools}, "chat/completions"), param="messages")
        assert told["message"] == "the chat template refuses these messages: tools"
        body = CHAT | {"tools": tools, "parallel_tool_calls": False}
        refused(send(other, body, "chat/completions"), param="parallel_tool_calls")
        assert send(other, body | {"tool_choice": "none"}, "chat/completions").status_code == 200


def test_what_the_template_does_not_read_is_refused_by_name():
    """The prompt would be the same without it: a model that is never told of tools does not call them."""
    template = ChatTemplate("{{ messages[0].content }}{% if tools is defined %}{{ enable_thinking }}{% endif %}")
    parse = lambda more, template: fields.parse_chat(CHAT | more, template, ByteTokenizer(), max_model_len=99)
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    taken = [tools, {"chat_template_kwargs": {"enable_thinking": False}}, {"documents": []}, {"reasoning_effort": None}]
    for more in taken:
        assert parse(more, template).prompts
    several = ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": "{{ tools | tojson }}"})
    assert parse(tools, several).prompts
    plain = ChatTemplate(
        "{# tools, documents #}{{ messages[0].content }} uses no tools{{ messages[0].reasoning_effort }}"
    )
    assert parse(tools | {"tool_choice": "none"}, plain).prompts
    for more, param, words in (
        (tools, "tools", "tool_choice"),
        ({"documents": [{"text": "x"}]}, "documents", "leave"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "leave"),
        ({"chat_template_kwargs": {"enable_thinkng": False}}, "chat_template_kwargs", "'enable_thinkng'.*leave"),
        (
            tools | {"documents": [{}], "chat_template_kwargs": {"x": 1}},
            "tools",
            "tools, documents, .*'x'.*tool_choice",
        ),
    ):
        with pytest.raises(BadRequestError, match=words) as refusal:
            parse(more, plain)
        assert refusal.value.param == param and f"does not read {param}" in str(refusal.value)


def test_a_field_and_an_argument_of_the_template_that_differ_are_refused():
    template = ChatTemplate("{{ reasoning_effort }}")
    parse = lambda body: fields.parse_chat(CHAT | body, template, ByteTokenizer(), max_model_len=99).prompts
    twice = lambda effort: {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": effort}}
    assert parse(twice("low")) == parse({"reasoning_effort": "low"}) == (tuple(ByteTokenizer().encode("low")),)
    for effort in ("high", None):
        with pytest.raises(BadRequestError, match="reasoning_effort differs from that in chat_template_kwargs: leave"):
            parse(twice(effort))


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city": "Paris", "days": 2}', '{"city": "Paris", "days": 2}'),
        ({"city": "Paris"}, '{"city": "Paris"}'),
        ("", "{}"),
        ('{"city": "Par', '"{\\"city\\": \\"Par"'),  # a model may write this; it stays text
        ('{"a": 1, "a": 2}', '"{\\"a\\": 1, \\"a\\": 2}"'),
        ("[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("[1]", '"[1]"'),
        (None, "null"),
    ],
)
def test_the_arguments_of_a_call_are_an_object_for_the_template(arguments, rendered):
    """OpenAI's interface has them as JSON text, which a template would quote again."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    (message,) = readers.messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}")
    assert template.render([message]) == rendered
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_a_call_beside_no_content_is_null_for_a_template_that_asks_for_it(content):
    """DeepSeek's templates write calls `if message['content'] is none`; others would print the null."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = readers.messages([{"role": "assistant", "tool_calls": [call]} | content])
    asks = ChatTemplate("{% for m in messages %}{{ 'call' if m['content'] is none else '' + m.content }}{% endfor %}")
    prints = ChatTemplate("{% for m in messages %}call{{ m.content }}{% endfor %}")
    assert asks.render(messages) == ("" if content.get("content") == "" else "call")
    assert prints.render(messages) == "call"


def test_a_call_without_a_function_is_left_to_the_template():
    for call in ({}, {"function": None}, {"function": {"name": "f"}}, {"function": ["f"]}):
        assert readers.messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [call]


def test_a_message_without_calls_is_an_ordinary_one_for_the_template():
    """Servers write such a list into their responses; Llama 3's template asks for 'tool_calls' in message."""
    (message,) = readers.messages([{"role": "assistant", "content": "hi", "tool_calls": []}])
    template = ChatTemplate("{% for m in messages %}{{ 'tool_calls' in m }}{{ m.content }}{% endfor %}")
    assert template.render([message]) == "Falsehi"


def test_an_empty_list_of_tools_or_documents_is_a_field_left_out():
    """Llama 3's template tells the model of an environment for tools unless they are none."""
    template = ChatTemplate("{{ tools is none }} {{ documents is none }} {{ messages[0].content }}")
    parse = lambda more: fields.parse_chat(CHAT | more, template, ByteTokenizer(), max_model_len=99).prompts
    told = (tuple(ByteTokenizer().encode("True True hi")),)
    assert parse({}) == parse({"tools": [], "documents": []}) == parse({"tools": None}) == told
    assert parse({"tools": [{}]}) == (tuple(ByteTokenizer().encode("False True hi")),)
