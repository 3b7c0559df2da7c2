"""Refuses a call of an engine while another thread is inside one, and in a fork of its process."""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class CallerLock:
    """A lock that its thread may take again: generate() calls step(), and step() a user's tokenizer.

    pid: of the process that made it. A fork has neither the engine's threads nor XLA's: it would wait forever.
    """

    def __init__(self):
        self.pid = os.getpid()
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release


def one_at_a_time(method: Method) -> Method:
    """The method; RuntimeError, and nothing is changed, while another thread holds the engine's `caller_lock`, or in a
    fork of the process that made the engine.

    Two threads that change the same block tables would give requests each other's tokens, or end the process.
    """

    @functools.wraps(method)
    def called(self, *args, **options):
        if os.getpid() != self.caller_lock.pid:
            raise RuntimeError(
                f"{method.__name__}() in a fork of the process that made this engine, whose threads it does not have: "
                "make the engine in the process that calls it; multiprocessing's 'spawn' starts one that is no fork"
            )
        if not self.caller_lock.acquire(blocking=False):
            raise RuntimeError(
                f"{method.__name__}() while another thread calls this engine: call it from one thread, or hold a lock "
                "of your own around each call"
            )
        try:
            return method(self, *args, **options)
        finally:
            self.caller_lock.release()

    return cast(Method, called)
