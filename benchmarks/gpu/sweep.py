"""The Hopper kernel beside FlashAttention-3 on shapes of real models: the geometric mean, and the worst ten.

    python -m benchmarks.gpu.sweep [--fa3 LIBRARY] [--seed N] [--cases 90] [--seconds 100] [--write | --out DIR]

LIBRARY: see benchmarks/gpu/fa3.py. The first cases are those of `sweep_cases.CLASSES`; the others are drawn by the
seed. Each is checked on a few rows against numpy float64, then timed: the sum of the kernels of a call by CUPTI, keys
in L2 where they fit. Programs are lowered in processes and compiled in threads while others are timed. A ratio is
FlashAttention-3's time over ours: more than 1 is faster. Its time is its kernels' by CUPTI too where a call is short,
else that of a CUDA graph, which has the gaps between kernels. --set is a python dict of GpuKernelConfig fields for
every case; with it, cases that the kernel refuses are left out.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.gpu import cases, check, cupti, drawn, jobs, lowering, sweep_cases
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.work_list import GpuWorkList, build_work_list

BOUND, LSE_BOUND = 6e-3, 1e-4  # of a row's relative error; of the log-sum-exp
CAPPED_LSE_BOUND = 2e-3
"""The same with a soft cap: tanh.approx is off by up to 2 ** -11 of a logit, which is the log-sum-exp of a row that
sees one key, and logits of N(0, 1) arrays are up to 4."""
PROCESSES, THREADS = 10, 14
SEEDS = (1, 2, 3)  # of q, k and v
TILES = ("block_kv", "stages", "q_buffers", "narrow_rows", "whole_units", "computing", "weights_first")


def fa3(library: str, batches: list[cases.KernelCase], seconds: float) -> dict[str, dict]:
    """Case name -> columns of its row; from a process of its own, before JAX takes the memory."""
    fields = ("name", "lengths", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "page", "kv_dtype")
    rows = [{name: getattr(case, name) for name in fields} for case in batches]
    for row, case in zip(rows, batches, strict=True):
        row |= dict(soft_cap=None, window=None) | dict(case.options)
    with tempfile.TemporaryDirectory() as folder:
        given, out = (os.path.join(folder, name) for name in ("batches.json", "times.json"))
        with open(given, "w", encoding="utf-8") as file:
            json.dump(rows, file)
        command = [sys.executable, "-m", "benchmarks.gpu.fa3", given, out, library, str(seconds)]
        subprocess.run(command, check=True, timeout=seconds + 60)
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def shapes_of(case: cases.KernelCase, config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a case's arrays."""
    shape, pages = jax.ShapeDtypeStruct, -(-case.seq_lens // case.page)
    order = (case.num_kv_heads, case.page) if config.layout == "HND" else (case.page, case.num_kv_heads)
    pools = (
        shape((int(pages.sum()), *order, dim), jnp.dtype(config.kv_dtype)) for dim in (case.head_dim, case.v_head_dim)
    )
    q = shape((int(case.q_lens.sum()), case.num_heads, case.head_dim), jnp.dtype(config.dtype))
    reqs = len(case.lengths)
    ints = dict(table=(reqs, max(int(pages.max()), 1)), starts=(reqs + 1,), seqs=(reqs,))
    return dict(zip("qkv", (q, *pools), strict=True)) | {name: shape(size, jnp.int32) for name, size in ints.items()}


def programs_of(case: cases.KernelCase, config) -> dict[str, bytes]:
    """The lowered functions of a case. Runs in a process without a GPU."""
    of = shapes_of(case, config)
    tokens = of["q"].shape[0]

    def fill(seed):
        seeds = zip(SEEDS, "qkv", strict=True)
        return tuple(drawn.fill(seed + jnp.uint32(n), of[name].shape, of[name].dtype) for n, name in seeds)

    def plan(starts, seqs):
        work = build_work_list(starts, seqs, tokens, config)
        return work.info, work.cta

    def attend(q, k, v, table, info, cta):
        return ragged_paged_attention(q, k, v, table, GpuWorkList(info=info, cta=cta), config)

    lengths = of["starts"], of["seqs"]
    run = (*(of[name] for name in ("q", "k", "v", "table")), *jax.eval_shape(plan, *lengths))
    return dict(
        fill=lowering.lowered(fill, jax.ShapeDtypeStruct((), jnp.uint32)),
        plan=lowering.lowered(plan, *lengths),
        attend=lowering.lowered(attend, *run),
    )


def host_arrays(case: cases.KernelCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(block table of permuted pages, query_start_loc, seq_lens)."""
    pages = -(-case.seq_lens // case.page)
    table = np.zeros((len(pages), max(int(pages.max()), 1)), np.int32)
    ids = np.random.default_rng(0).permutation(int(pages.sum()))
    for row, count, end in zip(table, pages, np.cumsum(pages), strict=True):
        row[:count] = ids[end - count : end]
    return table, np.append(0, np.cumsum(case.q_lens)).astype(np.int32), case.seq_lens.astype(np.int32)


def references(case, config, samples: int = 4) -> list[tuple[int, int, np.ndarray, float]]:
    """Sampled rows, (token, head, float64 output, its lse); the first and the last are among them."""
    of, (table, starts, seqs) = shapes_of(case, config), host_arrays(case)
    q, k, v = (drawn.Drawn(n, of[name].shape, of[name].dtype) for n, name in zip(SEEDS, "qkv", strict=True))
    host = (q, k, v, table, starts, seqs, None, None, (1.0, 1.0), None, None)
    rng, last = np.random.default_rng(0), len(case.lengths) - 1
    picks = [(0, 0), (last, case.lengths[last][0] - 1)]
    for r in rng.integers(0, last + 1, samples - 2):
        picks.append((int(r), int(rng.integers(case.lengths[r][0]))))
    rows = []
    for r, i in picks:
        head = int(rng.integers(case.num_heads))
        rows.append((int(starts[r]) + i, head, *check.reference_row(case, config, host, r, i, head)))
    return rows


def rows_error(rows, out, lse) -> dict:
    """The largest relative error of these rows, and of their lse."""
    relative = worst_lse = 0.0
    for token, head, want, want_lse in rows:
        got = out[token, head].astype(np.float64)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        relative = max(relative, float(np.nan_to_num(error, nan=np.inf)))
        worst_lse = max(worst_lse, float(np.nan_to_num(abs(float(lse[token, head]) - want_lse), nan=np.inf)))
    return dict(rel_err=relative, lse_err=worst_lse)


def timed(attend, run, iterations: int) -> tuple[float, dict[str, float]]:
    """cupti.micros, again where a program that another thread loaded was counted too."""
    try:
        return cupti.micros(attend, *run, iterations=iterations)
    except RuntimeError:
        return cupti.micros(attend, *run, iterations=iterations)


def measure(case: cases.KernelCase, config, programs: Future, rows: Future, peer: dict, iterations: int) -> dict:
    """One row: errors, microseconds, the ratio to the peer; `ok` says whether the numbers are right."""
    built = programs.result()
    table, starts, seqs = map(jnp.asarray, host_arrays(case))
    run = (*built["fill"](jnp.uint32(0)), table, *built["plan"](starts, seqs))
    row = rows_error(rows.result(), *(np.asarray(x) for x in built["attend"](*run)))
    row["ok"] = row["rel_err"] < BOUND and row["lse_err"] < (CAPPED_LSE_BOUND if config.logits.soft_cap else LSE_BOUND)
    us, parts = timed(built["attend"], run, iterations)
    tiles = {name: getattr(config, name) for name in TILES}
    row |= dict(us=us, parts=parts, tiles=tiles, bytes=case.read_bytes(), flop=case.flops())
    row |= dict(tb_s=row["bytes"] / us / 1e6, tflop_s=row["flop"] / us / 1e6) | peer
    best = peer.get("fa3_us", peer.get("fa3_graph_us"))
    return row | (dict(ratio=best / us) if best else {})


def jobs_of(todo: list[tuple], built: list[Any], peers: dict, args, rows: list) -> Iterator[jobs.Job]:
    """The jobs in order, with their compiled programs. Each keeps its row."""
    with ThreadPoolExecutor(2) as pool:
        own = {case.name: (case, config) for case, config, variant in reversed(todo)}
        witness = {name: pool.submit(references, *own[name]) for name in dict.fromkeys(c.name for c, _, _ in todo)}
        for number, (case, config, variant) in enumerate(todo):
            programs, built[number] = built[number], None

            def work(case=case, config=config, variant=variant, programs=programs):
                peer = peers.get(case.name, {})
                row = measure(case, config, programs, witness[case.name], peer, args.iterations)
                rows.append(row | dict(case=case.name, variant=variant))
                print(f"  {row.get('ratio', 0):.2f}", *(f"{k}={v}" for k, v in peer.items()),
                      *row["parts"].values(), row["tiles"], end=" ")  # fmt: skip
                return row

            yield dict(case=case.name, variant=variant), work
        pool.shutdown(wait=False, cancel_futures=True)


def summary(rows: list[dict]) -> str:
    """The geometric mean and the worst ten ratios, of the variants that the policy chooses."""
    judged = sorted((row for row in rows if "ratio" in row and not row["variant"]), key=lambda row: row["ratio"])
    if not judged:
        return "no ratio"
    mean = math.exp(sum(math.log(row["ratio"]) for row in judged) / len(judged))
    lines = [f"geometric mean {mean:.3f} of {len(judged)} ratios, {sum(r['ratio'] < 1 for r in judged)} below 1"]
    return "\n".join(lines + [f"{r['ratio']:6.2f}  {r['us']:9.1f} us  {r['case']}" for r in judged[:10]])


def selected(args) -> tuple[list[cases.KernelCase], list[tuple]]:
    """(batches, what is measured: (case, config, name of the variant)); a variant follows its case."""
    batches = [sweep_cases.case_of(*given) for given in sweep_cases.CLASSES]
    batches += [sweep_cases.drawn(args.seed, number) for number in range(max(args.cases - len(batches), 0))]
    batches = [case for case in batches[: args.cases] if jobs.is_wanted(case.name, args)]
    extra, todo = eval(args.set) if args.set else {}, []
    for case in batches:
        todo.append((case, check.config_of(case, **extra), args.set))
        for name, fields in () if extra else sweep_cases.VARIANTS:
            if name == case.name:
                label = ",".join(f"{key}={value}" for key, value in fields.items())
                todo.append((case, check.config_of(case, **fields), label))
    return batches, [one for one in todo if not (one[2] and supports(one[1]))]


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = jobs.parser_of("sweep", "Sweep shapes beside FlashAttention-3.", seconds=100)
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=len(sweep_cases.CLASSES))
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--set", default="", help="python dict of config fields for every case")
    args = parser.parse_args(argv)
    batches, todo = selected(args)
    if not batches:
        parser.error(f"--only: no batch has {args.only!r} in its name")
    compiler = lowering.Compiler(PROCESSES, THREADS)
    built = [compiler.compile(compiler.lower(programs_of, case, config)) for case, config, _ in todo]
    peers = cupti.attempt(lambda: fa3(args.fa3, batches, args.seconds / 3)) if args.fa3 else {}
    args.seconds -= peers.get("wall_s", 0)
    rows: list[dict] = []
    todo = jobs_of(todo, built, peers, args, rows)
    failed = jobs.run(todo, args, records.provenance(), "sweep")
    compiler.close()
    print(summary(rows), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
