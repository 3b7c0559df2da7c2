"""The engine's thread: the only caller of the engine; coroutines talk to it through queues.

A stream that was accepted always ends: with a finished output, or with an error that says what happened.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable

from jattn.engine import Engine, RequestOutput, SamplingParams, Stats
from jattn.engine.engine import Prompt

log = logging.getLogger("jattn.serve")


class QueueFullError(RuntimeError):
    """More requests wait than the server accepts."""


class StoppedError(RuntimeError):
    """The engine stopped before the request was finished."""


class EngineLoop:
    """Runs engine.step() while there is work, in a thread of its own."""

    def __init__(self, engine: Engine, max_queue: int = 256):
        self.engine, self.max_queue = engine, max_queue
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[RequestOutput | Exception], None]] = {}
        self._ids = (f"req-{i}" for i in itertools.count())
        self._lock = threading.Lock()
        self._stopped: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="jattn-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, why: str = "the server is shutting down") -> None:
        """End every stream with an error, and the thread; safe to call from anywhere, twice too."""
        self._commands.put(lambda: self._end(StoppedError(why)))
        self._commands.put(None)

    def join(self) -> None:
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Can it still serve?"""
        return self._stopped is None and self._thread.is_alive()

    @property
    def stats(self) -> Stats:
        """The engine's, as of now."""
        return self.engine.stats

    async def stream(self, prompt: Prompt, params: SamplingParams, salt: str = "") -> AsyncIterator[RequestOutput]:
        """A request's outputs as they grow. Leaving early, by an exception or a cancelled task, aborts it."""
        inbox: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        id = self._accept(lambda news: loop.call_soon_threadsafe(inbox.put_nowait, news))
        self._commands.put(lambda: self._add(id, prompt, params, salt))
        finished = False
        try:
            while not finished:
                news = await inbox.get()
                if isinstance(news, Exception):
                    finished = True
                    raise news
                finished = news.finished
                yield news
        finally:
            with self._lock:
                self._listeners.pop(id, None)
            if not finished:
                self._commands.put(lambda: self._abort(id))

    # ------------------------------------------------------------------ in any thread
    def _accept(self, listener: Callable[[RequestOutput | Exception], None]) -> str:
        with self._lock:
            if self._stopped is not None:
                raise StoppedError(str(self._stopped))
            if len(self._listeners) >= self.max_queue:
                raise QueueFullError(f"{len(self._listeners)} requests are being served or wait; try again later")
            id = next(self._ids)
            self._listeners[id] = listener
            return id

    # ------------------------------------------------------------------ in the engine's thread
    def _run(self) -> None:
        try:
            while self._obey():
                for output in self.engine.step():
                    self._tell(output)
        except Exception as error:  # whatever it is, nobody may wait for ever
            log.exception("the engine failed")
            self._end(StoppedError(f"the engine failed: {error}"))

    def _obey(self) -> bool:
        """Do what was asked; waits where there is nothing else to do. False: stop."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, id: str, prompt: Prompt, params: SamplingParams, salt: str) -> None:
        self.engine.add_request(prompt, params, request_id=id, salt=salt)

    def _abort(self, id: str) -> None:
        self.engine.abort(id)

    def _tell(self, output: RequestOutput) -> None:
        with self._lock:
            listener = self._listeners.get(output.id)
        if listener is not None:
            _send(listener, output)

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._stopped = error
            listeners = list(self._listeners.values())
        for listener in listeners:
            _send(listener, error)


def _send(listener, news) -> None:
    try:
        listener(news)
    except RuntimeError:  # its event loop has closed: nobody is there to hear
        log.debug("a listener left before its news came")
