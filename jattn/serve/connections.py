"""One HTTP connection: time-outs for sending a request and reading the answer, and limits."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jattn.serve import errors
from jattn.serve.options import ServerOptions
from jattn.serve.wire import Wire

REST_SECONDS = 2.0
"""For a client to read an answer that came before the end of its body; what it sends meanwhile is dropped."""

REST_BYTES = 1 << 24
"""Most bytes that are dropped so."""


class Connection(H11Protocol):
    """uvicorn's protocol with time-outs, a limit of connections, and JSON errors for requests that are not valid HTTP.

    uvicorn itself closes connections that are idle between two requests. Events are parsed in rounds: many small chunks
    do not hold up other connections.
    """

    def __init__(self, options: ServerOptions, **uvicorns: Any):
        super().__init__(**uvicorns)
        self._options = options
        self.conn: Wire = Wire(options.max_framing_bytes)
        self._is_called = False  # handle_events is scheduled
        self._num_dropped: int | None = None  # bytes dropped after an answer that came before the body's end
        self._reading: str | None = None  # the part of a request that is awaited: "headers", "body" or its "rest"
        self._reader: asyncio.TimerHandle | None = None
        self._writer: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes waiting to be sent, at the last check

    # ------------------------------------------------------------------ asyncio's and uvicorn's calls
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # call pause_writing as soon as one byte waits
        if len(self.connections) > self._options.max_connections:
            self._refuse(503, "the server has as many connections as it accepts; try again later", retry_after=1)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._num_dropped is not None:
            self._num_dropped += len(data)
            if self._num_dropped > REST_BYTES:
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        self.conn.receive_data(data)
        if not self._is_called:
            self.handle_events()

    def handle_events(self) -> None:
        """Parse one round of events; the next round comes after those of other connections."""
        was_called, self._is_called = self._is_called, False
        if self.transport.is_closing() or self._num_dropped is not None:
            return
        self.conn.begin_round()
        super().handle_events()
        if self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = _AnswersTransport(self)  # type: ignore[assignment]  it has what a cycle calls
        if self.conn.round_is_over:
            self._is_called = True
            self.transport.pause_reading()
            self.loop.call_soon(self.handle_events)
        elif was_called and not self.flow.read_paused:
            self.transport.resume_reading()
        self._watch()

    def on_response_complete(self) -> None:
        if self._num_dropped is not None:
            return
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._expect(None)
        self._forget_writer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._writer = self.loop.call_later(self._options.write_timeout, self._check_writing)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_writer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self.conn.complaint or (400, msg)))

    def close_after_answer(self) -> None:
        """Close; where the body was not read to its end, first let the client read the answer.

        Closing a socket that holds unread bytes resets the connection, and the client may lose the answer.
        """
        if self.conn.their_state is not h11.SEND_BODY or self.transport.is_closing():
            self.transport.close()
        elif self._num_dropped is None:
            self._num_dropped = 0
            self.transport.write_eof()
            self.flow.resume_reading()
            self.transport.resume_reading()
            self._expect("rest")

    # ------------------------------------------------------------------ reading
    def _watch(self) -> None:
        """Start or stop the timer for what the client must send next."""
        state = self.conn.their_state
        if self._num_dropped is not None:
            return
        if self.transport.is_closing():
            self._expect(None)
        elif state is h11.SEND_BODY:
            self._expect("body")
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._expect("headers")
        else:
            self._expect(None)

    def _expect(self, part: str | None) -> None:
        if part == self._reading:
            return
        if self._reader is not None:
            self._reader.cancel()
        self._reading, self._reader = part, None
        if part is not None:
            body = self._options.body_timeout
            limits = dict(headers=self._options.header_timeout, body=body, rest=min(body, REST_SECONDS))
            seconds = limits[part]
            self._reader = self.loop.call_later(seconds, self._time_out, f"the {part} took over {seconds:g} seconds")

    def _time_out(self, why: str) -> None:
        if self._reading == "rest":
            self.transport.close()
            return
        has_said = self._reading == "body" or self.conn.trailing_data[0]
        if has_said:
            self._refuse(408, why)
        else:  # no request has begun: the client would take a 408 for the answer to its next one
            self.transport.close()

    # ------------------------------------------------------------------ writing
    def _check_writing(self) -> None:
        """Close the connection if the client has read nothing since the last check."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        if unsent >= before:
            self.transport.abort()
            return
        self._unsent = unsent
        self._writer = self.loop.call_later(self._options.write_timeout, self._check_writing)

    def _forget_writer(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None

    def _refuse(self, status: int, message: str, retry_after: int | None = None) -> None:
        """Send an error, unless an answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # the application must not answer as well
            self.cycle.disconnected = True
            self.cycle.message_event.set()
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
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.close_after_answer()


class _AnswersTransport:
    """The transport as an answer uses it: to close it is the connection's business."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.close_after_answer()
