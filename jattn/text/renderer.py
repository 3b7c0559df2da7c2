"""Renders untrusted templates in processes of their own, with limits that the kernel and a timer enforce.

A process renders one chat after another. One that reaches a limit is killed, and the next chat starts another. The
processes end when this one does, because their input then ends.
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MAX_CPU_SECONDS = 2.0
"""Processor time to inspect a template, or to compile it and render one chat. Published ones take milliseconds."""
MAX_ELAPSED_SECONDS = 10.0
"""Elapsed time for the same."""
MAX_START_SECONDS = 60.0
"""Elapsed time until a new process is ready; it takes about 0.1 s."""
MAX_MEMORY = 1 << 30
"""Address space of a process, in bytes."""
MAX_CHARACTERS = 1 << 24
"""Characters of a prompt."""
MAX_PROCESSES = 4
"""Chats that are rendered at the same time; others wait."""
ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the process gets. Others are withheld, because they may hold an API key."""
PROGRAM = Path(__file__).with_name("sandbox.py")

_slots = threading.BoundedSemaphore(MAX_PROCESSES)
_idle: list["Process"] = []


class ProcessEndedError(Exception):
    """The process ended before it gave a result; the message says why."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a template reads of its input."""

    variables: frozenset[str]  # that it looks up by name
    asks_for_null: bool  # it compares a message's content with none, as DeepSeek's does to write calls


def render(source: str, variables: dict[str, Any], where: str) -> str:
    """The rendered text; ValueError with the template's own message or the limit that it reached."""
    return _result_of(dict(source=source, variables=variables, max_characters=MAX_CHARACTERS), where)["text"]


def inspect(source: str, where: str) -> Inspection:
    """What the template reads; ValueError if it cannot be compiled."""
    result = _result_of(dict(source=source), where)
    return Inspection(frozenset(result["variables"]), result["asks_for_null"])


def _result_of(job: dict[str, Any], where: str) -> dict[str, Any]:
    """What a process answers to the job; ValueError if the template is invalid, refuses, or reaches a limit."""
    job |= dict(max_seconds=MAX_CPU_SECONDS)
    line = (json.dumps(job, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    with _slots:
        try:
            result = _run(line)
        except ProcessEndedError as error:
            raise ValueError(f"{where} refuses these messages: {error}") from None
    if "invalid" in result:
        raise ValueError(f"{where} cannot be compiled: {result['invalid']}")
    if "refused" in result:
        raise ValueError(f"{where} refuses these messages: {result['refused']}")
    return result


def _run(line: bytes) -> dict[str, Any]:
    process = _idle_process() or Process()
    try:
        result = process.run(line)
    except BaseException:
        process.close()
        raise
    _idle.append(process)
    return result


def _idle_process() -> "Process | None":
    """A process that waits for a chat, removed from the list; None if there is none."""
    while True:
        try:
            process = _idle.pop()
        except IndexError:  # none, or another thread took it
            return None
        if process.is_alive():
            return process
        process.close()


class Process:
    """A running sandbox.py. It renders one chat at a time, and is not thread-safe."""

    def __init__(self):
        if importlib.util.find_spec("jinja2") is None:
            raise ImportError("a chat template needs jinja2: pip install 'jattn[models]'")
        # A new program, because a fork of this process could deadlock: its threads may hold locks. -I ignores the
        # environment and the user's packages. In a new session, Ctrl-C in the terminal does not reach the process.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(sys.path), str(MAX_MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        try:
            self._result(MAX_START_SECONDS)
        except ProcessEndedError as error:  # RuntimeError, because the chat did not cause it
            self.close()
            raise RuntimeError(f"the process that renders chat templates does not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def run(self, line: bytes) -> dict[str, Any]:
        """The result of one job: a line that asks for an inspection or for a chat."""
        return self._result(MAX_ELAPSED_SECONDS, line)

    def _result(self, max_seconds: float, line: bytes = b"") -> dict[str, Any]:
        """The result for this line. The timer has ended when this returns, so that it cannot kill a later chat."""
        assert self._popen.stdin and self._popen.stdout
        timed_out = threading.Event()
        timer = threading.Timer(max_seconds, lambda: (timed_out.set(), self._popen.kill()))
        timer.daemon = True
        timer.start()
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
            result = self._popen.stdout.readline(8 * MAX_CHARACTERS)
        except OSError:  # the process ended before it had read everything
            result = b""
        finally:
            timer.cancel()
            timer.join()
        if timed_out.is_set() or not result.endswith(b"\n"):
            self._popen.kill()
            code = self._popen.wait()
            raise ProcessEndedError(_reason(code, max_seconds if timed_out.is_set() else None))
        return json.loads(result.decode("utf-8", "surrogatepass"))

    def close(self) -> None:
        self._popen.kill()
        with contextlib.suppress(OSError), self._popen:  # closes the pipes, and waits
            pass


def _reason(code: int, timeout: float | None) -> str:
    """Why a process ended. timeout: the elapsed seconds after which it was killed, if it was."""
    if timeout is not None:
        return f"more than {timeout:g} seconds of elapsed time"
    if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
        return f"more than {MAX_CPU_SECONDS:g} seconds of processor time"
    return f"the process that renders them ended with code {code}"


@atexit.register
def close_idle() -> None:
    """End the processes that wait for a chat; the next chat starts one."""
    while _idle:
        _idle.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's
