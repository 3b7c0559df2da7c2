"""The engine's overhead: the time of a dispatch as served, over that of the same dispatches without the host.

    python -m benchmarks.gpu.engine_step [--requests 1 32] [--write | --out DIR] [--small]

A random Llama (1.1e9 parameters in bf16, made on the device) decodes one request, then 32 at once. First every
engine.step() is timed: it plans, sends the next dispatch, waits for this one's tokens and reads them. Then the same
batches are put on the device and dispatched again in the same order, with a single wait at the end: the same program,
lengths and pages, without work of the host in between. That is the device time, and

    overhead = served / device - 1.

Greedy sampling, 16 tokens a dispatch (the engine's default on a GPU), a byte tokenizer. `ms` is a decode step as
served. --small is a model for trying the script on a CPU.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import records
from jattn import models
from jattn.engine.programs import Programs
from jattn.text import ByteTokenizer

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=32000, hidden_size=2048, intermediate_size=8192,
    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, hidden_act="silu",
    max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, eos_token_id=1,
)  # fmt: skip
SMALL = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2) | dict(
    num_attention_heads=2, num_key_value_heads=1
)
BURST = 16
UNTIMED = 3  # decode dispatches before the timed ones: the first compiles


@contextlib.contextmanager
def recorded() -> Iterator[list]:
    """The batch of each dispatch, in order."""
    real, sent = Programs.__call__, []

    def call(programs, params, caches, before, packed):
        sent.append(packed)
        return real(programs, params, caches, before, packed)

    Programs.__call__ = call
    try:
        yield sent
    finally:
        Programs.__call__ = real


def make_engine(small: bool, requests: int, prompt: int, longest: int) -> jattn.Engine:
    """An engine in which all requests fit at once: their prompts in one dispatch, their tokens in the pool."""
    config = models.config_of(LLAMA | (SMALL if small else {}))
    params = jax.block_until_ready(models.init_params(config, 0, "float32" if small else "bfloat16"))
    return jattn.Engine(
        config, params, ByteTokenizer(), max_num_seqs=requests, max_num_batched_tokens=requests * prompt,
        max_model_len=longest, max_burst=BURST, prefix_caching=False,
    )  # fmt: skip


def serve(
    engine: jattn.Engine, prompts: np.ndarray, dispatches: int, prompt_steps: int = 1
) -> tuple[list[float], list]:
    """(seconds of each timed step, as many dispatches of full bursts as `recorded` them).

    prompt_steps: steps in which the engine computes the prompts.
    """
    most = BURST * (UNTIMED + dispatches + 2) + 1  # the last step that is timed still sends one
    params = jattn.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    seconds = []
    with recorded() as sent:
        for prompt in prompts:
            engine.add_request(prompt, params)
        for _ in range(prompt_steps + UNTIMED):  # the prompts, and the first decodes
            engine.step()
        for _ in range(dispatches):
            begin = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begin)
        list(engine.drain())
    bursts = [packed for packed in sent if int(packed.unpacked().steps) == BURST]
    assert len(bursts) >= dispatches + UNTIMED, f"{len(bursts)} of {len(sent)} dispatches had {BURST} steps"
    return seconds, bursts[UNTIMED : UNTIMED + dispatches]


def replay(engine: jattn.Engine, caches, bursts: list) -> tuple[float, Any]:
    """(seconds of the same dispatches, sent without waiting in between; the caches after them).

    No row ends. The first tokens are others, which changes no time.
    """
    runner = engine.runner
    before = jax.tree.map(jnp.copy, runner._row_state)
    before = dataclasses.replace(before, remaining=jnp.full_like(before.remaining, 2**20))
    batches = jax.block_until_ready(jax.device_put(bursts))
    begin = time.perf_counter()
    for batch in batches:
        caches, _, before = runner.programs(runner.params, caches, before, batch)
    jax.block_until_ready(before)
    return time.perf_counter() - begin, caches


def measure(requests: int, args: argparse.Namespace) -> dict:
    """The row of so many requests."""
    prompt = 32 if args.small else 256
    longest = prompt + BURST * (UNTIMED + args.dispatches + 2) + 1
    engine = make_engine(args.small, requests, prompt, longest)
    prompts = np.random.default_rng(0).integers(2, engine.config.vocab_size, (requests, prompt))
    seconds, bursts = serve(engine, prompts, args.dispatches)
    layer = jattn.PagedAttention(engine.config.layers[0].attention, engine.caches[0].spec, engine.runner.model.backend)
    caches, again = engine.caches, []
    for _ in range(1 + args.rounds):
        each, caches = replay(engine, caches, bursts)
        again.append(each)
    device = statistics.median(again[1:]) / args.dispatches
    served = sum(seconds) / args.dispatches
    return dict(
        case=f"step_{'small' if args.small else '1b'}_r{requests}", backend=layer.backend_name,
        ms=served * 1e3 / BURST, requests=requests, burst=BURST, dispatches=args.dispatches, served_ms=served * 1e3,
        served_median_ms=statistics.median(seconds) * 1e3,
        device_ms=device * 1e3, overhead_percent=(served / device - 1) * 100,
        output_tokens_per_s=requests * BURST / served,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.engine_step", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--requests", type=int, nargs="+", help="requests at once (default: 1 32; with --small 1 4)")
    parser.add_argument("--dispatches", type=int, default=40, help=f"timed, of {BURST} steps each (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="replays; the median counts (default: 3)")
    records.add_options(parser)
    args = parser.parse_args(argv)
    for requests in args.requests or ((1, 4) if args.small else (1, 32)):
        row = measure(requests, args)
        print(json.dumps(row, indent=1))
        print(
            f"a dispatch of {BURST} steps: {row['served_ms']:.3f} ms served, {row['device_ms']:.3f} on the device: ",
            end="",
        )
        print(f"overhead {row['overhead_percent']:.1f} %", flush=True)
        records.write([row | records.provenance()], "decode_step", records.folder_of(args))


if __name__ == "__main__":
    main()
