"""Programs of a decode step compared: seconds to compile, milliseconds a step, kernels.

    python -m benchmarks.gpu.programs [--small] [--seconds 220] [--only "r1 none,r1 engine"]

Prints one line a program; `equal` is the share of tokens that are those of the first program of the same batch. As in
the engine, a decode of fewer rows than its smallest program has is padded. --small is a model for trying the script on
a CPU, without the GPU's options.
"""

import argparse
import collections
import dataclasses
import glob
import gzip
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import name_lists
from benchmarks.gpu.engine_step import LLAMA, SMALL
from jattn import models
from jattn.engine.batch import empty_batch, meta_of, packed_batch
from jattn.engine.dispatch import Model, RowState, dispatch, empty_row_state
from jattn.engine.packing import Packed
from jattn.engine.scheduler import Limits
from jattn.engine.shapes import LEAST_ROWS, StepShape, StepShapes

BURST, CONTEXT = 16, 600


def batch_of(shapes, tokens, rows, blocks, **sampling):
    """`rows` decodes of about CONTEXT tokens, if tokens == rows. Else one prompt beside decodes in all other rows.

    sampling: fields of SamplingRows, the same for all rows; logprobs=1 asks for log-probabilities.
    """
    rng = np.random.default_rng(0)
    decode = tokens == rows
    tokens = max(tokens, LEAST_ROWS) if decode and shapes.is_coarse else tokens
    max_rows = tokens if decode else shapes.limits.max_num_seqs
    context = min(CONTEXT, shapes.limits.max_model_len - 64)
    lens = [1] * rows if decode else [1] * (max_rows - 1) + [tokens - max_rows + 1]
    seqs = rng.integers(context * 3 // 4, context * 5 // 4, len(lens)).tolist()
    if not decode:
        seqs[-1] = lens[-1]
    table = (1 + np.arange(len(lens) * shapes.max_blocks, dtype=np.int32)).reshape(len(lens), -1)
    assert table.max() < blocks, (table.max(), blocks)
    shape = StepShape(tokens, max_rows, decode)
    batch = empty_batch(shape, 1, shapes)
    meta = meta_of(lens, seqs, seqs, table, shapes, shape)
    fields = {name: np.full(max_rows, x, np.float32 if name != "top_k" else np.int32) for name, x in sampling.items()}
    logprobs = np.bool_(fields.pop("logprobs", None) is not None)
    ids = rng.integers(5, 500, tokens).astype(np.int32)
    remaining = np.where(np.arange(max_rows) < len(lens), 40, 0).astype(np.int32)
    return dataclasses.replace(
        batch,
        token_ids=ids,
        metas=(meta,),
        rows=dataclasses.replace(batch.rows, remaining=remaining, **fields),
        needs_logprobs=logprobs,
        steps=np.int32(BURST if decode else 1),
    )


@dataclasses.dataclass
class Program:
    """A dispatch to compile and time."""

    name: str
    model: Model
    params: Any
    make_caches: Callable[[], Any]
    max_rows: int
    batch: Packed
    options: str  # of XLA: those of the `engine`, or `none`
    steps: int  # model steps of a dispatch
    compiled: Any = None
    seconds: tuple = ()  # to trace, lower and compile

    def make_state(self) -> tuple[Any, RowState]:
        """(caches, an empty RowState), which a dispatch takes over."""
        return self.make_caches(), empty_row_state(self.max_rows)


def build(program: Program) -> Callable[[], Program]:
    """Trace and lower here; the returned function compiles, in any thread."""
    jitted = jax.jit(dispatch.function, static_argnums=0, donate_argnums=(2, 3))  # as `dispatch` does
    caches, before = jax.eval_shape(program.make_state)
    args = program.model, program.params, caches, before, program.batch
    options = {"engine": dispatch.options(*args), "none": None}[program.options]
    begin = time.perf_counter()
    traced = jitted.trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()

    def finish():
        start = time.perf_counter()
        program.compiled = lowered.compile(compiler_options=options or None)
        program.seconds = (traced_at - begin, lowered_at - traced_at, time.perf_counter() - start)
        return program

    return finish


def measure(program: Program, idle: float = 0.25) -> tuple:
    """(ms a step after an idle pause; sustained; seconds of the first run; tokens; ms until a call returns)."""
    (caches, before), batch = program.make_state(), jax.device_put(program.batch)
    begin = time.perf_counter()
    caches, sampled, before = program.compiled(program.params, caches, before, batch)
    jax.block_until_ready(sampled)
    first, tokens = time.perf_counter() - begin, np.asarray(sampled.tokens)

    def several(count):
        nonlocal caches, before
        begin, sampled = time.perf_counter(), None
        for _ in range(count):
            caches, sampled, before = program.compiled(program.params, caches, before, batch)
        jax.block_until_ready(sampled)
        return (time.perf_counter() - begin) / count / program.steps * 1e3

    several(2)
    cool = []
    for _ in range(3):
        time.sleep(idle)
        cool.append(several(2 if program.steps > 1 else 6))
    time.sleep(idle)
    begin = time.perf_counter()
    caches, sampled, before = program.compiled(program.params, caches, before, batch)
    call = (time.perf_counter() - begin) * 1e3
    jax.block_until_ready(sampled)
    several(6)
    return np.median(cool), several(12), first, tokens, call


def kernels(program: Program) -> list[tuple[str, float, float]]:
    """(name, count a step, us a step) of each kernel of one dispatch, those that take most first."""
    (caches, before), batch = program.make_state(), jax.device_put(program.batch)
    caches, sampled, before = program.compiled(program.params, caches, before, batch)
    jax.block_until_ready(sampled)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            caches, sampled, before = program.compiled(program.params, caches, before, batch)
            jax.block_until_ready(sampled)
        path = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]
        events = json.load(gzip.open(path))["traceEvents"]
    pids = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in e["args"].get("name", "")}
    tids = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name" and e["pid"] in pids
    }
    sums = collections.defaultdict(lambda: [0, 0.0])
    for e in events:
        if e.get("ph") == "X" and "Stream" in tids.get((e["pid"], e["tid"]), ""):
            sums[e["name"]][0] += 1
            sums[e["name"]][1] += e["dur"]
    steps = program.steps
    return sorted(((n, c / steps, t / steps) for n, (c, t) in sums.items()), key=lambda row: -row[2])


def guarded(work, *args, default=None):
    """work(*args); an exception is printed, and gives the default."""
    try:
        return work(*args)
    except Exception as error:
        traceback.print_exc(limit=-2)
        print(f"  ERROR {type(error).__name__}: {str(error)[:400]}", flush=True)
        return default


def main(argv: list[str] | None = None) -> None:
    """Compile and time each program, and print its line as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--seconds", type=float, default=220, help="no program is begun in the last 20 (default: 220)")
    parser.add_argument("--only", default="", help="names of programs, separated by commas; their kernels are printed")
    args = parser.parse_args(argv)
    wanted = name_lists.listed(parser, "--only", args.only)
    begin = time.perf_counter()
    left = lambda: args.seconds - (time.perf_counter() - begin)
    gpu = jax.default_backend() == "gpu"
    if args.small:
        LLAMA.update(SMALL, dtype="float32")
    dtype = "float32" if args.small else "bfloat16"
    config = models.config_of(LLAMA)
    params = jax.block_until_ready(models.init_params(config, 0, dtype))
    max_rows, budget, longest = (4, 64, 256) if args.small else (64, 2048, 2112)
    shapes = StepShapes(Limits(max_rows, budget, longest, BURST), 16)

    model = Model(models.forward, config)

    def numbers(x):
        at = jnp.arange(x.size, dtype=jnp.int32)
        return (at % 127 / 127 - 0.5).astype(x.dtype).reshape(x.shape)

    def blocks_of(size):
        return max_rows * -(-longest // size) + 2

    def caches_of(size):
        return jax.jit(lambda: jax.tree.map(numbers, config.make_caches(blocks_of(size), size, dtype)))

    def program(name, tokens, rows, options, size=64, **sampling):
        sized = dataclasses.replace(shapes, block_size=size)
        batch = batch_of(sized, tokens, rows, blocks_of(size), **sampling)
        packed = packed_batch([batch], sized)
        return Program(name, model, params, caches_of(size), max_rows, packed, options, BURST if rows else 1)

    def decode(rows, options, size=64, **sampling):
        more = "".join(f" {k}={v}" for k, v in sampling.items()) + (f" blocks of {size}" if size != 64 else "")
        return program(f"r{rows} {options}{more}", rows, rows, options, size, **sampling)

    def mixed(tokens, options):
        return program(f"T{tokens} {options}", tokens, 0, options)

    def deep(layers):
        keys = dict(num_hidden_layers=layers, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
        narrow = models.config_of(LLAMA | keys | (SMALL if args.small else {}))
        weights = jax.eval_shape(lambda: models.init_params(narrow, 0, dtype))
        batch, caches = batch_of(shapes, 4, 4, blocks_of(16)), lambda: narrow.make_caches(blocks_of(16), 16, dtype)
        model = Model(models.forward, narrow)
        packed = packed_batch([batch], shapes)
        return Program(f"{layers} layers", model, weights, caches, max_rows, packed, "engine", BURST)

    half = max_rows // 2
    print(f"start {time.perf_counter() - begin:.1f} s", flush=True)
    drawn: dict = dict(temperature=0.8, top_k=50, top_p=0.9)
    groups = [  # compiled side by side within a group: few, so that autotuning is hardly disturbed
        [lambda: decode(half, "engine"), lambda: decode(1, "engine")],
        [lambda: decode(half, "none"), lambda: decode(max_rows, "engine")],
        [lambda: mixed(budget // 4, "engine"), lambda: mixed(budget, "engine")],
        [lambda: decode(half, "engine", **drawn), lambda: decode(half, "engine", logprobs=1)],
        [lambda: decode(1, "none"), lambda: decode(4, "engine")],
        [lambda: mixed(max_rows, "engine"), lambda: decode(max_rows // 4, "engine")],
        [lambda: deep(16)],
        [lambda: deep(80 if not args.small else 4)],
        [lambda: decode(half, "engine", 16), lambda: decode(1, "engine", 16)],
    ]
    print(
        "== program: trace, lower, compile, first run (s); a call, a step after a pause, sustained (ms); equal tokens"
    )
    profiled = [f"r{half} none", "r1 none", f"T{max_rows} engine", f"T{budget // 4} engine"]
    tokens_of, tables, names, is_whole = {}, [], [], True
    with ThreadPoolExecutor(4) as pool:
        for group in groups:
            if left() < 20:
                print("out of time: programs left out", len(group))
                is_whole = False
                continue
            programs = [p for p in map(guarded, group) if p is not None]
            names += [p.name for p in programs]
            programs = [p for p in programs if not wanted or p.name in wanted]
            jobs = [(p, guarded(build, p)) for p in programs]
            for p, job in [(p, pool.submit(guarded, job)) for p, job in jobs if job]:
                if job.result() is None:
                    continue
                line = f"{p.name:36}" + "".join(f"{s:7.2f}" for s in p.seconds)
                if "layers" in p.name or (result := guarded(measure, p)) is None:
                    print(line, flush=True)
                    continue
                cool, hot, first, tokens, call = result
                known = tokens_of.setdefault(p.name.replace(" none", "").replace(" engine", ""), tokens)
                same = (known == tokens)[known >= 0].mean()
                print(f"{line} {first:6.2f} {call:6.2f} {cool:8.4f} {hot:8.4f}  equal {same:.3f}", flush=True)
                if (p.name in profiled or wanted) and gpu:
                    tables.append((p.name, guarded(kernels, p, default=[])))
    for name, rows in tables:
        print(f"== {name}: {sum(r[1] for r in rows):.1f} kernels, {sum(r[2] for r in rows):.1f} us a step")
        for n, c, t in rows[:32]:
            print(f"  {t:8.2f} us {c:7.2f}  {n[:70]}")
    print(f"end {time.perf_counter() - begin:.1f} s")
    if is_whole and (unknown := [name for name in wanted if name not in names]):
        parser.error(f"--only: no program {', '.join(unknown)}; there are {', '.join(names)}")


if __name__ == "__main__":
    main()
