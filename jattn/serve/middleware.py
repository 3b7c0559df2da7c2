"""ASGI middleware around every HTTP request: its id, its log line, a JSON error; and the check of the API key."""

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jattn.serve import errors

log = logging.getLogger("jattn.serve")

ID_PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl", "/v1/embeddings": "embd"}
PROBES = ("/health", "/metrics")
"""Paths that are requested every few seconds; they are logged at DEBUG."""


class RequestMiddleware:
    """Gives each HTTP request an id, logs it with its status and duration, and answers 500 if the application raises.

    The id is also in the body of the response, in its header X-Request-Id and in the engine. is_closing: True if the
    response must ask the client to close the connection.
    """

    def __init__(self, app: ASGIApp, is_closing: Callable[[], bool]):
        self._app, self._is_closing = app, is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"{ID_PREFIXES.get(scope['path'], 'req')}-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["id"] = id
        begin, status = time.monotonic(), None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
                if self._is_closing():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if status is not None:  # the response has begun: uvicorn breaks the connection, so it cannot seem complete
                raise
            log.exception("%s failed", id)
            failed = errors.ServeError("the server failed; its log has the details")
            await errors.response_of(failed)(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - begin
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            log.log(level, "%s %s %.200r %s in %.3f s", id, scope["method"], scope["path"], status, seconds)


def has_api_key(headers: Iterable[tuple[bytes, bytes]], api_key: str | None) -> bool:
    """True if no key is needed, or if there is exactly one header `Authorization: Bearer KEY` with this key.

    A key outside ASCII may arrive in UTF-8 or Latin-1. The comparison takes the same time for every key.
    """
    if api_key is None:
        return True
    values = [value for name, value in headers if name == b"authorization"]
    scheme, _, credentials = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    accepted = [api_key.encode("utf-8", errors="surrogateescape")]
    accepted += [api_key.encode("latin-1")] if all(ord(char) < 256 for char in api_key) else []
    digest = lambda text: hashlib.sha256(text).digest()
    is_equal = [hmac.compare_digest(digest(credentials.strip(b" ")), digest(each)) for each in accepted]
    return scheme.lower() == b"bearer" and any(is_equal)
