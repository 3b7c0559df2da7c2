"""Running the application under uvicorn until a signal."""

import uvicorn

from jattn.engine import Engine
from jattn.serve.app import ServerOptions, make_app


class Server(uvicorn.Server):
    """uvicorn, whose first signal ends every stream with an error instead of leaving clients to wait."""

    def __init__(self, config: uvicorn.Config, loop):
        super().__init__(config)
        self._engine_loop = loop

    def handle_exit(self, sig, frame) -> None:
        self._engine_loop.stop()
        super().handle_exit(sig, frame)


def make_server(engine: Engine, options: ServerOptions, host: str = "127.0.0.1", port: int = 8000) -> Server:
    """A server that is not running yet."""
    app = make_app(engine, options)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    return Server(config, app.state.loop)


def serve(engine: Engine, options: ServerOptions, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until a signal; only this machine can connect unless `host` says otherwise."""
    make_server(engine, options, host, port).run()
