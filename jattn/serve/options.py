"""The server's limits and time-outs."""

import dataclasses
import ipaddress
import math
import re
from collections.abc import Sequence

from jattn.engine.params import is_encodable

BODY_BYTES, EMBEDDING_BODY_BYTES = 1 << 20, 2048 * 4096
"""The default limit of a body, of an engine's server and of an embedding server: 2048 inputs of 4096 bytes each."""

ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:]+\])(?::([1-9][0-9]{0,4}))?")
"""The form of a browser's header Origin: scheme, host, and the port unless it is the scheme's default."""

ENDS_IN_NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)\.?")
"""A host that browsers read as an IPv4 address."""

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server is called, who may call it, its limits (counts or bytes) and its time-outs (seconds)."""

    model_name: str = "jattn"
    api_key: str | None = None
    allow_origins: Sequence[str] = ()  # whose pages may call the server (CORS); "*": all
    max_body_bytes: int | None = None  # None: BODY_BYTES, of an embedding server EMBEDDING_BODY_BYTES
    max_queue: int = 256  # sequences running or waiting: prompts x n of every accepted body; of embeddings: bodies
    max_prompts: int = 64  # in one body
    max_inputs: int = 2048  # in one body of /v1/embeddings
    default_max_tokens: int = 16  # of /v1/completions; a chat's default is max_model_len
    max_connections: int = 512
    header_timeout: float = 10.0  # for the request line and headers, from the connection or their first byte
    body_timeout: float = 60.0  # for a request's body, from the end of its headers
    keep_alive_timeout: float = 5.0  # between two requests of a connection
    write_timeout: float = 60.0  # for a client that reads nothing of its response
    grace: float = 20.0  # for running requests after SIGTERM

    @property
    def body_limit(self) -> int:
        """max_body_bytes, or the default of an engine's server; an embedding server fills in its own."""
        return BODY_BYTES if self.max_body_bytes is None else self.max_body_bytes

    @property
    def max_framing_bytes(self) -> int:
        """Bytes of a chunked body that are not its content."""
        return max(1 << 16, self.body_limit // 16)

    def __post_init__(self):
        reasons = []
        counts = ("max_queue", "max_prompts", "max_inputs", "default_max_tokens", "max_connections")
        for name in counts if self.max_body_bytes is None else ("max_body_bytes", *counts):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                reasons.append(f"{name}={value!r} must be an integer of at least 1")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout", "grace"):
            value, low = getattr(self, name), "from" if name == "grace" else "above"
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf or (value == 0 and name != "grace"):
                reasons.append(f"{name}={value!r} must be a finite number of seconds {low} 0")
        if not isinstance(self.model_name, str) or not self.model_name or not is_encodable(self.model_name):
            reasons.append(f"model_name={self.model_name!a} must be non-empty text")
        if self.api_key is not None and not _is_header_value(self.api_key):
            reasons.append("api_key must be text without spaces at its ends and without control characters")
        reasons += _origin_reasons(self.allow_origins)
        if reasons:
            raise ValueError("; ".join(reasons))


def _origin_reasons(origins: object) -> list[str]:
    """A sentence for each mistake: one that never matches would be ignored."""
    if not isinstance(origins, (list, tuple)):
        return [f"allow_origins={origins!a} must be a list of origins"]
    wanted = (
        "must be '*' or an origin as browsers send it: scheme://host or scheme://host:port (or file://), in lower "
        "case, letters beyond ASCII as xn--, an address in its usual form (127.0.0.1, [::1]), without a path and "
        "without the scheme's default port"
    )
    return [f"allow_origins: {each!a} {wanted}" for each in origins if each != "*" and not _is_origin(each)]


def _is_origin(text: object) -> bool:
    """Can it be equal to a browser's header Origin?"""
    if text == "file://":  # of Electron and Cordova
        return True
    match = ORIGIN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return False
    scheme, host, port = match[1], match[2], int(match[3] or 0)
    return _is_host(host) and port < 1 << 16 and port != DEFAULT_PORTS.get(scheme)


def _is_host(text: str) -> bool:
    """False for an address in a form that browsers do not send: they write 127.1 as 127.0.0.1."""
    try:
        if text.startswith("["):
            return text == f"[{_written(ipaddress.IPv6Address(text[1:-1]))}]"
        return not ENDS_IN_NUMBER.fullmatch(text) or str(ipaddress.IPv4Address(text)) == text
    except ValueError:
        return False


def _written(address: ipaddress.IPv6Address) -> str:
    """As browsers write it: newer versions of Python write the IPv4 address in ::ffff:7f00:1 with dots."""
    if address.ipv4_mapped is None:
        return address.compressed
    high, low = divmod(int(address.ipv4_mapped), 1 << 16)
    return f"::ffff:{high:x}:{low:x}"


def _is_header_value(text: object) -> bool:
    if not isinstance(text, str) or not text or text != text.strip():
        return False
    return not any(ord(char) < 32 or ord(char) == 127 for char in text)
