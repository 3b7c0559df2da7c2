"""Tokens per second of an engine whose requests share a system prompt, with cascade attention and without it.

    python -m benchmarks.gpu.shared_prompt [--requests 64 256] [--layers 8] [--write | --out DIR] [--small]

A random Llama (the widths of benchmarks.gpu.engine_step, fewer layers) serves requests that all begin with the same
8192 tokens, which the first one leaves in the prefix cache, and have 16 tokens of their own. `tokens_per_s`,
`flat_tokens_per_s`: generated tokens by the time from the first request to the last token. `shared`: dispatches that
read the prefix once. `compiled_later` must be 0. `same_tokens`: the share of tokens that are those of the flat run;
both are greedy, and random weights in bfloat16 let rounding decide some; `same_second`: the same of the first tokens
after the prompt's. --small is a model for a CPU, where no backend
shares prefixes.
"""

import argparse
import dataclasses
import sys
import time

import jax
import numpy as np

import jattn
from benchmarks import records
from benchmarks.gpu.engine_step import LLAMA, SMALL
from benchmarks.gpu.trace import difference, watched
from jattn import models
from jattn.engine import warming
from jattn.engine.shapes import StepShape, StepShapes
from jattn.text import ByteTokenizer

OWN, NEW, BLOCK, BURST = 16, 97, 64, 16


@dataclasses.dataclass(frozen=True)
class FewShapes(StepShapes):
    """The shapes that this load needs: decodes of each number of requests, and a step with all their own tokens."""

    requests: tuple[int, ...] = ()

    def all(self) -> tuple[StepShape, ...]:
        rows, tokens = self.requests, {OWN * count for count in self.requests}
        needed = lambda shape: shape.num_rows in rows if shape.is_decode else shape.num_tokens in tokens
        return tuple(filter(needed, super().all()))


def engine_of(config, params, requests: list[int], system: int, cascade: bool) -> jattn.Engine:
    """An engine that holds all requests at once, and computes their own tokens in one step."""
    rows = max(requests)
    longest = system + OWN + NEW + BURST
    blocks = system // BLOCK + rows * (-(-(OWN + NEW + BURST) // BLOCK) + 1) + 2
    return jattn.Engine(
        config, params, ByteTokenizer(), block_size=BLOCK, num_blocks=blocks, max_num_seqs=rows,
        max_num_batched_tokens=rows * OWN, max_model_len=longest, max_burst=BURST, cascade_attention=cascade,
    )  # fmt: skip


def warm(engine: jattn.Engine, requests: list[int]) -> int:
    """Compile the programs that these numbers of requests need, and return how many there are."""
    runner, fields = engine.runner, dataclasses.fields(StepShapes)
    values = {field.name: getattr(engine.shapes, field.name) for field in fields}
    shapes = FewShapes(**values, requests=tuple(requests))
    args = runner.programs, runner.params, runner.caches, runner._row_state, shapes
    runner._caches, runner._row_state, count = warming.compile_all(*args)
    return count


def serve(engine: jattn.Engine, system: list[int], rows: int) -> tuple[float, list[tuple[int, ...]]]:
    """(seconds, the tokens of each request), with the system prompt in the prefix cache."""
    rng = np.random.default_rng(1)
    own = rng.integers(2, engine.config.vocab_size, (rows, OWN)).tolist()
    params = jattn.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    begin = time.perf_counter()
    outputs = engine.generate([system + mine for mine in own], params)
    seconds = time.perf_counter() - begin
    assert not any(output.error for output in outputs)
    return seconds, [output.token_ids for output in outputs]


def measure(config, params, requests: list[int], tokens: int) -> list[dict]:
    """A row for each number of requests."""
    system = np.random.default_rng(0).integers(2, config.vocab_size, tokens).tolist()
    rows: list[dict] = [dict(case=f"system_{tokens}_r{n}", requests=n, layers=len(config.layers)) for n in requests]
    said: dict = {}
    for name, cascade in (("", True), ("flat_", False)):
        engine = engine_of(config, params, requests, tokens, cascade)
        begin = time.perf_counter()
        programs = warm(engine, requests)
        warmup = round(time.perf_counter() - begin, 1)
        engine.generate([system], jattn.SamplingParams(temperature=0, max_tokens=1))
        for row in rows:
            count, before = row["requests"], engine.stats
            with watched() as seen:
                seconds, said[name, count] = serve(engine, system, count)
            found = difference(engine.stats, before)
            mine = dict(tokens_per_s=count * NEW / seconds, seconds=seconds, compiled_later=seen.programs)
            mine |= dict(shared=found.get("shared_prefix_dispatches", 0), device_seconds=found["device_seconds"])
            mine |= dict(programs=programs, warmup_seconds=warmup, dispatches=seen.dispatches)
            row |= {f"{name}{key}": value for key, value in mine.items()}
            print("     ", row["case"], name or "cascade", mine, flush=True)
        jax.tree.map(lambda x: x.delete(), engine.caches)
    for row in rows:
        ours, flat = (np.array(said[name, row["requests"]]) for name in ("", "flat_"))
        row["over_flat"] = row["tokens_per_s"] / row["flat_tokens_per_s"]
        row["same_tokens"], row["same_second"] = float(np.mean(ours == flat)), float(np.mean(ours[:, 1] == flat[:, 1]))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run and print each case; 1 if a program was compiled after warm-up."""
    name = "python -m benchmarks.gpu.shared_prompt"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--system", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    records.add_options(parser)
    args = parser.parse_args(argv)
    sizes = dict(num_hidden_layers=args.layers, max_position_embeddings=16384) | (SMALL if args.small else {})
    config = models.config_of(LLAMA | sizes)
    params = jax.block_until_ready(models.init_params(config, 0, "float32" if args.small else "bfloat16"))
    failed = 0
    for row in measure(config, params, args.requests, args.system):
        print(f"{row['case']}: {row['tokens_per_s']:.0f} tokens/s, flat {row['flat_tokens_per_s']:.0f}: "
              f"{row['over_flat']:.2f}x; same tokens {row['same_tokens']:.3f}, of the first decode step "
              f"{row['same_second']:.3f}", flush=True)  # fmt: skip
        records.write([row | records.provenance()], "shared_prompt", records.folder_of(args))
        failed += row["compiled_later"] + row["flat_compiled_later"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
