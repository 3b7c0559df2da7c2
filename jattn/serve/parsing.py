"""Threads that parse bodies: apart from all other work, and large bodies apart from small ones."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jattn.serve.errors import QueueFullError

SMALL = 1 << 14
"""Bytes up to which a body is parsed in threads of its own, so that it never waits for a large one."""

NUM_SMALL, NUM_LARGE = 4, 2
"""Threads; a large body may take seconds, mostly with the interpreter's lock held."""

MAX_BYTES = 1 << 23
"""Most bytes of large bodies that are parsed or wait for it, or 8 bodies of the largest size."""

T = TypeVar("T")


class Parsers:
    """Runs the work on a body in the threads for its size; QueueFullError where too many bytes wait already."""

    def __init__(self, max_body_bytes: int):
        self._small = ThreadPoolExecutor(NUM_SMALL, "jattn-parse-small")
        self._large = ThreadPoolExecutor(NUM_LARGE, "jattn-parse-large")
        self._max_bytes = max(MAX_BYTES, 8 * max_body_bytes)
        self._lock = threading.Lock()
        self._num_bytes = 0  # of large bodies

    async def run(self, raw: bytes, work: Callable[[bytes], T]) -> T:
        """work(raw), in a thread."""
        if len(raw) <= SMALL:  # their number is limited by that of the connections
            return await asyncio.wrap_future(self._small.submit(work, raw))
        size = len(raw)
        with self._lock:
            if self._num_bytes + size > self._max_bytes:
                raise QueueFullError("too many large bodies are being read; try again later")
            self._num_bytes += size
        future = self._large.submit(work, raw)
        future.add_done_callback(lambda done: self._done(size))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop what waits, and let the threads end."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, size: int) -> None:
        with self._lock:
            self._num_bytes -= size
