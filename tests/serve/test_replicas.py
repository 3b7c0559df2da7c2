"""Two replicas under Ray Serve on one machine: their answers, the choice by prefix, and the death of one."""

import asyncio
import concurrent.futures
import http.client
import json
import time
import warnings

import httpx
import pytest
from starlette.requests import Request

from jattn import embedded
from jattn.serve import ServerOptions
from tests.serve.running import free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'jattn[ray]'")
    from ray import serve
    from ray.serve.exceptions import BackPressureError

    from jattn.serve.replicas import Call, Ingress, Replica, ReplicaOptions, build, prefix_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray has many, in this process
ENGINE = dict(num_blocks=129, block_size=16, max_num_seqs=4, max_num_batched_tokens=32, backend="sdpa")


@pytest.fixture(scope="module")
def port():
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = ReplicaOptions(
        model=str(embedded.directory()), num_replicas=2, health_seconds=1, max_ongoing_requests=8, engine=ENGINE
    )
    serve.run(build(options), name="adder")
    yield port
    serve.shutdown()
    ray.shutdown()


def send(port, path, body=None):
    """(status, replica, text) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET" if body is None else "POST", path, body=None if body is None else json.dumps(body))
    response = connection.getresponse()
    return response.status, response.getheader("x-replica"), response.read().decode()


def add(port, a, b, **options):
    body = dict(prompt=f"{a}+{b}=", temperature=0, max_tokens=8, stop="\n") | options
    return send(port, "/v1/completions", body)


def test_every_path_of_the_server_answers(port):
    status, replica, text = add(port, 740, 583)
    assert status == 200 and json.loads(text)["choices"][0]["text"] == "2340" and replica
    assert json.loads(send(port, "/v1/models")[2])["data"][0]["id"] == "jattn"
    assert "jattn_requests_total" in send(port, "/metrics")[2]
    status, _, text = send(port, "/v1/completions", dict(prompt=[], n="x"))
    assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"
    assert send(port, "/v1/nothing")[0] == 404
    assert send(port, "/v1/completions", dict(prompt="1" * (1 << 20)))[0] == 413


def test_a_stream_has_the_events_of_the_official_interface(port):
    status, _, text = add(port, 740, 583, stream=True)
    events = text.split("\n\n")
    assert status == 200 and events[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert "".join(parts) == "2340"


def test_a_prompt_goes_to_the_replica_that_had_its_beginning_before(port):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        chosen = [set(pool.map(lambda _, a=a: add(port, a, 100)[1], range(3))) for a in range(100, 116)]
    assert all(len(replicas) == 1 for replicas in chosen), "one prompt went to two replicas"
    assert len(set.union(*chosen)) == 2, "all prompts went to one replica"


def test_more_requests_than_a_replica_takes_go_to_the_other(port):
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        ends = list(pool.map(lambda _: add(port, 740, 583, max_tokens=24, stop=None, ignore_eos=True), range(32)))
    assert {status for status, _, _ in ends} == {200} and len({replica for _, replica, _ in ends}) == 2


def test_a_replica_that_is_killed_under_load_fails_only_its_own_requests(port):
    _, victim, _ = add(port, 740, 583)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        options = dict(stream=True, max_tokens=24, stop=None, ignore_eos=True)
        running = [pool.submit(add, port, 740 if i % 2 else 100 + i, 583, **options) for i in range(24)]
        concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        ray.kill(ray.get_actor(f"SERVE_REPLICA::adder#Replica#{victim}", namespace="serve"))
        ends = [each.result() for each in running]
    for status, replica, text in ends:
        assert status in (200, 503)
        assert "data: [DONE]" in text or (replica in (victim, None) and '"error"' in text), (status, replica, text)
    replicas = set()
    end = time.monotonic() + 120
    while victim in replicas or len(replicas) < 2:  # the first ones go to the other, later ones also to a new one
        assert time.monotonic() < end, f"no new replica: {replicas}"
        results = [add(port, a, 583) for a in range(740, 748)]
        assert all(status == 200 for status, _, _ in results)
        replicas = {replica for _, replica, _ in results}


def test_a_client_that_disconnects_cancels_the_application():
    ended = []

    async def application(scope, receive, send):
        assert (await receive())["body"] == b"body" and (scope["path"], scope["method"]) == ("/v1/x", "POST")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
            while True:
                await send({"type": "http.response.body", "body": b"part", "more_body": True})
        finally:
            ended.append(True)

    async def read_two():
        replica = object.__new__(Replica)
        replica._app, replica._id = application, "r1"
        parts = replica.respond(Call("POST", "/v1/x", b"", [], b"body"))
        seen = [await anext(parts), await anext(parts)]
        await parts.aclose()
        return seen

    assert asyncio.run(read_two()) == [(200, [(b"a", b"b"), (b"x-replica", b"r1")]), b"part"]
    assert ended == [True]


class Handle:
    """Stands for the replicas, which are full if `is_full`."""

    def __init__(self, is_full=False):
        self.calls, self.is_full, self.respond = [], is_full, self

    def options(self, **_):
        return self

    async def remote(self, call):
        self.calls.append(call)
        if self.is_full:
            raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
        yield 200, [(b"content-type", b"text/plain")]
        yield b"good"


def ask(ingress, method, path, root_path="", **request):
    """The answer of an ingress, without Ray."""

    async def application(scope, receive, send):
        response = await ingress(Request(scope, receive))
        await response(scope, receive, send)

    async def answer():
        transport = httpx.ASGITransport(application, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://ray") as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("path", "root_path", "passed"),
    [
        ("/v1/models?a=%3F", "", ("/v1/models", b"a=%3F")),
        ("/llm/v1/models", "/llm", ("/v1/models", b"")),
        ("/v1/v1/models", "/v1", ("/v1/models", b"")),
        ("/v1/models/a%3Fb%23c", "", ("/v1/models/a?b#c", b"")),
    ],
)
def test_a_replica_gets_the_path_behind_the_prefix_of_the_route(path, root_path, passed):
    handle = Handle()
    assert ask(Ingress(handle, ServerOptions(), 9), "GET", path, root_path).text == "good"
    assert [(call.path, call.query) for call in handle.calls] == [passed]


def test_a_page_of_another_origin_reads_the_errors_of_the_ingress():
    page, full = "https://chat.example", Handle(is_full=True)
    ingress = Ingress(full, ServerOptions(allow_origins=[page], max_body_bytes=9), 9)
    answers = [
        ask(ingress, "POST", "/v1/completions", content=content, headers={"Origin": page})
        for content in ("{}", "x" * 10)
    ]
    assert [answer.status_code for answer in answers] == [429, 413]
    asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
    answers.append(ask(ingress, "OPTIONS", "/v1/completions", headers=asked))
    assert answers[-1].status_code == 200 and len(full.calls) == 1, "a preflight needs no replica"
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {page}
    other = ask(ingress, "POST", "/v1/completions", headers={"Origin": "https://other.example"})
    assert other.status_code == 429 and "access-control-allow-origin" not in other.headers
    assert "vary" not in ask(Ingress(Handle(), ServerOptions(), 9), "GET", "/health", headers={"Origin": page}).headers


def test_limits_of_connections_are_rays():
    with pytest.raises(ValueError, match="max_connections, write_timeout in server: Ray's proxy"):
        build(ReplicaOptions(model="m", server=dict(write_timeout=1, max_connections=2, model_name="m")))


WRONG = [
    (dict(num_replicas=0), "greater than or equal to 1"),
    (dict(max_queued_requests=-1), "greater than or equal to 1"),  # Ray's own word for no limit
    (dict(max_queued_requests=0), "greater than or equal to 1"),  # Ray refuses it
    (dict(prefix_characters=-5), "greater than or equal to 1"),  # would cut the end of a prompt
    (dict(health_seconds=float("nan")), "finite"),
    (dict(engine=dict(tensor_paralel=2)), "tensor_paralel in engine: Engine.from_pretrained has no such argument"),
    (dict(engine=dict(options={}, params=1)), "options, params in engine: Engine.from_pretrained has no such argument"),
    (dict(engine=dict(block_size=0)), "block_size=0 must be a positive integer"),
    (dict(engine=dict(dtype="int8")), "dtype=int8 of weights must be None or one of"),
    (dict(engine=dict(progress="yes")), "progress='yes' must be callable"),
    (dict(engine=dict(quantization="int3")), "quantization='int3' is not known"),
    (dict(engine=dict(tensor_parallel=4), num_gpus=2), "engine is for 4 devices, and num_gpus=2"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_what_every_replica_would_refuse_is_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        build(ReplicaOptions(model="m", **options))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (dict(prompt="abcdX"), dict(prompt="abcdY"), True),
        (dict(prompt="abcX"), dict(prompt="abcY"), False),
        (dict(prompt=[1, 2, 3, 4, 5]), dict(prompt=[1, 2, 3, 4, 6]), True),
        (dict(prompt=["abcdX", "z"]), dict(prompt="abcdY"), True),
        (dict(prompt="abcdX", cache_salt="a"), dict(prompt="abcdX", cache_salt="b"), False),
        (
            dict(messages=[dict(role="user", content="a")]),
            dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b")]),
            True,
        ),
    ],
)
def test_the_name_of_a_beginning(one, other, same):
    names = [prefix_of(json.dumps(body).encode(), 4) for body in (one, other)]
    assert (names[0] == names[1]) == same and None not in names


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b'{"prompt": []}', b'{"messages": [1]}', b"[" * 100_000])
def test_a_body_without_a_beginning_has_no_name(raw):
    assert prefix_of(raw, 4) is None
