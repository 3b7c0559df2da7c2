"""How a server ends: gracefully after a signal, at once when its engine breaks."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import httpx
import pytest
import uvicorn

from jattn.serve import server as server_module
from jattn.serve.connection import Connection
from tests.serve.running import (
    PATIENCE,
    connection,
    free_port,
    held,
    post,
    serving,
    slow_engine,
    until_closed,
    wait_until,
)

ASK = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
LONG = ASK | {"max_tokens": 200}


@contextlib.contextmanager
def asking(url, body):
    """A list that holds the response to a request, sent in a thread, after the block has ended."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
    thread.start()
    yield answers
    thread.join(PATIENCE)


def test_after_a_signal_what_runs_is_finished_and_what_comes_is_refused():
    with serving(grace=PATIENCE) as (engine, server, url):
        with (
            asking(url, LONG) as whole, asking(url, LONG | {"stream": True}) as streamed, httpx.Client() as client,
            held(engine),
        ):  # fmt: skip
            client.get(f"{url}/health")  # a connection from before the signal
            wait_until(lambda: server.loop.num_requests == 2)
            server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: not server.loop.healthy)
            for asked in (client, httpx):  # on the old connection, and on a new one
                refused = asked.post(f"{url}/v1/completions", json=ASK)
                assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
                assert refused.headers["connection"] == "close"
            assert httpx.get(f"{url}/health").status_code == 503
        assert whole[0].status_code == 200 and whole[0].json()["usage"]["completion_tokens"] == 200
        assert streamed[0].text.endswith("data: [DONE]\n\n")
        wait_until(lambda: server.should_exit)
        with pytest.raises(httpx.ConnectError):
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 0)


@pytest.mark.parametrize("how", ["the grace period", "a second signal"])
def test_what_is_not_finished_in_time_ends_with_an_error(how):
    grace = 0.3 if how == "the grace period" else 60
    with serving(slow_engine(0.5), grace=grace) as (_, server, url):
        with asking(url, LONG) as whole, asking(url, LONG | {"stream": True}) as streamed:
            wait_until(lambda: server.loop.num_requests == 2)
            server.handle_exit(signal.SIGTERM, None)
            if how == "a second signal":
                server.handle_exit(signal.SIGTERM, None)
        assert whole[0].status_code == 503 and "shutting down" in whole[0].json()["error"]["message"]
        last = streamed[0].text.strip().rpartition("data: ")[2]
        assert "shutting down" in json.loads(last)["error"]["message"]


@pytest.mark.parametrize("order", ["asked, then the signal", "the signal, then asked"])
def test_what_another_process_asks_for_is_no_second_signal(order):
    """A supervisor sends SIGTERM to every process, and the others pass theirs on: requests may still finish."""
    ended = []
    loop = types.SimpleNamespace(drain=lambda: None, stop=lambda: ended.append(True), num_requests=1, failure=None)
    server = server_module.Server(uvicorn.Config(app=lambda: None), loop, grace=60)
    steps = [server.ask_to_stop, lambda: server.handle_exit(signal.SIGTERM, None)]
    for step in steps if order.startswith("asked") else reversed(steps):
        step()
        assert not asyncio.run(server.on_tick(1)) and not ended and server._deadline is not None
    server.handle_exit(signal.SIGTERM, None)
    assert asyncio.run(server.on_tick(1)) and ended


def test_a_request_whose_body_is_still_coming_when_the_signal_does_is_refused():
    with serving(grace=PATIENCE) as (engine, server, url):
        raw = post("/v1/completions", ASK)
        with asking(url, LONG), connection(url, raw[:-5]) as peer, held(engine):
            wait_until(lambda: server.loop.num_requests == 1)
            server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: not server.loop.healthy)
            peer.sendall(raw[-5:])
            assert until_closed(peer).startswith(b"HTTP/1.1 503")


def test_a_client_that_does_not_read_is_cut_off_at_the_end_and_no_error_logged(monkeypatch, caplog):
    monkeypatch.setattr(server_module, "FLUSH_SECONDS", 0.5)
    made = Connection.connection_made

    def with_small_buffer(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", with_small_buffer)
    with serving(write_timeout=60, grace=0) as (_, server, url), socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        deaf.sendall(post("/v1/completions", LONG | dict(n=8, temperature=1, logprobs=20, stream=True)))
        wait_until(lambda: any(each.flow and each.flow.write_paused for each in server.server_state.connections))
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: server.should_exit and not server.server_state.tasks)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


# ---------------------------------------------------------------------- processes
BREAKS = """
import sys, time
from jattn.serve import ServerOptions, serve
from tests.serve.running import make_engine

engine = make_engine()
step, seen = engine.step, set()

def breaks():  # not before both requests are there
    time.sleep(0.1)
    outputs = step()
    seen.update(output.id for output in outputs)
    if len(seen) > 1 and any(len(output.token_ids) > 5 for output in outputs):
        raise RuntimeError("the device is gone")
    return outputs

engine.step = breaks
serve(engine, ServerOptions(model_name="fake"), port=int(sys.argv[1]))
"""


@contextlib.contextmanager
def process(arguments, port):
    """A server in a separate process that answers requests."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen([sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        while True:
            assert child.poll() is None, "the server did not start"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_broken_engine_ends_streams_with_an_error_and_the_process_with_a_code():
    """So that a supervisor restarts it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process(["-c", BREAKS, str(port)], port) as child:
        with asking(url, LONG | {"stream": True}) as streamed, asking(url, LONG) as whole:
            pass
        assert "the device is gone" in json.loads(streamed[0].text.strip().rpartition("data: ")[2])["error"]["message"]
        assert whole[0].status_code == 503 and "the device is gone" in whole[0].json()["error"]["message"]
        _, said = child.communicate(timeout=PATIENCE)
        assert child.returncode == 1 and "the device is gone" in said


def test_jattn_serve_ends_with_code_0_after_a_signal_and_lets_its_requests_finish():
    port = free_port()
    sizes = ["--num-blocks", "65", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--deterministic"]
    command = ["-m", "jattn", "serve", "--port", str(port), *sizes, "--backend", "sdpa", "--grace", "60"]
    with process([*command, "--no-warmup"], port) as child:
        body = {"prompt": "740+583=", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        with connection(f"http://127.0.0.1:{port}", post("/v1/completions", body | {"stream": True})) as raw:
            begin = raw.recv(10)
            child.send_signal(signal.SIGTERM)
            streamed = begin + until_closed(raw)
        assert streamed.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n" in streamed
        assert child.wait(PATIENCE) == 0
