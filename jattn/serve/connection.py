"""One HTTP/1.1 connection: parsing in rounds, time-outs for reading and writing, and limits.

`H11Connection` limits what h11 parses; `Connection` is uvicorn's protocol on top of it.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jattn.errors.arguments import short
from jattn.serve import errors
from jattn.serve.options import ServerOptions

MAX_EVENTS = 64
"""h11 events parsed in a round, before other connections have their turn; each takes about 15 microseconds."""

MAX_HEAD_BYTES = 1 << 14
"""Bytes of a request line with its headers, and of a body's trailers. h11 may find out at the next read only."""

LINGER_SECONDS = 2.0
"""Lingering close: time for a client to read an early response. The rest of its body is discarded."""

MAX_REFUSED_OPEN = 32
"""Refused connections that stay open, for at most LINGER_SECONDS, until their clients have read the 503.

Further ones are closed at once, and a client that has sent a request may lose the 503.
"""

MAX_LINGER_BYTES = 1 << 24
"""Bytes of the body that are discarded in a lingering close; after more, the connection is closed."""


class H11Connection(h11.Connection):
    """h11's connection, with a limit on events per round and on the chunk framing of a body.

    refusal: status and message for the request that was refused here. A chunk has at least 5 bytes of framing, so
    max_framing_bytes limits the number of chunks, too.
    """

    def __init__(self, max_framing_bytes: int):
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.refusal: tuple[int, str] | None = None
        self._max_framing_bytes, self._num_framing_bytes, self._events_left = max_framing_bytes, 0, MAX_EVENTS

    def begin_round(self) -> None:
        self._events_left = MAX_EVENTS

    @property
    def round_is_over(self) -> bool:
        """True if there may be events that were not parsed in this round."""
        return not self._events_left

    def receive_data(self, data: bytes) -> None:
        """As h11's; line breaks before a request line are left out: some clients send one after a body."""
        if self.their_state is h11.IDLE and not len(self._receive_buffer):
            data = data.lstrip(b"\r\n")
        if data:  # none would mean that the client has closed the connection
            super().receive_data(data)

    def start_next_cycle(self) -> None:
        """As h11's; line breaks that have come since the last body are left out."""
        super().start_next_cycle()
        waiting = self._receive_buffer.maybe_extract_at_most(len(self._receive_buffer)) or b""
        self._receive_buffer += waiting.lstrip(b"\r\n")

    def next_event(self):
        """h11's next event; NEED_DATA also if the round is over."""
        if self.round_is_over:
            return h11.NEED_DATA
        self._events_left -= 1
        state, num_buffered = self.their_state, len(self._receive_buffer)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = 400, _why_invalid(error)
            raise
        if isinstance(event, h11.Request):
            self._num_framing_bytes = 0
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:  # proxies may disagree where the body ends
                raise self._refused(400, "send Content-Length or Transfer-Encoding, not both")
            return _in_origin_form(event)
        if state is h11.SEND_BODY:
            payload = len(event.data) if isinstance(event, h11.Data) else 0
            self._num_framing_bytes += num_buffered - len(self._receive_buffer) - payload
            if self._num_framing_bytes > self._max_framing_bytes:
                raise self._refused(
                    413, f"the chunks have over {self._max_framing_bytes} bytes of framing; send larger chunks"
                )
        return event

    def send(self, event: h11.Event) -> Any:  # bytes, or None for h11.ConnectionClosed
        """The event's bytes. A response before the end of the request's body has Connection: close."""
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [(name, value) for name, value in event.headers if name != b"connection"]
            headers.append((b"connection", b"close"))
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)

    def _refused(self, status: int, message: str) -> h11.RemoteProtocolError:
        self.refusal = status, message
        return h11.RemoteProtocolError(message, error_status_hint=status)


def _why_invalid(error: h11.RemoteProtocolError) -> str:
    """What is wrong with a request that h11 does not parse, and what to send instead."""
    if error.error_status_hint == 431:
        return (
            "the request line and headers, or the trailers of a body in chunks, have over "
            f"{MAX_HEAD_BYTES} bytes; send fewer or shorter ones"
        )
    return f"this is not a valid HTTP/1.1 request ({short(str(error))}); use http:// and an HTTP/1.1 client"


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with its target as a path: `http://host/path` means `/path`."""
    scheme, _, rest = request.target.partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        return request
    target = b"/" + rest.partition(b"/")[2]
    return h11.Request(
        method=request.method, target=target, headers=list(request.headers), http_version=request.http_version
    )


class Connection(H11Protocol):
    """uvicorn's protocol with read and write time-outs, a limit of connections, and JSON errors for invalid HTTP.

    uvicorn itself closes connections that are idle between two requests. Events are parsed in rounds, so that a body
    in many small chunks does not delay other connections.

    refused: a set that all connections of a server share, of those over the limit that are still open.
    """

    def __init__(self, options: ServerOptions, refused: set["Connection"], **uvicorn_arguments: Any):
        super().__init__(**uvicorn_arguments)
        self._options, self._refused = options, refused
        self.conn: H11Connection = H11Connection(options.max_framing_bytes)
        self._is_scheduled = False  # the next handle_events is scheduled
        self._num_discarded: int | None = None  # bytes discarded in a lingering close; None: there is none
        self._awaited: str | None = None  # what the read timer waits for: "headers", "body" or "linger"
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0  # bytes in the write buffer at the write timer's last check

    # ------------------------------------------------------------------ called by asyncio and uvicorn
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # call pause_writing as soon as one byte waits
        if len(self.connections) - len(self._refused) > self._options.max_connections:
            self._refuse()
        self._update_read_timer()

    def data_received(self, data: bytes) -> None:
        if self._num_discarded is not None:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_LINGER_BYTES:
                self.transport.close()
            return
        if self.conn.their_state is h11.MUST_CLOSE:  # no request follows one with Connection: close, or of HTTP/1.0
            return
        self._unset_keepalive_if_required()
        self.conn.receive_data(data)
        if not self._is_scheduled:
            self.handle_events()

    def handle_events(self) -> None:
        """Parse one round of events; schedule the next round after those of other connections."""
        was_scheduled, self._is_scheduled = self._is_scheduled, False
        if self.transport.is_closing() or self._num_discarded is not None:
            return
        self.conn.begin_round()
        super().handle_events()
        if self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]  it has the methods that a cycle calls
        if self.conn.round_is_over:
            self._is_scheduled = True
            self.transport.pause_reading()
            self.loop.call_soon(self.handle_events)
        elif was_scheduled and not self.flow.read_paused:
            self.transport.resume_reading()
        in_request = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not in_request and len(self.conn.trailing_data[0]) <= MAX_HEAD_BYTES:
            self.flow.resume_reading()  # uvicorn reads nothing behind a request; a client that leaves is noticed so
        self._update_read_timer()

    def on_response_complete(self) -> None:
        if self._num_discarded is not None:
            return
        super().on_response_complete()
        self._update_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._refused.discard(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._await(None)
        self._cancel_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._options.write_timeout, self._check_writing)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def send_400_response(self, msg: str) -> None:
        self._send_error(*(self.conn.refusal or (400, msg)))

    def close_after_response(self, lingers: bool = False) -> None:
        """Close the connection. If there is more to read, the client first gets time to read the response.

        Closing a socket that holds unread bytes resets the connection, and the client may lose the response.
        lingers: wait for more although no request has begun, because the client may be sending it.
        """
        lingers = lingers or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not lingers or self.transport.is_closing():
            self.transport.close()
        elif self._num_discarded is None:
            self._num_discarded = 0
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection
                self.transport.abort()
                return
            self.flow.resume_reading()
            self.transport.resume_reading()
            self._await("linger")

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a request with Upgrade is served as one without, and uvicorn would ask for a library each time."""

    def _refuse(self) -> None:
        """Send a 503, because the server has as many connections as it accepts."""
        lingers = len(self._refused) < MAX_REFUSED_OPEN
        self._refused.add(self)
        message = "the server has as many connections as it accepts; try again later"
        self._send_error(503, message, retry_after=1, lingers=lingers)

    # ------------------------------------------------------------------ reading
    def _update_read_timer(self) -> None:
        """Start or stop the timer for what the client must send next."""
        state = self.conn.their_state
        if self._num_discarded is not None:
            return
        if self.transport.is_closing():
            self._await(None)
        elif state is h11.SEND_BODY:
            self._await("body")
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await("headers")
        else:
            self._await(None)

    def _await(self, part: str | None) -> None:
        """Start the timer for this part, unless it runs; None: stop it."""
        if part == self._awaited:
            return
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._awaited, self._read_timer = part, None
        if part is not None:
            body = self._options.body_timeout
            limits = dict(headers=self._options.header_timeout, body=body, linger=min(body, LINGER_SECONDS))
            seconds = limits[part]
            self._read_timer = self.loop.call_later(
                seconds, self._on_read_timeout, f"the {part} took over {seconds:g} seconds"
            )

    def _on_read_timeout(self, message: str) -> None:
        if self._awaited == "linger":
            self.transport.close()
            return
        request_has_begun = self._awaited == "body" or self.conn.trailing_data[0]
        if request_has_begun:
            self._send_error(408, message)
        else:  # a client would take the 408 for the response to its next request
            self.transport.close()

    # ------------------------------------------------------------------ writing
    def _check_writing(self) -> None:
        """Abort the connection if the client has read nothing since the last check."""
        num_unsent, before = self.transport.get_write_buffer_size(), self._num_unsent
        if num_unsent >= before:
            self.transport.abort()
            return
        self._num_unsent = num_unsent
        self._write_timer = self.loop.call_later(self._options.write_timeout, self._check_writing)

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _send_error(self, status: int, message: str, retry_after: int | None = None, lingers: bool = False) -> None:
        """Send an error response, unless a response has begun; then close_after_response(lingers)."""
        if self.transport.is_closing():
            return
        is_head = False
        if self.cycle is not None and not self.cycle.response_complete:  # the application must not respond as well
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
            is_head = self.cycle.scope["method"] == "HEAD"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = errors.encode(
                errors.error_body(message, "server_error" if status >= 500 else errors.BadRequestError.kind)
            )
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            headers += [("retry-after", str(retry_after))] if retry_after is not None else []
            response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            events = response, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()
            self.transport.write(b"".join(self.conn.send(event) for event in events))
        self.close_after_response(lingers)


class _ResponseTransport:
    """The transport as uvicorn's response cycle uses it; close() becomes the connection's close_after_response."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.close_after_response()
