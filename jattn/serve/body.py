"""Reading a request's body: a size limit, and strict JSON that every parser reads alike."""

import json
import math
import re
from typing import Any

from starlette.requests import Request

from jattn.serve.errors import BadRequestError, EncodedError, TooLargeError

MAX_DEPTH = 32
"""Deepest nesting of objects and lists."""

MAX_DIGITS = 20
"""Most characters of an integer; a seed has up to 19."""

MAX_VALUES = 20_000
"""Most keys and list items in all objects and lists of a body, besides the items of `prompt`."""

_TOO_MANY = f"the body has more than {MAX_VALUES} keys and list items besides its prompt's"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONG_INTEGER = re.compile(rb"[0-9]{%d}" % MAX_DIGITS)


async def read(request: Request, most: int) -> bytes:
    """The body, at most `most` bytes; a larger content-length is refused without reading, and so is compression."""
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("", "identity"):
        raise EncodedError(f"Content-Encoding: {encoding:.80} is not served here; send the body uncompressed")
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


def parse(raw: bytes, max_prompts: int, max_model_len: int) -> dict[str, Any]:
    """The JSON object in a body: UTF-8 without a byte order mark, no key twice, no number beyond a double, no half of a
    surrogate pair, nothing nested deeper than MAX_DEPTH, at most MAX_VALUES values besides those of `prompt`.

    Too many values, or items of a `prompt`, are refused before they are looked at.
    """
    _count_marks(raw, MAX_VALUES + max_prompts, MAX_VALUES + max_prompts * max_model_len)
    try:
        body = json.loads(
            raw.decode("utf-8"),
            parse_int=_integer if _LONG_INTEGER.search(raw) else int,  # json reads int without calling it
            parse_float=_number,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    _check(body, MAX_DEPTH, MAX_VALUES + _count(body.get("prompt"), max_prompts, max_model_len))
    return body


def _count_marks(raw: bytes, max_nested: int, max_commas: int) -> None:
    """Refuse a body of more objects and lists, or commas, than parse() can accept. json.loads takes 0.1 s for a
    megabyte of empty lists and lets no other thread run meanwhile."""
    count = lambda text: (text.count(b"[") + text.count(b"{"), text.count(b","))
    nested, commas = count(raw)
    if nested > max_nested + 1 or commas > max_commas:  # perhaps of a text
        nested, commas = count(_STRING.sub(b"", raw))
        if nested > max_nested + 1 or commas > max_commas:
            raise BadRequestError(_TOO_MANY)


def _count(prompt: Any, max_prompts: int, max_model_len: int) -> int:
    """How many items a list of prompts or tokens has, in itself and in its lists."""
    if not isinstance(prompt, list) or not prompt:
        return 0
    if type(prompt[0]) is int:
        longest = count = len(prompt)
    else:
        if len(prompt) > max_prompts:
            raise BadRequestError(f"{len(prompt)} prompts, at most {max_prompts}", "prompt")
        lengths = [len(each) for each in prompt if isinstance(each, list)]
        longest, count = max(lengths, default=0), len(prompt) + sum(lengths)
    if longest >= max_model_len:
        raise BadRequestError(
            f"the prompt has {longest} tokens, and prompt and output together may have {max_model_len}", "prompt"
        )
    return count


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
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice[:80]!a} stands twice in one object")
    return found


def _check(value: Any, depth: int, num_left: int) -> int:
    """Refuse what may not be in a body; how many more values it may have after this one's."""
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
        num_left -= len(value)
        if num_left < 0:
            raise BadRequestError(_TOO_MANY)
        for part in value.items() if isinstance(value, dict) else value:
            if isinstance(part, tuple):
                _check(part[0], depth, num_left)
                part = part[1]
            if isinstance(part, (str, dict, list)):
                num_left = _check(part, depth - 1, num_left)
    return num_left
