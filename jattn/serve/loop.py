"""The engine's thread: it alone changes the engine; coroutines send it commands and read its outputs from inboxes.

Every accepted body ends, with finished outputs or with an error.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from jattn.engine import Engine, FinishReason, RequestOutput, SamplingParams, Stats
from jattn.engine.engine import Prompt
from jattn.serve.errors import FailedError, QueueFullError, StoppedError
from jattn.serve.stream import Inbox, Stream

log = logging.getLogger("jattn.serve")


@dataclasses.dataclass(eq=False)
class _Request:
    """One prompt of a body, from its acceptance until the engine has finished or aborted it."""

    id: str
    index: int  # of the prompt in its body
    params: SamplingParams
    inbox: Inbox
    has_left: bool = False  # the client is gone


class EngineLoop:
    """Runs engine.step() while there is work, in a thread of its own.

    `max_queue` limits the sequences (n per prompt) from acceptance until the engine has finished or aborted them.
    """

    def __init__(self, engine: Engine, max_queue: int = 256):
        self.engine, self.max_queue = engine, max_queue
        self.failure: BaseException | None = None  # what broke the engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()  # guards _requests and _closed
        self._closed: str | None = None  # why nothing is accepted any more
        self._thread = threading.Thread(target=self._run, name="jattn-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, why: str = "the server is shutting down") -> None:
        """Accept nothing more; accepted requests go on."""
        with self._lock:
            self._closed = self._closed or why

    def stop(self, why: str = "the server is shutting down") -> None:
        """End every stream with an error, then the thread."""
        self._commands.put(lambda: self._end(why))
        self._commands.put(None)

    def join(self) -> None:
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Does it accept requests?"""
        return self._closed is None and self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Accepted prompts that are not finished or aborted yet."""
        return len(self._requests)

    @property
    def stats(self) -> Stats:
        """The engine's counters now; read from any thread."""
        return self.engine.stats

    def check_open(self) -> None:
        """StoppedError if nothing is accepted any more."""
        if self._closed is not None:
            raise StoppedError(self._closed)

    def submit(self, id: str, prompts: Sequence[Prompt], params: SamplingParams, salt: str = "") -> Stream:
        """Queue all of a body's prompts, or none of them; call it and read the Stream in the same event loop.

        Their ids in the engine are `id`, or `id.0`, `id.1` ... where there are several.
        """
        inbox = Inbox()
        ids = [id] if len(prompts) == 1 else [f"{id}.{index}" for index in range(len(prompts))]
        requests = [_Request(each, index, params, inbox) for index, each in enumerate(ids)]
        with self._lock:
            self.check_open()
            held = sum(request.params.n for request in self._requests.values())
            if held + len(ids) * params.n > self.max_queue:
                raise QueueFullError(
                    f"{held} sequences are served or wait, this body asks for {len(ids) * params.n} more, and at most "
                    f"{self.max_queue} may; try again later"
                )
            self._requests.update({request.id: request for request in requests})
        for request, prompt in zip(requests, prompts, strict=True):
            self._commands.put(lambda request=request, prompt=prompt: self._add(request, prompt, salt))
        return Stream(inbox, len(ids), lambda: self._leave(requests))

    # ------------------------------------------------------------------ in any thread
    def _leave(self, requests: list[_Request]) -> None:
        with self._lock:
            running = [request for request in requests if self._requests.get(request.id) is request]
        for request in running:
            request.has_left = True
            self._commands.put(lambda request=request: self._abort(request))

    # ------------------------------------------------------------------ in the engine's thread
    def _run(self) -> None:
        try:
            while self._obey():
                for output in self.engine.step():
                    self._tell(output)
        except BaseException as error:  # of any kind: no client may wait for ever
            log.exception("the engine is broken")
            self.failure = error
            self._end(f"the engine failed: {error}")

    def _obey(self) -> bool:
        """Run the queued commands; waits for one while the engine has no work. False: end the thread."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, request: _Request, prompt: Prompt, salt: str) -> None:
        if request.has_left:
            self._let_go(request)
            return
        try:
            self.engine.add_request(prompt, request.params, request_id=request.id, salt=salt)
        except Exception as error:  # fails this request only
            log.exception("%s: the engine could not take it", request.id)
            self._let_go(request)
            request.inbox.put(request.index, FailedError(f"the engine could not take this request: {error}"))

    def _abort(self, request: _Request) -> None:
        if self._requests.get(request.id) is not request:  # it ended meanwhile
            return
        try:
            self.engine.abort(request.id)
        except Exception:
            log.exception("%s: the engine could not abort it", request.id)
        self._let_go(request)

    def _tell(self, output: RequestOutput) -> None:
        request = self._requests.get(output.id)
        if request is None:
            return
        aborted = any(done.finish_reason is FinishReason.ABORT for done in output.outputs)
        if output.finished:
            self._let_go(request)
        request.inbox.put(request.index, FailedError("the engine dropped this request") if aborted else output)

    def _let_go(self, request: _Request) -> None:
        with self._lock:
            self._requests.pop(request.id, None)

    def _end(self, why: str) -> None:
        with self._lock:
            self._closed = why
            requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            request.inbox.put(request.index, StoppedError(why))
