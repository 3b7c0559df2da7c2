"""The ASGI application of an embedder: POST /v1/embeddings, with the fields and the response of OpenAI's interface."""

import asyncio
import base64
import dataclasses
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jattn.embedder import Embedder
from jattn.serve import body, errors, fields
from jattn.serve.embedding_loop import EmbeddingLoop
from jattn.serve.handlers import Handlers, make_application, unless_disconnected
from jattn.serve.options import EMBEDDING_BODY_BYTES, ServerOptions


def make_embeddings_app(embedder: Embedder, options: ServerOptions = ServerOptions()) -> Starlette:  # noqa: B008  frozen
    """The ASGI application; its lifespan starts and stops the embedder's thread, `app.state.loop`."""
    if options.max_body_bytes is None:
        options = dataclasses.replace(options, max_body_bytes=EMBEDDING_BODY_BYTES)
    loop = EmbeddingLoop(embedder, options.max_queue)
    parsers = body.ParserThreads(options.body_limit)
    handlers = _Handlers(
        embedder=embedder, loop=loop, parsers=parsers, options=options, max_model_len=embedder.max_length
    )
    return make_application(
        handlers, [Route("/v1/embeddings", handlers.guarded(handlers.embeddings), methods=["POST"])]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Handlers(Handlers):
    """The handler of the route of embeddings."""

    embedder: Embedder
    loop: EmbeddingLoop

    async def embeddings(self, request: Request) -> Response:
        self.loop.check_open()
        raw = await body.read(request, self.options.body_limit)
        parsed, rows = await self.parsers.run(raw, self._tokenized)
        self.log_user(request, parsed.user)
        result = asyncio.wrap_future(self.loop.submit(rows))
        made = await unless_disconnected(request, result)
        return await asyncio.to_thread(lambda: errors.json_response(self._response(parsed, rows, made)))

    def _tokenized(self, raw: bytes) -> tuple[fields.ParsedEmbeddings, list[list[int]]]:
        """The fields of a body, and its inputs as tokens."""
        most = fields.MAX_INT32 if self.max_model_len is None else self.max_model_len
        parsed = fields.parse_embeddings(body.parse(raw, self.options.max_inputs, most, "input"))
        if parsed.model is not None:
            self.check_model(parsed.model)
        if parsed.prompt_name is not None and parsed.prompt_name not in self.embedder.prompts:
            known = ", ".join(self.embedder.prompts) or "none: this model has no prompts"
            raise errors.BadRequestError(f"prompt_name must be one of {known}", "prompt_name")
        if parsed.dimensions is not None and parsed.dimensions > (size := self.embedder.size):
            raise errors.BadRequestError(f"dimensions={parsed.dimensions} must be at most {size}", "dimensions")
        rows = []
        for each in parsed.inputs:
            if isinstance(each, str):
                fields.check_length(each, most, "input")
            try:
                rows.append(self.embedder.tokens_of(each, parsed.prompt_name))
            except ValueError as error:
                raise errors.BadRequestError(f"input: {error}", "input") from error
        return parsed, rows

    def _response(self, parsed: fields.ParsedEmbeddings, rows: list[list[int]], made: np.ndarray) -> dict[str, Any]:
        finished = self.embedder.finished(made, parsed.dimensions)
        if wrong := np.flatnonzero(~np.isfinite(finished).all(axis=-1)).tolist():
            raise errors.FailedError(f"the model's embedding is NaN or infinite for the inputs {wrong[:5]}")
        num_tokens = sum(map(len, rows))
        data = [
            {"object": "embedding", "index": index, "embedding": _as_base64(row) if parsed.is_base64 else row.tolist()}
            for index, row in enumerate(finished)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self.options.model_name, "usage": usage}


def _as_base64(row: np.ndarray) -> str:
    """Its float32 values in little-endian order."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
