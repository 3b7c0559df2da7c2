"""The routes, on Starlette."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jattn.engine import Engine, RequestOutput, admission
from jattn.serve import wire
from jattn.serve.loop import EngineLoop, QueueFullError, StoppedError

POLL_SECONDS = 0.1
"""How often a request that is not streamed looks whether its client is still there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the server accepts."""

    model_name: str = "jattn"
    api_key: str | None = None
    max_body_bytes: int = 1 << 20
    max_queue: int = 256
    max_prompts: int = 64  # of one body
    default_max_tokens: int = 16


class TooLargeError(ValueError):
    """The body is larger than the server accepts."""


def make_app(engine: Engine, options: ServerOptions = ServerOptions()) -> Starlette:  # noqa: B008  frozen
    """The application; its lifespan starts and stops the engine's thread, `app.state.loop`."""
    loop = EngineLoop(engine, options.max_queue)
    server = _Server(engine, loop, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        loop.start()
        yield
        loop.stop()
        await asyncio.to_thread(loop.join)

    guarded = server.guarded
    routes = [
        Route("/v1/completions", guarded(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(server.chat), methods=["POST"]),
        Route("/v1/models", guarded(server.models)),
        Route("/metrics", guarded(server.metrics)),
        Route("/health", server.health),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.loop = loop
    return app


@dataclasses.dataclass(frozen=True)
class _Server:
    engine: Engine
    loop: EngineLoop
    options: ServerOptions

    def guarded(self, handler: Callable) -> Callable:
        """With the API key asked for, and every refusal as the interface words it."""

        async def answer(request: Request) -> Response:
            if not self._allowed(request):
                return _refusal(401, "the API key is missing or wrong", "authentication_error")
            try:
                return await handler(request)
            except wire.BadRequestError as error:
                return _refusal(400, str(error), param=error.param)
            except TooLargeError as error:
                return _refusal(413, str(error))
            except QueueFullError as error:
                return _refusal(429, str(error), "rate_limit_error", headers={"Retry-After": "1"})
            except StoppedError as error:
                return _refusal(503, str(error), "server_error")
            except ClientDisconnect:
                return Response(status_code=499)

        return answer

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._serve(request, wire.parse_completion(body, self.options.default_max_tokens))

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        room = self.engine.limits.max_model_len
        return await self._serve(request, wire.parse_chat(body, self.engine.chat_template, room))

    async def models(self, request: Request) -> Response:
        card = dict(id=self.options.model_name, object="model", created=int(time.time()), owned_by="jattn")
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self.engine.limits.max_model_len}]})

    async def health(self, request: Request) -> Response:
        healthy = self.loop.healthy
        return JSONResponse({"status": "ok" if healthy else "stopped"}, status_code=200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.loop.stats.prometheus(), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------ serving
    async def _serve(self, request: Request, asked: wire.Asked) -> Response:
        self._check(asked)
        id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        streams = [self.loop.stream(prompt, asked.params, asked.salt) for prompt in asked.prompts]
        if asked.stream:
            events = _merged(streams)
            first = await anext(events)  # a full queue is a 429, not a broken stream
            return StreamingResponse(self._events(asked, id, first, events), media_type="text/event-stream")
        outputs = await _unless_gone(request, asyncio.gather(*(_last(stream) for stream in streams)))
        failed = [output.error for output in outputs for output in output.outputs if output.error]
        if failed:
            return _refusal(500, failed[0], "server_error")
        return JSONResponse(wire.answer(asked, outputs, id, self.options.model_name, self._token_text))

    async def _events(self, asked: wire.Asked, id: str, first, events) -> AsyncIterator[str]:
        """Server-sent events; the last is [DONE], or an error."""
        name, seen, last = self.options.model_name, {}, {}
        try:
            async with contextlib.aclosing(events):
                news = first
                while news is not None:
                    p, output = news
                    last[p] = output
                    for done in output.outputs:
                        if done.error:
                            yield _event(wire.error_body(done.error, "server_error"))
                            return
                        key = (p, done.index)
                        state = (done.text, len(done.token_ids), done.finish_reason)
                        text, tokens, _ = before = seen.get(key, ("", 0, None))
                        if state != before:
                            index = p * asked.params.n + done.index
                            yield _event(wire.chunk(asked, done, index, (text, tokens), id, name, self._token_text))
                        seen[key] = state
                    news = await anext(events, None)
        except StoppedError as error:
            yield _event(wire.error_body(str(error), "server_error"))
            return
        if asked.include_usage:
            yield _event(wire.usage_chunk(asked, list(last.values()), id, name))
        yield "data: [DONE]\n\n"

    def _check(self, asked: wire.Asked) -> None:
        """400 for what the engine would refuse."""
        if len(asked.prompts) > self.options.max_prompts:
            raise wire.BadRequestError(f"{len(asked.prompts)} prompts, at most {self.options.max_prompts}", "prompt")
        engine = self.engine
        for prompt in asked.prompts:
            vocab = engine.config.vocab_size
            _, reasons = admission.check(prompt, asked.params, engine.tokenizer, vocab, engine.limits)
            if reasons:
                raise wire.BadRequestError("; ".join(reasons), "messages" if asked.chat else "prompt")

    async def _body(self, request: Request) -> dict:
        most, parts, size = self.options.max_body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise TooLargeError(f"the body is larger than {most} bytes")
            parts.append(part)
        try:
            return json.loads(b"".join(parts))
        except ValueError as error:
            raise wire.BadRequestError(f"the body is not JSON: {error}") from error

    def _allowed(self, request: Request) -> bool:
        key = self.options.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return key is None or hmac.compare_digest(given.encode(), key.encode())

    def _token_text(self, token: int) -> str:
        return str(token) if self.engine.tokenizer is None else self.engine.tokenizer.decode([token])


async def _last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """A request's final output."""
    async with contextlib.aclosing(stream):
        async for output in stream:
            if output.finished:
                return output
    raise StoppedError("the engine ended a request without saying why")


async def _merged(streams: list[AsyncIterator[RequestOutput]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """(which, output) of several requests as they come; all are left together."""
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(contextlib.aclosing(stream))
        tasks = {asyncio.ensure_future(anext(stream, None)): p for p, stream in enumerate(streams)}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    p = tasks.pop(task)
                    if (output := task.result()) is not None:
                        tasks[asyncio.ensure_future(anext(streams[p], None))] = p
                        yield p, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_gone(request: Request, work: asyncio.Future):
    """The result of `work`; where the client leaves before it is there, the work is cancelled."""
    try:
        while not work.done():
            await asyncio.wait([work], timeout=POLL_SECONDS)
            if not work.done() and await request.is_disconnected():
                raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _event(body: dict) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _refusal(status: int, message: str, kind="invalid_request_error", param=None, headers=None) -> JSONResponse:
    return JSONResponse(wire.error_body(message, kind, param), status_code=status, headers=headers)
