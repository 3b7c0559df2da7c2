"""Running the application under uvicorn until a signal, or until the engine breaks."""

import functools
import time

import uvicorn

from jattn.engine import Engine
from jattn.serve.app import make_app
from jattn.serve.connections import Connection
from jattn.serve.loop import EngineLoop
from jattn.serve.options import ServerOptions

FLUSH_SECONDS = 5
"""For clients to read the end of their answers after the last request has ended."""


class Server(uvicorn.Server):
    """uvicorn with a graceful shutdown.

    After the first signal new requests get 503 while those that run have `grace` seconds to finish; then, or after a
    second signal, their streams end with an error. A broken engine ends the server at once.
    """

    def __init__(self, config: uvicorn.Config, loop: EngineLoop, grace: float):
        super().__init__(config)
        self.engine_loop, self.grace = loop, grace
        self._num_signals = 0
        self._deadline: float | None = None

    def handle_exit(self, sig, frame) -> None:
        self._num_signals += 1  # only count: a signal may arrive while a lock is held

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second; True: end."""
        if self._num_signals and self._deadline is None:
            self._deadline = time.monotonic() + self.grace
            self.engine_loop.drain()
        if self._deadline is not None:
            is_over = self._num_signals > 1 or time.monotonic() >= self._deadline
            if is_over:
                self.engine_loop.stop()
            self.should_exit |= is_over or not self.engine_loop.num_requests
        self.should_exit |= self.engine_loop.failure is not None
        return await super().on_tick(counter)


def make_server(engine: Engine, options: ServerOptions, host: str = "127.0.0.1", port: int = 8000) -> Server:
    """A server, not started."""
    app = make_app(engine, options)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=functools.partial(Connection, options),  # type: ignore[arg-type]  uvicorn only calls it
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]  uvicorn only passes it to call_later
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    return Server(config, app.state.loop, options.grace)


def serve(engine: Engine, options: ServerOptions, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until a signal; only this machine can connect unless `host` says otherwise.

    RuntimeError if the engine broke: exit with a code other than 0 then, so that a supervisor restarts the process.
    """
    server = make_server(engine, options, host, port)
    server.run()
    if (failure := server.engine_loop.failure) is not None:
        raise RuntimeError("the engine is broken, and with it the server") from failure
