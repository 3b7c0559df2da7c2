"""The engine's thread, and how its outputs reach the coroutine that writes the response.

Only this thread changes the engine. Coroutines send it commands through a queue, and read outputs from an Inbox. Every
accepted body ends, with finished outputs or with an error.

A request in this file is a request of the engine: one prompt of a body, with its n completions.
"""

import asyncio
import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from jattn.engine import Engine, FinishReason, RequestOutput, SamplingParams, Stats, switch_interval
from jattn.engine.engine import Prompt
from jattn.serve.errors import FailedError, QueueFullError, StoppedError

log = logging.getLogger("jattn.serve")

Update = RequestOutput | Exception


class Inbox:
    """The newest output of each request of a body, written by the engine's thread and read by a coroutine.

    An output contains the request's whole text so far. So a slow reader misses nothing, and memory does not grow while
    it waits.
    """

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._has_updates = asyncio.Event()
        self._lock = threading.Lock()
        self._updates: dict[int, Update] = {}
        self._is_scheduled = False  # put() has asked for a wake, and get() has not run since

    def put(self, index: int, update: Update) -> bool:
        """Keep an update; True if `wake` must be called. From any thread. index: of the prompt in its body.

        An error is the last update, and is kept.
        """
        with self._lock:
            if not isinstance(self._updates.get(index), Exception):
                self._updates[index] = update
            must_wake, self._is_scheduled = not self._is_scheduled, True
        return must_wake

    async def get(self) -> dict[int, Update]:
        """Wait for updates; returns them by index."""
        await self._has_updates.wait()
        with self._lock:
            self._has_updates.clear()
            updates, self._updates, self._is_scheduled = self._updates, {}, False
        return updates

    @staticmethod
    def wake(inboxes: Iterable["Inbox"]) -> None:
        """Wake the readers of inboxes whose `put` was True. From any thread.

        There is one call for each event loop: every call writes to a socket, meanwhile the loop's thread takes the
        interpreter, and this thread waits to get it back. With a call for each reader, 512 streams of an engine that
        computes nothing took 1.94 s instead of 1.71.
        """
        events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for inbox in inboxes:
            events.setdefault(inbox._loop, []).append(inbox._has_updates)
        for loop, of_loop in events.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed: there is no reader
                loop.call_soon_threadsafe(_set_all, of_loop)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class OutputStream:
    """The outputs of a body's requests as they grow: (index, output) until all are finished, or a ServeError."""

    def __init__(self, inbox: Inbox, num_requests: int, abort: Callable[[], None]):
        self._inbox, self._num_requests, self._abort = inbox, num_requests, abort

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        unfinished = set(range(self._num_requests))
        while unfinished:
            for index, update in (await self._inbox.get()).items():
                if isinstance(update, Exception):
                    raise update
                if update.finished:
                    unfinished.discard(index)
                yield index, update

    async def finished(self) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts."""
        last = {index: output async for index, output in self}
        return [last[index] for index in range(self._num_requests)]

    def close(self) -> None:
        """Abort the unfinished requests. Call it for every stream, also after its end."""
        self._abort()


@dataclasses.dataclass(eq=False)
class _EngineRequest:
    """One prompt of a body, from its acceptance until the engine has finished or aborted it."""

    id: str
    index: int  # of the prompt in its body
    params: SamplingParams
    inbox: Inbox
    is_aborted: bool = False  # its outputs are no longer read


class EngineLoop:
    """Runs engine.step() while there is work, in a thread of its own.

    `max_queue` limits the sequences (n per prompt) from acceptance until the engine has finished or aborted them.
    """

    def __init__(self, engine: Engine, max_queue: int = 256):
        self.engine, self.max_queue = engine, max_queue
        self.failure: BaseException | None = None  # what broke the engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, _EngineRequest] = {}
        self._num_sequences = 0  # of all _requests
        self._lock = threading.Lock()  # guards _requests, _num_sequences and _closed
        self._closed: str | None = None  # why nothing more is accepted; None: it is open
        self._thread = threading.Thread(target=self._run, name="jattn-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, why: str = "the server is shutting down") -> None:
        """Accept nothing more; accepted requests continue."""
        with self._lock:
            self._closed = self._closed or why

    def stop(self, why: str = "the server is shutting down") -> None:
        """End every stream with an error, then the thread. Streams do not wait for the engine, which may compile."""
        self._stop_all(why)
        self._commands.put(None)

    def fail(self, error: BaseException) -> None:
        """The engine is broken: end every stream with an error. From any thread; the engine's may wait for ever."""
        self.failure = self.failure or error
        self._stop_all(f"the engine failed: {self.failure}")

    def join(self) -> None:
        """Wait for the thread to end; not if the engine is broken, because it may wait for a device for ever."""
        if self.failure is None:
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """True while requests are accepted."""
        return self._closed is None and self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Accepted prompts that are not finished or aborted yet."""
        return len(self._requests)

    @property
    def stats(self) -> Stats:
        """The engine's counters; may be read from any thread."""
        return self.engine.stats

    def check_open(self) -> None:
        """StoppedError if nothing more is accepted."""
        if self._closed is not None:
            raise StoppedError(self._closed)

    def submit(self, id: str, prompts: Sequence[Prompt], params: SamplingParams, salt: str = "") -> OutputStream:
        """Queue all prompts of a body, or none. Call this in the event loop that reads the stream.

        The requests' ids in the engine are `id`, or `id.0`, `id.1` ... if there are several prompts.
        """
        inbox = Inbox()
        ids = [id] if len(prompts) == 1 else [f"{id}.{index}" for index in range(len(prompts))]
        requests = [_EngineRequest(each, index, params, inbox) for index, each in enumerate(ids)]
        with self._lock:
            self.check_open()
            num_queued, num_new = self._num_sequences, len(ids) * params.n
            if num_queued + num_new > self.max_queue:
                raise QueueFullError(
                    f"{num_queued} sequences are running or waiting, this body needs {num_new} more, and the limit "
                    f"is {self.max_queue}; try again later"
                )
            self._requests.update({request.id: request for request in requests})
            self._num_sequences += num_new
        for request, prompt in zip(requests, prompts, strict=True):
            self._commands.put(lambda request=request, prompt=prompt: self._add(request, prompt, salt))
        return OutputStream(inbox, len(ids), lambda: self._request_abort(requests))

    # ------------------------------------------------------------------ in any thread
    def _stop_all(self, why: str) -> None:
        with self._lock:
            self._closed = why
            requests, self._requests, self._num_sequences = list(self._requests.values()), {}, 0
        Inbox.wake([request.inbox for request in requests if request.inbox.put(request.index, StoppedError(why))])

    def _request_abort(self, requests: list[_EngineRequest]) -> None:
        with self._lock:
            unfinished = [request for request in requests if self._requests.get(request.id) is request]
        for request in unfinished:
            request.is_aborted = True
            self._commands.put(lambda request=request: self._abort(request))

    # ------------------------------------------------------------------ in the engine's thread
    def _run(self) -> None:
        try:
            with switch_interval.short.in_server():
                while self._run_commands():
                    self._deliver(self.engine.step())
        except BaseException as error:  # of any kind: every waiting client must get an error
            log.exception("the engine is broken")
            self.fail(error)

    def _run_commands(self) -> bool:
        """Run the queued commands; wait for one while the engine has no work. False: end the thread."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, request: _EngineRequest, prompt: Prompt, salt: str) -> None:
        if request.is_aborted:
            self._remove(request)
            return
        try:
            self.engine.add_request(prompt, request.params, request_id=request.id, salt=salt)
        except Exception as error:  # fails this request only
            log.exception("%s: the engine could not add it", request.id)
            self._remove(request)
            failed = FailedError(f"the engine could not add this request: {error}")
            Inbox.wake([request.inbox] if request.inbox.put(request.index, failed) else [])

    def _abort(self, request: _EngineRequest) -> None:
        if self._requests.get(request.id) is not request:  # it has finished meanwhile
            return
        try:
            self.engine.abort(request.id)
        except Exception:
            log.exception("%s: the engine could not abort it", request.id)
        self._remove(request)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Put the outputs into the inboxes of their bodies, then wake the readers."""
        to_wake = []
        try:
            for output in outputs:
                request = self._requests.get(output.id)
                if request is None:
                    continue
                update: Update = output
                if output.finished:  # as whatever was aborted
                    self._remove(request)
                    if any(completion.finish_reason is FinishReason.ABORT for completion in output.outputs):
                        update = FailedError("the engine aborted this request")
                if request.inbox.put(request.index, update):
                    to_wake.append(request.inbox)
        finally:  # also after an error: put() asks for one wake, so fail() would not wake these readers again
            Inbox.wake(to_wake)

    def _remove(self, request: _EngineRequest) -> None:
        with self._lock:
            if self._requests.pop(request.id, None) is not None:
                self._num_sequences -= request.params.n
