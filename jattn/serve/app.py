"""The ASGI application: its routes, and a request's way from body to response."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jattn.engine import Engine, admission
from jattn.errors.arguments import short
from jattn.serve import body, errors, fields
from jattn.serve.engine_loop import EngineLoop, OutputStream
from jattn.serve.middleware import RequestMiddleware, has_api_key
from jattn.serve.options import ServerOptions
from jattn.serve.responses import ResponseBuilder

log = logging.getLogger("jattn.serve")

CLIENT_DISCONNECTED = 499
"""Status in the log if the client has closed the connection."""


def make_app(engine: Engine, options: ServerOptions = ServerOptions()) -> Starlette:  # noqa: B008  frozen
    """The ASGI application; its lifespan starts and stops the engine's thread, `app.state.loop`."""
    loop = EngineLoop(engine, options.max_queue)
    parsers = body.ParserThreads(options.max_body_bytes)
    handlers = _Handlers(engine, loop, parsers, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        loop.start()
        yield
        loop.stop()
        parsers.close()
        await asyncio.to_thread(loop.join)

    guarded = handlers.guarded
    routes = [
        Route("/v1/completions", guarded(handlers.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(handlers.chat_completions), methods=["POST"]),
        Route("/v1/models", guarded(handlers.models)),
        Route("/v1/models/{name:path}", guarded(handlers.model)),
        Route("/metrics", guarded(handlers.metrics)),
        Route("/health", handlers.health),
    ]
    middleware = [Middleware(RequestMiddleware, is_closing=lambda: not loop.healthy)]
    exception_handlers = {HTTPException: handlers.http_exception}
    app = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=exception_handlers)
    app.router.redirect_slashes = False
    app.state.loop = loop
    return app


@dataclasses.dataclass(frozen=True)
class _Handlers:
    """The handler of each route."""

    engine: Engine
    loop: EngineLoop
    parsers: body.ParserThreads
    options: ServerOptions
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable:
        """The handler after a check of the API key; a ServeError becomes its JSON response."""

        async def guarded_handler(request: Request) -> Response:
            try:
                self._check_api_key(request)
                return await handler(request)
            except errors.ServeError as error:
                return errors.response_of(error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_DISCONNECTED)

        return guarded_handler

    async def completions(self, request: Request) -> Response:
        max_tokens = self.options.default_max_tokens
        return await self._generate(request, lambda values: fields.parse_completion(values, max_tokens))

    async def chat_completions(self, request: Request) -> Response:
        engine, max_len = self.engine, self.engine.limits.max_model_len
        parse = lambda values: fields.parse_chat(values, engine.chat_template, engine.tokenizer, max_len)
        return await self._generate(request, parse)

    async def models(self, request: Request) -> Response:
        return errors.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return errors.json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        healthy = self.loop.healthy
        return errors.json_response({"status": "ok" if healthy else "stopped"}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.loop.stats.prometheus(), media_type="text/plain; version=0.0.4")

    async def http_exception(self, request: Request, error: Exception) -> Response:
        """The router's 404 and 405 as JSON. Without the API key it is a 401, which does not show what paths exist."""
        assert isinstance(error, HTTPException)
        try:
            if request.url.path != "/health":
                self._check_api_key(request)
        except errors.InvalidApiKeyError as invalid:
            return errors.response_of(invalid)
        route = f"{request.method} {request.url.path}"
        messages = {404: f"there is no {route}", 405: f"{route} is not allowed"}
        message = messages.get(error.status_code, error.detail)
        error_body = errors.error_body(message, errors.BadRequestError.kind)
        return errors.json_response(error_body, error.status_code, dict(error.headers or {}))

    # ------------------------------------------------------------------ completions
    async def _generate(self, request: Request, parse: Callable[[dict[str, Any]], fields.ParsedBody]) -> Response:
        """The response to a POST. parse: the fields of this route's body; it runs in a thread."""
        self.loop.check_open()
        raw = await body.read(request, self.options.max_body_bytes)
        max_prompts, max_len = self.options.max_prompts, self.engine.limits.max_model_len
        parsed = await self.parsers.run(raw, lambda raw: self._tokenized(parse(body.parse(raw, max_prompts, max_len))))
        id = request.scope["state"]["id"]
        if parsed.user is not None:
            log.info("%s is of user %.200r", id, parsed.user)
        builder = ResponseBuilder(parsed, id, self.options.model_name, self.engine.tokenizer)
        stream = self.loop.submit(id, parsed.prompts, parsed.params, parsed.salt)
        if parsed.stream:
            return _EventStreamResponse(builder, stream, parsed)
        with contextlib.closing(stream):
            outputs = await _unless_disconnected(request, stream.finished())
        return await asyncio.to_thread(lambda: errors.json_response(builder.whole(outputs)))

    def _tokenized(self, parsed: fields.ParsedBody) -> fields.ParsedBody:
        """The body with its prompts as tokens; an error if the engine cannot serve it."""
        if parsed.model is not None:
            self._check_model(parsed.model)
        prompt_field, max_len = "messages" if parsed.is_chat else "prompt", self.engine.limits.max_model_len
        for prompt in parsed.prompts:
            if isinstance(prompt, str):
                fields.check_length(prompt, max_len, prompt_field)
        if len(parsed.prompts) * parsed.params.n > self.options.max_queue:
            count = f"{len(parsed.prompts)} prompts x n={parsed.params.n}"
            raise errors.BadRequestError(
                f"{count} are more sequences than this server's queue holds, {self.options.max_queue}", "n"
            )
        engine, prompts = self.engine, []
        for prompt in parsed.prompts:
            vocab_size = engine.config.vocab_size
            tokens, problems = admission.check(prompt, parsed.params, engine.tokenizer, vocab_size, engine.limits)
            if problems:
                argument = next(iter(problems))
                param = prompt_field if argument == "prompt" else argument
                raise errors.BadRequestError("; ".join(problems.values()), param)
            prompts.append(tokens)
        return dataclasses.replace(parsed, prompts=tuple(prompts))

    def _check_api_key(self, request: Request) -> None:
        if not has_api_key(request.scope["headers"], self.options.api_key):
            raise errors.InvalidApiKeyError("the API key is missing or wrong: send Authorization: Bearer KEY")

    def _check_model(self, name: str) -> None:
        served = self.options.model_name
        if name != served:
            raise errors.UnknownModelError(f"there is no model {short(name)}; this server has {served!r}", "model")

    def _model_card(self) -> dict[str, Any]:
        card = dict(id=self.options.model_name, object="model", created=self.created, owned_by="jattn")
        return card | {"max_model_len": self.engine.limits.max_model_len}


class _EventStreamResponse(StreamingResponse):
    """Server-sent events; the last is [DONE] or an error. When it ends, unfinished engine requests are aborted."""

    def __init__(self, builder: ResponseBuilder, stream: OutputStream, parsed: fields.ParsedBody):
        super().__init__(self._events(builder, parsed), 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        self._stream = stream

    async def __call__(self, scope, receive, send) -> None:
        with contextlib.closing(self._stream):
            await super().__call__(scope, receive, send)

    async def _events(self, builder: ResponseBuilder, parsed: fields.ParsedBody) -> AsyncIterator[bytes]:
        has_logprobs = parsed.params.logprobs is not None  # they take long to write: in a thread
        try:
            async for prompt_index, output in self._stream:
                events = builder.events(prompt_index, output)
                for event in await asyncio.to_thread(list, events) if has_logprobs else events:
                    yield _event(event)
            if parsed.include_usage:
                yield _event(builder.usage_event())
        except errors.ServeError as error:
            yield _event(errors.body_of(error))
        except Exception:
            log.exception("a stream failed")
            yield _event(errors.body_of(errors.ServeError("the server failed")))
        else:
            yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + errors.encode(data) + b"\n\n"


async def _unless_disconnected(request: Request, work: Awaitable) -> Any:
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
