"""Limits of a chat template: its time, and the size of the values it makes. Each check raises BoundError."""

import contextlib
import contextvars
import re
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

MOST_SECONDS = 2.0
"""CPU time of the thread to render one chat. Templates in use take milliseconds."""
MOST_SIZE = 1 << 24
"""Characters of a text, or of all the texts in a list."""
MOST_PARTS = 1 << 18
"""Values in a list or an object, nested ones included."""
MOST_NUMBER = 1 << 16
"""Largest width or count, and most bits of a product of integers."""
COUNTING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice")
"""Methods and filters whose integer arguments are widths or counts."""
GROWING = ("replace", "join", "expandtabs", "indent", "wordwrap", "translate")
"""Methods and filters whose result may be as large as the product of their operands' sizes."""
PERCENT = ("%", r"%(\([^)]*\))?[-+ #0-9.]*(\d{5}|\*)")
BRACES = ("{", r"\{[^{}]*:[^{}]*(\d{5}|\{)")
WIDTHS = {"%": PERCENT, "format": BRACES, "format_map": BRACES}
"""Method -> (what a format field begins with, a pattern of fields whose width has five digits or is an argument)."""

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline")


class BoundError(Exception):
    """The template asks for too much."""


@contextlib.contextmanager
def clock() -> Iterator[None]:
    """Count the time from here on."""
    token = _deadline.set(time.thread_time() + MOST_SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def measured(value: Any) -> Any:
    """The value, if it is not too large."""
    if isinstance(value, (str, list, tuple, dict)) and size_of(value) > MOST_SIZE:
        raise BoundError(f"a value of more than {MOST_SIZE} characters or {MOST_PARTS} parts")
    return value


def size_of(value: Any) -> int:
    """Characters and parts of a value, nested ones included; 2 * MOST_SIZE from MOST_PARTS parts on."""
    left, parts, characters = [value], 0, 0
    while left:
        item = left.pop()
        parts += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            left += item
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
        if parts + len(left) > MOST_PARTS:
            return 2 * MOST_SIZE
    return parts + characters


def joined(parts: Iterable[Any]) -> str:
    """The parts as one text."""
    size, found = 0, []
    for part in parts:
        found.append(part if isinstance(part, str) else str(measured(part)))
        size += len(found[-1])
        if size > MOST_SIZE:
            raise BoundError(f"a text of more than {MOST_SIZE} characters")
        check_time()
    return "".join(found)


def looped(values: Any) -> Any:
    """The iterable of a loop: a sized one as it is, any other with a check of the time at each item."""
    check_time()
    return values if isinstance(values, Sized) else timed(values)


def timed(values: Iterable[Any]) -> Iterator[Any]:
    """The values, with a check of the time at each."""
    for value in values:
        check_time()
        yield value


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large, before it is computed."""
    check_time()
    if operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(many, (str, list, tuple)) and isinstance(count, int) and len(many) * count > MOST_SIZE:
                raise BoundError(f"a product of more than {MOST_SIZE} characters or parts")
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MOST_NUMBER:
            raise BoundError("a number of too many digits")
    if operator == "%" and isinstance(left, str):
        check_growth("%", left, [right])


def check_growth(name: str, value: Any, others: list[Any]) -> None:
    """Refuse a call of a method or filter whose result might be too large, before it is computed."""
    numbers = [abs(other) for other in others if isinstance(other, int)] if name in COUNTING else []
    if max(numbers, default=0) > MOST_NUMBER:
        raise BoundError(f"{name} with a width or a count of more than {MOST_NUMBER}")
    if name in WIDTHS:
        sign, width = WIDTHS[name]
        if re.search(width, str(value)):
            raise BoundError("a format with a width of more than four digits, or one that an argument gives")
        units, size = str(value).count(sign), sum(map(size_of, others))
    elif name in GROWING and isinstance(value, Sized):
        if name == "join" and isinstance(value, str) and isinstance(others[0], Sized):
            value, others = others[0], [value]  # str.join: the list is the argument
        units, first = len(value), others[0] if others else None
        if name == "replace" and isinstance(value, str) and isinstance(first, str) and first:
            units = value.count(first)
        size = max([*map(size_of, others), *numbers], default=0)
    else:
        return
    if units * size > 4 * MOST_SIZE:
        raise BoundError(f"{name} may make more than {MOST_SIZE} characters")


def check_time() -> None:
    """Raise BoundError when the time is used up."""
    if time.thread_time() > _deadline.get(float("inf")):
        raise BoundError(f"more than {MOST_SECONDS:g} seconds")
