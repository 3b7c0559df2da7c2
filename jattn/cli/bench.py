"""`jattn bench serving`, `jattn bench kernels` and `jattn bench --tune`."""

import argparse
import dataclasses
import importlib
import json
import math
import time
from pathlib import Path

import numpy as np

from jattn import device
from jattn.cli import options, processes, screen
from jattn.cli.command import add_command
from jattn.cli.trace import Arrival, make_trace
from jattn.engine import Engine, Processes, SamplingParams
from jattn.engine.stats import Stats

MAX_SLEEP = 3600.0
"""Seconds of one time.sleep, which raises for more than a clock can count."""


def add(commands) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "bench",
        "measure serving or the kernels",
        ["jattn bench serving --requests 200 --rate 20", "jattn bench --tune --out tiles.json"],
    )
    parser.add_argument(
        "--tune", action="store_true", help="measure tile sizes of the GPU kernel and write the best to a file"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="with --tune: the file (default: the one in the package)"
    )
    parser.set_defaults(run=run_tune)
    kinds = parser.add_subparsers(metavar="WHAT")
    serving = add_command(
        kinds,
        "serving",
        "throughput and latencies of an engine under a synthetic load",
        ["jattn bench serving --model ~/models/llama --requests 200 --rate 20 --out runs.jsonl"],
    )
    load = serving.add_argument_group("the load")
    load.add_argument("--requests", type=int, default=64, help="number of requests (default: 64)")
    load.add_argument("--rate", type=float, help="mean arrivals per second, Poisson (default: all at once)")
    load.add_argument("--mean-input", type=float, default=48, help="mean tokens of a prompt (default: 48)")
    load.add_argument("--mean-output", type=float, default=24, help="mean tokens of an output (default: 24)")
    load.add_argument("--shared", type=float, default=0.5, help="share of prompts with a common prefix (default: 0.5)")
    load.add_argument(
        "--load-seed", type=int, default=0, help="seed of the random prompts, lengths and arrivals (default: 0)"
    )
    load.add_argument("--out", type=Path, metavar="FILE", help="append the results to this file as one line of JSON")
    options.add_engine(serving)
    processes.add(serving)
    serving.set_defaults(run=lambda args: processes.run(args, run_serving))
    kernels = add_command(
        kinds,
        "kernels",
        "the attention kernels; in the root of a checkout, as `python -m jattn bench kernels`",
        ["jattn bench kernels --backend sdpa,cpu_native", "jattn bench kernels --help"],
        add_help=False,
        prefix_chars="\0",  # every argument is one of benchmarks/run.py, --help too
    )
    kernels.add_argument("rest", nargs="*", help="options of benchmarks/run.py")
    kernels.set_defaults(run=run_kernels)


def run_serving(args: argparse.Namespace, group: Processes | None = None) -> int:
    """0 if no request failed. group: of the processes that share the engine, if there are several."""
    _check_load(args)
    engine = options.make_engine(args, processes=group)
    trace = make_trace(
        args.requests, vocab_size=engine.config.vocab_size, max_len=engine.limits.max_model_len, rate=args.rate,
        mean_input=args.mean_input, mean_output=args.mean_output, shared=args.shared, seed=args.load_seed,
    )  # fmt: skip
    options.warm(engine)
    results = measure(engine, trace)
    rows = [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in results.items()]
    screen.table(("result", "value"), rows, plain="\n".join(f"{name:32}{value:>12}" for name, value in rows))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"arguments": {k: str(v) for k, v in vars(args).items() if k != "run"}} | results) + "\n"
            )
    return 1 if results["failed"] else 0


def _check_load(args: argparse.Namespace) -> None:
    """ValueError or OSError, before the model loads, for a load that cannot be made, or results that cannot be kept."""
    if args.requests < 1:
        raise ValueError(f"--requests {args.requests} must be 1 or more")
    for name in ("rate", "mean_input", "mean_output"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be a number above 0")
    if not 0 <= args.shared <= 1:
        raise ValueError(f"--shared {args.shared} must be from 0 to 1")
    if args.out is not None:
        args.out.open("a", encoding="utf-8").close()


def run_kernels(args: argparse.Namespace) -> int:
    """Run benchmarks/run.py of the checkout."""
    return _checkout("benchmarks.run").main(args.rest)


def run_tune(args: argparse.Namespace) -> int:
    """Run benchmarks/gpu/tune.py of the checkout on this GPU."""
    if not args.tune:
        raise ValueError("nothing to measure: give 'serving', 'kernels' or --tune; see jattn bench --help")
    if (chip := device.detect()).platform != "gpu":
        raise ValueError(f"--tune needs a GPU; this process runs on {chip.platform}")
    return _checkout("benchmarks.gpu.tune").main([] if args.out is None else ["--out", str(args.out)])


def _checkout(module: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "the kernel benchmarks are not installed: in the root of a checkout, run `python -m jattn bench ...`"
        ) from error


def measure(engine: Engine, trace: list[Arrival]) -> dict[str, float | int]:
    """Serve the trace as it arrives, and return counts, throughput and percentiles.

    TTFT is the time from arrival to the first token; ITL the time between two tokens, spread evenly over the tokens
    that arrive together.
    """
    begin, waiting = time.perf_counter(), list(reversed(trace))
    now = lambda: time.perf_counter() - begin
    arrived, first, last, seen, gaps, failed = {}, {}, {}, {}, [], 0
    while waiting or engine.has_work:
        while waiting and waiting[-1].seconds <= now():
            arrival = waiting.pop()
            params = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True)
            arrived[engine.add_request(arrival.prompt, params)] = arrival.seconds
        if not engine.has_work:
            time.sleep(min(max(waiting[-1].seconds - now(), 0), MAX_SLEEP))
            continue
        for output in engine.step():
            count, time_now = len(output.token_ids), now()
            failed += output.error is not None
            if count and output.id not in first:
                first[output.id] = time_now
            elif count > seen.get(output.id, 0):
                new = count - seen[output.id]
                gaps += [(time_now - last[output.id]) / new] * new
            seen[output.id], last[output.id] = count, time_now
    seconds = now()
    stats = engine.stats
    ttft = [first[id] - arrived[id] for id in first]
    return {
        "requests": len(trace), "failed": failed, "seconds": seconds,
        "output_tokens": sum(seen.values()), "output_tokens_per_s": sum(seen.values()) / seconds,
        "prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens,
        **_percentiles("ttft_ms", ttft), **_percentiles("itl_ms", gaps),
        "preemptions": stats.preemptions, "dispatches": stats.dispatches, "steps": stats.steps,
        **seconds_of(stats), "host_share": stats.host_seconds / seconds,
    }  # fmt: skip


def seconds_of(stats: Stats) -> dict[str, float]:
    """Every counter of the engine that counts seconds."""
    names = [field.name for field in dataclasses.fields(stats) if field.name.endswith("_seconds")]
    return {name: getattr(stats, name) for name in names}


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    found = np.percentile(seconds, (50, 90, 99)) * 1e3 if seconds else (float("nan"),) * 3
    return {f"{name}_p{p}": float(value) for p, value in zip((50, 90, 99), found, strict=True)}
