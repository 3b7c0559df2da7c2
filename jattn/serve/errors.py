"""The errors that clients see: an HTTP status, and a body in the JSON of the OpenAI interface."""

import json
from typing import Any

from starlette.responses import Response

MAX_MESSAGE = 1000
"""Characters of a message, which may quote the client's text."""


class ServeError(Exception):
    """An error response; `param` names the field of the body that is wrong."""

    status, kind, code = 500, "server_error", None
    headers: dict[str, str] = {}

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class BadRequestError(ServeError):
    """The body is not valid, or uses a feature that is not supported."""

    status, kind = 400, "invalid_request_error"


class InvalidApiKeyError(ServeError):
    """The API key is missing or wrong."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}


class UnknownModelError(ServeError):
    """The body or path names a model that is not served here."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"


class BodyTooLargeError(ServeError):
    """The body has more bytes than the server accepts."""

    status, kind = 413, "invalid_request_error"


class ContentEncodingError(ServeError):
    """The body is compressed."""

    status, kind = 415, "invalid_request_error"


class QueueFullError(ServeError):
    """More sequences are running or waiting, or more bodies are being parsed, than the server accepts."""

    status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"
    headers = {"Retry-After": "1"}


class FailedError(ServeError):
    """The engine could not finish this request; others continue."""


class StoppedError(ServeError):
    """The server is shutting down, or its engine is broken."""

    status = 503


LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Characters that end a line for `str.splitlines` -> how JSON escapes them; it always escapes the others."""


def encode(body: dict[str, Any]) -> bytes:
    """JSON in UTF-8, in one line by Unicode's rules too; ValueError for NaN or infinity, which JSON does not have.

    A reader of a stream may split it into lines by these rules, as httpx does.
    """
    text = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="replace")
    for char, escaped in LINE_ENDS.items():
        text = text.replace(char, escaped)
    return text


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message[:MAX_MESSAGE], "type": kind, "param": param, "code": code}}


def body_of(error: ServeError) -> dict[str, Any]:
    return error_body(str(error), error.kind, error.param, error.code)


def response_of(error: ServeError) -> Response:
    return json_response(body_of(error), error.status, error.headers)


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, media_type="application/json")
