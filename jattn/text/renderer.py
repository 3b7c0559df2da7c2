"""Rendering of untrusted templates in processes of their own, with limits that the kernel and a clock keep.

A process serves one chat after another. One that reaches a limit is ended, and the next chat starts another. A process
ends by itself when this one does, because its input then ends.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MOST_SECONDS = 2.0
"""Processor time to compile a template and render one chat. Templates in use take milliseconds."""
MOST_WAIT = 10.0
"""Seconds by the clock for the same."""
MOST_START = 60.0
"""Seconds by the clock until a new process is ready; it takes about 0.1."""
MOST_MEMORY = 1 << 30
"""Bytes of address space of a process."""
MOST_SIZE = 1 << 24
"""Characters of a prompt."""
MOST_PROCESSES = 4
"""Chats that are rendered at once; others wait."""
PASSED = ("TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Variables of the environment that the process gets; an API key may be in another."""
PROGRAM = Path(__file__).with_name("sandbox.py")

_places = threading.BoundedSemaphore(MOST_PROCESSES)
_idle: list["Process"] = []


class EndedError(Exception):
    """The process ended in the middle of a chat; the text says why."""


def render(source: str, variables: dict[str, Any], where: str) -> str:
    """The rendered text; ValueError with the message of the template or of the limit that it reached."""
    request = dict(source=source, variables=variables, seconds=MOST_SECONDS, most=MOST_SIZE)
    line = (json.dumps(request, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    with _places:
        try:
            answer = _ask(line)
        except EndedError as error:
            raise ValueError(f"{where} refuses these messages: {error}") from None
    if "unreadable" in answer:
        raise ValueError(f"{where} is not a template that can be read: {answer['unreadable']}")
    if "refused" in answer:
        raise ValueError(f"{where} refuses these messages: {answer['refused']}")
    return answer["text"]


def _ask(line: bytes) -> dict[str, str]:
    process = _idle_one() or Process()
    try:
        answer = process.ask(line)
    except BaseException:
        process.close()
        raise
    _idle.append(process)
    return answer


def _idle_one() -> "Process | None":
    """A process that waits for a chat, taken off the list."""
    while True:
        try:
            process = _idle.pop()
        except IndexError:  # none, or another thread took it
            return None
        if process.is_alive():
            return process
        process.close()


class Process:
    """A running sandbox.py. Not thread-safe: one chat at a time."""

    def __init__(self):
        if importlib.util.find_spec("jinja2") is None:
            raise ImportError("a chat template needs jinja2: pip install 'jattn[models]'")
        # a new program and no fork of this one, whose threads (JAX has many) a fork would break; isolated, with this
        # process's search path; a session of its own, so that Ctrl-C in the terminal reaches only this process
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(sys.path), str(MOST_MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in PASSED if name in os.environ},
            start_new_session=True,
        )
        try:
            self._answer(MOST_START)
        except EndedError as error:  # not the chat's fault
            self.close()
            raise RuntimeError(f"the process that renders chat templates does not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, line: bytes) -> dict[str, str]:
        return self._answer(MOST_WAIT, line)

    def _answer(self, seconds: float, line: bytes = b"") -> dict[str, str]:
        """The answer to this line. Afterwards the clock is stopped for certain, so that it ends no later chat."""
        assert self._popen.stdin and self._popen.stdout
        late = threading.Event()
        clock = threading.Timer(seconds, lambda: (late.set(), self._popen.kill()))
        clock.daemon = True
        clock.start()
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
            answer = self._popen.stdout.readline(8 * MOST_SIZE)
        except OSError:  # it ended before it read everything
            answer = b""
        finally:
            clock.cancel()
            clock.join()
        if late.is_set() or not answer.endswith(b"\n"):
            self._popen.kill()
            code = self._popen.wait()
            raise EndedError(_why(code, seconds if late.is_set() else None))
        return json.loads(answer.decode("utf-8", "surrogatepass"))

    def close(self) -> None:
        self._popen.kill()
        with contextlib.suppress(OSError), self._popen:  # closes the pipes, and waits
            pass


def _why(code: int, seconds: float | None) -> str:
    if seconds is not None:
        return f"more than {seconds:g} seconds by the clock"
    if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
        return f"more than {MOST_SECONDS:g} seconds of processor time"
    return f"the process that renders them ended with code {code}"


@atexit.register
def close_idle() -> None:
    """End the processes that wait; the next chat starts one."""
    while _idle:
        _idle.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's
