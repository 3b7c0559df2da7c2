"""Bodies in many chunks, responses before the end of a body, and headers that are not allowed."""

import contextlib
import json
import socket
import time

import h11
import httpx
import pytest

from jattn.serve import connection as connection_module
from tests.serve.running import answered, connection, held, is_idle, post, serving, until_closed, wait_until

ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
RAW = json.dumps(ASK).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LIMIT = 1 << 16
"""Bytes of framing, with the default options."""


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def in_chunks(raw, size=1, extension=b""):
    parts = (raw[at : at + size] for at in range(0, len(raw), size))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)


def send(raw, data):
    """Send as much as the server takes."""
    try:
        raw.sendall(data)
    except OSError:
        return


def test_a_body_of_a_million_chunks_is_refused_after_a_fixed_share_of_framing(server, monkeypatch):
    """The server reads no more while it has many bytes to parse."""
    waiting = []  # bytes at each event
    parsed = connection_module.H11Connection.next_event
    monkeypatch.setattr(
        connection_module.H11Connection,
        "next_event",
        lambda self: waiting.append(len(self._receive_buffer)) or parsed(self),
    )
    with connection(server[2], HEAD + CHUNKED) as raw:
        send(raw, in_chunks(b"{" + b" " * 1_000_000))
        assert until_closed(raw).startswith(b"HTTP/1.1 413")
    assert LIMIT // 5 <= len(waiting) < 1.1 * LIMIT // 5
    assert max(waiting) < 1 << 19  # asyncio reads up to 1 << 18 at once


@pytest.mark.parametrize("extension", [b"", b";" + b"x" * 1000])
def test_framing_over_the_limit_is_told_so(server, extension):
    padded = RAW[:-1] + b" " * 20_000 + b"}"
    with connection(server[2], HEAD + CHUNKED + in_chunks(padded, 1, extension)[: LIMIT + 30_000]) as raw:
        said = until_closed(raw)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and "framing" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_a_body_in_chunks_within_the_limit_is_served(server, size):
    padded = RAW[:-1] + b" " * 8000 * size + b"}"
    with connection(server[2], HEAD + CHUNKED + in_chunks(padded[: 1 << 20], size) + b"0\r\n\r\n") as raw:
        assert answered(raw)[0] == (200 if len(padded) <= 1 << 20 else 400)
        raw.sendall(post("/v1/completions", ASK))
        assert answered(raw)[0] == 200


def test_a_round_parses_few_events_and_the_rest_comes_later():
    conn = connection_module.H11Connection(LIMIT)
    conn.receive_data(HEAD + CHUNKED + in_chunks(b"x" * 1000))
    counts = []
    while not counts or conn.round_is_over:
        conn.begin_round()
        counts.append(0)
        while conn.next_event() is not h11.NEED_DATA:
            counts[-1] += 1
    assert sum(counts) == 1001 and max(counts) == connection_module.MAX_EVENTS


@pytest.mark.parametrize("size", [b"Content-Length: 100000\r\n\r\n", CHUNKED])
def test_after_an_answer_before_the_bodys_end_nothing_more_is_parsed(server, size, monkeypatch):
    """The client can read the whole response, although it goes on sending."""
    with connection(server[2], b"POST /nowhere HTTP/1.1\r\nHost: x\r\n" + size) as raw:
        response = b""
        while not response.endswith(b"}}"):
            response += raw.recv(1 << 16)
        assert response.startswith(b"HTTP/1.1 404") and b"\r\nconnection: close\r\n" in response
        events = []
        monkeypatch.setattr(
            connection_module.H11Connection, "next_event", lambda self: events.append(1) or h11.NEED_DATA
        )
        send(raw, in_chunks(b"x" * 200_000))
        raw.shutdown(socket.SHUT_WR)
        assert until_closed(raw) == b"" and not events
    wait_until(lambda: not server[1].server_state.connections)


def test_a_large_body_that_is_refused_at_once_does_not_cost_the_client_its_answer(server):
    """Closing a socket with unread bytes would reset the connection."""
    for _ in range(5):
        with connection(server[2], post("/v1/completions", b" " * 3_000_000, "Connection: close\r\n")) as raw:
            assert until_closed(raw).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400, "not both"),
        (b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(RAW), 415, "gzip"),
        (b"Content-Encoding: gzip, identity\r\nContent-Length: %d\r\n" % len(RAW), 415, "gzip"),
        (b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n" % len(RAW), 415, "gzip"),
    ],
)
def test_a_body_whose_end_or_coding_is_unclear_is_refused(server, headers, status, words):
    with connection(server[2], HEAD + headers + b"\r\n" + RAW) as raw:
        code, body = answered(raw)
        assert code == status and words in body["error"]["message"]
        assert status == 415 or until_closed(raw) == b""
    wait_until(lambda: is_idle(*server[:2]))


def test_identity_and_absolute_targets_are_as_good_as_none(server):
    identity = b"Content-Encoding: Identity\r\nContent-Length: %d\r\n\r\n" % len(RAW)
    with connection(server[2], HEAD.replace(b" /v1", b" http://proxy:80/v1") + identity + RAW) as raw:
        assert answered(raw)[0] == 200
        raw.sendall(b"GET HTTP://x/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(raw) == (200, {"status": "ok"})


def test_a_refused_connection_is_told_when_to_come_again():
    with serving(max_connections=1) as (_, server, url), connection(url, HEAD):
        wait_until(lambda: len(server.server_state.connections) == 1)
        answer = httpx.get(f"{url}/health")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_an_invalid_body_of_a_head_request_is_refused_without_a_body(server, caplog):
    """The response to HEAD never has a body, but the length of the one that GET would get."""
    with connection(server[2], HEAD.replace(b"POST", b"HEAD") + CHUNKED + b"zz\r\n") as raw:
        head, _, body = until_closed(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-length: 0" not in head and body == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_is_noticed_behind_bytes_of_its_next_request(server, monkeypatch):
    engine, running, url = server
    step, before = engine.step, engine.stats.aborted
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.2) or step())  # it does not end by itself
    with connection(url, post("/v1/completions", ASK | {"max_tokens": 240})) as raw:
        wait_until(lambda: engine.stats.cache_usage > 0)
        for part in (b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            raw.sendall(part)
            time.sleep(0.3)  # each is read by itself
    wait_until(lambda: is_idle(engine, running), seconds=30)
    assert engine.stats.aborted > before


def test_bytes_of_later_requests_are_read_up_to_a_limit_while_one_runs(server):
    engine, running, url = server
    with connection(url) as raw, held(engine):
        raw.sendall(post("/v1/completions", ASK))
        wait_until(lambda: running.loop.num_requests)
        (conn,) = running.server_state.connections
        raw.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10_000):
                raw.sendall(post("/v1/completions", ASK) * 100)
        assert len(conn.conn.trailing_data[0]) < 1 << 19  # asyncio reads up to 1 << 18 at once
    wait_until(lambda: is_idle(engine, running))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("headers", "version"), [("Connection: close\r\n", b"1.1"), ("", b"1.0")])
def test_bytes_behind_the_last_request_of_a_connection_mean_nothing(server, headers, version, stream):
    """Some clients send a line break after a body."""
    engine, running, url = server
    asked = post("/v1/completions", ASK | {"stream": stream}, headers).replace(b"HTTP/1.1", b"HTTP/" + version)
    with connection(url) as raw:
        with held(engine):
            raw.sendall(asked)
            wait_until(lambda: running.loop.num_requests)
            raw.sendall(b"\r\n")
            time.sleep(0.3)
        said = until_closed(raw)
    assert said.startswith(b"HTTP/1.1 200") and said.count(b"HTTP/1.1") == 1 and (b"[DONE]" in said) == stream


def test_an_upgrade_is_not_made_and_no_library_is_asked_for(server, caplog):
    """Java's client asks for HTTP/2 in this way with every first request."""
    upgrade = post(
        "/v1/completions", ASK, "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"
    )
    with connection(server[2], upgrade) as raw:
        assert answered(raw)[0] == 200
        raw.sendall(post("/v1/completions", ASK))
        assert answered(raw)[0] == 200
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("wrong", [b"GET /health HTTP/1.1\r\nHost: x\r\nA: ", HEAD + CHUNKED + b"zz\r\n"])
def test_what_is_refused_as_invalid_is_read_for_a_while(server, wrong):
    """Closing a socket with unread bytes would reset the connection."""
    for _ in range(5):
        with connection(server[2], wrong) as raw:
            raw.sendall(b"x" * 3_000_000)  # raises if the connection is reset
            said = b""
            while part := raw.recv(1 << 16):
                said += part
        assert said.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("when", ["with the body", "while it runs", "after the response"])
def test_line_breaks_before_a_request_mean_nothing(server, when):
    """RFC 9112, 2.2: a server should ignore one that a client sends after a body."""
    engine, running, url = server
    breaks = [b"\r\n", b"\r\n\r\n", b"\n"]
    with connection(url) as raw:
        for each in breaks:
            with held(engine):
                raw.sendall(post("/v1/completions", ASK) + (each if when == "with the body" else b""))
                wait_until(lambda: running.loop.num_requests)
                if when == "while it runs":
                    raw.sendall(each)
                    time.sleep(0.1)
            assert answered(raw)[0] == 200
            if when == "after the response":
                raw.sendall(each)
                time.sleep(0.1)
        raw.sendall(b"\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(raw) == (200, {"status": "ok"})


def test_after_an_invalid_body_the_client_is_not_asked_to_continue(server, caplog):
    expecting = HEAD + b"Expect: 100-continue\r\n" + CHUNKED + b"zz\r\n"
    with connection(server[2], expecting) as raw:
        said = until_closed(raw)
    assert said.startswith(b"HTTP/1.1 400") and b"100 Continue" not in said
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
