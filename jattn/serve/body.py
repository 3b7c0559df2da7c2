"""Reading a request's body: a size limit, and strict JSON that every parser reads alike."""

import json
import math
from typing import Any

from starlette.requests import Request

from jattn.serve.errors import BadRequestError, TooLargeError

MAX_DEPTH = 32
"""Deepest nesting of objects and lists."""

MAX_DIGITS = 20
"""Most digits of an integer; a seed has up to 19."""


async def read(request: Request, most: int) -> bytes:
    """The body, at most `most` bytes; a larger content-length is refused without reading."""
    too_large = TooLargeError(f"the body is larger than {most} bytes")
    announced = request.headers.get("content-length", "0")  # h11 has checked that these are digits
    if len(announced) > MAX_DIGITS or int(announced) > most:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body: UTF-8 without a byte order mark, no key twice, no number beyond a double, no half of a
    surrogate pair, and nothing nested deeper than MAX_DEPTH."""
    try:
        body = json.loads(
            raw.decode("utf-8"),
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    _check(body, MAX_DEPTH)
    return body


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is larger than any number here")
    return number


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!a} stands twice in one object")
        found[name] = value
    return found


def _check(value: Any, depth: int) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequestError(
                f"the body holds half a surrogate pair, {value[error.start]!a}, which is no character"
            ) from error
    elif isinstance(value, (dict, list)):
        if not depth:
            raise BadRequestError(f"the body nests deeper than {MAX_DEPTH}")
        for part in value.items() if isinstance(value, dict) else value:
            if isinstance(part, tuple):
                _check(part[0], depth)
                part = part[1]
            if isinstance(part, (str, dict, list)):
                _check(part, depth - 1)
