"""What a command prints: tables and progress bars, by rich on a terminal, if it is installed; and expected errors."""

import contextlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from jattn.errors import CacheFullError, UnsupportedError

EXPECTED = (ValueError, OSError, ImportError, UnsupportedError, CacheFullError)
"""Errors that a user can cause. They are printed in one line, without a traceback."""

SECONDS_BETWEEN_LINES = 10.0
"""Where stderr is no terminal but perhaps a service's log, a long task prints a line at most this often."""

Report = Callable[[int, int, str], None]
"""report(done, total, what): called before each part of a long task."""


def is_of_transfer_guard(error: BaseException) -> bool:
    """Did jax_transfer_guard refuse a transfer?"""
    return re.search("Disallowed [a-z-]+ transfer", str(error)) is not None


def told(error: BaseException) -> str:
    """The message of an error. Of the operating system's: the file if there is one, and what is wrong; no number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeEncodeError) and not error.encoding.lower().startswith("utf"):  # of print
        missing = error.object[error.start]
        return f"the encoding of the output, {error.encoding}, has no {missing!a}: set PYTHONIOENCODING=utf-8"
    return str(error)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], plain: str) -> None:
    """Print a table on a terminal; elsewhere print `plain`."""
    console = _console(sys.stdout)
    if console is None:
        print(plain)
        return
    from rich import box
    from rich.table import Table

    found = Table(*head, box=box.SIMPLE_HEAD, show_header=any(head), pad_edge=False)
    for row in rows:
        found.add_row(*map(_as_it_is, row))
    console.print(found)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Report]:
    """A progress bar on stderr; without rich a line for each part; a line now and then if stderr is not a terminal."""
    console = _console(sys.stderr)
    if console is None:
        yield _line(title) if sys.stderr.isatty() else _now_and_then(_line(title))
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total, what: bars.update(
            task, completed=done, total=total, description=f"{title} {_as_it_is(what)}"
        )


def _console(stream: TextIO):
    """rich's console; None if the stream is not a terminal, or rich is not installed."""
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(file=stream)


def _line(title: str) -> Report:
    return lambda done, total, what: print(f"{title} {done + 1}/{total}: {what}", file=sys.stderr, flush=True)


def _now_and_then(report: Report) -> Report:
    """A Report that calls this one at most every SECONDS_BETWEEN_LINES, and not before so many."""
    last = time.monotonic()

    def seldom(done: int, total: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            report(done, total, what)
            last = time.monotonic()

    return seldom


def _as_it_is(text: str) -> str:
    """The text with square brackets escaped, which rich reads as markup."""
    from rich.markup import escape

    return escape(text)
