"""`make bench`: times backends on the named cases and checks each answer against numpy float64.

python -m benchmarks.run --case dec_16x4k --backend sdpa --rounds 7 --write
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import cases, inputs, naive, records, timing

BENCH = "attention_with_plan"
"""The plan (`attn.build`) is made inside the timed call; `benchmarks.cpu` makes it once before."""
DEFAULT = "dec_16x4k_p16_bf16,dec_16x4k_p128_bf16,pre_1x2k_bf16,pre_4x512_bf16,mixed_16d_2p_bf16"


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=DEFAULT, help="parts of case names, separated by commas")
    parser.add_argument("--backend", default="sdpa", help="backends, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-refcheck", dest="refcheck", action="store_false", help="do not check the answers")
    records.add_options(parser)
    args = parser.parse_args(argv)
    wanted = dict.fromkeys(case for part in args.case.split(",") for case in cases.find(part))
    bandwidth = read_bandwidth()
    print(f"{records.chip_name()}, JAX {jax.__version__}; read bandwidth in this run: {bandwidth / 1e9:.1f} GB/s")
    print(
        f"{'case':22} {'backend':10} {'best ms':>9} {'median':>9} {'GB/s':>7} {'GFLOP/s':>8} {'temp MiB':>9}  vs naive"
    )
    rows = []
    for number, case in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {case.name} ...", end="\r", file=sys.stderr, flush=True)
        rows += measure(case, args.backend.split(","), args.rounds, args.refcheck, bandwidth)
    records.write(rows, BENCH, records.folder_of(args))
    return int(any(row.get("wrong") for row in rows))


def measure(case: cases.Case, backends: list[str], rounds: int, refcheck: bool, bandwidth: float) -> list[dict]:
    """One row a backend; for decode, the naive gather is timed in turn with them."""
    given = inputs.make(case)
    calls, temporaries = {}, {}
    for name in backends:
        attn = jattn.PagedAttention(given.spec, given.cache.spec, backend=name)
        step = jax.jit(lambda q, cache, meta, params, attn=attn: attn.attend(q, cache, attn.build(meta), params))
        compiled = step.lower(given.q, given.cache, given.meta, given.params).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = lambda c=compiled: c(given.q, given.cache, given.meta, given.params)
    if given.meta.max_query_len == 1:
        calls["naive"] = naive.caller(given)
    times = timing.in_turn(calls, rounds)
    rows = []
    for name in backends:
        row = row_of(case, name, times[name], bandwidth) | {"temp_mib": temporaries[name] / 2**20}
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


def row_of(case: cases.Case, backend: str, times: timing.Times, bandwidth: float) -> dict:
    """The columns that every attention row has; `floor_ms` is the time of reading the keys and values once."""
    return {
        "case": case.name,
        "backend": backend,
        "ms": times.median * 1e3,
        "best_ms": times.best * 1e3,
        "floor_ms": case.kv_bytes / bandwidth * 1e3,
        "bytes": case.kv_bytes,
        "flop": case.flop,
        "read_gb_s": bandwidth / 1e9,
    } | records.provenance()


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
    """Twice the rounding of an output of order one to the query's dtype."""
    return 2 * float(jnp.finfo(case.dtype).eps) if case.dtype != "float32" else 1e-5


def read_bandwidth() -> float:
    """Bytes a second of summing 512 MiB, best of five: no decode on this machine can read faster."""
    data = jnp.ones((2**27,), jnp.float32)
    total = jax.jit(jnp.sum)
    return data.nbytes / timing.in_turn({"read": lambda: total(data)}, 5)["read"].best


if __name__ == "__main__":
    sys.exit(main())
