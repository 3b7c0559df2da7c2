"""Programs of a decode step compared: seconds to compile, milliseconds a step, kernels.

    python -m benchmarks.gpu.programs [--small] [--seconds 220] [--only NAME ...]

Prints one line a program. --small is a model for trying the script on a CPU, without the GPU's options.
"""

import argparse
import collections
import dataclasses
import functools
import glob
import gzip
import json
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.engine_step import LLAMA, SMALL
from jattn import models
from jattn.attention import PagedAttention
from jattn.engine.batch import _meta, empty_batch
from jattn.engine.dispatch import Model, dispatch
from jattn.engine.scheduler import Limits
from jattn.engine.shapes import StepShapes
from jattn.models import decoder
from jattn.models.layers import embed, head
from jattn.nn.apply import angles_of

BURST, CONTEXT = 16, 600
BUFFER = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION"
CB = {"xla_gpu_enable_command_buffer": BUFFER, "xla_gpu_graph_min_graph_size": 1}
OPTIONS = {
    "none": {},
    "cb": CB,
    "cb+exhaustive": CB | {"xla_gpu_exhaustive_tiling_search": True},
    "cb+no_triton": CB | {"xla_gpu_enable_triton_gemm": False},
    "cb+no_autotune": CB | {"xla_gpu_autotune_level": 0},
    "cb+concurrent": CB | {"xla_gpu_graph_enable_concurrent_region": True},
    "cb+pdl": CB | {"xla_gpu_enable_pdl": True},
    "cb+dsf": CB | {"xla_gpu_enable_dynamic_slice_fusion": True},
    "cb+dsf+unroll": CB | {"xla_gpu_enable_dynamic_slice_fusion": True, "xla_gpu_command_buffer_unroll_loops": True},
    "cb+dsf+no_triton": CB | {"xla_gpu_enable_dynamic_slice_fusion": True, "xla_gpu_enable_triton_gemm": False},
}


def stacked(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def one_pool(config, blocks, dtype):
    """One cache with the blocks of all layers."""
    one = dataclasses.replace(config, layers=config.layers[:1])
    return one.make_caches(blocks * len(config.layers), 16, dtype)


def scan_forward(config, params, token_ids, caches, meta, *, backend="auto", logits_at=None):
    """models.forward as lax.scan over stacked weights and one pool."""
    layer, count = config.layers[0], len(config.layers)
    (pool,), positions = caches, meta.positions()
    x = embed(config, params, jnp.asarray(token_ids), positions)
    attn = PagedAttention(layer.attention, pool.spec, backend, dtype=x.dtype)
    plan, angles = attn.build(meta), angles_of(layer.rope, meta)
    blocks = pool.spec.num_blocks // count

    def body(carry, xs):
        (pool, x), (weights, i) = carry, xs
        at = attn.for_layer(plan, i, blocks)
        pool, x = decoder._self_attention(layer, attn, weights, x, pool, at, positions, angles)
        return (pool, decoder._mlp(layer, weights, x)), None

    (pool, x), _ = jax.lax.scan(body, (pool, x), (params["layers"], jnp.arange(count)))
    if logits_at is not None:
        x = x[jnp.asarray(logits_at)]
    return (pool,), head(config, params, x)


def batch_of(shapes, tokens, rows, blocks):
    """rows decodes of CONTEXT tokens; or, if tokens > rows, one prompt of tokens - rows + 1 beside rows - 1 decodes."""
    rng = np.random.default_rng(0)
    decode = tokens == rows
    max_rows = rows if decode else shapes.limits.max_num_seqs
    context = min(CONTEXT, shapes.limits.max_model_len - 64)
    lens = [1] * rows if decode else [1] * (max_rows - 1) + [tokens - max_rows + 1]
    seqs = rng.integers(context * 3 // 4, context * 5 // 4, len(lens)).tolist()
    if not decode:
        seqs[-1] = lens[-1]
    table = (1 + np.arange(len(lens) * shapes.max_blocks, dtype=np.int32)).reshape(len(lens), -1)
    assert table.max() < blocks, (table.max(), blocks)
    shape = (tokens, max_rows, decode)
    batch = empty_batch(shape, 1, shapes)
    meta = _meta(lens, seqs, seqs, table, shapes, shape)
    left = np.full(max_rows, 40, np.int32)
    rows_ = dataclasses.replace(batch.rows, remaining=left)
    ids = rng.integers(5, 500, tokens).astype(np.int32)
    return dataclasses.replace(
        batch, token_ids=ids, metas=(meta,), rows=rows_, steps=np.int32(BURST if decode else 1)
    )


@dataclasses.dataclass
class Program:
    name: str
    model: Model
    params: object
    caches: object  # makes them
    batch: object
    options: dict
    steps: int
    compiled: object = None
    seconds: tuple = ()


def build(program):
    begin = time.perf_counter()
    f = jax.jit(dispatch.__wrapped__, static_argnums=0, donate_argnums=2)
    caches = jax.eval_shape(program.caches)
    traced = f.trace(program.model, program.params, caches, program.batch)
    t1 = time.perf_counter()
    lowered = traced.lower()
    t2 = time.perf_counter()

    def finish():
        t3 = time.perf_counter()
        program.compiled = lowered.compile(compiler_options=program.options or None)
        program.seconds = (t1 - begin, t2 - t1, time.perf_counter() - t3)
        return program

    return finish


def measure(program, rounds=10):
    caches, batch = program.caches(), jax.device_put(program.batch)
    first = time.perf_counter()
    caches, sampled, _ = program.compiled(program.params, caches, batch)
    jax.block_until_ready(sampled)
    first = time.perf_counter() - first
    tokens = np.asarray(sampled.tokens)
    best = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(rounds):
            caches, sampled, _ = program.compiled(program.params, caches, batch)
        jax.block_until_ready(sampled)
        best.append((time.perf_counter() - begin) / rounds / program.steps)
    return np.median(best) * 1e3, first, tokens


def kernels(program, steps):
    """(name, count a step, us a step) of each kernel of one dispatch."""
    caches, batch = program.caches(), jax.device_put(program.batch)
    caches, sampled, _ = program.compiled(program.params, caches, batch)
    jax.block_until_ready(sampled)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            caches, sampled, _ = program.compiled(program.params, caches, batch)
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
    rows = sorted(((n, c / steps, t / steps) for n, (c, t) in sums.items()), key=lambda r: -r[2])
    return rows


def host_trace(lower_compile):
    """Seconds by XLA's own trace marks while `lower_compile` runs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            lower_compile()
        path = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]
        events = json.load(gzip.open(path))["traceEvents"]
    sums = collections.defaultdict(lambda: [0, 0.0])
    for e in events:
        if e.get("ph") == "X" and not e["name"].startswith("$"):
            sums[e["name"][:50]][0] += 1
            sums[e["name"][:50]][1] += e["dur"] / 1e6
    return sorted(((n, c, t) for n, (c, t) in sums.items()), key=lambda r: -r[2])


def guarded(work, *args, default=None):
    try:
        return work(*args)
    except Exception as error:
        traceback.print_exc(limit=-2)
        print(f"  ERROR {type(error).__name__}: {str(error)[:400]}", flush=True)
        return default


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=220)
    args = parser.parse_args()
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
    blocks = max_rows * shapes.max_blocks + 2

    def filled(make, layers=1):
        def numbers(x):
            at = jnp.arange(x.size, dtype=jnp.int32) % (x.size // layers)
            return (at % 127 / 127 - 0.5).astype(x.dtype).reshape(x.shape)

        return jax.jit(lambda: jax.tree.map(numbers, make()))

    plain = Model(models.forward, config, "auto")
    plain_caches = filled(lambda: config.make_caches(blocks, 16, dtype))
    scan = Model(scan_forward, config, "auto")
    scan_params = params | {"layers": jax.jit(stacked)(params["layers"])}

    def decode(kind, rows, options):
        model, weights, caches = (
            (plain, params, plain_caches) if kind == "unrolled" else (scan, scan_params, filled(lambda: one_pool(config, blocks, dtype), len(config.layers)))
        )
        batch = batch_of(shapes, rows, rows, blocks)
        return Program(f"{kind} r{rows} {options}", model, weights, caches, batch, OPTIONS[options] if gpu else {}, BURST)

    def mixed(tokens, options):
        batch = batch_of(shapes, tokens, 0, blocks)
        return Program(f"unrolled T{tokens} {options}", plain, params, plain_caches, batch, OPTIONS[options] if gpu else {}, 1)

    def deep(layers):
        small = models.config_of(LLAMA | dict(num_hidden_layers=layers, hidden_size=1024, intermediate_size=4096, num_attention_heads=16) | (SMALL if args.small else {}))
        weights = jax.eval_shape(lambda: models.init_params(small, 0, dtype))
        caches = lambda: small.make_caches(blocks, 16, dtype)
        batch = batch_of(shapes, 4, 4, blocks)
        return Program(f"{layers} layers r4 cb", Model(models.forward, small, "auto"), weights, caches, batch, OPTIONS["cb"] if gpu else {}, BURST)

    full = max_rows // 2
    print(f"start {time.perf_counter() - begin:.1f} s", flush=True)
    print("== compiled alone: trace, lower, compile (s)", flush=True)
    alone = [(lambda: decode("unrolled", full, "none")), lambda: deep(16), lambda: deep(80 if not args.small else 4)]
    ready = []
    for i, make in enumerate(alone):
        program = guarded(make)
        if program is None:
            continue
        finish = guarded(build, program)
        if i == 0:
            rows = guarded(host_trace, finish, default=[])
            ready.append(program)
        else:
            guarded(finish)
        print(f"{program.name:32}", *(f"{s:7.2f}" for s in program.seconds), flush=True)
        if i == 0:
            for n, c, t in rows[:28]:
                print(f"    {t:8.2f} s {c:6d} {n}")
    wanted = [("unrolled", full, "cb"), ("scan", full, "none"), ("scan", full, "cb"), ("unrolled", full, "cb+no_autotune"),
              ("unrolled", 1, "none"), ("unrolled", 1, "cb"), ("scan", full, "cb+dsf"),
              ("scan", full, "cb+dsf+unroll"), ("scan", full, "cb+dsf+no_triton"), ("unrolled", full, "cb+no_triton"),
              ("unrolled", full, "cb+exhaustive"), ("unrolled", full, "cb+concurrent"), ("unrolled", full, "cb+pdl"),
              ("unrolled", max_rows, "none"), ("unrolled", max_rows, "cb"), ("unrolled", full // 2, "cb"), ("unrolled", 4, "cb")]
    jobs = [functools.partial(decode, *w) for w in wanted]
    jobs += [functools.partial(mixed, t, o) for t in (budget // 4, budget) for o in ("none", "cb")]
    futures = []
    with ThreadPoolExecutor(8) as pool:
        for job in jobs:
            if left() < 60:
                print("out of time: programs left out")
                break
            program = guarded(job)
            finish = program and guarded(build, program)
            if finish:
                futures.append((program, pool.submit(guarded, finish)))
        print(f"lowered at {time.perf_counter() - begin:.1f} s", flush=True)
        for program, future in futures:
            if future.result() is not None:
                ready.append(program)
    print(f"compiled at {time.perf_counter() - begin:.1f} s", flush=True)
    print("== program: trace, lower, compile (s, side by side), first run (s), ms a step, tokens equal to the first of its shape")
    tokens_of = {}
    for program in ready:
        if left() < 25:
            print("out of time: not measured", program.name)
            continue
        result = guarded(measure, program)
        if result is None:
            continue
        ms, first, tokens = result
        known = tokens_of.setdefault(program.name.split()[1], tokens)
        same = (known == tokens)[known >= 0].mean()
        print(f"{program.name:32}", *(f"{s:7.2f}" for s in program.seconds), f"{first:7.2f} {ms:8.4f} ms  equal {same:.3f}", flush=True)
    for program in ready:
        if left() < 8 or not gpu:
            break
        if program.name in ("unrolled r32 none", "unrolled r32 cb", "unrolled r1 none", "unrolled T512 none"):
            rows = guarded(kernels, program, program.steps, default=[])
            print(f"== {program.name}: {sum(r[1] for r in rows):.1f} kernels, {sum(r[2] for r in rows):.1f} us a step")
            for n, c, t in rows[:45]:
                print(f"  {t:8.2f} us {c:7.2f}  {n[:70]}")
    print(f"end {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
