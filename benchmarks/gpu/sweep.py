"""The Hopper kernel beside FlashAttention-3 on shapes of real models: the geometric mean, and the worst ten.

    python -m benchmarks.gpu.sweep [--fa3 LIBRARY] [--seed N] [--cases 60] [--seconds 100] [--write | --out DIR]

LIBRARY: see benchmarks/gpu/fa3.py. The first cases are one of each class; the others are drawn by the seed. Each is
checked on a few rows against numpy float64, then timed: the sum of the kernels of a call by CUPTI, keys in L2 where
they fit. Some cases at a time are compiled in threads, then timed with nothing beside them. A ratio is
FlashAttention-3's time over ours: more than 1 is faster. `--set` is a python dict of GpuKernelConfig fields for every
case; with it, cases that the kernel refuses are left out.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from benchmarks import records
from benchmarks.gpu import cases, check, cupti, jobs
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.work_list import build_work_list

BOUND, LSE_BOUND = 6e-3, 1e-4  # of a row's relative error; of the log-sum-exp
TOGETHER = 12  # cases that are compiled at the same time
MOST_KEYS = 3 << 30  # bytes of a drawn batch's keys and values
MODELS = {  # heads, kv heads, head_dim, v_head_dim, soft cap, window
    "llama8b": (32, 8, 128, 128, None, None),
    "llama70b_tp8": (8, 1, 128, 128, None, None),
    "qwen7b": (28, 4, 128, 128, None, None),
    "qwen14b": (40, 8, 128, 128, None, None),
    "qwen30b_a3b": (32, 4, 128, 128, None, None),
    "mistral_window": (32, 8, 128, 128, None, 4096),
    "mha13b": (40, 40, 128, 128, None, None),
    "gpt_oss": (64, 8, 64, 64, None, None),
    "gpt_oss_window": (64, 8, 64, 64, None, 128),
    "llama1b": (32, 8, 64, 64, None, None),
    "qwen05b": (14, 2, 64, 64, None, None),
    "phi3_mini": (32, 32, 96, 96, None, None),
    "gemma2_9b": (16, 8, 256, 256, 50.0, None),
    "gemma2_9b_window": (16, 8, 256, 256, 50.0, 4096),
    "gemma3_12b": (16, 8, 256, 256, None, None),
    "gemma3_12b_window": (16, 8, 256, 256, None, 1024),
    "mla_materialised": (16, 16, 192, 128, None, None),
}
EIGHT_BITS = ("llama8b", "qwen30b_a3b", "gpt_oss", "llama70b_tp8", "gemma3_12b")
MIXED = ((1, 4096),) * 32 + ((2048, 2048), (2048, 6144))
CLASSES = (  # name, model, lengths, page, 8 bits
    ("pre_1x8k_fp8", "llama8b", ((8192, 8192),), 16, True),
    ("mixed_32d_2p_fp8", "llama8b", MIXED, 16, True),
    ("pre_1x4k_d256_softcap", "gemma2_9b", ((4096, 4096),), 16, False),
    ("pre_1x8k_d192_v128", "mla_materialised", ((8192, 8192),), 16, False),
    ("pre_1x4k_d64", "gpt_oss", ((4096, 4096),), 16, False),
    ("pre_1x512", "llama8b", ((512, 512),), 16, False),
    ("chunk_512_of_64k", "llama8b", ((512, 65536),), 16, False),
    ("dec_1x300", "llama8b", ((1, 300),), 16, False),
    ("dec_4x500", "llama8b", ((1, 500),) * 4, 16, False),
    ("dec_512_tiny", "llama8b", tuple((1, 50 + 37 * i % 751) for i in range(512)), 16, False),
    ("pre_1x4k_d96", "phi3_mini", ((4096, 4096),), 16, False),
    ("pre_ragged", "llama8b", tuple((n, n) for n in (3001, 517, 1800, 64, 2222, 130, 905, 4000)), 16, False),
    ("pre_1x4k_d256", "gemma3_12b", ((4096, 4096),), 64, False),
    ("mixed_d256", "gemma3_12b", MIXED, 64, False),
    ("pre_1x8k", "llama8b", ((8192, 8192),), 16, False),
    ("mixed_32d_2p", "llama8b", MIXED, 16, False),
    ("dec_64x4k", "llama8b", ((1, 4096),) * 64, 16, False),
    ("mixed_d256_fp8", "gemma3_12b", MIXED, 64, True),
)


def case_of(name: str, model: str, lengths: tuple, page: int, eight_bits: bool) -> cases.KernelCase:
    """A batch of a model in MODELS."""
    heads, kv_heads, dim, v_dim, cap, window = MODELS[model]
    options = (("soft_cap", cap),) if cap else ()
    options += (("window", window),) if window else ()
    return cases.KernelCase(
        name=name, lengths=lengths, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, page=page,
        kv_dtype="float8_e4m3fn" if eight_bits else "bfloat16", options=options,
    )  # fmt: skip


def lengths_of(kind: str, rng: np.random.Generator) -> tuple:
    """(q_len, seq_len) of each request of a drawn batch."""
    log = lambda low, high, *size: np.exp(rng.uniform(np.log(low), np.log(high), size)).astype(int)
    if kind == "prefill":
        n = int(log(128, 16384, 1)[0])
        return ((n, n),)
    if kind == "prefills":
        return tuple((int(n), int(n)) for n in log(64, 4096, int(rng.integers(2, 13))))
    if kind == "chunk":
        new, old = int(log(128, 4096, 1)[0]), int(log(2048, 65536, 1)[0])
        return ((new, old + new),)
    if kind == "decode":
        count, top = int(log(1, 256, 1)[0]), int(log(256, 32768, 1)[0])
        return tuple((1, int(n)) for n in rng.integers(top // 4, top, count))
    if kind == "tiny":
        return tuple((1, int(n)) for n in log(16, 800, int(log(1, 512, 1)[0])))
    if kind == "spec":
        q_len, seqs = int(rng.integers(2, 9)), log(256, 16384, int(log(1, 64, 1)[0]))
        return tuple((q_len, int(n)) for n in seqs)
    decodes = tuple((1, int(n)) for n in log(200, 8192, int(rng.integers(4, 65))))
    return decodes + tuple((int(n), int(n + old)) for n, old in zip(log(200, 4096, 2), log(64, 8192, 2), strict=True))


def drawn(seed: int, number: int) -> cases.KernelCase:
    """Case `number` of a seed: the same whatever was drawn before it."""
    rng = np.random.default_rng((seed, number))
    model = str(rng.choice(list(MODELS)))
    kind = str(rng.choice(("prefill", "prefills", "chunk", "decode", "tiny", "spec", "mixed")))
    page, eight_bits = int(rng.choice((16, 64, 128))), model in EIGHT_BITS and rng.random() < 0.3
    lengths = lengths_of(kind, rng)
    name = f"{seed}.{number}_{kind}_{model}_p{page}{'_fp8' * eight_bits}"
    case = case_of(name, model, lengths, page, eight_bits)
    if case.read_bytes() <= MOST_KEYS:
        return case
    return dataclasses.replace(case, lengths=lengths[: max(1, int(len(lengths) * MOST_KEYS / case.read_bytes()))])


def fa3(library: str, batches: list[cases.KernelCase], seconds: float) -> dict[str, float | str]:
    """Case name -> microseconds, or the reason why not; from a process of its own, before JAX takes the memory."""
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


@dataclasses.dataclass
class Program:
    """A compiled attention call, its inputs, and sampled rows: (token, head, float64 output, its lse)."""

    attend: Any
    inputs: tuple
    rows: list[tuple[int, int, np.ndarray, float]]


def compiled(case: cases.KernelCase, config) -> Program:
    """Runs in a thread."""
    q, k, v, table, starts, seqs = inputs = check.make_inputs(case, config, poison=False)
    work = jax.jit(lambda s, n: build_work_list(s, n, q.shape[0], config))(starts, seqs)
    run = (q, k, v, table, work)
    attend = jax.jit(lambda q, k, v, t, w: ragged_paged_attention(q, k, v, t, w, config))
    return Program(attend.lower(*run).compile(), run, references(case, config, inputs))


def references(case, config, inputs, samples: int = 3) -> list[tuple[int, int, np.ndarray, float]]:
    """Sampled rows; the first and the last are among them."""
    q, k, v, table, starts, seqs = inputs
    host = (q, k, v, *map(np.asarray, (table, starts, seqs)), None, None, (1.0, 1.0), None, None)
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


def measure(case: cases.KernelCase, config, program: Future, peer, iterations: int) -> dict:
    """One row: errors, microseconds, the ratio to the peer; `ok` says whether the numbers are right."""
    built = program.result()
    run = built.inputs
    out, lse = (np.asarray(x) for x in built.attend(*run))
    row = rows_error(built.rows, out, lse)
    row["ok"] = row["rel_err"] < BOUND and row["lse_err"] < LSE_BOUND
    us, parts = cupti.micros(built.attend, *run, iterations=iterations)
    tiles = {name: getattr(config, name) for name in ("block_kv", "stages", "q_buffers", "narrow_rows")}
    row |= dict(us=us, parts=parts, tiles=tiles, bytes=case.read_bytes(), flop=case.flops())
    row |= dict(tb_s=row["bytes"] / us / 1e6, tflop_s=row["flop"] / us / 1e6)
    return row | (dict(fa3_us=peer, ratio=peer / us) if isinstance(peer, float) else dict(fa3=peer))


def jobs_of(batches, extra: dict, peers: dict, iterations: int, pool, rows: list) -> Iterator[jobs.Job]:
    """The jobs in order, compiled TOGETHER; each keeps its row."""
    todo = [(case, check.config_of(case, **extra)) for case in batches]
    todo = [(case, config) for case, config in todo if not (extra and supports(config))]
    programs = {}
    for number, (case, config) in enumerate(todo):
        if number % TOGETHER == 0:
            some = todo[number : number + TOGETHER]
            programs = {other.name: pool.submit(compiled, other, wanted) for other, wanted in some}
            wait(programs.values())

        program = programs.pop(case.name)

        def work(case=case, config=config, program=program):
            row = measure(case, config, program, peers.get(case.name), iterations)
            rows.append(row | dict(case=case.name))
            if "ratio" in row:
                print(f"  {row['ratio']:.2f} of FlashAttention-3's {row['fa3_us']:.1f} us, {row['tiles']}", end=" ")
            return row

        yield dict(case=case.name, backend="pallas_gpu"), work


def summary(rows: list[dict]) -> str:
    """The geometric mean and the worst ten ratios."""
    judged = sorted((row for row in rows if "ratio" in row), key=lambda row: row["ratio"])
    if not judged:
        return "no ratio"
    mean = math.exp(sum(math.log(row["ratio"]) for row in judged) / len(judged))
    lines = [f"geometric mean {mean:.3f} of {len(judged)} ratios, {sum(r['ratio'] < 1 for r in judged)} below 1"]
    return "\n".join(lines + [f"{r['ratio']:6.2f}  {r['us']:9.1f} us  {r['case']}" for r in judged[:10]])


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.sweep", description="Sweep shapes beside FlashAttention-3."
    )
    jobs.add_options(parser, seconds=100)
    parser.add_argument("--fa3", metavar="LIBRARY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--set", default="", help="python dict of config fields for every case")
    args = parser.parse_args(argv)
    batches = [case_of(*given) for given in CLASSES]
    batches += [drawn(args.seed, number) for number in range(max(args.cases - len(batches), 0))]
    wanted = [text for text in args.only.split(",") if text]
    batches = [case for case in batches[: args.cases] if not wanted or any(text in case.name for text in wanted)]
    peers = cupti.attempt(lambda: fa3(args.fa3, batches, args.seconds / 4)) if args.fa3 else {}
    args.seconds -= peers.get("wall_s", 0)
    rows: list[dict] = []
    with ThreadPoolExecutor(TOGETHER) as pool:
        extra = eval(args.set) if args.set else {}
        todo = jobs_of(batches, extra, peers, args.iterations, pool, rows)
        failed = jobs.run(todo, args, records.provenance(), "sweep")
        pool.shutdown(wait=False, cancel_futures=True)
    print(summary(rows), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
