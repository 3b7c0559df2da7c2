"""Seconds until an engine has compiled its programs, and how many programs it compiles later.

    python -m benchmarks.gpu.warmup [--write | --out DIR] [--small]

A random Llama (1.1e9 parameters in bf16) with at most 64 requests and 2048 tokens a step compiles every program. Then
it serves batches that end in one request, with sampling, penalties, log-probabilities, stop strings, an abort,
preemption, prefix hits, sleep and wake, and new weights. A compilation counts if it took over a second: those of
dispatches do, those of small copies do not. --small is a model for trying the script on a CPU.
"""

import argparse
import json
import time

import jax
import numpy as np

import jattn
from benchmarks import records
from benchmarks.gpu.engine_step import LLAMA, SMALL
from jattn import models
from jattn.text import ByteTokenizer

DISPATCH = "/jax/core/compile/backend_compile_duration"


def make_engine(small: bool) -> jattn.Engine:
    config = models.config_of(LLAMA | (SMALL if small else {}))
    params = jax.block_until_ready(models.init_params(config, 0, "float32" if small else "bfloat16"))
    rows, budget = (4, 64) if small else (64, 2048)
    return jattn.Engine(
        config, params, ByteTokenizer(), num_blocks=max(rows * 7, 34), max_num_seqs=rows,
        max_num_batched_tokens=budget, max_model_len=512,
    )  # fmt: skip


def serve(engine: jattn.Engine, count: int, rng: np.random.Generator, **options) -> None:
    """Generate for ragged requests of which every other one has the shared prefix."""
    shared = rng.integers(5, 500, 48).tolist()
    prompts = [shared * (i % 2) + rng.integers(5, 500, rng.integers(3, 200)).tolist() for i in range(count)]
    params = [
        jattn.SamplingParams(max_tokens=int(rng.integers(3, 90)), ignore_eos=True, **options) for _ in range(count)
    ]
    assert not any(output.error for output in engine.generate(prompts, params))


def everything(engine: jattn.Engine) -> None:
    rng = np.random.default_rng(0)
    rows = engine.limits.max_num_seqs
    for options in (
        dict(temperature=0), dict(temperature=0.8, top_k=5, top_p=0.9), dict(temperature=0.8, stop="zz"),
        dict(temperature=0.8, logprobs=2, presence_penalty=0.5),
    ):  # fmt: skip
        serve(engine, 2 * rows, rng, **options)
    ids = [engine.add_request([5] * 40, jattn.SamplingParams(max_tokens=60, ignore_eos=True)) for _ in range(3)]
    for _ in range(3):
        engine.step()
    for id in ids[1:]:
        engine.abort(id)
    list(engine.drain())
    engine.sleep()
    engine.wake()
    serve(engine, rows, rng, temperature=0)
    engine.update_weights(engine.params)
    serve(engine, rows, rng, temperature=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    records.add_options(parser)
    args = parser.parse_args()
    engine, seconds = make_engine(args.small), []
    jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: name == DISPATCH and seconds.append(s))
    begin = time.perf_counter()
    programs = engine.warmup()
    ready, compiled = time.perf_counter() - begin, sum(s > 1 for s in seconds)
    seconds.clear()
    everything(engine)
    row = dict(
        case="warmup_small" if args.small else "warmup_1b_r64", seconds=round(ready, 1), programs=programs,
        cache="cold", compiled_in_warmup=compiled, compiled_later=sum(s > 1 for s in seconds),
        preemptions=engine.stats.preemptions, cached_tokens=engine.stats.cached_tokens,
    )  # fmt: skip
    row |= records.provenance()
    print(json.dumps(row))
    records.write([row], "warmup", records.folder_of(args))


if __name__ == "__main__":
    main()
