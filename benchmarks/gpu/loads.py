"""What users ask for, beside greedy tokens: one engine serves the same ragged trace with other options, and over HTTP.

    python -m benchmarks.gpu.loads [--only LOAD,...] [--model 8b] [--write | --out DIR] [--small]

The trace and the random Llama are those of benchmarks.gpu.trace (trace_1b_r256; --small: trace_small); --model 8b: the
same requests to a Llama of 8e9 parameters. Each token is a word, so that text and stop strings cost the host what they
cost with a real tokenizer. `over_greedy` is the throughput over that of `greedy` in the same run. http: as `jattn
serve`, with a client in another process that streams every request; http_paced: requests arrive at random, at 0.7 of
the rate that `http` reached.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import numpy as np

import jattn
from benchmarks import name_lists, records
from benchmarks.gpu import cupti, trace
from jattn.cli.serve import collect_rarely
from jattn.serve import ServerOptions
from jattn.serve.server import bind, listen, make_server

SIZES = {
    "1b": {},
    "8b": dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
}
"""Fields of the random Llama by model."""
GREEDY = dict(temperature=0.0)
SAMPLED = dict(temperature=0.8, top_p=0.95)
LOADS: dict[str, Sequence[dict]] = {
    "greedy": [GREEDY],
    "sampled": [SAMPLED],
    "cut": [dict(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01)],
    "penalties": [SAMPLED | dict(repetition_penalty=1.1, frequency_penalty=0.3)],
    "logprobs": [GREEDY | dict(logprobs=5)],
    "stop": [GREEDY | dict(stop=["\n\nUser:", "w17 w18"])],
    "mixed": [GREEDY, SAMPLED, SAMPLED | dict(logprobs=5), SAMPLED | dict(stop=["w17 w18"], presence_penalty=0.5)],
}
"""Sampling options by load; request i has those at i modulo their number."""
HTTP, PACE = ("http", "http_mixed", "http_paced"), 0.7


class Words:
    """A tokenizer of which each token is a word."""

    def __init__(self, vocab_size: int):
        self._words = [f" w{token}" for token in range(vocab_size)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([self._words[token] for token in token_ids])


def params_of(options: Sequence[dict], work: list) -> list[dict]:
    """The sampling options of each request."""
    return [options[i % len(options)] | dict(max_tokens=new, ignore_eos=True) for i, (_, new) in enumerate(work)]


def over_http(engine: jattn.Engine, work: list, options: Sequence[dict], at: list[float]) -> dict:
    """The client's figures of a server in this process."""
    sockets = bind("127.0.0.1", 0)
    listen(sockets)
    server = make_server(engine, ServerOptions(max_queue=len(work)))
    serving = threading.Thread(target=server.run, args=(sockets,))
    serving.start()
    bodies = [
        dict(prompt=prompt, stream=True, stream_options=dict(include_usage=True)) | each
        for (prompt, _), each in zip(work, params_of(options, work), strict=True)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dict(connections=len(work), bodies=bodies, at=at), file)
        file.flush()
        command = [sys.executable, "-m", "benchmarks.http_client", str(sockets[0].getsockname()[1]), file.name]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            server.should_exit = True
            serving.join()
    return json.loads(done.stdout)


def arrivals_of(work: list, tokens_per_s: float) -> list[float]:
    """Seconds at which the requests arrive, at random, PACE times as fast as this throughput allows."""
    mean_gap = sum(new for _, new in work) / len(work) / (PACE * tokens_per_s)
    return np.cumsum(np.random.default_rng(0).exponential(mean_gap, len(work))).tolist()


def measure(engine: jattn.Engine, work: list, name: str, rates: dict[str, float]) -> dict:
    """The figures of one load. rates: tokens per second of the loads before it."""
    before = engine.stats
    with trace.watched() as seen:
        if name in HTTP:
            at = arrivals_of(work, rates["http"]) if name == "http_paced" else [0.0] * len(work)
            row = over_http(engine, work, LOADS["mixed" if name == "http_mixed" else "greedy"], at)
        else:
            params = [jattn.SamplingParams(**each) for each in params_of(LOADS[name], work)]
            row = trace.serve(engine, work, params).figures()
    stats = trace.difference(engine.stats, before)
    host = dict(host_seconds=stats.get("host_seconds"), waiting_seconds=stats.get("waiting_seconds"))
    return row | host | dict(compiled_later=seen.programs, dispatches=seen.dispatches)


def main(argv: list[str] | None = None) -> int:
    """Run and print every load; 1 if one failed, or a program was compiled after warm-up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.loads", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of loads, separated by commas")
    parser.add_argument("--model", default="1b", choices=SIZES)
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    records.add_options(parser)
    args = parser.parse_args(argv)
    wanted = name_lists.known(parser, "--only", args.only, [*LOADS, *HTTP], "load") or [*LOADS, *HTTP]
    if "http_paced" in wanted and "http" not in wanted:
        parser.error("--only: http_paced needs http, whose throughput sets its pace")
    shape = trace.SMALL_TRACE if args.small else next(t for t in trace.TRACES if t.name == "trace_1b_r256")
    config, params = trace.model_of(args.small, 4096, **SIZES[args.model])
    engine = jattn.Engine(
        config, params, Words(config.vocab_size), max_num_seqs=shape.rows, max_num_batched_tokens=shape.budget,
        max_model_len=shape.longest, prefix_caching=False,
    )  # fmt: skip
    begin = time.perf_counter()
    programs = engine.warmup()
    print(f"{programs} programs in {time.perf_counter() - begin:.1f} s", flush=True)
    collect_rarely()  # as `jattn serve` does
    work = shape.work(config.vocab_size)
    rates: dict[str, float] = {}
    failed = 0
    for name in wanted:
        row: dict = cupti.attempt(lambda name=name: measure(engine, work, name, rates))
        row = dict(case=name, variant=args.model, trace=shape.name) | row
        if (rate := row.get("output_tokens_per_s")) is not None:
            rates[name] = rate
            row |= dict(over_greedy=rate / rates["greedy"]) if "greedy" in rates else {}
        print(name, flush=True)
        trace.show(row)
        records.write([row | records.provenance()], "loads", records.folder_of(args))
        failed += "error" in row or row["compiled_later"] != 0 or row.get("errors", 0) != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
