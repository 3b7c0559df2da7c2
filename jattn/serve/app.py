"""The routes, on Starlette."""

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
from jattn.serve import body, errors, fields
from jattn.serve.answers import Answer
from jattn.serve.door import Door, allowed
from jattn.serve.loop import EngineLoop
from jattn.serve.options import ServerOptions
from jattn.serve.parsing import Parsers
from jattn.serve.stream import Stream

log = logging.getLogger("jattn.serve")

CLIENT_LEFT = 499
"""Status in the log where the client has closed the connection."""


def make_app(engine: Engine, options: ServerOptions = ServerOptions()) -> Starlette:  # noqa: B008  frozen
    """The ASGI application; its lifespan starts and stops the engine's thread, `app.state.loop`."""
    loop = EngineLoop(engine, options.max_queue)
    parsers = Parsers(options.max_body_bytes)
    server = _Server(engine, loop, parsers, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        loop.start()
        yield
        loop.stop()
        parsers.close()
        await asyncio.to_thread(loop.join)

    guarded = server.guarded
    routes = [
        Route("/v1/completions", guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(server.chat), methods=["POST"]),
        Route("/v1/models", guarded(server.models)),
        Route("/v1/models/{name:path}", guarded(server.model)),
        Route("/metrics", guarded(server.metrics)),
        Route("/health", server.health),
    ]
    door = Middleware(Door, is_closing=lambda: not loop.healthy)
    handlers = {HTTPException: server.by_http}
    app = Starlette(routes=routes, lifespan=lifespan, middleware=[door], exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.loop = loop
    return app


@dataclasses.dataclass(frozen=True)
class _Server:
    engine: Engine
    loop: EngineLoop
    parsers: Parsers
    options: ServerOptions
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable:
        """The handler behind a check of the API key; a ServeError becomes its JSON answer."""

        async def answer(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except errors.ServeError as error:
                return errors.response_of(error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)

        return answer

    async def completions(self, request: Request) -> Response:
        limit = self.options.default_max_tokens
        return await self._serve(request, lambda found: fields.completion(found, limit))

    async def chat(self, request: Request) -> Response:
        template, room = self.engine.chat_template, self.engine.limits.max_model_len
        return await self._serve(request, lambda found: fields.chat(found, template, self.engine.tokenizer, room))

    async def models(self, request: Request) -> Response:
        return errors.json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return errors.json_response(self._card())

    async def health(self, request: Request) -> Response:
        healthy = self.loop.healthy
        return errors.json_response({"status": "ok" if healthy else "stopped"}, 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.loop.stats.prometheus(), media_type="text/plain; version=0.0.4")

    async def by_http(self, request: Request, error: Exception) -> Response:
        """The router's 404 and 405 as JSON; without the API key, a 401 that does not tell which paths there are."""
        assert isinstance(error, HTTPException)
        try:
            if request.url.path != "/health":
                self._check_key(request)
        except errors.KeyRefusedError as refused:
            return errors.response_of(refused)
        where = f"{request.method} {request.url.path}"
        said = {404: f"there is no {where}", 405: f"{where} is not allowed"}.get(error.status_code, error.detail)
        refusal = errors.error_body(said, errors.BadRequestError.kind)
        return errors.json_response(refusal, error.status_code, dict(error.headers or {}))

    # ------------------------------------------------------------------ serving
    async def _serve(self, request: Request, parse: Callable[[dict[str, Any]], fields.Asked]) -> Response:
        self.loop.check_open()
        raw = await body.read(request, self.options.max_body_bytes)
        most, room = self.options.max_prompts, self.engine.limits.max_model_len
        asked = await self.parsers.run(raw, lambda raw: self._checked(parse(body.parse(raw, most, room))))
        id = request.scope["state"]["id"]
        if asked.user is not None:
            log.info("%s is of user %.200r", id, asked.user)
        answer = Answer(asked, id, self.options.model_name, self.engine.tokenizer)
        stream = self.loop.submit(id, asked.prompts, asked.params, asked.salt)
        if asked.stream:
            return _EventStream(answer, stream, asked)
        with contextlib.closing(stream):
            outputs = await _unless_gone(request, stream.finished())
        return await asyncio.to_thread(lambda: errors.json_response(answer.whole(outputs)))

    def _checked(self, asked: fields.Asked) -> fields.Asked:
        """The request with its prompts as tokens; an error where it cannot be served."""
        if asked.model is not None:
            self._check_model(asked.model)
        name, room = "messages" if asked.chat else "prompt", self.engine.limits.max_model_len
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                fields.check_length(prompt, room, name)
        if len(asked.prompts) * asked.params.n > self.options.max_queue:
            count = f"{len(asked.prompts)} prompts x n={asked.params.n}"
            raise errors.BadRequestError(f"{count} are more sequences than the {self.options.max_queue} served", "n")
        engine, prompts = self.engine, []
        for prompt in asked.prompts:
            vocab = engine.config.vocab_size
            tokens, wrong = admission.check(prompt, asked.params, engine.tokenizer, vocab, engine.limits)
            if wrong:
                field = next(iter(wrong))
                raise errors.BadRequestError("; ".join(wrong.values()), name if field == "prompt" else field)
            prompts.append(tokens)
        return dataclasses.replace(asked, prompts=tuple(prompts))

    def _check_key(self, request: Request) -> None:
        if not allowed(request.scope["headers"], self.options.api_key):
            raise errors.KeyRefusedError("the API key is missing or wrong: send Authorization: Bearer KEY")

    def _check_model(self, name: str) -> None:
        if name != self.options.model_name:
            raise errors.UnknownModelError(f"there is no model {name!r:.80}, only {self.options.model_name!r}", "model")

    def _card(self) -> dict[str, Any]:
        card = dict(id=self.options.model_name, object="model", created=self.created, owned_by="jattn")
        return card | {"max_model_len": self.engine.limits.max_model_len}


class _EventStream(StreamingResponse):
    """Server-sent events; the last is [DONE] or an error. When it ends, unfinished requests are aborted."""

    def __init__(self, answer: Answer, stream: Stream, asked: fields.Asked):
        super().__init__(self._events(answer, asked), 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        self._stream = stream

    async def __call__(self, scope, receive, send) -> None:
        with contextlib.closing(self._stream):
            await super().__call__(scope, receive, send)

    async def _events(self, answer: Answer, asked: fields.Asked) -> AsyncIterator[bytes]:
        is_long = asked.params.logprobs is not None  # log-probabilities are slow to write: in a thread
        try:
            async for p, output in self._stream:
                events = answer.events(p, output)
                for event in await asyncio.to_thread(list, events) if is_long else events:
                    yield _event(event)
            if asked.include_usage:
                yield _event(answer.last_event())
        except errors.ServeError as error:
            yield _event(errors.body_of(error))
        except Exception:
            log.exception("a stream failed")
            yield _event(errors.body_of(errors.ServeError("the server failed")))
        else:
            yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + errors.encode(body) + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable) -> Any:
    """The result of `work`; if the client disconnects first, the work is cancelled and ClientDisconnect raised."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Wait until the client disconnects; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
