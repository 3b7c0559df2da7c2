"""Clients: one that sends a request and checks the response, and some that misbehave."""

import contextlib
import http.client
import json
import random
import socket
import time

from tests.serve.fuzz import expect

PATIENCE = 60
"""Seconds without a response that count as a hang."""

PATHS = ("/v1/completions", "/v1/chat/completions")


class WrongError(AssertionError):
    """A response that is not allowed."""


class Client:
    """One connection, which is opened again when the server has closed it."""

    def __init__(self, port: int):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def close(self) -> None:
        self._connection.close()

    def ask(self, path: str, raw: bytes, method: str = "POST") -> tuple[int, str, bytes]:
        """(status, content type, body); tries again on a new connection if the server had closed the old one."""
        for attempt in range(2):
            try:
                self._connection.request(method, path, raw)
                response = self._connection.getresponse()
                return response.status, response.headers["content-type"].partition(";")[0], response.read()
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self._connection.close()
                if attempt:
                    raise
        raise AssertionError

    def judge(self, path: str, raw: bytes) -> int:
        """Send the body, and check that the status is allowed and that the response has the right shape."""
        allowed = expect.statuses(path, raw)
        end = time.monotonic() + PATIENCE
        while True:
            status, kind, body = self.ask(path, raw)
            if status != 429 or 429 in allowed or time.monotonic() > end:
                break
            time.sleep(0.02)  # requests of disconnected clients still count in the queue
        if status not in allowed:
            raise WrongError(f"status {status}, but {sorted(allowed)} is allowed: {body[:300]!r}")
        if status != 200:
            check_error(kind, body)
        else:
            check_response(json.loads(raw), path == PATHS[1], kind, body)
        return status


def check_error(kind: str, body: bytes) -> None:
    error = json.loads(body)["error"]
    fine = kind == "application/json" and set(error) == {"message", "type", "param", "code"}
    if not fine or not isinstance(error["message"], str) or not error["message"]:
        raise WrongError(f"not an error of the OpenAI interface: {kind} {body[:300]!r}")


def check_response(asked: dict, is_chat: bool, kind: str, body: bytes) -> None:
    """Check the shape of a response, and that its parts agree."""
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked.get("stream"):
        choices, usage = read_stream(asked, is_chat, kind, body)
    else:
        _check(kind == "application/json", kind)
        whole = json.loads(body)
        choices, usage = (
            {choice["index"]: _flat(choice, is_chat, "message") for choice in whole["choices"]},
            whole["usage"],
        )
        _check(whole["object"] == ("chat.completion" if is_chat else "text_completion"), whole["object"])
    prompts = expect.prompts(asked, is_chat)
    _check(sorted(choices) == list(range(len(prompts) * asked.get("n", 1))), "the choices' indices")
    for choice in choices.values():
        _check(choice["finish_reason"] in ("stop", "length"), choice)
        _check("\ud800" > max(choice["text"], default="") or choice["text"].encode(), "text")
        told = asked.get("logprobs") is not None and asked.get("logprobs") is not False
        _check((choice["tokens"] is not None) == told, "logprobs as asked")
        if told and not is_chat:
            at = choice["offsets"]
            _check(at == sorted(at) and all(0 <= i <= len(choice["text"]) for i in at), "text_offset")
    if usage is not None:
        tokens = sum(len(p.encode()) if isinstance(p, str) else len(p) for p in prompts)
        _check(usage["prompt_tokens"] == tokens, f"{usage} of {tokens} prompt tokens")
        limit = asked.get("max_completion_tokens", asked.get("max_tokens", expect.LENGTH if is_chat else 16))
        _check(len(choices) <= usage["completion_tokens"] <= limit * len(choices), f"{usage} of at most {limit} each")
        if all(choice["tokens"] is not None for choice in choices.values()):
            _check(usage["completion_tokens"] == sum(choice["tokens"] for choice in choices.values()), "tokens told")


def read_stream(asked: dict, is_chat: bool, kind: str, body: bytes) -> tuple[dict, dict | None]:
    """(the choices, joined from all events; the usage)."""
    *events, last, rest = body.split(b"\n\n")
    _check(kind == "text/event-stream" and last == b"data: [DONE]" and rest == b"", f"the end of the stream: {last!r}")
    choices, usage, heads = {}, None, set()
    for event in events:
        _check(event.startswith(b"data: "), event)
        chunk = json.loads(event.removeprefix(b"data: "))
        heads.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        usage = chunk.get("usage")
        for choice in chunk["choices"]:
            new = _flat(choice, is_chat, "delta")
            old = choices.setdefault(choice["index"], None)
            if is_chat:
                _check(
                    (choice["delta"].get("role") == "assistant") == (old is None), "the role is in the first event only"
                )
            choices[choice["index"]] = new if old is None else _joined(old, new)
    _check(len(heads) == 1, "one id, time, model and object")
    _check((usage is not None) == bool((asked.get("stream_options") or {}).get("include_usage")), "usage as asked")
    return choices, usage


def _flat(choice: dict, is_chat: bool, message: str) -> dict:
    told, text = choice["logprobs"], choice[message].get("content", "") if is_chat else choice["text"]
    flat = dict(text=text, finish_reason=choice["finish_reason"], tokens=None, offsets=[])
    if told is None:
        return flat
    if is_chat:
        return flat | dict(tokens=len(told["content"]))
    _check(all(token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True)), "top_logprobs")
    return flat | dict(tokens=len(told["tokens"]), offsets=told["text_offset"])


def _joined(old: dict, new: dict) -> dict:
    _check(old["finish_reason"] is None, "an event after a choice's end")
    return {name: new[name] if name == "finish_reason" or old[name] is None else old[name] + new[name] for name in old}


def _check(is_true: object, what: object) -> None:
    if not is_true:
        raise WrongError(f"wrong: {what!r:.400}")


# ---------------------------------------------------------------------- misbehaving
LONG = json.dumps({"prompt": "1+1=", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}).encode()


def _sent(path: str, raw: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw


def abandons(port: int, path: str, raw: bytes) -> None:
    """Sends a valid request that takes long, and does not wait for the response."""
    with socket.create_connection(("127.0.0.1", port), 0.05) as peer, contextlib.suppress(TimeoutError):
        peer.sendall(_sent(path, raw))
        said = peer.recv(1 << 16)
        _check(said.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429")), said[:300])


def cuts(port: int, rng: random.Random, raw: bytes) -> None:
    """Disconnects in the middle of its request."""
    sent = _sent(rng.choice(PATHS), raw)
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as peer:
        peer.sendall(sent[: rng.randrange(len(sent))])


def leaves(port: int, rng: random.Random, raw: bytes) -> None:
    """Asks for many tokens and disconnects, before the first or in the middle of the stream."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as peer:
        peer.sendall(_sent(PATHS[0], LONG if rng.random() < 0.7 else LONG.replace(b'"stream": true, ', b"")))
        if rng.random() < 0.5:
            peer.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                peer.recv(rng.choice([1, 100, 5000]))


def is_slow(port: int, rng: random.Random, raw: bytes) -> None:
    """Sends a byte now and then; must get an error or be disconnected."""
    sent = _sent(rng.choice(PATHS), raw or b"{}")
    sent = sent[: rng.randrange(1, len(sent))]
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as peer, contextlib.suppress(ConnectionError):
        for byte in sent[:40]:
            peer.sendall(bytes([byte]))
            time.sleep(0.02)
        said = b"".join(iter(lambda: peer.recv(1 << 16), b""))
        _check(not said or said.startswith(b"HTTP/1.1 4"), said[:200])


def is_deaf(port: int, rng: random.Random, raw: bytes) -> None:
    """Asks for a long stream and does not read it."""
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", port))
        peer.sendall(_sent(PATHS[0], LONG.replace(b"}", b', "logprobs": 20}')))
        time.sleep(rng.uniform(0.2, 2))


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n"
HEADS = [
    b"",
    b"\r\n\r\n",
    b"\0\0\0",
    b"GET",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/3.0\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    GET % (b"/v1/models", b"Authorization: Bearer \xff\xfe\r\n"),
    GET % (b"/v1/models/%ff%00%0a", b""),
    GET % (b"/%2e%2e/%2e%2e", b""),
    GET % (b"http://x/health", b""),
    GET % (b"/", b"X: " + b"y" * 70000 + b"\r\n"),
    GET % (b"/", b"A: b\r\n" * 9000),
    GET % (b"/", b"bad header\r\n"),
    GET % (b"/", b": y\r\n"),
    GET % (b"/health", b"Upgrade: websocket\r\n"),
    b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"G\xc3\x89T / HTTP/1.1\r\nHost: x\r\n\r\n",
]


def is_no_http(port: int, rng: random.Random, raw: bytes) -> None:
    """Sends odd heads or random bytes; must get no 5xx, JSON if there is a body, or be disconnected."""
    sent = rng.choice(HEADS) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 300))
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(sent)
        said = b"".join(iter(lambda: peer.recv(1 << 16), b""))
        head, _, body = (
            said.removeprefix(b"HTTP/1.1 100 \r\n\r\n")
            .removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            .partition(b"\r\n\r\n")
        )
        _check(not said or head[9:10] in b"24", said[:300])
        if body and head[9:10] == b"4" and b"\r\n\r\n" not in body:
            check_error("application/json", body)


MISBEHAVING = (cuts, leaves, is_slow, is_deaf, is_no_http)
