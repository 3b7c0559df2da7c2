"""NVIDIA's compute-sanitizer over every variant of the GPU kernels, a process for each variant and tool.

    python -m benchmarks.gpu.sanitize --log DIR [--sanitizer PATH] [--tools racecheck,memcheck,synccheck]
                                      [--only PARTS | --sample] [--seconds 900] [--jobs 4]
    python -m benchmarks.gpu.sanitize --case NAME        one variant in this process, without the sanitizer
    python -m benchmarks.gpu.sanitize --list

The program is in the CUDA toolkit and in the package nvidia-cuda-sanitizer-api. Only Mosaic's kernels are checked. DIR
gets summary.jsonl, a row for each run, and logs.txt, what the tools wrote. A run is clean if the tool found nothing and
the numbers are right. Each variant has a process, since memcheck crashed after three cases in one. Runs begin tool by
tool, in the order of --only or of SAMPLE, and none begins in the last 20 seconds.

Each tool's first run is a control: a kernel with a fault of the kind that the tool looks for (synccheck has none). If
the fault is not reported, the tool does not see our kernels (because of its filter of names, or a machine that it does
not support): its clean runs prove nothing, and those that have not begun are left out.
"""

import argparse
import collections
import dataclasses
import functools
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import name_lists
from benchmarks.gpu import (
    cases,
    check,
    expert_product,
    faults,
    layer_tail,
    mla_decode,
    packed_product,
    sampling,
    variants,
    write,
)
from jattn.engine import SamplingParams
from jattn.nn import layer_tail as tail_op
from jattn.ops import many_rows, product

TOOLS = ("racecheck", "memcheck", "synccheck")
LENGTHS = ((1, 300), (70, 150), (5, 133), (0, 0), (9, 200))  # a tool makes a kernel up to 100 times slower
PLACES = (  # where the program may be if PATH has none
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/opt/nvidia/*/compute-sanitizer",
    sysconfig.get_path("purelib") + "/nvidia/**/compute-sanitizer",  # of the package
)
CONTROLS = {"racecheck": "control race", "memcheck": "control bounds"}
FOUND, WRONG = 9, 8  # exit codes
LEAST = 20  # seconds: a process that imports JAX and compiles a kernel takes as long
LONGEST_LOG = 20_000  # characters of a run's log that are kept
PROCESSORS = 16  # multiprocessors for which the warp-level kernel has CTAs; with more, most CTAs would have no work
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


def tail(shape: tuple, in_pairs: bool, formula: tail_op.TailFormula = layer_tail.FORMULA) -> dict:
    """A small layer's tail. in_pairs: pairs of CTAs share a strip of gate and up."""
    weights, scales = layer_tail.layer(shape, 0, formula)
    hidden, heads, *_ = shape
    keys = jax.random.split(jax.random.key(1))
    a, x = (jax.random.normal(key, (8, n), jnp.bfloat16) for key, n in zip(keys, (heads, hidden), strict=True))
    config = tail_op.config_of(8, a.dtype, weights, scales, formula)
    found = layer_tail.chain(config, a, x, [(weights, scales)], formula)[0]
    error = layer_tail.furthest(found, layer_tail.exactly(a, x, weights, scales, formula=formula))
    return dict(error=error, ok=config is not None and config.in_pairs == in_pairs and error < 3e-2)


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


def product_of_experts(tokens: int) -> dict:
    """Some tokens' experts: gate and up in one launch, then down."""
    return expert_product.measure(expert_product.Problem(8, 2, 256, 384, tokens), timed=False)


def packed(form: str, rows: int) -> dict:
    """Some rows times a small packed matrix. 8 are multiplied by mma.sync, 70 by wgmma, in two tiles."""
    group = (packed_product.draw(form, 1024, 1024, 0),)
    x = jax.random.normal(jax.random.key(9), (rows, 1024), packed_product.FORMS[form][-1])
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
        found |= {f"packed{rows} {form}": functools.partial(packed, form, rows) for rows in (8, 70)}
    found |= {"control race": faults.race, "control bounds": faults.bounds}
    found |= {f"many_rows {'gated' if g else 'joined'}": functools.partial(product_of_many_rows, g) for g in (0, 1)}
    found |= {f"experts {tokens}": functools.partial(product_of_experts, tokens) for tokens in (9, 600)}
    for form in (None, "mxfp4", "fp8_g128"):
        problem = expert_product.Problem(8, 2, 256, 384, 5, form)
        run = functools.partial(expert_product.measure_layer, problem, timed=False)
        found[f"mixture of 5 {form or 'bfloat16'}"] = run
    # Both cuts; one, by single loads; more passes to halve the range; the row instead of lists.
    for vocab, top_k, top_p in ((40000, 20, 0.8), (40001, 0, 0.9), (40000, 0, 0.999), (40000, 9000, 1.0)):
        problem, name = sampling.Problem(3, vocab), f"sampling_floor {top_k} {top_p}"
        found[name] = functools.partial(sampling.measure_floor, problem, top_k, top_p, timed=False)
        params = SamplingParams(top_k=top_k, top_p=top_p, min_p=0.001)
        found[f"draw {top_k} {top_p}"] = functools.partial(sampling.measure_choice, problem, params, timed=False)
    small = 1024, 1024, 2048, (1024, 256, 256)
    found["layer_tail"] = functools.partial(tail, small, in_pairs=False)
    found["tail_norms_after"] = functools.partial(tail, small, in_pairs=False, formula=layer_tail.NORMS_AFTER)
    return found | {"tail_pairs": functools.partial(tail, (2048, 512, 1792, (512, 128, 128)), in_pairs=True)}


def find_sanitizer() -> str | None:
    """The program's path; None: it is not on this machine."""
    known = [
        shutil.which("compute-sanitizer"),
        *(path for place in PLACES for path in glob.glob(place, recursive=True)),
    ]
    return next((path for path in known if path and os.path.isfile(path) and os.access(path, os.X_OK)), None)


def command(sanitizer: str, tool: str, name: str, log: pathlib.Path) -> list[str]:
    """The command line of one run. JAX starts ptxas, which is no target."""
    options = ["--tool", tool, "--kernel-name", "kns=mosaic_gpu", "--error-exitcode", str(FOUND)]
    options += ["--target-processes", "application-only", "--log-file", str(log)]
    return [sanitizer, *options, sys.executable, "-m", "benchmarks.gpu.sanitize", "--case", name]


def environment(tool: str, cache: pathlib.Path) -> dict[str, str]:
    """Of a run. Several processes share the card's memory, and the tools compile the same programs."""
    own = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", PYTHONUNBUFFERED="1")
    own |= dict(JAX_COMPILATION_CACHE_DIR=str(cache), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    if tool == "memcheck":  # an allocation for each array, or what lies past one would be another one's
        own["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    return os.environ | own


def verdict(code: int, text: str) -> str:
    """clean | hazards | wrong | crashed, from the exit code and the tool's log.

    racecheck's exit code says nothing of hazards that are warnings.
    """
    found = found_in(text)
    if found is None or code not in (0, FOUND, WRONG):
        return "crashed"
    if code == FOUND or found:
        return "hazards"
    return "wrong" if code == WRONG else "clean"


def found_in(text: str) -> int | None:
    """How many faults a tool's log counts; None: the log has no end."""
    counts = re.findall(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) ", text)
    return sum(map(int, counts)) if counts else None


@dataclasses.dataclass
class Runs:
    """The runs of one call, some at the same time."""

    sanitizer: str
    end: float  # in time.time()'s seconds
    folder: pathlib.Path  # of this call, for logs and compiled programs; removed later
    blind: set = dataclasses.field(default_factory=set)  # tools that did not see their control's fault

    def one(self, tool: str, name: str) -> dict | None:
        """The row of one run; None if there is no time left for it, or if its tool is blind."""
        start = time.time()
        if self.end - start < LEAST or tool in self.blind:
            return None
        row, text = self._run(tool, name, start)
        if name == CONTROLS.get(tool):
            row["verdict"] = "seen" if found_in(text) else "blind"  # a bad address ends the program with another code
            self.blind |= {tool} if row["verdict"] == "blind" else set()
        if row["verdict"] in ("clean", "seen"):
            del row["said"]
        return row | dict(log=text[-LONGEST_LOG:])

    def _run(self, tool: str, name: str, start: float) -> tuple[dict, str]:
        log = self.folder / (re.sub(r"\W+", "_", f"{tool} {name}") + ".txt")
        line, env = command(self.sanitizer, tool, name, log), environment(tool, self.folder / "compiled")
        with log.with_suffix(".out").open("w+b") as out:  # a file: what a killed process leaves behind holds no pipe
            run = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
            try:
                code = run.wait(timeout=self.end - start)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(run.pid, signal.SIGKILL)  # the program that is checked, too
                run.wait()
            out.seek(0)
            said = out.read()[-1000:].decode(errors="replace")
        text = log.read_text(errors="replace") if log.exists() else ""
        found = "unfinished" if code is None else verdict(code, text)
        took = round(time.time() - start, 1)
        return dict(tool=tool, case=name, verdict=found, code=code, seconds=took, said=said), text


def run_all(args: argparse.Namespace, names: list[str]) -> int:
    """The number of runs that are not clean."""
    args.log.mkdir(parents=True, exist_ok=True)
    counts, skipped, tools = collections.Counter(), 0, args.tools.split(",")
    wanted = [(tool, CONTROLS[tool]) for tool in tools if tool in CONTROLS]
    wanted += [(tool, name) for tool in tools for name in names if name not in CONTROLS.values()]
    with (
        tempfile.TemporaryDirectory() as folder,
        (args.log / "summary.jsonl").open("a", encoding="utf-8") as summary,
        (args.log / "logs.txt").open("a", encoding="utf-8") as logs,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        runs = Runs(args.sanitizer, time.time() + args.seconds, pathlib.Path(folder))
        for done in as_completed([pool.submit(runs.one, *each) for each in wanted]):
            if (row := done.result()) is None:
                skipped += 1
                continue
            counts[row["verdict"]] += 1
            print(f"{row['verdict']:10s} {row['tool']:10s} {row['case']:48s} {row['seconds']} s", flush=True)
            logs.write(f"\n##### {row['tool']} {row['case']}: {row['verdict']}\n{row.pop('log')}")
            summary.write(json.dumps(row) + "\n")
            for file in (logs, summary):
                file.flush()
            if row["verdict"] in ("blind", "crashed"):
                print(row["said"][-400:], flush=True)
    print(dict(counts), f"skipped: {skipped}", flush=True)
    return sum(counts.values()) - counts["clean"] - counts["seen"] + skipped


def main(argv: list[str] | None = None) -> int:
    """One variant in this process, or all of them under the sanitizer; 0 if all is clean and nothing was skipped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="run this variant here")
    parser.add_argument("--list", action="store_true", help="print the variants")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("sanitizer"), help="folder of the logs")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="path")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--sample", action="store_true", help="the variants of SAMPLE")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side (default: 4)")
    args = parser.parse_args(argv)
    known = variants_by_name()
    if args.sample:
        names = [name for name in SAMPLE if name in known]
    else:
        found = functools.partial(name_lists.matching, parser, "--only", names=known, what="variant")
        parts = name_lists.listed(parser, "--only", args.only) or [""]  # in whose order the variants run
        names = list(dict.fromkeys(name for part in parts for name in found(text=part)))
    if args.list:
        print("\n".join(names))
        return 0
    if args.case:
        row = known[args.case]()
        print(row, flush=True)
        return 0 if bool(np.all(row["ok"])) else WRONG
    if args.sanitizer is None or not os.access(args.sanitizer, os.X_OK):
        parser.error(f"no program {args.sanitizer or 'compute-sanitizer'}: --sanitizer PATH says where it is")
    return int(run_all(args, names) > 0)


if __name__ == "__main__":
    sys.exit(main())
