"""POST /v1/embeddings returns the embedder's vectors in OpenAI's JSON, refuses by name, and ends every request."""

import base64
import threading

import httpx
import numpy as np
import openai
import pytest

import jattn
from jattn import Embedder, models
from jattn.models.dense import DenseLayer
from jattn.text import ByteTokenizer
from tests.models import examples
from tests.serve.running import PATIENCE, serving, wait_until
from tests.serve.test_refusals import refused

CLIENT = httpx.Client(timeout=PATIENCE)


def make_embedder(**options) -> Embedder:
    """A small BERT over bytes."""
    config = models.config_of(examples.ENCODERS["bert"] | dict(vocab_size=258)).without_head()
    fields = dict(pooling="mean", prompts=dict(query="q: "), backend="sdpa")
    return Embedder(
        config=config, params=examples.params_of(config), tokenizer=ByteTokenizer(num_special=2), **fields | options
    )


class Slow(Embedder):
    """Waits until it is let go."""

    gate = threading.Event()

    def pooled(self, rows):
        self.gate.wait(PATIENCE)
        return super().pooled(rows)


class Broken(Embedder):
    def pooled(self, rows):
        raise RuntimeError("no memory")


@pytest.fixture(scope="module")
def served():
    embedder = make_embedder()
    with serving(embedder, model_name="fake", max_inputs=5) as (_, _, url):
        yield embedder, url


def send(url, **body):
    return CLIENT.post(f"{url}/v1/embeddings", json=body)


def test_a_body_may_have_as_many_texts_as_clients_send_at_once():
    """LangChain sends 1000 texts in a body: of 1100 characters each they have more than the 1 MiB of other servers."""
    post = lambda url, size: CLIENT.post(f"{url}/v1/embeddings", content=b'{"input": "x"' + b" " * (size - 14) + b"}")
    with serving(make_embedder()) as (_, _, url):
        assert post(url, 1 << 23).status_code == 200
        refused(post(url, (1 << 23) + 1), 413)
    with serving(make_embedder(), max_body_bytes=99) as (_, _, url):
        assert post(url, 99).status_code == 200
        assert "larger than 99 bytes: send less" in refused(post(url, 100), 413)["message"]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [("hello", ["hello"]), (["hello", "a"], ["hello", "a"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])],
)
def test_the_vectors_are_the_embedders(served, given, inputs):
    embedder, url = served
    answer = send(url, input=given, model="fake")
    assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("embd-")
    said = answer.json()
    assert [row["index"] for row in said["data"]] == list(range(len(inputs)))
    assert {row["object"] for row in said["data"]} == {"embedding"} and (said["object"], said["model"]) == (
        "list",
        "fake",
    )
    count = sum(map(len, inputs))
    assert said["usage"] == dict(prompt_tokens=count, total_tokens=count)
    made = np.array([row["embedding"] for row in said["data"]])
    np.testing.assert_allclose(made, embedder.embed(inputs), atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)


def test_dimensions_formats_and_prompts_are_honoured(served):
    embedder, url = served
    wanted = embedder.embed(["hello"], dim=7, prompt="query")[0]
    answer = send(url, input="hello", dimensions=7, prompt_name="query", encoding_format="float").json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], wanted, atol=2e-6)
    text = send(url, input="hello", dimensions=7, prompt_name="query", encoding_format="base64").json()
    raw = base64.b64decode(text["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32(answer["data"][0]["embedding"]))
    assert answer["usage"]["prompt_tokens"] == len("q: hello")


def test_dense_layers_decide_how_many_dimensions_there_are():
    embedder = make_embedder(
        dense=(DenseLayer(kernel=np.eye(32, 40, dtype=np.float32) * 2, activation="Tanh"),), dim=36
    )
    with serving(embedder, model_name="fake") as (_, _, url):
        for asked, count in ({}, 36), ({"dimensions": 40}, 40), ({"dimensions": 9}, 9):
            made = send(url, input="hello", **asked).json()["data"][0]["embedding"]
            np.testing.assert_allclose(made, embedder.embed(["hello"], dim=count)[0], atol=2e-6)
            assert len(made) == count
        assert "at most 40" in refused(send(url, input="x", dimensions=41), param="dimensions")["message"]


def test_the_openai_package_reads_the_response(served):
    embedder, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        for form in (openai.NOT_GIVEN, "float"):  # it asks for base64 if it may choose
            made = client.embeddings.create(model="fake", input=["hello", "a"], encoding_format=form)
            np.testing.assert_allclose([row.embedding for row in made.data], embedder.embed(["hello", "a"]), atol=2e-6)
            assert made.usage.prompt_tokens == 6


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (dict(), "input", "input=None must be text"),
        (dict(input=[]), "input", "must be text, token ids, or a list of either"),
        (dict(input=[1.5]), "input", "must be text"),
        (dict(input=""), "input", "has no tokens"),
        (dict(input=[258]), "input", "token id 258"),
        (dict(input="x" * 65), "input", "65 tokens, and this model reads up to 64"),
        (dict(input=[5] * 65), "input", "the input has 65 tokens, and this model reads up to 64"),
        (dict(input="x" * 20_000), "input", "the input has 20000 characters"),
        (dict(input=["x"] * 6), "input", "6 inputs, at most 5"),
        (dict(input="x", dimensions=33), "dimensions", "dimensions=33 must be at most 32"),
        (dict(input="x", dimensions=0), "dimensions", "dimensions=0 must be an integer"),
        (dict(input="x", encoding_format="hex"), "encoding_format", "float or base64"),
        (dict(input="x", prompt_name="passage"), "prompt_name", "must be one of query"),
        (dict(input="x", temperature=0), "temperature", "unknown"),
    ],
)
def test_a_wrong_field_is_refused_by_name(served, body, param, words):
    error = refused(send(served[1], **body), param=param)
    assert words in error["message"]


def test_the_other_routes_and_errors_are_its_neighbours(served):
    _, url = served
    assert refused(send(url, input="x", model="other"), 404, "model")["code"] == "model_not_found"
    error = refused(CLIENT.post(f"{url}/v1/completions", json={"prompt": "x"}), 404)
    assert error["message"].endswith("this server has /v1/embeddings, /v1/models, /v1/models/{name}, /health, /version")
    refused(CLIENT.get(f"{url}/v1/embeddings"), 405)
    refused(CLIENT.post(f"{url}/v1/embeddings", content=b"{"), 400)
    assert CLIENT.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 64
    assert CLIENT.get(f"{url}/health").json() == {"status": "ok"}
    assert CLIENT.get(f"{url}/version").json() == {"version": jattn.__version__}
    with serving(make_embedder(), api_key="secret") as (_, _, guarded):
        refused(send(guarded, input="x"), 401)


def test_a_failing_batch_fails_its_own_requests_and_the_server_continues():
    with serving(Broken(**vars(make_embedder()))) as (_, server, url):
        for _ in range(2):
            assert "no memory" in refused(send(url, input="x"), 500)["message"]
        assert server.loop.healthy and server.loop.num_requests == 0


class Choosy(Slow):
    """Fails where an input is "bad"."""

    def pooled(self, rows):
        made = super().pooled(rows)
        if self.tokens_of("bad") in rows:
            raise RuntimeError("no memory")
        return made


def test_of_requests_that_are_embedded_together_only_the_one_fails_that_cannot_be():
    Slow.gate.clear()
    answers: dict[str, httpx.Response] = {}
    with serving(Choosy(**vars(make_embedder()))) as (_, server, url):
        ask = lambda text: answers.update({text: send(url, input=text)})
        threads = [threading.Thread(target=ask, args=(text,)) for text in ("first", "good", "bad", "also good")]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: server.loop.num_requests == number + 1)
        Slow.gate.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert {text: answer.status_code for text, answer in answers.items() if answer.status_code != 200} == {"bad": 500}
    alone = make_embedder().embed(["also good"])[0].tolist()
    np.testing.assert_allclose(answers["also good"].json()["data"][0]["embedding"], alone, rtol=1e-5, atol=1e-6)


class Overflowing(Embedder):
    """Its second row is not a number, as of a model that overflows in float16."""

    def pooled(self, rows):
        made = super().pooled(rows)
        made[1:2] = np.nan
        return made


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_embedding_that_is_no_number_is_an_error(form):
    with serving(Overflowing(**vars(make_embedder()))) as (_, _, url):
        assert "the inputs [1]" in refused(send(url, input=["a", "b"], encoding_format=form), 500)["message"]
        assert send(url, input="a", encoding_format=form).status_code == 200


def test_requests_that_wait_are_bounded_embedded_together_and_ended_by_a_stop():
    Slow.gate.clear()
    embedder, answers = Slow(**vars(make_embedder())), []
    with serving(embedder, max_queue=3) as (_, server, url):
        loop = server.loop
        threads = [threading.Thread(target=lambda: answers.append(send(url, input="x"))) for _ in range(3)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: loop.num_requests == number + 1)
        assert refused(send(url, input="x"), 429)["code"] == "rate_limit_exceeded"
        loop.stop("the test ends it")
        wait_until(lambda: len(answers) == 2)  # the third is being embedded
        Slow.gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(answer.status_code for answer in answers) == [200, 503, 503]


def test_a_client_that_leaves_frees_its_place():
    Slow.gate.clear()
    with serving(Slow(**vars(make_embedder()))) as (_, server, url):
        first = threading.Thread(target=lambda: send(url, input="x"))
        first.start()
        wait_until(lambda: server.loop.num_requests == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/embeddings", json=dict(input="y"), timeout=0.5)
        wait_until(lambda: server.loop.num_requests == 1)
        Slow.gate.set()
        first.join(PATIENCE)
        wait_until(lambda: server.loop.num_requests == 0)
