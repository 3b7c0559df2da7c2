"""HTTP/1.1 as h11 parses it, some events at a time, with a limit on what the chunks of a body may cost."""

import h11

ROUND = 64
"""Most events parsed before other connections have their turn; each takes about 15 microseconds."""


class Wire(h11.Connection):
    """h11's connection. `complaint` is the status and message for a request that this class refuses.

    A chunk has at least 5 bytes of framing, so `max_framing` limits the chunks of a body and its bytes on the wire.
    """

    def __init__(self, max_framing: int):
        super().__init__(h11.SERVER)
        self.complaint: tuple[int, str] | None = None
        self._max_framing, self._framing, self._num_left = max_framing, 0, ROUND

    def begin_round(self) -> None:
        self._num_left = ROUND

    @property
    def round_is_over(self) -> bool:
        """There may be events that were not parsed in this round."""
        return not self._num_left

    def next_event(self):
        """h11's next event; NEED_DATA also where the round is over."""
        if self.round_is_over:
            return h11.NEED_DATA
        self._num_left -= 1
        state, before = self.their_state, len(self._receive_buffer)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._framing = 0
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:  # proxies may disagree where the body ends
                raise self._refusal(400, "send Content-Length or Transfer-Encoding, not both")
            return _in_origin_form(event)
        if state is h11.SEND_BODY:
            payload = len(event.data) if isinstance(event, h11.Data) else 0
            self._framing += before - len(self._receive_buffer) - payload
            if self._framing > self._max_framing:
                raise self._refusal(413, f"the chunks have over {self._max_framing} bytes of framing; send larger ones")
        return event

    def send(self, event):
        """h11's bytes; an answer that comes before the end of the request's body closes the connection."""
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [(name, value) for name, value in event.headers if name != b"connection"]
            headers.append((b"connection", b"close"))
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)

    def _refusal(self, status: int, message: str) -> h11.RemoteProtocolError:
        self.complaint = status, message
        return h11.RemoteProtocolError(message, error_status_hint=status)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with its target as a path: `http://host/path` means `/path`."""
    scheme, _, rest = request.target.partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        return request
    target = b"/" + rest.partition(b"/")[2]
    return h11.Request(
        method=request.method, target=target, headers=list(request.headers), http_version=request.http_version
    )
