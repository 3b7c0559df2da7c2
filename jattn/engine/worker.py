"""Worker: a thread that calls functions one after the other."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_calls_of: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue]" = weakref.WeakKeyDictionary()
"""The queue of each thread that has not ended."""


class Worker:
    """Its thread ends with the Worker, or with the process, which waits for what was submitted.

    A ThreadPoolExecutor refuses work as soon as the main thread has ended, while other threads still use the engine.
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        _calls_of[thread] = self._calls
        thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False  # at exit _end_all ends the thread

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Call the function when all earlier calls have ended; the future has its result or its exception."""
        future: Future = Future()
        self._calls.put((future, function, args))
        return future

    def wait(self) -> None:
        """Wait until all calls so far have ended."""
        self.submit(lambda: None).result()


def _run(calls: "queue.SimpleQueue[tuple | None]") -> None:
    """The thread: run the calls in order, until None."""
    while (call := calls.get()) is not None:
        future, function, args = call
        try:
            future.set_result(function(*args))
        except BaseException as error:  # the caller of result() gets it
            future.set_exception(error)
        del call, future, function, args  # frees them while the thread waits for the next call


@atexit.register  # before JAX's own handler, which was registered earlier and drops the devices
def _end_all() -> None:
    """Let every thread finish its calls and end. Python would stop a daemon thread at any point, inside XLA too."""
    threads = dict(_calls_of)
    for calls in threads.values():
        calls.put(None)
    for thread in threads:
        thread.join()
