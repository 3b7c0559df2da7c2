"""The embedder's thread. It embeds what has arrived meanwhile in one go; every accepted body ends."""

import dataclasses
import logging
import queue
import threading
from concurrent.futures import Future

import numpy as np

from jattn.embedder import Embedder
from jattn.serve.errors import FailedError, QueueFullError, StoppedError

log = logging.getLogger("jattn.serve")


@dataclasses.dataclass(eq=False)
class _Body:
    """The inputs of one request, as tokens, and where their embeddings go."""

    rows: list[list[int]]
    result: "Future[np.ndarray]"

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


class EmbeddingLoop:
    """Runs Embedder.pooled in a thread of its own. `max_queue` limits the bodies that run or wait."""

    def __init__(self, embedder: Embedder, max_queue: int = 256):
        self.embedder, self.max_queue = embedder, max_queue
        self.failure: BaseException | None = None  # what broke the thread
        self._queue: queue.SimpleQueue[_Body | None] = queue.SimpleQueue()
        self._unfinished: set[_Body] = set()
        self._lock = threading.Lock()  # guards _unfinished and _closed
        self._closed: str | None = None  # why nothing more is accepted; None: it is open
        self._thread = threading.Thread(target=self._run, name="jattn-embedder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, why: str = "the server is shutting down") -> None:
        """Accept nothing more; accepted bodies continue."""
        with self._lock:
            self._closed = self._closed or why

    def stop(self, why: str = "the server is shutting down") -> None:
        """End every body that waits with an error, then the thread."""
        self._stop_all(why)
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """True while bodies are accepted."""
        return self._closed is None and self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Accepted bodies that are not finished yet."""
        return len(self._unfinished)

    def check_open(self) -> None:
        """StoppedError if nothing more is accepted."""
        if self._closed is not None:
            raise StoppedError(self._closed)

    def submit(self, rows: list[list[int]]) -> "Future[np.ndarray]":
        """Queue the inputs of a body; the result is f32[N, size], see Embedder.pooled. A cancelled one is skipped."""
        body = _Body(rows, Future())
        with self._lock:
            self.check_open()
            if len(self._unfinished) >= self.max_queue:
                raise QueueFullError(
                    f"{len(self._unfinished)} requests are running or waiting, and the limit is {self.max_queue}; try "
                    "again later"
                )
            self._unfinished.add(body)
        body.result.add_done_callback(lambda _: self._forget(body))
        self._queue.put(body)
        return body.result

    def _forget(self, body: _Body) -> None:
        with self._lock:
            self._unfinished.discard(body)

    # ------------------------------------------------------------------ in the embedder's thread
    def _run(self) -> None:
        try:
            while (bodies := self._next()) is not None:
                self._embed([body for body in bodies if self._begin(body)])
        except BaseException as error:  # of any kind: every waiting client must get an error
            log.exception("the embedder is broken")
            self.failure = error
            self._stop_all(f"the embedder failed: {error}")
            with self._lock:
                running = [body for body in self._unfinished if body.result.running()]
            for body in running:
                body.result.set_exception(StoppedError(f"the embedder failed: {error}"))

    def _next(self) -> list[_Body] | None:
        """The bodies that wait, up to a batch of tokens, but at least one. None: end the thread."""
        bodies: list[_Body] = []
        while not bodies or sum(body.num_tokens for body in bodies) < self.embedder.max_batched_tokens:
            try:
                body = self._queue.get(block=not bodies)
            except queue.Empty:
                break
            if body is None:
                return None
            bodies.append(body)
        return bodies

    def _begin(self, body: _Body) -> bool:
        """True if the caller must give this body its result: no other thread does, and its client has not left."""
        with self._lock:
            result = body.result
            return not result.done() and not result.running() and result.set_running_or_notify_cancel()

    def _embed(self, bodies: list[_Body]) -> None:
        """Embed these bodies together; if that fails, each alone, so that only the one fails whose inputs are why."""
        if not bodies:
            return
        try:
            rows = self.embedder.pooled([row for body in bodies for row in body.rows])
        except Exception as error:
            if len(bodies) > 1:
                log.warning("%d requests could not be embedded together, now each alone: %s", len(bodies), error)
                for body in bodies:
                    self._embed([body])
                return
            log.exception("a request could not be embedded")
            bodies[0].result.set_exception(FailedError(f"these inputs could not be embedded: {error}"))
            return
        ends = np.cumsum([len(body.rows) for body in bodies])
        for body, part in zip(bodies, np.split(rows, ends[:-1]), strict=True):
            body.result.set_result(part)

    def _stop_all(self, why: str) -> None:
        """Bodies that run now still get their embeddings."""
        with self._lock:
            self._closed = why
            bodies = list(self._unfinished)
        for body in bodies:
            if self._begin(body):
                body.result.set_exception(StoppedError(why))
