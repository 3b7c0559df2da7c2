"""`jattn serve` serves embeddings if the folder or --pooling says so, and refuses what an embedder does not have."""

import argparse

import jax
import pytest

from jattn import Embedder
from jattn.cli import options, serve
from tests.models.test_embedder import folder  # noqa: F401  a fixture


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


def test_a_folder_with_modules_is_served_for_embeddings(folder):  # noqa: F811
    args = parsed("--model", str(folder), "--max-num-batched-tokens", "64", "--backend", "sdpa")
    assert options.serves_embeddings(args)
    made = options.make_embedder(args)
    assert isinstance(made, Embedder) and (made.pooling, made.max_batched_tokens, made.backend) == ("last", 64, "sdpa")
    half = options.make_embedder(parsed("--model", str(folder), "--dtype", "float16"))
    assert {x.dtype.name for x in jax.tree.leaves(half.params)} == {"float16"}
    assert len(half.embed(["one"])) == 1


def test_pooling_asks_for_embeddings_and_overrides_the_folder(folder):  # noqa: F811
    assert options.make_embedder(parsed("--model", str(folder), "--pooling", "mean")).pooling == "mean"
    (folder / "modules.json").unlink()
    assert not options.serves_embeddings(parsed("--model", str(folder))) and not options.serves_embeddings(parsed())
    assert options.serves_embeddings(parsed("--model", str(folder), "--pooling", "cls"))


def test_the_limit_of_bodies_is_the_one_given_or_the_servers_own(folder, monkeypatch):  # noqa: F811
    served = []

    def serve_nothing(embedder, server, host, port, sockets):
        served.append(server.max_body_bytes)
        for each in sockets:
            each.close()

    monkeypatch.setattr("jattn.serve.serve", serve_nothing)
    monkeypatch.setattr(serve, "collect_rarely", lambda: None)
    for more in ([], ["--max-body-bytes", "7"]):
        args = parsed("--model", str(folder), "--port", "0", *more)
        args.run(args)
    assert served == [None, 7]


@pytest.mark.parametrize("option", [["--num-blocks", "4"], ["--tensor-parallel", "2"], ["--deterministic"]])
def test_options_of_the_engine_are_refused_by_name(folder, option):  # noqa: F811
    with pytest.raises(ValueError, match=f"which do not have {option[0]}"):
        options.make_embedder(parsed("--model", str(folder), *option))


def test_several_processes_serve_no_embeddings(folder):  # noqa: F811
    several = ["--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", "0"]
    args = parsed("--model", str(folder), *several)
    with pytest.raises(ValueError, match="embedding model, which one process serves"):
        args.run(args)


def test_the_list_of_engine_options_has_their_defaults():
    args = vars(parsed())
    assert {name: args[name] for name in options.ENGINE_ONLY} == options.ENGINE_ONLY
    rest = {"model", "dtype", "quantization", "max_num_batched_tokens", "backend", "compile_cache_mb"}
    parser = argparse.ArgumentParser()
    options.add_engine(parser)
    assert vars(parser.parse_args([])).keys() == options.ENGINE_ONLY.keys() | rest


def test_the_embedded_model_makes_no_embeddings():
    with pytest.raises(ValueError, match="--pooling needs --model"):
        options.make_embedder(parsed("--pooling", "mean"))
