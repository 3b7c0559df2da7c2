"""`make bench`: times the backends that work here on the named cases, checks each answer, keeps the figures.

python -m benchmarks.run --case dec_16x4k --backend sdpa --rounds 7 --write
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import cases, inputs, naive, timing
from jattn import device

RESULTS = pathlib.Path(__file__).parent / "results"
DEFAULT = "dec_16x4k_p16_bf16,dec_16x4k_p128_bf16,pre_1x2k_bf16,pre_4x512_bf16,mixed_16d_2p_bf16"


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=DEFAULT, help="parts of case names, separated by commas")
    parser.add_argument("--backend", default="sdpa", help="backends, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-refcheck", dest="refcheck", action="store_false", help="do not check the answers")
    parser.add_argument("--write", action="store_true", help="append the rows to benchmarks/results/<chip>/run.jsonl")
    args = parser.parse_args(argv)
    wanted = [case for part in args.case.split(",") for case in cases.find(part)]
    bandwidth = read_bandwidth()
    print(f"{device.detect()}, JAX {jax.__version__}; read bandwidth here, now: {bandwidth / 1e9:.1f} GB/s")
    print(
        f"{'case':22} {'backend':10} {'best ms':>9} {'median':>9} {'GB/s':>7} {'GFLOP/s':>8} {'temp MiB':>9}  vs naive"
    )
    rows = []
    for number, case in enumerate(dict.fromkeys(wanted), 1):
        print(f"[{number}/{len(wanted)}] {case.name} ...", end="\r", file=sys.stderr, flush=True)
        rows += measure(case, args.backend.split(","), args.rounds, args.refcheck, bandwidth)
    if args.write:
        print(f"appended to {append(rows)}")
    return int(any(row.get("wrong") for row in rows))


def measure(case: cases.Case, backends: list[str], rounds: int, refcheck: bool, bandwidth: float) -> list[dict]:
    """One row a backend; for decode, the naive gather takes its turns too."""
    given = inputs.make(case)
    calls, temporaries = {}, {}
    for name in backends:
        attn = jattn.PagedAttention(given.spec, given.cache.spec, backend=name)
        step = jax.jit(lambda q, cache, meta, params, attn=attn: attn.attend(q, cache, attn.build(meta), params))
        compiled = step.lower(given.q, given.cache, given.meta, given.params).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = lambda c=compiled: c(given.q, given.cache, given.meta, given.params)
    if given.meta.max_query_len == 1:
        yardstick = jax.jit(naive.attention, static_argnums=3)
        calls["naive"] = lambda: yardstick(given.q, given.cache, given.meta, given.spec.scale)
    times = timing.in_turn(calls, rounds)
    rows = []
    for name in backends:
        row = record(case, name, times[name], bandwidth) | {"temp_mib": temporaries[name] / 2**20}
        if "naive" in times:
            row |= {"naive_ms": times["naive"].median * 1e3, "ratio_to_naive": timing.ratio(times, "naive", name)}
        if refcheck:
            row["refcheck_max_err"] = check(case, given, calls[name]())
            row["wrong"] = row["refcheck_max_err"] > tolerance(case)
        rows.append(row)
        versus = f"{row['ratio_to_naive']:.1f}x" if "naive" in times else ""
        print(
            f"{case.name:22} {name:10} {row['best_ms']:9.2f} {row['ms']:9.2f} {case.kv_bytes / row['ms'] / 1e6:7.1f} "
            f"{case.flop / row['ms'] / 1e6:8.0f} {row['temp_mib']:9.1f}  {versus}"
            + ("  WRONG" if row.get("wrong") else "")
        )
    return rows


def record(case: cases.Case, backend: str, times: timing.Times, bandwidth: float) -> dict:
    """The common columns of a row."""
    return {
        "case": case.name,
        "backend": backend,
        "ms": times.median * 1e3,
        "best_ms": times.best * 1e3,
        "floor_ms": case.kv_bytes / bandwidth * 1e3,
        "bytes": case.kv_bytes,
        "flop": case.flop,
        "read_gb_s": bandwidth / 1e9,
    } | provenance()


def provenance() -> dict:
    """Where and when a figure comes from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "jax": jax.__version__,
        "chip": chip_name(),
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


def chip_name() -> str:
    """The accelerator's own name, or the processor's with its number of cores."""
    if device.detect().platform != "cpu":
        return jax.devices()[0].device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.machine()} x {os.cpu_count()}"


def check(case: cases.Case, given: inputs.Inputs, state: jattn.AttentionState) -> float:
    """Largest error of the last token of the first and the last request against numpy float64."""
    k, v = (np.asarray(x) for x in given.cache.logical())
    group = case.num_heads // case.num_kv_heads
    worst = 0.0
    for r in (0, len(case.seq_lens) - 1):
        token, length = int(given.meta.query_start_loc[r + 1]) - 1, case.seq_lens[r]
        pages = np.asarray(given.meta.block_table)[r, : -(-length // case.page)]
        for h in (0, case.num_heads - 1):
            keys = k[pages, :, h // group].reshape(-1, case.head_dim)[:length].astype(np.float64)
            values = v[pages, :, h // group].reshape(-1, case.head_dim)[:length].astype(np.float64)
            logits = keys @ np.asarray(given.q[token, h], np.float64) * given.spec.scale
            p = np.exp(logits - logits.max())
            error = np.asarray(state.out[token, h], np.float64) - p @ values / p.sum()
            worst = max(worst, float(np.abs(error).max()))
    return worst


def tolerance(case: cases.Case) -> float:
    """Rounding of an output of order one to the query's dtype, twice."""
    return 2 * float(jnp.finfo(case.dtype).eps) if case.dtype != "float32" else 1e-5


def read_bandwidth() -> float:
    """Bytes a second of summing 512 MiB, best of five: the floor of decode on this machine at this hour."""
    data = jnp.ones((2**27,), jnp.float32)
    total = jax.jit(jnp.sum)
    return data.nbytes / timing.in_turn({"read": lambda: total(data)}, 5)["read"].best


def append(rows: list[dict], name: str = "run") -> pathlib.Path:
    """Keep the rows in results/<platform>/<name>.jsonl, one JSON object a line."""
    path = RESULTS / device.detect().platform / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
