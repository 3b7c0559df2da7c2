"""Pages of other origins may call the server if `allow_origins` says so, and only then."""

import logging

import httpx
import pytest

from jattn import cli
from jattn.cli import options
from jattn.serve import ServerOptions
from tests.serve.running import PATIENCE, make_engine, serving, slow_engine
from tests.serve.test_embeddings import make_embedder

PAGE, OTHER = "https://chat.example", "https://other.example"
KEY = "secret"
GOOD = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
CLIENT = httpx.Client(timeout=PATIENCE)
HEADERS = "authorization,content-type,x-stainless-lang"


@pytest.fixture(scope="module")
def url():
    with serving(allow_origins=("http://localhost:3000", PAGE), api_key=KEY, max_body_bytes=5000) as (_, _, url):
        yield url


def preflight(url, origin=PAGE, path="/v1/completions", method="POST", **more):
    headers = {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": HEADERS}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return CLIENT.options(url + path, headers=headers)


def ask(url, method="POST", path="/v1/completions", origin=PAGE, **request):
    headers = {"Origin": origin, "Authorization": f"Bearer {KEY}"} | request.pop("headers", {})
    request = request or {"json": GOOD} if method == "POST" else request
    return CLIENT.request(method, url + path, headers=headers, **request)


def allowed(answer):
    """The origin whose pages may read the answer."""
    return answer.headers.get("access-control-allow-origin")


def listed(answer, name):
    return {each.strip().lower() for each in answer.headers[name].split(",")}


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/completions", "POST"), ("/v1/models", "GET"), ("/health", "HEAD"), ("/nowhere", "POST")]
)
def test_a_preflight_needs_no_key_and_is_no_request(url, path, method, caplog):
    caplog.set_level(logging.DEBUG, "jattn.serve")
    answer = preflight(url, path=path, method=method)
    assert answer.status_code == 200 and allowed(answer) == PAGE
    assert method.lower() in listed(answer, "access-control-allow-methods")
    assert listed(answer, "access-control-allow-headers") >= set(HEADERS.split(","))
    assert "origin" in listed(answer, "vary") and "x-request-id" not in answer.headers
    assert not caplog.records


def test_a_public_page_may_call_this_machine(url):
    """Chrome's private network access: hosted pages that call a local server. A 400 blocked them."""
    ask_for_network = {"access_control_request_private_network": "true"}
    answer = preflight(url, **ask_for_network)
    assert answer.status_code == 200 and answer.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-private-network" not in preflight(url).headers
    assert preflight(url, OTHER, **ask_for_network).status_code == 400


def test_a_page_of_each_origin_reads_its_answers(url):
    for origin in ("http://localhost:3000", PAGE):
        answer = ask(url, origin=origin)
        assert answer.status_code == 200 and allowed(answer) == origin and "origin" in listed(answer, "vary")
        assert {"x-request-id", "retry-after"} <= listed(answer, "access-control-expose-headers")


def test_a_page_reads_a_stream(url):
    answer = ask(url, json=GOOD | {"stream": True})
    assert allowed(answer) == PAGE and answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (400, dict(json=GOOD | {"top_p": 0})),
        (401, dict(json=GOOD, headers={"Authorization": "Bearer wrong"})),
        (404, dict(path="/nowhere")),
        (405, dict(path="/health")),
        (405, dict(method="OPTIONS")),  # no preflight: it asks for no method
        (413, dict(json=GOOD | {"prompt": "x" * 6000})),
        (415, dict(json=GOOD, headers={"Content-Encoding": "gzip"})),
        (500, dict(json=GOOD | {"prompt": [40, 41]})),
    ],
)
def test_a_page_reads_errors(url, status, asked, monkeypatch):
    if status == 500:
        monkeypatch.setattr("jattn.serve.app.ResponseBuilder", lambda *_: 1 / 0)
    answer = ask(url, **asked)
    assert answer.status_code == status and allowed(answer) == PAGE and answer.json()["error"]["message"]


def test_a_page_reads_that_the_queue_is_full_or_that_the_server_stops():
    with serving(slow_engine(), allow_origins=[PAGE], max_queue=1) as (_, server, url):
        body = GOOD | {"max_tokens": 200, "stream": True}
        with CLIENT.stream("POST", f"{url}/v1/completions", json=body):
            full = ask(url)
            server.loop.drain()
            stops = ask(url)
            assert preflight(url).status_code == 200
    assert (full.status_code, allowed(full), full.headers["retry-after"]) == (429, PAGE, "1")
    assert (stops.status_code, allowed(stops), stops.headers["connection"]) == (503, PAGE, "close")


@pytest.mark.parametrize("origin", [OTHER, PAGE + ".evil.example", PAGE + ":444", "http://chat.example", "null"])
def test_a_page_of_another_origin_reads_nothing(url, origin):
    answer = preflight(url, origin)
    assert answer.status_code == 400 and allowed(answer) is None
    answer = ask(url, origin=origin)
    assert answer.status_code == 200 and allowed(answer) is None  # the browser hides it from the page


def test_a_star_means_every_origin_and_no_cookies():
    with serving(allow_origins=["*"]) as (_, _, url):
        for origin in (PAGE, "null"):
            for answer in (preflight(url, origin), ask(url, origin=origin), ask(url, path="/nowhere", origin=origin)):
                assert allowed(answer) == "*" and "access-control-allow-credentials" not in answer.headers


def test_an_embedding_server_has_the_same_rule():
    with serving(make_embedder(), allow_origins=[PAGE]) as (_, _, url):
        assert allowed(preflight(url, path="/v1/embeddings")) == PAGE
        assert allowed(ask(url, path="/v1/embeddings", json={"input": "x"})) == PAGE


def test_without_the_option_a_preflight_is_a_method_that_is_not_allowed():
    with serving(make_engine()) as (_, _, url):
        answer = preflight(url)
        assert answer.status_code == 405 and "OPTIONS /v1/completions" in answer.json()["error"]["message"]
        answers = (answer, ask(url), ask(url, json=GOOD | {"stream": True}), ask(url, path="/nowhere"))
        assert not [
            name for each in answers for name in each.headers if name.startswith("access-control") or name == "vary"
        ]


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost", "http://localhost:3000", "https://a-b.example.com:8443", "http://127.0.0.1:8080",
        "http://[::1]:5173", "app://obsidian.md", "tauri://localhost", "chrome-extension://abcdefghijklmnop",
        "vscode-webview://0a1b2c", "http://[2001:db8::1:0]:8080", "http://[::ffff:7f00:1]", "http://[::ffff:0:1]", "file://",
        "https://xn--tda.example", "https://1password.example", "https://a.0x7g", "*",
    ],
)  # fmt: skip
def test_an_origin_is_a_scheme_a_host_and_a_port(origin):
    assert ServerOptions(allow_origins=[origin]).allow_origins == [origin]


@pytest.mark.parametrize(
    "origin",
    [
        "", "null", "localhost", "localhost:3000", "http://", "http://localhost/", "https://x.example/page",
        "https://x.example?q", "https://*.example.com", "HTTPS://x.example", "https://X.example", "https://x.example:443",
        "http://x.example:80", "http://x.example:", "http://x.example:080", "http://x.example:65536",
        "https://user@x.example", "https://x.example\n", " https://x.example", "https://x.example,https://y.example",
        "https://ü.example", "http://127.1", "http://127.0.0.01", "http://1.2.3.256", "http://2130706433", "http://0x7f.1",
        "http://127.0.0.1.", "http://[0:0:0:0:0:0:0:1]", "http://[::ffff:127.0.0.1]", "http://[::01]", "http://[1::2::3]",
        "http://[:::]", "http://[::ffff:007f:1]", "http://[0::ffff:7f00:1]", "file:///", "**", None, 7, b"*",
    ],
)  # fmt: skip
def test_what_is_no_origin_is_refused_with_what_was_wanted(origin):
    with pytest.raises(ValueError, match="allow_origins: .* must be '\\*' or an origin as browsers send it") as refusal:
        ServerOptions(allow_origins=[PAGE, origin], max_queue=0)
    assert ascii(origin) in str(refusal.value) and "max_queue=0" in str(refusal.value)


@pytest.mark.parametrize("origins", ["*", PAGE, None, {"*": 1}, 7])
def test_the_origins_are_a_list(origins):
    with pytest.raises(ValueError, match="allow_origins=.* must be a list"):
        ServerOptions(allow_origins=origins)


def test_the_command_takes_the_option_several_times(monkeypatch, capsys):
    served = []

    def serve(engine, server, host, port, sockets):
        served.append(server)
        for each in sockets:
            each.close()

    monkeypatch.setattr(options, "make_engine", lambda args, **_: make_engine())
    monkeypatch.setattr("jattn.serve.serve", serve)
    monkeypatch.setattr("jattn.cli.serve.collect_rarely", lambda: None)
    command = ["serve", "--port", "0", "--no-warmup"]
    for more in ([], ["--allow-origin", PAGE, "--allow-origin", "http://localhost:3000"]):
        assert cli.main([*command, *more]) == 0
    assert [server.allow_origins for server in served] == [(), (PAGE, "http://localhost:3000")]
    assert cli.main([*command, "--allow-origin", "localhost:3000"]) == 2
    assert "'localhost:3000' must be '*' or an origin" in capsys.readouterr().err
