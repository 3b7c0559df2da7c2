"""Ctrl-C and SIGTERM end a command wherever its main thread is; and a program may start with closed descriptors.

Python calls a signal's handler in the main thread, between two bytecodes. Two things keep that from ending a command:
the main thread may be inside XLA for minutes, and what a handler raises in a callback of the garbage collector (JAX has
one) or in a destructor is printed and dropped.
"""

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

PATIENCE = 5.0
"""Seconds from a signal until the process ends although its main thread, or a thread that it waits for, is busy."""

RETRY_SECONDS = 0.05
"""How long after an exception was dropped the signal is repeated: its callback has ended by then."""

SENTENCES = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
CODES = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM}
"""The exit code after each signal; of a server that SIGTERM ends it is 0, see `exit_0`."""

DROPPED = b"\0"
"""What is written to the thread when the exception of a handler was dropped; other bytes are numbers of signals."""

_said: dict[int, int] = {}  # the signals that ended the command -> its exit code
_left_to_others = threading.Event()


def forget() -> None:
    """A new command begins in this process."""
    _said.clear()


def say(number: int, code: int | None = None) -> int:
    """Print the sentence of a signal that ends the command, once; returns its exit code: `code`, or that of CODES."""
    if number not in _said:
        _said[number] = CODES[signal.Signals(number)] if code is None else code
        with contextlib.suppress(OSError):  # nobody reads stderr any more: the signal ends the command all the same
            print(f"jattn: {SENTENCES[signal.Signals(number)]}", file=sys.stderr, flush=True)
    return _said[number]


def is_said() -> bool:
    """True if the command ends because of a signal."""
    return bool(_said)


def end() -> NoReturn:
    """End the process after a signal, without Python's own end, with the code of the first signal.

    A signal interrupts a compilation, but XLA's threads go on with it: Python's end would take away what they use, and
    the exit code would be that of a segmentation fault.
    """
    os._exit(next(iter(_said.values())))


def exit_0(number: int, frame: object) -> None:
    """The handler of a command that a supervisor ends by this signal as a matter of course."""
    raise SystemExit(say(number, 0))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Around a whole program: a thread sees each signal as it comes, repeats it if its exception was dropped, and ends
    the process if it has not ended after PATIENCE."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    hook = sys.unraisablehook

    def repeat_dropped(dropped) -> None:
        if issubclass(dropped.exc_type, (KeyboardInterrupt, SystemExit)):
            with contextlib.suppress(OSError):
                writer.send(DROPPED)  # takes no lock: the callback may have come while one is held
        else:
            hook(dropped)

    sys.unraisablehook = repeat_dropped
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="jattn-signals", daemon=True).start()
    try:
        yield
    finally:
        if _said:  # the process ends; another Ctrl-C would only print where
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(before)
        sys.unraisablehook = hook
        writer.close()  # ends the thread


@contextlib.contextmanager
def left_to_others() -> Iterator[None]:
    """Signals ask for an orderly stop here, which may take longer than PATIENCE."""
    _left_to_others.set()
    try:
        yield
    finally:
        _left_to_others.clear()


def _watch(reader: socket.socket) -> None:
    last = signal.SIGINT
    with reader:
        while received := reader.recv(64):
            for byte in received:
                if byte == DROPPED[0]:
                    time.sleep(RETRY_SECONDS)
                    _thread.interrupt_main(last)
                elif byte in CODES:
                    last = signal.Signals(byte)
                    if not _left_to_others.is_set():
                        timer = threading.Timer(PATIENCE, _end, (last,))
                        timer.daemon = True
                        timer.start()


def _end(number: signal.Signals) -> None:
    if not _left_to_others.is_set():
        os._exit(say(number, 0 if signal.getsignal(number) is exit_0 else None))


def open_missing() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

    Python has None in place of a closed one, print(file=None) writes to stdout, and the next file or socket that is
    opened would get its number: what a library prints would be in it. What is written to stdout is an error (EBADF),
    because it is the result of a command; complaints that nobody can read are not.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            access = os.O_RDONLY if name == "stdout" else os.O_RDWR
            os.open(os.devnull, access)  # gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  for ever
