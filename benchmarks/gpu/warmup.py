"""Seconds until an engine has its programs: compiled, loaded from disk, and with more layers; none is compiled later.

    python -m benchmarks.gpu.warmup [--only warmup | compile] [--write | --out DIR] [--small]

warmup_1b_r64       a random Llama (1.1e9 parameters in bf16) with at most 64 requests and 2048 tokens a step: `cold`,
                    and `disk`, in a second process that has the programs of the first (jattn.compile_cache). The first
                    then serves batches that end in one request, with sampling, penalties, log-probabilities, stop
                    strings, an abort, preemption, prefix hits, sleep and wake, and new weights: `compiled_later`
                    counts programs
compile_80_over_16  warm-up of 80 narrow layers over that of 16: how compiling grows with the number of layers

Each measurement is a process of its own. --small is a model for trying the script on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

import jax
import numpy as np

import jattn
from benchmarks import records
from benchmarks.gpu.engine_step import LLAMA, SMALL
from benchmarks.gpu.trace import watched
from jattn import compile_cache, models
from jattn.engine import sizing
from jattn.text import ByteTokenizer
from pallas_kernels.cpu.native import library

NARROW = dict(SMALL, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
SHARED = 128
"""Tokens of the shared prefix: at least one whole block of the default size, 64 on an accelerator, is found again."""
STARTS = ("cold", "disk")
CACHE = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JATTN_COMPILE_CACHE")
PARTS_OF_START = (
    "jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration", "cache_retrieval_time_sec"
)  # fmt: skip
"""JAX's names of times, of which a program that comes from disk whole has none."""


def make_engine(small: bool, layers: int | None) -> jattn.Engine:
    """The engine of warmup_1b_r64; with `layers` a narrow model of that depth and two programs."""
    shape = SMALL if small else {}
    config = models.config_of(LLAMA | (shape if layers is None else NARROW | dict(num_hidden_layers=layers)))
    params = jax.block_until_ready(models.init_params(config, 0, "float32" if small else "bfloat16"))
    rows, budget = (1, 16) if layers else (4, 64) if small else (64, 2048)
    block = sizing.default_block_size()
    blocks = max(rows * 112 // block, 512 // block + 2)  # too few for all rows at once: some are preempted
    return jattn.Engine(
        config, params, ByteTokenizer(), num_blocks=blocks, max_num_seqs=rows,
        max_num_batched_tokens=budget, max_model_len=512,
    )  # fmt: skip


def serve(engine: jattn.Engine, count: int, rng: np.random.Generator, **options) -> None:
    """Generate for ragged requests of which every other one has the shared prefix."""
    shared = rng.integers(5, 500, SHARED).tolist()
    prompts = [shared * (i % 2) + rng.integers(5, 500, rng.integers(3, 200)).tolist() for i in range(count)]
    params = [
        jattn.SamplingParams(max_tokens=int(rng.integers(3, 90)), ignore_eos=True, **options) for _ in range(count)
    ]
    assert not any(output.error for output in engine.generate(prompts, params))


def everything(engine: jattn.Engine) -> None:
    """Serve what the module's docstring names, so that a program that warm-up left out is compiled now."""
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


def measure(args: argparse.Namespace) -> dict:
    """Warm an engine up in this process."""
    events: Counter = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    parts: Counter = Counter()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: parts.update({event.rpartition("/")[2]: duration_secs})  # pyright: ignore
    )
    engine = make_engine(args.small, args.layers)
    if args.folder:
        if args.small:
            library.status()  # from the user's own folder: building it takes longer than warming up
        os.environ["JATTN_CACHE_DIR"] = args.folder
        compile_cache.enable()
    events.clear()
    parts.clear()
    with watched() as seen:
        begin = time.perf_counter()
        programs = engine.warmup()
        row = dict(seconds=round(time.perf_counter() - begin, 2), programs=programs, needed_in_warmup=seen.programs)
    row |= dict(loaded=events["cache_hits"], stored=events["cache_misses"])
    row |= {name: round(parts[name], 2) for name in PARTS_OF_START}
    if args.once == "cold":
        with watched() as seen:
            everything(engine)
        row |= dict(compiled_later=seen.programs, compiled_later_all=dict(seen.compiled))
        row |= dict(preemptions=engine.stats.preemptions, cached_tokens=engine.stats.cached_tokens)
    return row | records.provenance()


def apart(args: argparse.Namespace, once: str, folder: str | None = None, layers: int | None = None) -> dict:
    """`measure` in a process of its own, with jattn's cache in `folder` or with none."""
    environment = {name: value for name, value in os.environ.items() if name not in CACHE}
    command = [sys.executable, "-m", "benchmarks.gpu.warmup", "--once", once]
    command += ["--folder", folder] if folder else []
    command += (["--small"] if args.small else []) + ([] if layers is None else ["--layers", str(layers)])
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.split("FOUND ")[-1])


def starts(args: argparse.Namespace) -> list[dict]:
    """A row of the first process and one of the second."""
    with tempfile.TemporaryDirectory() as folder:
        found = {start: apart(args, start, folder) for start in STARTS}
    case = "warmup_small" if args.small else "warmup_1b_r64"
    return [dict(case=case, variant=start, cache=start) | row for start, row in found.items()]


def depth(args: argparse.Namespace) -> list[dict]:
    """The row of the deeper model over the shallower one."""
    many, few = (10, 2) if args.small else (80, 16)
    rows = {layers: apart(args, "layers", layers=layers) for layers in (few, many)}
    seconds = {f"seconds_of_{layers}": row["seconds"] for layers, row in rows.items()}
    ratio = rows[many]["seconds"] / rows[few]["seconds"]
    case = "compile_small" if args.small else f"compile_{many}_over_{few}"
    return [rows[few] | dict(case=case, ratio=round(ratio, 2), cache="cold") | seconds]


PARTS = dict(warmup=starts, compile=depth)


def main(argv: list[str] | None = None) -> int:
    """Run and print every case; 1 if a program was compiled after warm-up, or the load preempted or shared nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.warmup", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--only", choices=PARTS, help="only the cases whose names begin with this")
    parser.add_argument("--once", choices=(*STARTS, "layers"), help=argparse.SUPPRESS)  # the process of one measurement
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    records.add_options(parser)
    args = parser.parse_args(argv)
    if args.once:
        print("FOUND", json.dumps(measure(args)))
        return 0
    rows = []
    for name, part in PARTS.items():
        for row in part(args) if args.only in (None, name) else ():
            print(json.dumps(row), flush=True)
            rows.append(row)
    records.write(rows, "warmup", records.folder_of(args))  # last: it may start JAX, which takes the card's memory
    lacking = any(row.get(name) == 0 for row in rows for name in ("preemptions", "cached_tokens"))
    return int(lacking or any(row.get("compiled_later") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
