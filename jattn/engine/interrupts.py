"""Ctrl-C between two changes of the engine's state, never inside one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold SIGINT back until the block ends, then let the program's own handler see it.

    A KeyboardInterrupt may be raised at any line, and half of a change (tokens accepted but not committed, a block
    released but still in a table) would give later requests wrong tokens. Python delivers signals to the main thread
    only, so in any other thread there is nothing to hold.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    seen: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if seen:
            handler(*seen[0])
