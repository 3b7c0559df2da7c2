"""Outputs from the engine's thread to a coroutine: the newest one of each request, not a queue of all."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

from jattn.engine import RequestOutput

News = RequestOutput | Exception


class Inbox:
    """The newest output of each request of a body. An output holds the whole request so far, so a slow reader misses
    nothing, and memory does not grow while it waits."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._news: dict[int, News] = {}
        self._is_called = False  # _arrived.set is scheduled, and get() has not run since

    def put(self, index: int, news: News) -> None:
        """From any thread."""
        with self._lock:
            self._news[index] = news
            must_call, self._is_called = not self._is_called, True
        if must_call:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: there is no reader
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> dict[int, News]:
        """Wait for new outputs; returns them by the request's index."""
        await self._arrived.wait()
        with self._lock:
            self._arrived.clear()
            news, self._news, self._is_called = self._news, {}, False
        return news


class Stream:
    """The outputs of a body's requests as they grow: (index, output), until all are finished, or a ServeError."""

    def __init__(self, inbox: Inbox, count: int, leave: Callable[[], None]):
        self._inbox, self._count, self._leave = inbox, count, leave

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        growing = set(range(self._count))
        while growing:
            for index, news in (await self._inbox.get()).items():
                if isinstance(news, Exception):
                    raise news
                if news.finished:
                    growing.discard(index)
                yield index, news

    async def finished(self) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts."""
        last = {index: output async for index, output in self}
        return [last[index] for index in range(self._count)]

    def close(self) -> None:
        """Abort the unfinished requests. Call it for every stream, also after its end."""
        self._leave()
