"""A Ray Serve application: several engines with the same model behind one address; needs `pip install 'jattn[ray]'`.

    serve run jattn.serve.replicas:build model=DIR num_replicas=2

Ray places and restarts the replicas, and its ConsistentHashRouter chooses one by the beginning of the prompt: the
replica that has computed the same beginning before finds it in its prefix cache. If that one has
`max_ongoing_requests` already, the request goes to the next.
"""

import asyncio
import dataclasses
import hashlib
import inspect
import json
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import pydantic
from pydantic import Field
from ray import serve  # type: ignore[import-not-found]
from ray.exceptions import RayError  # type: ignore[import-not-found]
from ray.serve.config import RequestRouterConfig  # type: ignore[import-not-found]
from ray.serve.exceptions import BackPressureError  # type: ignore[import-not-found]
from ray.serve.handle import DeploymentHandle  # type: ignore[import-not-found]
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jattn import compile_cache
from jattn.engine import Engine, keep_freed_memory, pretrained
from jattn.errors import UnsupportedError
from jattn.models.sentence_folder import is_sentence_folder
from jattn.serve import body, errors
from jattn.serve.app import make_app
from jattn.serve.handlers import cors
from jattn.serve.options import ServerOptions

log = logging.getLogger("jattn.serve")

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
CONNECTION_OPTIONS = ("max_connections", "header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout")
"""ServerOptions about connections, which Ray's proxy has; they are refused."""

MAX_WAITING_PARTS = 8
"""Parts of a response that wait for the ingress. Then the replica's coroutine waits, and the engine goes on."""


class ReplicaOptions(pydantic.BaseModel, extra="forbid"):
    """The arguments of `build`: of `serve run` as name=value, or of a configuration file of Ray Serve."""

    model: str  # a Hugging Face folder, which every replica can read
    num_replicas: int = Field(2, ge=1)
    num_gpus: float = Field(0, ge=0, allow_inf_nan=False)  # of each replica
    # of each replica; with more, a request goes to another one, and waits if all have
    max_ongoing_requests: int = Field(64, ge=1)
    max_queued_requests: int = Field(256, ge=1)  # waiting for a replica; more get a 429
    prefix_characters: int = Field(256, ge=1)  # the beginning of a prompt that decides to which replica it goes
    # between two checks of a replica; one that fails is restarted
    health_seconds: float = Field(10.0, gt=0, allow_inf_nan=False)
    engine: dict[str, Any] = {}  # arguments of Engine.from_pretrained
    server: dict[str, Any] = {}  # arguments of ServerOptions


@dataclasses.dataclass(frozen=True)
class Call:
    """An HTTP request, for a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


def build(options: ReplicaOptions) -> serve.Application:
    """The application. Its ingress reads each request and passes it to one of the replicas."""
    if ignored := sorted({*options.server} & set(CONNECTION_OPTIONS)):
        raise ValueError(f"{', '.join(ignored)} in server: Ray's proxy has the connections; set its own limits")
    if is_sentence_folder(options.model):
        raise UnsupportedError(f"{options.model} is an embedding model, and replicas have engines: use jattn serve")
    server = ServerOptions(**options.server)
    _check_engine(options)
    engines = serve.deployment(
        num_replicas=options.num_replicas,
        ray_actor_options={"num_gpus": options.num_gpus},
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=options.max_queued_requests,
        health_check_period_s=options.health_seconds,
        graceful_shutdown_timeout_s=server.grace,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": options.num_replicas - 1}
        ),
    )(Replica).bind(options.model, options.engine, options.server | {"allow_origins": ()})  # the ingress has them
    most = options.num_replicas * options.max_ongoing_requests + options.max_queued_requests
    ingress = serve.deployment(max_ongoing_requests=most)(Ingress)
    return ingress.bind(engines, server, options.prefix_characters)


def _check_engine(options: ReplicaOptions) -> None:
    """An error for what every replica would refuse, because Ray starts such replicas again and again."""
    own = inspect.signature(Engine.from_pretrained).parameters.values()
    taken = {each.name for each in own if each.kind is each.KEYWORD_ONLY}
    if unknown := pretrained.unknown_names(Engine, options.engine.keys() - taken):
        raise ValueError(f"{', '.join(unknown)} in engine: Engine.from_pretrained has no such argument")
    engine = pretrained.check_options(options.engine)
    devices = math.prod(engine.get(name, 1) for name in pretrained.MESH_AXES)
    if devices > 1 and 0 < options.num_gpus < devices:
        raise ValueError(f"engine is for {devices} devices, and num_gpus={options.num_gpus:g}: give as many")


class Replica:
    """An engine with the application of `jattn serve`."""

    def __init__(self, model: str, engine: dict[str, Any], server: dict[str, Any]):
        keep_freed_memory()
        compile_cache.enable()
        loaded = Engine.from_pretrained(model, **engine)
        loaded.warmup()
        self._app = make_app(loaded, ServerOptions(**server))
        self._loop = self._app.state.loop
        self._loop.start()
        self._id = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Ray restarts the replica if this raises."""
        if not self._loop.healthy:
            raise RuntimeError(f"the engine is broken: {self._loop.failure}")

    async def respond(self, call: Call) -> AsyncIterator[Any]:
        """(status, headers), then the parts of the response's body. If the caller cancels, the request is aborted."""
        parts: asyncio.Queue[Any] = asyncio.Queue(MAX_WAITING_PARTS)

        async def run() -> None:
            try:
                await self._app(_scope(call), _receiver(call.body), parts.put)
                end = RuntimeError("the application sent no end of its response")
            except Exception as error:
                end = error
            await parts.put(end)

        answer = asyncio.ensure_future(run())
        try:
            while True:
                message = await parts.get()
                if isinstance(message, Exception):
                    raise message
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], (b"x-replica", self._id.encode())]
                    continue
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body", False):
                    return
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)


class _ApplicationResponse(Response):
    """What an ASGI application answers; Ray calls a response with `scope`, `receive` and `send`."""

    def __init__(self, app: ASGIApp):
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Ingress:
    """Passes HTTP requests to the replicas, and their responses back as they grow."""

    def __init__(self, engines: DeploymentHandle, server: ServerOptions, prefix_characters: int):
        self._engines, self._body_limit, self._prefix_characters = engines, server.body_limit, prefix_characters
        self._app: ASGIApp = self._answer
        for cls, args, keywords in cors(server):
            self._app = cls(self._app, *args, **keywords)

    async def __call__(self, request: Request) -> Response:
        return _ApplicationResponse(self._app)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._response(Request(scope, receive))
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        try:
            raw = await body.read(request, self._body_limit)
        except errors.ServeError as error:
            return errors.response_of(error)
        prefix = await asyncio.to_thread(prefix_of, raw, self._prefix_characters) if raw else None
        chosen = {} if prefix is None else {"session_id": prefix}
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))  # the prefix of Ray's route
        call = Call(request.method, path, request.scope["query_string"], request.headers.raw, raw)
        parts = self._engines.options(stream=True, **chosen).respond.remote(call)
        try:
            status, headers = await anext(parts)
        except BackPressureError:
            return errors.response_of(errors.QueueFullError("all replicas are full; try again later"))
        except RayError as error:
            log.warning("a replica failed before it answered: %s", error)
            return errors.response_of(errors.StoppedError("the replica of this request has ended; try again"))
        is_event_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        response = StreamingResponse(_body(parts, is_event_stream), status)
        response.raw_headers = headers
        return response


async def _body(parts: AsyncIterator[bytes], is_event_stream: bool) -> AsyncIterator[bytes]:
    """The parts of a response; if its replica ends, an event stream ends with an error, another one incomplete."""
    try:
        async for part in parts:
            yield part
    except RayError:
        if not is_event_stream:
            raise
        failed = errors.StoppedError("the replica of this request has ended; try again")
        yield b"data: " + errors.encode(errors.body_of(failed)) + b"\n\n"


def prefix_of(raw: bytes, characters: int) -> str | None:
    """A name of the beginning of a body's prompt; None if it has none. For a chat only the messages up to the first of
    the user count, so all its turns have one name.
    """
    try:
        values = json.loads(raw)
        if isinstance(messages := values.get("messages"), list):
            first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
            prompt = "".join(json.dumps(message.get("content")) for message in messages[: first + 1])
        else:
            prompt = values["prompt"]
            if isinstance(prompt, list) and not isinstance(prompt[0], int):
                prompt = prompt[0]  # of several prompts
        beginning = json.dumps([values.get("cache_salt"), prompt[:characters]])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # the replica will say what is wrong
        return None
    return hashlib.sha256(beginning.encode()).hexdigest()


# ---------------------------------------------------------------------- a call of an ASGI application
def _scope(call: Call) -> dict[str, Any]:
    return dict(
        type="http", asgi={"version": "3.0", "spec_version": "2.4"}, http_version="1.1", scheme="http",
        method=call.method, path=call.path, raw_path=call.path.encode(), root_path="", query_string=call.query,
        headers=call.headers,
    )  # fmt: skip


def _receiver(raw: bytes):
    """The `receive` of an ASGI application: the body, then nothing. Its task is cancelled if the client disconnects."""
    messages = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        return await asyncio.Future()

    return receive
