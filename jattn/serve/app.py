"""The ASGI application of an engine: its routes, and a request's way from body to response."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jattn.engine import Engine, admission
from jattn.serve import body, errors, fields
from jattn.serve.engine_loop import EngineLoop, OutputStream
from jattn.serve.handlers import Handlers, make_application, unless_disconnected
from jattn.serve.options import ServerOptions
from jattn.serve.responses import ResponseBuilder
from jattn.serve.token_texts import TokenTexts

log = logging.getLogger("jattn.serve")

MAX_LOGPROBS_AT_ONCE = 512
"""Log-probabilities that are written while other streams wait, about a millisecond; more are written in a thread."""


def make_app(engine: Engine, options: ServerOptions = ServerOptions()) -> Starlette:  # noqa: B008  frozen
    """The ASGI application; its lifespan starts and stops the engine's thread, `app.state.loop`."""
    loop = EngineLoop(engine, options.max_queue)
    parsers = body.ParserThreads(options.body_limit)
    handlers = _Handlers(
        engine=engine, loop=loop, texts=TokenTexts(engine.tokenizer), parsers=parsers, options=options,
        max_model_len=engine.limits.max_model_len,
    )  # fmt: skip
    guarded = handlers.guarded
    routes = [
        Route("/v1/completions", guarded(handlers.completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(handlers.chat_completions), methods=["POST"]),
        Route("/metrics", guarded(handlers.metrics)),
    ]
    return make_application(handlers, routes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Handlers(Handlers):
    """The handler of each route of an engine."""

    engine: Engine
    loop: EngineLoop
    texts: TokenTexts

    async def completions(self, request: Request) -> Response:
        max_tokens = self.options.default_max_tokens
        return await self._generate(request, lambda values: fields.parse_completion(values, max_tokens))

    async def chat_completions(self, request: Request) -> Response:
        engine, max_len = self.engine, self.engine.limits.max_model_len
        parse = lambda values: fields.parse_chat(values, engine.chat_template, engine.tokenizer, max_len)
        return await self._generate(request, parse)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.loop.stats.prometheus(), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------ completions
    async def _generate(self, request: Request, parse: Callable[[dict[str, Any]], fields.ParsedBody]) -> Response:
        """The response to a POST. parse: the fields of this route's body; it runs in a thread."""
        self.loop.check_open()
        raw = await body.read(request, self.options.body_limit)
        max_prompts, max_len = self.options.max_prompts, self.engine.limits.max_model_len
        parsed = await self.parsers.run(raw, lambda raw: self._tokenized(parse(body.parse(raw, max_prompts, max_len))))
        id = request.scope["state"]["id"]
        self.log_user(request, parsed.user)
        builder = ResponseBuilder(parsed, id, self.options.model_name, self.texts)
        stream = self.loop.submit(id, parsed.prompts, parsed.params, parsed.salt)
        if parsed.stream:
            return _EventStreamResponse(builder, stream, parsed)
        with contextlib.closing(stream):
            outputs = await unless_disconnected(request, stream.finished())
        return await asyncio.to_thread(lambda: errors.json_response(builder.whole(outputs)))

    def _tokenized(self, parsed: fields.ParsedBody) -> fields.ParsedBody:
        """The body with its prompts as tokens; an error if the engine cannot serve it."""
        if parsed.model is not None:
            self.check_model(parsed.model)
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
            tokens, _, problems = admission.check(prompt, parsed.params, engine.tokenizer, vocab_size, engine.limits)
            if problems:
                argument = next(iter(problems))
                param = prompt_field if argument == "prompt" else argument
                raise errors.BadRequestError("; ".join(problems.values()), param)
            prompts.append(tokens)
        return dataclasses.replace(parsed, prompts=tuple(prompts))


class _EventStreamResponse(StreamingResponse):
    """Server-sent events; the last is [DONE] or an error. When it ends, unfinished engine requests are aborted."""

    def __init__(self, builder: ResponseBuilder, stream: OutputStream, parsed: fields.ParsedBody):
        super().__init__(self._events(builder, parsed), 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        self._stream = stream

    async def __call__(self, scope, receive, send) -> None:
        with contextlib.closing(self._stream), contextlib.suppress(ClientDisconnect):
            await unless_disconnected(Request(scope, receive), self.stream_response(send))

    async def _events(self, builder: ResponseBuilder, parsed: fields.ParsedBody) -> AsyncIterator[bytes]:
        try:
            async for prompt_index, output in self._stream:
                events = builder.events(prompt_index, output)
                if builder.num_unsent_logprobs(prompt_index, output) > MAX_LOGPROBS_AT_ONCE:
                    events = await asyncio.to_thread(list, events)
                for event in events:
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
