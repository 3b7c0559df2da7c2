"""Connections that are slow, stuck or too many: each is closed in time, and delays no other."""

import contextlib
import gc
import json
import socket
import time

import httpx
import pytest

from jattn.serve.connection import MAX_REFUSED_OPEN, Connection
from tests.serve.running import answered, connection, is_idle, post, serving, slow_engine, until_closed, wait_until

ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server():
    with serving(header_timeout=1.0, body_timeout=1.0, keep_alive_timeout=1.5, write_timeout=1.0) as running:
        yield running


def drip(raw, bytes_, seconds):
    """Send byte by byte until the server closes."""
    try:
        for byte in bytes_:
            raw.sendall(bytes([byte]))
            time.sleep(seconds)
    except OSError:
        return


def closed_after(url, sent, dripped=b""):
    """(the bytes that the server sent, the seconds until it closed the connection)."""
    begin = time.monotonic()
    with connection(url, sent) as raw:
        drip(raw, dripped, 0.1)
        return until_closed(raw), time.monotonic() - begin


def test_a_connection_that_says_nothing_is_closed(server):
    said, seconds = closed_after(server[2], b"")
    assert said == b"" and 0.9 < seconds < 9  # not the default, 10 s


def test_headers_that_take_too_long_are_told_so_and_closed(server):
    """Slowloris: a byte now and then does not extend the time-out."""
    said, seconds = closed_after(server[2], HEAD, b"X-Slow: " + b"x" * 600)  # for a minute
    assert seconds < 9 and (not said or b"HTTP/1.1 408" in said)
    said, _ = closed_after(server[2], HEAD)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
    assert "headers" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("how", ["length", "chunked"])
def test_a_body_that_takes_too_long_is_told_so_and_closed(server, how):
    engine, loop, url = server
    size = b"Content-Length: 1000\r\n\r\n" if how == "length" else b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    said, seconds = closed_after(url, HEAD + size)
    assert 0.9 < seconds < 30 and said.startswith(b"HTTP/1.1 408")
    assert "body" in json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]
    _, seconds = closed_after(url, HEAD + b"Content-Length: 1000\r\n\r\n", b"x" * 600)
    assert seconds < 30


def test_a_body_that_nobody_wants_cannot_be_sent_for_ever(server):
    """After a refusal at the headers, a client may send only until the time-out."""
    begin = time.monotonic()
    with connection(server[2], b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n") as raw:
        drip(raw, b"1\r\nx\r\n" * 200, 0.05)  # for a minute
        assert b"404" in until_closed(raw)
    assert time.monotonic() - begin < 30


def test_an_idle_connection_is_closed_and_a_used_one_kept(server):
    url = server[2]
    with connection(url) as raw:
        for _ in range(4):
            raw.sendall(post("/v1/completions", ASK))
            assert answered(raw)[0] == 200
            time.sleep(0.5)
        begin = time.monotonic()
        until_closed(raw)
        assert time.monotonic() - begin < 4.5  # not the default, 5 s


def test_a_second_request_has_the_header_time_out_too(server):
    with connection(server[2], post("/v1/completions", ASK)) as raw:
        assert answered(raw)[0] == 200
        raw.sendall(HEAD)
        assert b"HTTP/1.1 408" in until_closed(raw)


def test_requests_in_a_row_on_one_connection_are_all_answered(server):
    """Pipelined requests, the last without keep-alive."""
    raw = post("/v1/completions", ASK) * 3 + post("/v1/completions", ASK, "Connection: close\r\n")
    with connection(server[2], raw) as peer:
        assert until_closed(peer).count(b"HTTP/1.1 200") == 4


def test_a_long_answer_outlives_every_time_out_while_it_is_read():
    limits = dict.fromkeys(("header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout"), 0.8)
    with serving(slow_engine(0.05), **limits) as (_, _, url):
        for stream in (False, True):
            begin = time.monotonic()
            ask = ASK | {"max_tokens": 200, "stream": stream}
            answer = httpx.post(f"{url}/v1/completions", json=ask)
            assert answer.status_code == 200 and time.monotonic() - begin > 1
            assert answer.text.rstrip().endswith("[DONE]" if stream else "}")


def test_a_client_that_takes_nothing_holds_back_itself_alone_and_is_closed(monkeypatch):
    """Its events coalesce, other clients are served meanwhile, and the write time-out closes its connection."""
    made = Connection.connection_made

    def with_small_buffer(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", with_small_buffer)
    with serving(write_timeout=2.0) as (engine, server, url):
        ask = ASK | dict(max_tokens=250, n=8, temperature=1, logprobs=20, stream=True)
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.sendall(post("/v1/completions", ask))
            wait_until(lambda: server.loop.num_requests == 1)
            assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200
            wait_until(lambda: not server.server_state.connections)
            assert b"[DONE]" not in until_closed(deaf)
        wait_until(lambda: is_idle(engine, server))
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_more_connections_than_the_limit_are_told_so_and_places_come_back():
    with serving(max_connections=3) as (_, server, url):
        peers = [connection(url, HEAD) for _ in range(3)]
        for peer in peers:
            peer.__enter__()
        wait_until(lambda: len(server.server_state.connections) == 3)
        with connection(url) as fourth:
            said = until_closed(fourth)
        assert (
            said.startswith(b"HTTP/1.1 503")
            and "connections" in json.loads(said.split(b"\r\n\r\n")[1])["error"]["message"]
        )
        for peer in peers:
            peer.__exit__(None, None, None)
        wait_until(lambda: not server.server_state.connections)
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_a_client_that_sends_its_request_before_it_reads_is_told_of_the_limit():
    """As http.client, and therefore requests and urllib: after a close its second part was a broken pipe."""
    with serving(max_connections=1) as (_, server, url), connection(url, HEAD):
        wait_until(lambda: len(server.server_state.connections) == 1)
        with connection(url) as second:
            second.recv(1, socket.MSG_PEEK)  # the response is there
            for _ in range(3):
                second.sendall(HEAD)
                time.sleep(0.05)
            said = until_closed(second)
            assert said.startswith(b"HTTP/1.1 503") and said.endswith(b"}}")
        others = [connection(url) for _ in range(MAX_REFUSED_OPEN + 5)]
        with contextlib.ExitStack() as stack:
            for told in [until_closed(stack.enter_context(each)) for each in others]:
                assert told.startswith(b"HTTP/1.1 503") and told.endswith(b"}}")
            wait_until(
                lambda: len(server.server_state.connections) <= 1 + MAX_REFUSED_OPEN
            )  # the others are not waited for
    with serving(max_connections=1) as (_, server, url):
        with connection(url, HEAD), connection(url) as told:
            until_closed(told)  # and stays open at this end
            assert len(server.server_state.connections) == 2
            assert httpx.get(f"{url}/health").status_code == 503
        wait_until(lambda: not server.server_state.connections)


def test_a_refused_client_that_has_left_is_nothing_to_log(caplog):
    with serving(max_connections=1) as (_, server, url), connection(url, HEAD):
        wait_until(lambda: len(server.server_state.connections) == 1)
        server.servers[0].get_loop().call_soon_threadsafe(time.sleep, 0.3)  # the server comes to it later
        time.sleep(0.1)
        for _ in range(3):
            with connection(url):  # closed before the 503 is written, which a reset answers
                pass
        assert httpx.get(f"{url}/health").status_code == 503
        wait_until(lambda: len(server.server_state.connections) == 1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_refused_connection_takes_no_place():
    with serving(max_connections=1) as (_, server, url):
        with contextlib.ExitStack() as stack:
            with connection(url, HEAD):
                wait_until(lambda: len(server.server_state.connections) == 1)
                until_closed(stack.enter_context(connection(url)))  # and stays open at this end
            wait_until(lambda: len(server.server_state.connections) <= 1)
            assert httpx.get(f"{url}/health").status_code == 200


def test_cut_connections_leave_no_task_no_timer_and_no_place():
    with serving() as (engine, server, url):
        raw = post("/v1/completions", ASK | {"max_tokens": 200, "stream": True})
        for cut in (0, 1, 10, len(raw) // 2, len(raw) - 1, len(raw)):
            with connection(url, raw[:cut]):
                pass
        wait_until(lambda: not server.server_state.connections and not server.server_state.tasks)
        wait_until(lambda: is_idle(engine, server))
        wait_until(lambda: not connections_alive())


def connections_alive():
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Connection]
