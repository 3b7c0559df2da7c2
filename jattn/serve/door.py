"""Around every request: an id, a line in the log, and a JSON answer even if the application raises."""

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jattn.serve import errors

log = logging.getLogger("jattn.serve")

PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}
PROBES = ("/health", "/metrics")  # requested every few seconds: logged at DEBUG


class Door:
    """ASGI middleware. The same id is in the answer, in the header X-Request-Id, in the engine and in the log."""

    def __init__(self, app: ASGIApp, is_closing: Callable[[], bool]):
        self._app, self._is_closing = app, is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = f"{PREFIXES.get(scope['path'], 'req')}-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["id"] = id
        begin, status = time.monotonic(), None

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
                if self._is_closing():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            if status is not None:  # the answer has begun: break the connection, so that it is not taken for whole
                raise
            log.exception("%s failed", id)
            await errors.response_of(errors.ServeError("the server failed; its log says why"))(scope, receive, named)
        finally:
            seconds = time.monotonic() - begin
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            log.log(level, "%s %s %.200r %s in %.3f s", id, scope["method"], scope["path"], status, seconds)


def allowed(headers: Iterable[tuple[bytes, bytes]], key: str | None) -> bool:
    """True if no key is needed, or if there is one header `Authorization: Bearer KEY` with this key.

    A key beyond ASCII may arrive in UTF-8 or Latin-1. The comparison takes the same time for every key.
    """
    if key is None:
        return True
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, said = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    wanted = [key.encode("utf-8", errors="surrogateescape")]
    wanted += [key.encode("latin-1")] if all(ord(char) < 256 for char in key) else []
    hashed = lambda text: hashlib.sha256(text).digest()
    same = [hmac.compare_digest(hashed(said.strip(b" ")), hashed(each)) for each in wanted]
    return scheme.lower() == b"bearer" and any(same)
