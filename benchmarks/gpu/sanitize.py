"""NVIDIA's compute-sanitizer over every variant of the GPU kernels, a process for each variant and tool.

    python -m benchmarks.gpu.sanitize --log DIR [--sanitizer PATH] [--tools racecheck,memcheck,synccheck]
                                      [--only PARTS | --sample] [--seconds 900] [--jobs 4]
    python -m benchmarks.gpu.sanitize --case NAME        one variant in this process, without the sanitizer
    python -m benchmarks.gpu.sanitize --list

The program is in the CUDA toolkit and in the package nvidia-cuda-sanitizer-api. Only Mosaic's kernels are checked. DIR
gets a file for each run, and summary.jsonl. A run is clean if the tool found nothing and the numbers are right. In one
process, memcheck crashed after three cases. Runs begin in the order of --only, or of SAMPLE, a tool after the other, so
that what must be known first comes first, and none in the last 10 seconds.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cases, check, layer_tail, mla_decode, packed_product, variants, write
from jattn.nn import layer_tail as tail_op
from jattn.ops import many_rows, product

TOOLS = ("racecheck", "memcheck", "synccheck")
LENGTHS = ((1, 300), (70, 150), (5, 133), (0, 0), (9, 200))  # a tool makes a kernel up to 100 times slower
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"  # where the toolkit has it
FOUND, WRONG = 9, 8  # exit codes
PROCESSORS = 16  # whose CTAs the warp-level kernel has; of more, most would have no work
WARPS = (
    "mix", "mix_window", "mix_spans", "mix_qq", "mix_sinks", "mix_d64_v64", "mix_d256_v256", "mix_fp8", "mix_int8",
    "mix_all",
)  # fmt: skip
SAMPLE = (
    "warp mix", "warp mix_fp8", "attention mix", "attention mix_fp8", "few few_fp8", "warp mix_d256_v256",
    "warp mix_all", "attention mix_d256_v256", "few few_tokens_fp8 token_scales=True",
    "few mix_tokens_fp8 token_scales=True", "attention mix_d192_fp8", "attention mix_all", "warp mix_d64_v64",
    "warp mix_int8",
)  # fmt: skip
"""The most valuable variants, for a bounded time: decode, prefill and both in one launch, wide heads, 8 bits."""


def attention(case: cases.KernelCase, **fields) -> dict:
    """A small batch beside numpy float64."""
    args = argparse.Namespace(no_check=False, samples=6, time=False, iterations=1)
    row = check.run_case(dataclasses.replace(case, lengths=LENGTHS), args, **fields)
    return row | dict(ok=bool(row["rel_err"] < 3e-2 and row["lse_err"] < 1e-2 and row["same_bits"]))


def tail() -> dict:
    """A small layer's tail."""
    weights, scales = layer_tail.layer((1024, 1024, 2048, (1024, 256, 256)), 0)
    a, x = (jax.random.normal(key, (8, 1024), jnp.bfloat16) for key in jax.random.split(jax.random.key(1)))
    config = tail_op.config_of(8, a.dtype, weights, scales, layer_tail.NORMS)
    found = layer_tail.chain(config, a, x, [(weights, scales)])[0]
    error = layer_tail.furthest(found, layer_tail.exactly(a, x, weights, scales))
    return dict(error=error, ok=config is not None and error < 3e-2)


def product_of_many_rows(gated: bool) -> dict:
    """256 rows times two small matrices."""
    keys = jax.random.split(jax.random.key(2), 3)
    x = jax.random.normal(keys[0], (256, 512), jnp.bfloat16)
    weights = tuple((jax.random.normal(key, (512, 512)) * 512**-0.5).astype(jnp.bfloat16) for key in keys[1:])
    served = many_rows.config_of(x, weights, together=gated) is not None
    ours, theirs = (many_rows.gated, many_rows.gated_in_steps) if gated else (many_rows.joined, many_rows.in_steps)
    found = ours(x, *weights) if gated else ours(x, weights)
    wanted = theirs(x, *weights) if gated else jnp.concatenate(theirs(x, weights), axis=1)
    error = float(jnp.abs(found.astype(jnp.float32) - wanted.astype(jnp.float32)).max())
    return dict(error=error, ok=served and error < 6e-2)


def packed(form: str) -> dict:
    """8 rows times a small packed matrix."""
    group = (packed_product.draw(form, 1024, 1024, 0),)
    x = jax.random.normal(jax.random.key(9), (8, 1024), jnp.bfloat16)
    error = packed_product.error(packed_product.ours(x, [group])[0], x, group)
    kernel = product._choose(x, group, x.dtype).name
    return dict(error=error, kernel=kernel, ok=error < 2.0**-8 * 5 and kernel == "gpu_packed")


def variants_by_name() -> dict[str, Callable[[], dict]]:
    """Name -> what runs it once and says whether the numbers are right."""
    found: dict[str, Callable[[], dict]] = {}
    for case in cases.CHECKED:
        found[f"attention {case.name}"] = functools.partial(attention, case)
    by_name = {case.name: case for case in cases.CHECKED}
    for name in WARPS:
        found[f"warp {name}"] = functools.partial(attention, by_name[name], chip="sm_80", processors=PROCESSORS)
    for case, options in variants.SMALL:
        text = ",".join(f"{name}={value}" for name, value in options.items())
        found[" ".join(["few", case.name, text]).strip()] = functools.partial(
            variants.measure, case, options, timed=False, iterations=1
        )
    for case in mla_decode.CHECKED:
        found[f"mla {case.name}"] = functools.partial(mla_decode.measure, case, timed=False, iterations=1)
    for name in write.CASES:
        found[f"write {name}"] = functools.partial(write.measure, name, iterations=0)
    for form in packed_product.FORMS:
        found[f"packed {form}"] = functools.partial(packed, form)
    found |= {f"many_rows {'gated' if g else 'joined'}": functools.partial(product_of_many_rows, g) for g in (0, 1)}
    return found | {"layer_tail": tail}


def command(sanitizer: str, tool: str, name: str, log: pathlib.Path) -> list[str]:
    """The command line of one run."""
    options = ["--tool", tool, "--kernel-name", "kns=mosaic_gpu", "--error-exitcode", str(FOUND)]
    own = [sys.executable, "-m", "benchmarks.gpu.sanitize", "--case", name]
    return [sanitizer, *options, "--log-file", str(log), *own]


def verdict(code: int, text: str) -> str:
    """clean | hazards | wrong | crashed, from the exit code and the tool's log."""
    finished = "RACECHECK SUMMARY" in text or "ERROR SUMMARY" in text
    known = {0: "clean", FOUND: "hazards", WRONG: "wrong"}
    return known.get(code, "crashed") if finished else "crashed"


def run_one(args: argparse.Namespace, end: float, tool: str, name: str) -> dict | None:
    """The row of one run; None if there is no time left for it. end: in time.time()'s seconds."""
    start = time.time()
    if end - start < 10:
        return None
    log = args.log / f"{tool} {name}.txt".replace(" ", "_").replace("/", "_")
    own = os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")  # several processes share the card's memory
    try:
        line = command(args.sanitizer, tool, name, log)
        done = subprocess.run(line, timeout=end - start, capture_output=True, env=own)
        code, said = done.returncode, (done.stdout + done.stderr)[-500:].decode(errors="replace")
    except subprocess.TimeoutExpired:
        code, said = -1, "out of time"
    found = verdict(code, log.read_text(errors="replace") if log.exists() else "")
    row = dict(tool=tool, case=name, verdict=found, code=code, seconds=round(time.time() - start, 1))
    return row | ({} if found == "clean" else dict(said=said))


def run_all(args: argparse.Namespace, names: list[str]) -> int:
    """The number of runs that are not clean."""
    args.log.mkdir(parents=True, exist_ok=True)
    end, counts, skipped = time.time() + args.seconds, collections.Counter(), 0
    wanted = [(tool, name) for tool in args.tools.split(",") for name in names]
    with (args.log / "summary.jsonl").open("a", encoding="utf-8") as summary, ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda each: run_one(args, end, *each), wanted):
            if row is None:
                skipped += 1
                continue
            counts[row["verdict"]] += 1
            print(f"{row['verdict']:8s} {row['tool']:10s} {row['case']:48s} {row['seconds']} s", flush=True)
            summary.write(json.dumps(row) + "\n")
            summary.flush()
    print(dict(counts), f"skipped for time: {skipped}", flush=True)
    return sum(counts.values()) - counts["clean"] + skipped


def main(argv: list[str] | None = None) -> int:
    """One variant in this process, or all of them under the sanitizer; 0 if all is clean and nothing was skipped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="run this variant here")
    parser.add_argument("--list", action="store_true", help="print the variants")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("sanitizer"), help="folder of the logs")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or SANITIZER, help="path")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--sample", action="store_true", help="the variants of SAMPLE")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side (default: 4)")
    args = parser.parse_args(argv)
    known = variants_by_name()
    parts = SAMPLE if args.sample else args.only.split(",")
    names = [name for part in parts for name in known if (name == part if args.sample else part in name)]
    names = list(dict.fromkeys(names))
    if args.list:
        print("\n".join(names))
        return 0
    if args.case:
        row = known[args.case]()
        print(row, flush=True)
        return 0 if bool(np.all(row["ok"])) else WRONG
    return int(run_all(args, names) > 0)


if __name__ == "__main__":
    sys.exit(main())
