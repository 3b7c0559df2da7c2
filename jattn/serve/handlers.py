"""What the applications share: the API key, CORS, errors as JSON, the routes of models, health and version."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import jattn
from jattn.errors.arguments import short
from jattn.serve import errors
from jattn.serve.body import ParserThreads
from jattn.serve.middleware import RequestMiddleware, has_api_key
from jattn.serve.options import ServerOptions

log = logging.getLogger("jattn.serve")

CLIENT_DISCONNECTED = 499
"""Status in the log if the client has closed the connection."""

OPEN_PATHS = ("/health", "/version")
"""Paths that need no API key."""


class ServingLoop(Protocol):
    """The thread that does an application's work, as the server sees it."""

    failure: BaseException | None  # what broke it

    @property
    def healthy(self) -> bool:
        """True while requests are accepted."""
        ...

    @property
    def num_requests(self) -> int:
        """Accepted requests that are not finished."""
        ...

    def start(self) -> None: ...

    def drain(self, why: str = ...) -> None:
        """Accept nothing more; accepted requests continue."""
        ...

    def stop(self, why: str = ...) -> None:
        """End every request with an error, then the thread."""
        ...

    def join(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handlers:
    """The handlers of the routes that every application has."""

    loop: ServingLoop
    parsers: ParserThreads
    options: ServerOptions
    max_model_len: int | None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def routes(self) -> list[Route]:
        """The routes of models, health and version."""
        return [
            Route("/v1/models", self.guarded(self.models)),
            Route("/v1/models/{name:path}", self.guarded(self.model)),
            Route("/health", self.health),
            Route("/version", self.version),
        ]

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable:
        """The handler after a check of the API key; a ServeError becomes its JSON response."""

        async def guarded_handler(request: Request) -> Response:
            try:
                self.check_api_key(request)
                return await handler(request)
            except errors.ServeError as error:
                return errors.response_of(error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_DISCONNECTED)

        return guarded_handler

    async def models(self, request: Request) -> Response:
        return errors.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["name"])
        return errors.json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        healthy = self.loop.healthy
        return errors.json_response({"status": "ok" if healthy else "stopped"}, 200 if healthy else 503)

    async def version(self, request: Request) -> Response:
        return errors.json_response({"version": jattn.__version__})

    async def http_exception(self, request: Request, error: Exception) -> Response:
        """The router's 404 and 405 as JSON. Without the API key it is a 401, which does not show what paths exist."""
        assert isinstance(error, HTTPException)
        path = request.scope["path"]  # of the router; request.url leaves out tabs and line breaks
        try:
            if path not in OPEN_PATHS:
                self.check_api_key(request)
        except errors.InvalidApiKeyError as invalid:
            return errors.response_of(invalid)
        route, headers = f"{request.method} {path:.200}", dict(error.headers or {})
        paths = ", ".join(each.path_format for each in request.app.routes if isinstance(each, Route))
        messages = {
            404: f"there is no {route}; this server has {paths}",
            405: f"{route} is not allowed; use {headers.get('Allow')}",
        }
        message = messages.get(error.status_code, error.detail)
        error_body = errors.error_body(message, errors.BadRequestError.kind)
        return errors.json_response(error_body, error.status_code, headers)

    def log_user(self, request: Request, user: str | None) -> None:
        """Log the body's `user` beside the request's id."""
        if user is not None:
            log.info("%s is of user %.200r", request.scope["state"]["id"], user)

    def check_api_key(self, request: Request) -> None:
        if not has_api_key(request.scope["headers"], self.options.api_key):
            raise errors.InvalidApiKeyError("the API key is missing or wrong: send Authorization: Bearer KEY")

    def check_model(self, name: str) -> None:
        served = self.options.model_name
        if name != served:
            raise errors.UnknownModelError(f"there is no model {short(name)}; this server has {served!r}", "model")

    def _model_card(self) -> dict[str, Any]:
        card = dict(id=self.options.model_name, object="model", created=self.created, owned_by="jattn")
        return card | {"max_model_len": self.max_model_len}


def make_application(handlers: Handlers, routes: Sequence[Route]) -> Starlette:
    """The ASGI application with these routes and those of `handlers`; its lifespan starts and stops the loop."""
    loop = handlers.loop

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        loop.start()
        yield
        loop.stop()
        handlers.parsers.close()
        await asyncio.to_thread(loop.join)

    app = Starlette(
        routes=[*routes, *handlers.routes()],
        lifespan=lifespan,
        middleware=[*cors(handlers.options), Middleware(RequestMiddleware, is_closing=lambda: not loop.healthy)],
        exception_handlers={HTTPException: handlers.http_exception},
    )
    app.router.redirect_slashes = False
    app.state.loop, app.state.options = loop, handlers.options
    return app


def cors(options: ServerOptions) -> list[Middleware]:
    """CORS, the outermost middleware: a preflight is neither logged nor counted, and errors have the headers too."""
    if not options.allow_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.allow_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # Chrome asks for it before a public page may call a server of this machine
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    ]


async def unless_disconnected(request: Request, work: Awaitable) -> Any:
    """The result of `work`; if the client disconnects first, the work is cancelled and ClientDisconnect raised."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    """Wait until the client disconnects; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
