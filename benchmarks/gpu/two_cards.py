"""Everything that needs several cards of one host, in one run: each part in a process of its own, with its own limit.

    python -m benchmarks.gpu.two_cards [--seconds 200] [--parts PART ..] [--write | --out DIR] [--small]

tail         one launch for the rest of a layer on both cards: numbers against float64, time of a layer
serve1       an 8B model on one card: a decode step of 64 requests, a prompt of 8192 tokens
serve2       the same on two cards; `to_one_device`, and how far its tokens are those of one card
serve2_xla   without the launches of `tail`: all-reduces by NCCL
serve2_shot  the same, by XLA's own all-reduce kernels
serve2_graph as serve2, with NCCL's calls in CUDA graphs: a dispatch is one graph; `graph_equal`: has it serve2's tokens
serve1_int4, serve2_int4: the decode step with weights of 4 bits
sums         benchmarks.gpu.rank_sums
context      benchmarks.gpu.context_parallel
collectives  benchmarks.gpu.collectives
large        benchmarks.gpu.large_model: a folder of 141 GB loaded by Engine.from_pretrained and served

Processes start together, up to JAX's start; only one at a time then uses the cards. A part that is stuck is ended.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks import records

ROWS, PROMPT, LONG = 64, 512, 8192
BLOCKS = 1600  # of 64 tokens: 64 requests of 1100, and some more
ALL_REDUCE_BY_XLA = {"xla_gpu_experimental_use_collective_kernels": "all_reduce"}
LIMITS = {  # seconds of a part once it has the cards
    "tail": 25, "serve1": 75, "serve2": 78, "serve2_xla": 60, "serve2_shot": 60,
    "serve2_graph": 60, "serve1_int4": 70, "serve2_int4": 70, "sums": 50, "context": 70, "collectives": 20,
    "large": 200,
}  # fmt: skip
LEAST_SECONDS = 10  # with less time left, no part begins
FIRST = ("tail", "sums", "serve1", "serve2", "context", "collectives", "serve2_graph", "serve2_xla", "serve2_shot")


# ---------------------------------------------------------------------- the parts
def tail(args: argparse.Namespace) -> list[dict]:
    """The launch on all cards beside XLA's products and all-reduces, for a layer of an 8B model."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.gpu import layer_tail as single
    from jattn.engine.xla_options import COMMAND_BUFFERS, CUDA_OPTIONS
    from jattn.nn import layer_tail as op
    from jattn.ops.product import product

    ranks = args.ranks
    mesh = jax.make_mesh((ranks,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    shape = (256, 256, 512, (256, 128, 128)) if args.small else single.SHAPES["llama_8b"]
    layers = [single.layer(shape, seed) for seed in range(single.LAYERS)]
    columns, inputs, whole = PartitionSpec(None, "x"), PartitionSpec("x"), PartitionSpec()
    specs = ((inputs,), (columns, columns), (inputs,), (columns,) * 3)
    keys = jax.random.split(jax.random.key(8))
    dtype = jnp.bfloat16
    a, x = (jax.random.normal(key, (ROWS, n), dtype) for key, n in zip(keys, shape[1::-1], strict=True))
    wanted = single.exactly(a, x, *layers[0])
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    placed = [(jax.tree.map(place, w, specs), place(s, whole)) for w, s in layers]
    a, x = place(a, columns), place(x, whole)
    config = op.config_of(ROWS, a.dtype, *layers[0], single.FORMULA, ranks=ranks, kv_ranks=ranks)
    rows = []

    multiply = lambda y, w: product(y, w, dtype=y.dtype)

    def chain(by_launch: bool, a, x, layers):
        found, counters = [], op.new_counters(config if by_launch else None)
        for weights, scales in layers:
            if by_launch:
                x, rows, counters = op.layer_tail(single.FORMULA, config, a, x, weights, scales, counters)
            else:
                (o,), (gate, up), (down,), following = weights
                summed = lambda y, w: jax.lax.psum(multiply(y, w), "x")
                x = x + summed(a, o)
                n = single.FORMULA.mlp_norm({"scale": scales[0]}, x)
                x = x + summed(jax.nn.silu(multiply(n, gate)) * multiply(n, up), down)
                n = single.FORMULA.next_norm({"scale": scales[1]}, x)
                rows = jnp.concatenate([multiply(n, w) for w in following], axis=1)
            widths = np.cumsum([w.shape[1] for w in weights[3]])[:-1]
            found.append((x, *jnp.split(rows, widths, axis=1)))
            a = jnp.tile(rows, (1, 2))[:, : a.shape[1]]
        return found

    of_layer = (whole, columns, columns, columns)
    graph = {} if args.small else CUDA_OPTIONS | {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS + ",COLLECTIVES"}
    plain = {} if args.small else CUDA_OPTIONS
    ways = {"launch": (True, plain), "nccl": (False, plain), "nccl, graph": (False, graph)}
    for name, (by_launch, options) in ways.items():
        if by_launch and config is None:
            print("no launch for this chip", flush=True)
            continue
        try:
            body = functools.partial(chain, by_launch)
            in_specs = (columns, whole, [(specs, (whole, whole))] * len(layers))
            mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=[of_layer] * len(layers),
                                   check_vma=False)  # fmt: skip
            run = jax.jit(mapped).lower(a, x, placed).compile(compiler_options=options or None)
            found = jax.block_until_ready(run(a, x, placed))
            x_ranks = [np.asarray(part.data, np.float32) for part in found[-1][0].addressable_shards]
            first = found[0][0], np.concatenate([np.asarray(y, np.float32) for y in found[0][1:]], axis=1)
            err = single.furthest(first, wanted)
            again = [run(a, x, placed) for _ in range(5)]
            same = all(
                bool(jnp.array_equal(y, z))
                for other in again
                for y, z in zip(jax.tree.leaves(other), jax.tree.leaves(found), strict=True)
            )
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                for _ in range(20):
                    out = run(a, x, placed)
                jax.block_until_ready(out)
                times.append((time.perf_counter() - begin) / 20 / len(layers) * 1e6)
            row = dict(case="tail_8b_r64", variant=f"{ranks} devices, {name}", us=min(times), err=err, same=same)
            row |= dict(ranks_equal=all(np.array_equal(y, x_ranks[0]) for y in x_ranks), ok=err < 0.02)
            if by_launch and row["ok"] and same and row["ranks_equal"]:
                (pathlib.Path(args.shared) / "tail.ok").touch()
        except Exception as error:
            row = dict(case="tail_8b_r64", variant=f"{ranks} devices, {name}", ok=False, error=str(error)[:300])
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def serve(args: argparse.Namespace, ranks: int, variant: str = "") -> list[dict]:
    """Decode and prefill of an 8B model on so many cards."""
    with two_programs(*((128, 4) if args.small else (LONG, ROWS))):
        return serve_so(args, ranks, variant)


def serve_so(args: argparse.Namespace, ranks: int, variant: str) -> list[dict]:
    """See `serve`."""
    import jax
    import numpy as np

    import jattn
    from benchmarks.gpu import engine_step, tensor_parallel
    from jattn import models
    from jattn.engine import xla_options
    from jattn.models import ModelMesh

    folder = pathlib.Path(args.shared)
    launch_failed = (folder / "tail.ready").exists() and not (folder / "tail.ok").exists()
    if variant in ("xla", "shot") or launch_failed:
        setattr(ModelMesh, "has_one_memory", property(lambda model_mesh: model_mesh.size == 1))  # noqa: B010
    if variant == "shot":
        xla_options.CUDA_OPTIONS_ON_MESH |= ALL_REDUCE_BY_XLA
    if variant == "graph":
        xla_options.CUDA_OPTIONS_ON_MESH["xla_gpu_enable_command_buffer"] = xla_options.COMMAND_BUFFERS + ",COLLECTIVES"
    clock = Clock()
    kind, rows, prompt, long = ("small", 4, 32, 128) if args.small else ("8b", ROWS, PROMPT, LONG)
    config = tensor_parallel.config_of(kind)
    mesh = jax.make_mesh((1, ranks), ("data", "tensor"), devices=jax.devices()[:ranks])
    params = tensor_parallel.weights_of(config, mesh, "float32" if args.small else "bfloat16")
    params = models.quantise(params, "int4") if variant == "int4" else params
    clock("weights")
    new_engine = functools.partial(tensor_parallel.engine_of, config, params, mesh, rows, long, long + 1024)
    blocks = None if args.small else BLOCKS
    engine = new_engine(blocks)
    engine.warmup()
    clock("two programs")
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, config.vocab_size, (rows, prompt))
    greedy = lambda count: jattn.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = engine.generate([p.tolist() for p in prompts], greedy(33))
    tokens = [list(output.token_ids) for output in outputs]
    clock("33 tokens of each")
    (folder / f"tokens{ranks}{variant}.json").write_text(json.dumps(tokens))
    dispatches = 4 if args.small else 20
    steps = -(-rows * prompt // long)
    name = f"{ranks} devices" + (f", {variant}" if variant else "") + (", no launch" * launch_failed * (ranks > 1))
    seconds, _ = engine_step.serve(engine, prompts, dispatches, steps)
    kept = f"tp_{kind}_int4" if variant == "int4" else f"tp_{kind}"
    found = {f"{kept}_decode_r{rows}": float(np.median(seconds)) / engine_step.BURST * 1e3}
    clock("decode")
    print(json.dumps(dict(variant=name, **found)), flush=True)
    if not args.small:
        print(json.dumps(dict(kernels=profiled(engine, prompts, steps, ranks))), flush=True)
        clock("profile")
    if variant in ("", "shot"):
        ids, times = rng.integers(2, config.vocab_size, long).tolist(), []
        for _ in range(8):
            begin = time.perf_counter()
            engine.generate([ids], greedy(1))
            times.append(time.perf_counter() - begin)
        found[f"tp_{kind}_prefill_8k"] = float(np.median(times[2:])) * 1e3
        clock("prefill")
    if ranks > 1 and variant == "" and not args.small:
        print(json.dumps(dict(variant=name, **found)), flush=True)
        del engine
        xla_options.CUDA_OPTIONS_ON_MESH["xla_gpu_enable_command_buffer"] = xla_options.COMMAND_BUFFERS + ",COLLECTIVES"
        xla_options.options_of.cache_clear()
        engine = new_engine(blocks)
        engine.warmup()
        clock("two programs with collectives in graphs")
        again = engine.generate([p.tolist() for p in prompts], greedy(33))
        graph_equal = sum(list(a.token_ids) == b for a, b in zip(again, tokens, strict=True)) / rows
        print(json.dumps(dict(graph_equal=graph_equal)), flush=True)
        seconds, _ = engine_step.serve(engine, prompts, dispatches, steps)
        found[f"tp_{kind}_decode_r{rows}_graph"] = float(np.median(seconds)) / engine_step.BURST * 1e3
        print(json.dumps(dict(kernels_in_graph=profiled(engine, prompts, steps, ranks))), flush=True)
        print(json.dumps(dict(variant=name, **found)), flush=True)
    results = [dict(case=case, variant=name, ranks=ranks, ms=ms) for case, ms in found.items()]
    alone = folder / ("alone_int4.json" if variant == "int4" else "alone.json")
    if ranks == 1:
        alone.write_text(json.dumps(found))
    elif alone.exists():
        of_one = json.loads(alone.read_text())
        first = json.loads((folder / f"tokens1{variant if variant == 'int4' else ''}.json").read_text())
        for row in results:
            row |= dict(to_one_device=row["ms"] / of_one[row["case"]]) if row["case"] in of_one else {}
        results[0] |= agreement(tokens, first)
    for row in results:
        print(json.dumps(row), flush=True)
    return results


@contextlib.contextmanager
def two_programs(tokens: int, rows: int) -> Iterator[None]:
    """Engines have two programs only: decodes of `rows` requests, and other batches of `tokens` tokens."""
    from unittest import mock

    from jattn.engine.shapes import StepShape, StepShapes

    decode, mixed = StepShape(rows, rows, True), StepShape(tokens, rows, False)
    choose = lambda self, plan, shares_prefix=False: decode if plan.is_decode else mixed
    with (
        mock.patch.object(StepShapes, "all", lambda self: (decode, mixed)),
        mock.patch.object(StepShapes, "of", choose),
    ):
        yield


def agreement(tokens: list[list[int]], wanted: list[list[int]]) -> dict:
    """first_equal: the share of requests whose first token is equal; equal_before: tokens until the first other one."""
    before = [
        next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
        for mine, other in zip(tokens, wanted, strict=True)
    ]
    return dict(first_equal=sum(n > 0 for n in before) / len(before), equal_before=sum(before) / len(before))


def profiled(engine, prompts, steps: int, ranks: int) -> dict[str, tuple[float, float]]:
    """Of a decode step: microseconds and launches of each kernel, the mean of the cards; the longest first."""
    import collections
    import glob
    import gzip

    import jax

    import jattn
    from benchmarks.gpu.engine_step import BURST

    with tempfile.TemporaryDirectory() as folder:
        most = jattn.SamplingParams(temperature=0, max_tokens=BURST * 7, ignore_eos=True)
        for prompt in prompts:
            engine.add_request(prompt, most)
        for _ in range(steps + 2):
            engine.step()
        with jax.profiler.trace(folder):
            engine.step()
            engine.step()
        list(engine.drain())
        path = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]
        events = json.load(gzip.open(path))["traceEvents"]
    pids = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in e["args"].get("name", "")}
    tids = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name" and e["pid"] in pids
    }
    sums: dict[str, list] = collections.defaultdict(lambda: [0, 0.0])
    for e in events:
        if e.get("ph") == "X" and "Stream" in tids.get((e["pid"], e["tid"]), ""):
            sums[e["name"][:40]][0] += 1
            sums[e["name"][:40]][1] += e["dur"]
    many = 2 * BURST * ranks
    longest = sorted(sums.items(), key=lambda item: -item[1][1])[:24]
    return {name: (round(us / many, 1), round(count / many, 1)) for name, (count, us) in longest}


def context(args: argparse.Namespace) -> list[dict]:
    """benchmarks.gpu.context_parallel"""
    from benchmarks.gpu import context_parallel

    where = ["--out", str(args.out)] if args.out else ["--write"] if args.write else []
    variants = ["default"] if args.small else ["default", "graph"]
    context_parallel.main([*where, "--variants", *variants, "--ranks", str(args.ranks), "--seconds", "52",
                           *(["--small", "--cases", "tp_8x1k"] if args.small else [])])  # fmt: skip
    return []


def sums(args: argparse.Namespace) -> list[dict]:
    """benchmarks.gpu.rank_sums"""
    from benchmarks.gpu import rank_sums

    where = ["--out", str(args.out)] if args.out else ["--write"] if args.write else []
    rank_sums.main([*where, "--ranks", str(args.ranks), *(["--small"] if args.small else [])])
    return []


def collectives(args: argparse.Namespace) -> list[dict]:
    """benchmarks.gpu.collectives"""
    from benchmarks.gpu import collectives

    where = ["--out", str(args.out)] if args.out else ["--write"] if args.write else []
    collectives.main([*where, "--ranks", str(args.ranks), *(["--small"] if args.small else [])])
    return []


def large(args: argparse.Namespace) -> list[dict]:
    """benchmarks.gpu.large_model; the folder is written by a process of its own from the start of the run."""
    from benchmarks.gpu import large_model

    args.wait = 120
    large_model.run(pathlib.Path(args.folder), args)
    return []


PARTS = {
    "tail": tail,
    "serve1": functools.partial(serve, ranks=1),
    "serve2": lambda args: serve(args, args.ranks),
    "serve2_xla": lambda args: serve(args, args.ranks, "xla"),
    "serve2_shot": lambda args: serve(args, args.ranks, "shot"),
    "serve2_graph": lambda args: serve(args, args.ranks, "graph"),
    "serve1_int4": lambda args: serve(args, 1, "int4"),
    "serve2_int4": lambda args: serve(args, args.ranks, "int4"),
    "sums": sums,
    "context": context,
    "collectives": collectives,
    "large": large,
}


class Clock:
    """Prints the seconds since the last call."""

    def __init__(self):
        self.last = time.perf_counter()

    def __call__(self, what: str) -> None:
        now = time.perf_counter()
        print(f"  {what}: {now - self.last:.1f} s", flush=True)
        self.last = now


# ---------------------------------------------------------------------- one part in its process
def run_part(name: str, args: argparse.Namespace) -> None:
    """Start JAX, wait for the cards, run the part and keep its rows."""
    import jax

    jax.devices()
    turn = pathlib.Path(args.shared) / f"{name}.go"
    (pathlib.Path(args.shared) / f"{name}.ready").touch()
    while not turn.exists():
        time.sleep(0.02)
    rows = PARTS[name](args)
    if rows:
        file = "layer_tail_ranks" if name == "tail" else "tensor_parallel"
        records.write([row | records.provenance() for row in rows], file, records.folder_of(args))


def command_of(name: str, args: argparse.Namespace, shared: str) -> list[str]:
    """The command of a part's process."""
    command = [sys.executable, "-u", "-m", "benchmarks.gpu.two_cards", "--part", name, "--shared", shared]
    command += ["--ranks", str(args.ranks), "--folder", str(args.folder), *(["--small"] if args.small else [])]
    return command + (["--out", str(args.out)] if args.out else ["--write"] if args.write else [])


class Process:
    """A part's process, which touches NAME.ready, and then waits for NAME.go in the folder `shared`."""

    def __init__(self, name: str, command: list[str], shared: str):
        self.name, self.shared = name, pathlib.Path(shared)
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
        settings = memory | os.environ
        with (self.shared / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=settings
            )

    def run(self, seconds: float) -> str:
        """Give it the cards; how it ended."""
        begin = time.perf_counter()
        (self.shared / f"{self.name}.go").touch()
        try:
            code = self.process.wait(seconds)
            how = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            self.end()
            how = "ended, out of time"
        return f"{how}, {time.perf_counter() - begin:.1f} s"

    def wait_until_ready(self, seconds: float) -> bool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and self.process.poll() is None:
            if (self.shared / f"{self.name}.ready").exists():
                return True
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """End its own process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def output(self) -> str:
        return (self.shared / f"{self.name}.log").read_text(errors="replace")


def run_in_turn(processes: list[Process], end: float) -> int:
    """Give each the cards, as long as there is time (of time.perf_counter), and print its last lines; those failed."""
    failed = 0
    for process in processes:
        left = end - time.perf_counter()
        if left < LEAST_SECONDS:
            print(f"skipped for time: {process.name}", flush=True)
            continue
        ready = process.wait_until_ready(min(60, left))
        limit = min(LIMITS.get(process.name, 60), end - time.perf_counter())
        how = process.run(limit) if ready else "did not start"
        failed += not how.startswith("ok")
        print(f"== {process.name}: {how}", flush=True)
        lines = process.output().splitlines()
        print("\n".join(line[:1500] for line in lines[-(12 if how.startswith("ok") else 25) :]), flush=True)
    return failed


@contextlib.contextmanager
def written(args: argparse.Namespace) -> Iterator[None]:
    """If the part `large` is asked for, a process that writes its folder, beside the other parts."""
    if "large" not in args.parts:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.gpu.large_model", str(args.folder), "--only-folder"]
    process = subprocess.Popen(command + ["--small"] * args.small, start_new_session=True)
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    """Run the parts in order, each if there is time; the number that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.two_cards", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=200, help="of the whole run (default: 200)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(FIRST), help="in this order")
    parser.add_argument("--ranks", type=int, default=2, help="cards (default: 2)")
    parser.add_argument("--small", action="store_true", help="small models, for a CPU")
    parser.add_argument("--folder", default="/dev/shm/large", help="for `large`, in memory (default: /dev/shm/large)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--shared", help=argparse.SUPPRESS)
    records.add_options(parser)
    args = parser.parse_args(argv)
    if args.part:
        run_part(args.part, args)
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as shared, written(args):
        processes = [Process(name, command_of(name, args, shared), shared) for name in args.parts]
        try:
            failed = run_in_turn(processes, begin + args.seconds)
        finally:
            for process in processes:
                process.end()
                if args.out:
                    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
                    (pathlib.Path(args.out) / f"{process.name}.log").write_text(process.output())
    print(f"{failed} failed; {time.perf_counter() - begin:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
