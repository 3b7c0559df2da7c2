"""Refuses a call of an engine while another thread is inside one."""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def make_lock() -> Any:
    """A lock that its thread may take again: generate() calls step(), and step() a user's tokenizer."""
    return threading.RLock()


def one_at_a_time(method: Method) -> Method:
    """The method; RuntimeError, and nothing is changed, while another thread holds the engine's `caller_lock`.

    Two threads that change the same block tables would give requests each other's tokens, or end the process.
    """

    @functools.wraps(method)
    def called(self, *args, **options):
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
