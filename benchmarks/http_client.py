"""A client that streams many completions at once and spends little on each: it counts bytes, and parses two events.

    python -m benchmarks.http_client PORT FILE      # FILE: {"connections": N, "bodies": [...], "at": [seconds, ...]}

Each connection sends one body after another; `at` says when each may be sent at the earliest. Bodies ask for a stream
with its usage. It prints one line of JSON: output tokens, events, errors, seconds, and milliseconds to the first event.
"""

import asyncio
import json
import pathlib
import re
import sys
import time
from collections import deque

TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
TAIL_BYTES = 4096
"""The end of a response that is kept: its last two events."""


class _Seen:
    """What all connections saw."""

    def __init__(self):
        self.tokens = self.events = self.errors = 0
        self.first_ms: list[float] = []


class _Connection(asyncio.Protocol):
    def __init__(self, bodies: deque, seen: _Seen, begin: float):
        self._bodies, self._seen, self._begin = bodies, seen, begin
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self._transport = transport
        self._send_next()

    def _send_next(self) -> None:
        if not self._bodies:
            self._transport.close()
            return
        at, body = self._bodies.popleft()
        wait = self._begin + at - time.perf_counter()
        self._tail = b""
        asyncio.get_running_loop().call_later(max(wait, 0), self._send, json.dumps(body).encode())

    def _send(self, body: bytes) -> None:
        self._sent, self._has_begun = time.perf_counter(), False
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200 "):  # the connection would stay open, and this wait
            self._tail = data
            self._transport.abort()
            return
        count = data.count(b"data: ")
        if count and not self._has_begun:
            self._has_begun = True
            self._seen.first_ms.append((time.perf_counter() - self._sent) * 1e3)
        self._seen.events += count
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._tail.endswith(END):
            found = TOKENS.findall(self._tail)
            self._seen.tokens += int(found[-1]) if found else 0
            self._send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._seen.errors += bool(self._tail) and not self._tail.endswith(END)
        self.ended.set_result(None)


async def load(port: int, bodies: list[dict], connections: int, at: list[float]) -> dict[str, float]:
    """Send all bodies to the server at this port of this machine; returns the figures."""
    seen, begin, waiting = _Seen(), time.perf_counter(), deque(zip(at, bodies, strict=True))
    made = [_Connection(waiting, seen, begin) for _ in range(connections)]
    for each in made:
        await asyncio.get_running_loop().create_connection(lambda each=each: each, "127.0.0.1", port)
    await asyncio.gather(*(each.ended for each in made))
    seconds, first = time.perf_counter() - begin, sorted(seen.first_ms)
    return dict(
        output_tokens=seen.tokens, events=seen.events, errors=seen.errors, seconds=seconds,
        output_tokens_per_s=seen.tokens / seconds,
        ttft_ms_p50=first[len(first) // 2] if first else 0, ttft_ms_p99=first[len(first) * 99 // 100] if first else 0,
    )  # fmt: skip


def main() -> None:
    asked = json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(load(int(sys.argv[1]), asked["bodies"], asked["connections"], asked["at"]))))


if __name__ == "__main__":
    main()
