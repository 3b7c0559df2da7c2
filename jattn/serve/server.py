"""Runs the application under uvicorn until a signal, or until the engine breaks."""

import asyncio
import contextlib
import errno
import functools
import socket
import time

import uvicorn

from jattn.embedder import Embedder
from jattn.engine import Engine, LockStepEngine
from jattn.errors import EngineDeadError
from jattn.serve.app import make_app
from jattn.serve.connection import MAX_REFUSED_OPEN, Connection
from jattn.serve.embeddings import make_embeddings_app
from jattn.serve.engine_loop import EngineLoop
from jattn.serve.handlers import ServingLoop
from jattn.serve.options import ServerOptions

FLUSH_SECONDS = 5
"""How long clients may read the end of their responses after the last request has ended."""


BACKLOG = 2048
"""Connections that may wait to be accepted, and the most that asyncio accepts in one go: uvicorn's number."""

SPARE_FILES = 64 + MAX_REFUSED_OPEN
"""Files that a server has open besides the connections that it accepts; some are of connections over the limit."""


class Server(uvicorn.Server):
    """uvicorn with a graceful shutdown.

    After the first signal new requests get 503, and running ones have `grace` seconds to finish. Then, or after a
    second signal, their streams end with an error. A broken engine ends the server at once. What other processes ask
    for is no second signal: a supervisor sends SIGTERM to each of them.
    """

    def __init__(self, config: uvicorn.Config, loop: ServingLoop, grace: float):
        super().__init__(config)
        self.loop, self.grace = loop, grace
        self._num_signals = 0
        self._is_asked_to_stop = False
        self._deadline: float | None = None

    def handle_exit(self, sig, frame) -> None:
        self._num_signals += 1  # nothing more: a signal may arrive while a lock is held

    def ask_to_stop(self) -> None:
        """As the first signal. From any thread."""
        self._is_asked_to_stop = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second; True ends the server."""
        if (self._num_signals or self._is_asked_to_stop) and self._deadline is None:
            self._deadline = time.monotonic() + self.grace
            self.loop.drain()
        if self._deadline is not None:
            is_expired = self._num_signals > 1 or time.monotonic() >= self._deadline
            if is_expired:
                self.loop.stop()
            self.should_exit |= is_expired or not self.loop.num_requests
        self.should_exit |= self.loop.failure is not None
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None) -> None:
        """Abort the connections that are open after FLUSH_SECONDS: of clients that do not read.

        uvicorn would cancel their tasks a second later, and log errors. After an abort they end as after a disconnect.
        """
        timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._abort_connections)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(served: Engine | Embedder, options: ServerOptions, host: str = "127.0.0.1", port: int = 8000) -> Server:
    """A server that is not running yet."""
    app = make_embeddings_app(served, options) if isinstance(served, Embedder) else make_app(served, options)
    refused: set[Connection] = set()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=functools.partial(Connection, app.state.options, refused),  # type: ignore[arg-type]  uvicorn only calls it
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=backlog_of(options.max_connections),
        timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]  uvicorn only passes it to call_later
        timeout_graceful_shutdown=FLUSH_SECONDS + 1,
    )
    return Server(config, app.state.loop, options.grace)


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for every address of `host`. They do not listen yet, so clients are refused until the server runs.

    Port 0: any free one. ValueError if `host` is not an address; OSError if it is taken or not this machine's.
    """
    if not host:
        raise ValueError("host='' would mean every interface; use 0.0.0.0 or :: for that, 127.0.0.1 for this machine")
    if not 0 <= port <= 65535:
        raise ValueError(f"{port=} must be from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host=} is not an address: {error}") from error
    sockets, problems = [], []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bound(family, kind, protocol, (address[0], port or address[1], *address[2:])))
        except OSError as error:
            problems.append(_cannot_listen(host, port, error))
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                break
        else:
            port = port or sockets[0].getsockname()[1]  # the same for every address
    if not sockets or any(problem.errno in (errno.EADDRINUSE, errno.EACCES) for problem in problems):
        for each in sockets:
            each.close()
        raise problems[-1]
    return sockets


def backlog_of(max_connections: int) -> int:
    """Raise the process's limit of open files to what a server needs; returns the backlog for which it suffices.

    ValueError if it does not even suffice for the connections. When accept() fails for want of a file, asyncio logs a
    traceback for each place in the backlog, every second, and nobody is served meanwhile.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed + BACKLOG:
        most = needed + BACKLOG if hard == resource.RLIM_INFINITY else min(needed + BACKLOG, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        if soft <= needed:
            raise ValueError(
                f"{max_connections=} needs {needed + 1} open files, and this process may have {soft}: raise the limit "
                f"(ulimit -n), or take max_connections={max(soft - SPARE_FILES - 1, 1)}"
            )
        return min(soft - needed, BACKLOG)
    return BACKLOG


def listen(sockets: list[socket.socket]) -> None:
    """Accept connections at the sockets of `bind`; OSError if another server does so at their port.

    Connections inherit SO_REUSEADDR: without it those that have ended would keep the port from the next server.
    """
    for each in sockets:
        try:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.listen(BACKLOG)
        except OSError as error:
            host, port = each.getsockname()[:2]
            raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> OSError:
    way = "; take another port (0: any free one)" if error.errno == errno.EADDRINUSE else ""
    return OSError(error.errno, f"cannot listen on {host}, port {port}: {error.strerror}{way}")


def _bound(family: int, kind: int, protocol: int, address: tuple) -> socket.socket:
    """A socket with this address, for itself alone unless ended connections of an earlier server have it still.

    On Linux two sockets with SO_REUSEADDR can have one address while neither listens: two servers that start together
    would both load their models.
    """
    try:
        return _bound_with(family, kind, protocol, address, reuse=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return _bound_with(family, kind, protocol, address, reuse=True)


def _bound_with(family: int, kind: int, protocol: int, address: tuple, *, reuse: bool) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def serve(
    served: Engine | Embedder,
    options: ServerOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until a signal. With the default host only this machine can connect.

    sockets: the result of `bind` for this host and port; None: bind here. RuntimeError if the engine broke: exit with a
    code other than 0 then, so that a supervisor restarts the process.
    """
    sockets = bind(host, port) if sockets is None else sockets
    listen(sockets)
    server = make_server(served, options, host, port)
    loop = server.loop
    if isinstance(served, LockStepEngine) and isinstance(loop, EngineLoop):
        served.processes.on_end = lambda processes, why: loop.fail(EngineDeadError(why))
        served.processes.on_stop = server.ask_to_stop
    server.run(sockets)
    if (failure := server.loop.failure) is not None:
        raise RuntimeError("the engine is broken, so the server has ended") from failure
