"""A request's body: read with a size limit, then parsed as strict JSON in threads of its own."""

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from jattn import strict_json
from jattn.errors.arguments import short
from jattn.serve.errors import BadRequestError, BodyTooLargeError, ContentEncodingError, QueueFullError

MAX_DEPTH = 32
"""Nesting of objects and lists."""

MAX_DIGITS = 20
"""Characters of an integer. A seed has up to 19 digits."""

MAX_VALUES = 20_000
"""Keys and list items in all objects and lists of a body, besides the items of `prompt` or `input`."""

MAX_SMALL_BYTES = 1 << 14
"""Up to this size a body is parsed in the threads for small bodies, so that it never waits for a large one."""

NUM_SMALL_THREADS, NUM_LARGE_THREADS = 4, 2
"""Parsing a large body may take seconds and holds the GIL most of the time."""

MAX_PENDING_BYTES = 1 << 23
"""Total size of the large bodies that are being parsed or wait for it; at least 8 bodies of the largest size fit."""

_TOO_MANY = f"the body has more than {MAX_VALUES} keys and list items besides its prompt's"
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, also one that does not end: if that did not match, the search would read on from each of its quotes.

Nothing that was matched is tried again (`++`, `*+`): for that, `re` would keep about 130 bytes for each byte of a text.
"""

T = TypeVar("T")


async def read(request: Request, max_bytes: int) -> bytes:
    """The bytes of the body. A larger Content-Length is refused without reading; so is a compressed body."""
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip()
    if encoding.lower() not in ("", "identity"):
        raise ContentEncodingError(f"Content-Encoding {short(encoding)} is not supported; send the body uncompressed")
    too_large = BodyTooLargeError(
        f"the body is larger than {max_bytes} bytes: send less in one request, or start the server with a higher "
        "max_body_bytes"
    )
    content_length = request.headers.get("content-length", "0")  # h11 has checked that these are digits
    if len(content_length) > MAX_DIGITS or int(content_length) > max_bytes:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse(raw: bytes, max_prompts: int, max_model_len: int, field: str = "prompt") -> dict[str, Any]:
    """The JSON object in a body: UTF-8 without a byte order mark, strict JSON, within the limits above.

    Too many values, or too many items of `field`, which is "prompt" or "input", are refused before they are visited.
    """
    _count_marks(raw, MAX_VALUES + max_prompts, MAX_VALUES + max_prompts * max_model_len)
    try:
        body = strict_json.parse(raw.decode("utf-8"), MAX_DEPTH, MAX_DIGITS)
    except ValueError as error:
        raise BadRequestError(f"the body cannot be read as JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    num_prompt_items = _count_prompt_items(body.get(field), max_prompts, max_model_len, field)
    try:
        strict_json.check(body, MAX_DEPTH, MAX_VALUES + num_prompt_items)
    except strict_json.TooManyValuesError:
        raise BadRequestError(_TOO_MANY) from None
    except ValueError as error:
        raise BadRequestError(f"the body cannot be read as JSON: {error}") from error
    return body


def _count_marks(raw: bytes, max_nested: int, max_commas: int) -> None:
    """Refuse a body with more brackets and braces, or commas, than parse() can accept.

    Parsing a megabyte of empty lists takes 0.1 s, during which json.loads lets no other thread run.
    """
    count = lambda text: (text.count(b"[") + text.count(b"{"), text.count(b","))
    nested, commas = count(raw)
    if nested > max_nested + 1 or commas > max_commas:  # they may be inside strings: count again without those
        nested, commas = count(_STRING.sub(b"", raw))
        if nested > max_nested + 1 or commas > max_commas:
            raise BadRequestError(_TOO_MANY)


def _count_prompt_items(prompt: Any, max_prompts: int, max_model_len: int, field: str) -> int:
    """The number of items of a list of prompts or of tokens, those of inner lists included."""
    if not isinstance(prompt, list) or not prompt:
        return 0
    if type(prompt[0]) is int:
        longest = count = len(prompt)
    else:
        if len(prompt) > max_prompts:
            raise BadRequestError(f"the body has {len(prompt)} {field}s, at most {max_prompts}", field)
        lengths = [len(each) for each in prompt if isinstance(each, list)]
        longest, count = max(lengths, default=0), len(prompt) + sum(lengths)
    if longest + (field == "prompt") > max_model_len:  # a prompt has at least one token of output
        limit = "prompt and output together may have" if field == "prompt" else "this model reads up to"
        raise BadRequestError(f"the {field} has {longest} tokens, and {limit} {max_model_len}", field)
    return count


class ParserThreads:
    """Runs the work on a body in the threads for its size; QueueFullError if too many bytes already wait."""

    def __init__(self, max_body_bytes: int):
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, "jattn-parse-small")
        self._large = ThreadPoolExecutor(NUM_LARGE_THREADS, "jattn-parse-large")
        self._max_pending_bytes = max(MAX_PENDING_BYTES, 8 * max_body_bytes)
        self._lock = threading.Lock()
        self._num_pending_bytes = 0  # of large bodies

    async def run(self, raw: bytes, work: Callable[[bytes], T]) -> T:
        """work(raw), in a thread."""
        if len(raw) <= MAX_SMALL_BYTES:  # the limit on connections bounds their number
            return await asyncio.wrap_future(self._small.submit(work, raw))
        size = len(raw)
        with self._lock:
            if self._num_pending_bytes + size > self._max_pending_bytes:
                raise QueueFullError("too many large bodies are waiting to be parsed; try again later")
            self._num_pending_bytes += size
        future = self._large.submit(work, raw)
        future.add_done_callback(lambda done: self._release(size))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop the work that waits, and let the threads end."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def _release(self, size: int) -> None:
        with self._lock:
            self._num_pending_bytes -= size
