"""Hostile clients against a server in this process with the embedded model, and valid requests in between.

    python -m tests.serve.fuzz --seconds 60 --seed 0        for a minute
    python -m tests.serve.fuzz --bodies 20000               for this many bodies

Every response must have a status that tests/serve/fuzz/expect.py allows, and the shape of the OpenAI interface. After
each hundred bodies valid requests must get the right response. At the end no request, block, task or file may be left.
The exit code is 1 if one of these is not so; then the body that was sent is printed.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import logging
import random
import sys
import threading
import time

from jattn.engine import Engine
from tests.serve.fuzz import bodies, clients, expect, leaks
from tests.serve.running import embedded_engine, serving

OPTIONS = dict(
    model_name=expect.MODEL,
    max_body_bytes=expect.MAX_BODY,
    max_queue=expect.MAX_SEQUENCES,
    max_prompts=expect.MAX_PROMPTS,
    header_timeout=0.5,
    body_timeout=1.0,
    keep_alive_timeout=2.0,
    write_timeout=1.0,
    max_connections=256,
)
WORKERS = 2
GOOD = {"prompt": "740+583=", "max_tokens": 8, "temperature": 0, "stop": "\n"}
MAX_AWAITED_TOKENS = 600
"""Tokens: the response to a body that asks for more is not awaited."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="for how long (default: 20, or until --bodies are sent)")
    parser.add_argument("--bodies", type=int, help="how many bodies (default: as many as fit into --seconds)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args(argv)
    seconds = args.seconds or (20.0 if args.bodies is None else float("inf"))
    return fuzz(seconds, args.bodies or sys.maxsize, args.seed)


def fuzz(seconds: float, max_bodies: int, seed: int, engine: Engine | None = None, want: str = "2340") -> int:
    """Returns the exit code. want: the model's output for 740+583=, which has the lowest digit first."""
    if engine is None:
        engine = embedded_engine()
        engine.warmup()
    errors = Errors(logging.ERROR)
    logging.getLogger().addHandler(errors)
    with contextlib.ExitStack() as stack:
        stack.callback(logging.getLogger().removeHandler, errors)
        _, server, url = stack.enter_context(serving(engine, **OPTIONS))
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every request that is not valid HTTP
        port = int(url.rpartition(":")[2])
        run = Run(port, seconds, max_bodies, want)
        run.good()  # makes the connections, threads and caches that stay
        before = leaks.resources(server)
        threads = [threading.Thread(target=run.work, args=(seed * WORKERS + w,)) for w in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not run.wrong:
            run.good()
            run.wrong += leaks.find(engine, server, before)
    run.wrong += errors.lines
    print(
        f"{run.sent} bodies in {time.monotonic() - run.begin:.0f} s: {dict(sorted(run.statuses.items()))}, "
        f"{run.abandoned} not awaited, {run.misbehaved} misbehaving clients, {run.num_good} good rounds, seed {seed}"
    )
    for line in run.wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if run.wrong else 0


class Errors(logging.Handler):
    """Collects the errors that the server, uvicorn or asyncio log."""

    def __init__(self, level: int):
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Run:
    """The state that the workers share."""

    def __init__(self, port: int, seconds: float, max_bodies: int, want: str):
        self.port, self.max_bodies, self.want = port, max_bodies, want
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.sent = self.abandoned = self.num_good = self.misbehaved = 0
        self.statuses: collections.Counter[int] = collections.Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def work(self, seed: int) -> None:
        """Send bodies until the end, or until something is wrong."""
        rng, client = random.Random(seed), clients.Client(self.port)
        pool = concurrent.futures.ThreadPoolExecutor(4)  # misbehaving clients are slow
        running: list[concurrent.futures.Future] = []
        raw, path = b"", ""
        try:
            while self._next():
                is_chat = rng.random() < 0.4
                path, raw = clients.PATHS[is_chat], bodies.mutated(rng, bodies.good(rng, is_chat))
                if rng.random() < 0.03:
                    running.append(
                        pool.submit(rng.choice(clients.MISBEHAVING), self.port, random.Random(rng.random()), raw)
                    )
                if len(running) > 8:
                    running.pop(0).result(clients.PATIENCE)
                    self.misbehaved += 1
                self._send(client, path, raw)
            for future in running:
                future.result(clients.PATIENCE)
                self.misbehaved += 1
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}\n  seed {seed}, POST {path} {raw[:2000]!r}")
        finally:
            pool.shutdown()
            client.close()

    def good(self) -> None:
        """Check that valid requests get the right text, streamed and not."""
        with contextlib.closing(clients.Client(self.port)) as client:
            for stream in (False, True):
                asked = GOOD | {"stream": stream}
                raw = json.dumps(asked).encode()
                if client.judge(clients.PATHS[0], raw) != 200:
                    raise clients.WrongError("a valid request was refused")
                _, kind, body = client.ask(clients.PATHS[0], raw)
                if stream:
                    choices, _ = clients.read_stream(asked, False, kind, body)
                    text = choices[0]["text"]
                else:
                    text = json.loads(body)["choices"][0]["text"]
                if text != self.want:
                    raise clients.WrongError(f"{text!r} is not {self.want!r}, the expected text")
            status, _, body = client.ask("/health", b"", "GET")
            if (status, json.loads(body)) != (200, {"status": "ok"}):
                raise clients.WrongError(f"/health says {status} {body!r}")
        self.num_good += 1

    def _next(self) -> bool:
        with self._lock:
            if self.wrong or self.sent >= self.max_bodies or time.monotonic() > self.end:
                return False
            self.sent += 1
            is_turn = self.sent % 100 == 0
        if is_turn:
            self.good()
        return True

    def _send(self, client: clients.Client, path: str, raw: bytes) -> None:
        if (
            expect.statuses(path, raw) == {200}
            and work_of(json.loads(raw), path == clients.PATHS[1]) > MAX_AWAITED_TOKENS
        ):
            self.abandoned += 1
            clients.abandons(self.port, path, raw)
            return
        status = client.judge(path, raw)
        with self._lock:
            self.statuses[status] += 1


def work_of(body: dict, is_chat: bool) -> int:
    """The number of tokens that a body asks for."""
    asked = expect.prompts({name: value for name, value in body.items() if value is not None}, is_chat)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or (expect.LENGTH if is_chat else 16)
    room = sum(min(limit, expect.LENGTH - len(p)) for p in asked)
    return room * (body.get("n") or 1)


if __name__ == "__main__":
    sys.exit(main())
