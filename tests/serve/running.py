"""A server in a thread of this process, with the fake model or the embedded one; and raw connections to it."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time

import httpx._config
import numpy as np

from jattn import embedded
from jattn.engine import Engine
from jattn.serve import ServerOptions
from jattn.serve.server import bind, make_server
from jattn.text import ByteTokenizer, ChatTemplate
from tests.engine import fake

CONFIG = fake.FakeConfig(vocab_size=258, max_positions=256)
PARAMS = {"bias": np.where(np.arange(258) < 2, -1000, 0).astype(np.float32)}  # no end, no poison by itself
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

PATIENCE = 120
"""Seconds until what does not happen is an error: no measure of the server, so that a busy machine passes, too."""
for _part in ("connect", "read", "write", "pool"):  # of requests by httpx, which would wait for 5 s
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, PATIENCE)


def make_engine(**options):
    """The fake model, whose tokens are bytes."""
    sizes = dict(num_blocks=65, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, deterministic=True)
    tokenizer, template = ByteTokenizer(num_special=2), ChatTemplate(TEMPLATE)
    return Engine(CONFIG, PARAMS, tokenizer, forward=fake.forward, chat_template=template, **sizes | options)


def slow_engine(seconds=0.02):
    """The fake model, where each step takes `seconds` longer."""
    engine = make_engine()
    step = engine.step
    engine.step = lambda: time.sleep(seconds) or step()
    return engine


@contextlib.contextmanager
def held(engine):
    """The engine's steps wait until the block ends; its thread may be inside one."""
    step, gate = engine.step, threading.Event()
    engine.step = lambda: gate.wait(PATIENCE) and step()
    try:
        yield
    finally:
        engine.step = step
        gate.set()


def embedded_engine(**options):
    """The embedded model, which adds, with a chat template."""
    sizes = dict(num_blocks=129, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, backend="sdpa")
    engine = Engine.from_pretrained(embedded.directory(), **sizes | options)
    engine.chat_template = ChatTemplate(TEMPLATE)
    return engine


@contextlib.contextmanager
def serving(engine=None, **options):
    """(engine, server, base address) of a server in a thread."""
    engine = make_engine() if engine is None else engine
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    server = make_server(engine, ServerOptions(**dict(model_name="fake") | options))
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield engine, server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.loop.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def free_port():
    """A port for a process that starts later: of those that Linux gives to nobody who asks for any port."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(true, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def is_idle(engine, server):
    """True if no request, sequence or block is left."""
    return not (server.loop.num_requests or engine.has_work or engine.stats.cache_usage)


@contextlib.contextmanager
def connection(url, sent=b"", timeout=PATIENCE):
    """A socket to the server; the bytes `sent` have been sent."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout) as raw:
        raw.sendall(sent)
        yield raw


def post(path, body, headers=""):
    """The bytes of a POST."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n{headers}\r\n"
    return head.encode("utf-8") + raw


def answered(raw):
    """(status, JSON) of the next response on a connection that stays open."""
    response = http.client.HTTPResponse(raw)
    response.begin()
    return response.status, json.loads(response.read())


def until_closed(raw):
    """All bytes that the server sends before it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
