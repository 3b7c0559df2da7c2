"""Delays Ctrl-C until a change of the engine's state is complete."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay SIGINT until the block ends, then call the program's own handler.

    A KeyboardInterrupt may be raised at any line. Half of a change (tokens accepted but not committed, a block released
    but still in a table) would give later requests wrong tokens. Python delivers signals to the main thread only, so
    other threads need no delay.
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
