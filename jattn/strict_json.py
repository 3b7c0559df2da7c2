"""Strict JSON from untrusted sources: it refuses what JSON parsers read differently or cannot write again.

`parse` refuses duplicate keys, NaN, infinity, and numbers that a 64-bit float cannot hold. `check` limits the nesting
and the number of values, and refuses unpaired surrogates, which have no UTF-8 encoding. Every error is a ValueError.
"""

import functools
import json
import math
import re
import sys
from typing import Any

from jattn.errors.arguments import short


def parse(text: str, max_depth: int, max_digits: int | None = None) -> Any:
    """The value of a JSON text.

    max_digits: characters of an integer, sign included; None: Python's own limit of 4300 digits. max_depth: only named
    in the error for a text that is nested too deeply for the parser; `check` enforces it.
    """

    integer = int  # json reads `int` in C, without a call
    if max_digits is not None and re.search(f"[0-9]{{{max_digits}}}", text) is not None:
        integer = functools.partial(_integer, max_digits)
    try:
        return json.loads(
            text,
            parse_int=integer,
            parse_float=_finite,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except RecursionError:
        raise ValueError(_too_deep(max_depth)) from None


class TooManyValuesError(ValueError):
    """There are more keys and list items than allowed."""


def check(value: Any, max_depth: int, max_values: int = sys.maxsize) -> None:
    """ValueError for an unpaired surrogate or too deep a nesting; TooManyValuesError for too many keys and list items.

    A container with too many entries is refused before they are visited.
    """
    try:
        _check(value, max_depth, max_values)
    except RecursionError:
        raise ValueError(_too_deep(max_depth)) from None


def _check(value: Any, depth_left: int, values_left: int) -> int:
    """How many more values there may be after this one; RecursionError where the nesting is too deep."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = value[error.start]
            raise ValueError(f"a string has the unpaired surrogate {found!a}; surrogates must come in pairs") from None
    elif isinstance(value, (dict, list)):
        if not depth_left:
            raise RecursionError
        values_left -= len(value)
        if values_left < 0:
            raise TooManyValuesError("there are too many keys and list items")
        for key in value if isinstance(value, dict) else ():
            _check(key, depth_left, values_left)
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, (str, dict, list)):
                values_left = _check(part, depth_left - 1, values_left)
    return values_left


def _too_deep(max_depth: int) -> str:
    return f"lists and objects are nested more than {max_depth} deep"


def _integer(max_digits: int, digits: str) -> int:
    if len(digits) > max_digits:
        raise ValueError(f"an integer has {len(digits)} digits, at most {max_digits}")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{short(digits)} is not a JSON number that a 64-bit float can hold")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {short(twice)} appears twice; keep one")
    return found
