"""Times cpu_native, sdpa, the naive gather and vLLM's CPU kernels in turn, in one process, and judges the targets.

    PYTHONPATH=. python -m benchmarks.cpu --case dec_16x4k,pre --rounds 9 --peers --write
    PYTHONPATH=. python -m benchmarks.cpu --all --peers --slow --sweeps 3 --write    # everything

A ratio is another's time over cpu_native's in the same round; a row has the median over the rounds and the ratio of the
best runs. --sweeps repeats everything and counts the rounds of all sweeps together, so that a minute in which the
machine is busy touches some rounds of every case, not all rounds of one. `floor_ms` is the time in which this machine,
in this run, only reads the keys and values. Freed memory is kept, as `jattn serve` keeps it: vLLM's kernels write into
one array again and again, and fresh memory for each result would make JAX up to a third slower.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator

import jax

import jattn
from benchmarks import cases as named
from benchmarks import inputs, naive, records, run, targets, timing, write
from benchmarks.peers import vllm_cpu
from jattn.engine import keep_freed_memory

RECYCLED_BYTES = 60 << 20
"""malloc recycles blocks of up to this size. Results are smaller; the cases' pools are larger and get new large pages,
as the one pool of a server does."""

FEATURES = {
    "off": {},
    "window": {"sliding_window": 4096},
    "soft_cap": {"logits_soft_cap": 30.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
}


def main(argv: list[str] | None = None) -> int:
    """Run, print a table; 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", help="parts of case names, separated by commas")
    parser.add_argument("--rounds", type=int, default=9, help="of every sweep")
    parser.add_argument("--sweeps", type=int, default=1, help="over everything; the last one keeps the rows")
    parser.add_argument("--peers", action="store_true", help="time vLLM's kernels too")
    parser.add_argument("--slow", action="store_true", help="time sdpa and the naive gather too")
    parser.add_argument("--isa", default="auto", help="instruction set of cpu_native")
    parser.add_argument("--per-core", action="store_true", help="processor time, vLLM on one thread: for busy machines")
    parser.add_argument("--features", action="store_true", help="what each feature costs, instead of the cases")
    parser.add_argument("--fresh-memory", action="store_true", help="leave malloc alone: large results on new pages")
    parser.add_argument("--all", "--bars", action="store_true", help="cases, features, KV writes; judge every target")
    records.add_options(parser)
    args = parser.parse_args(argv)
    if args.peers and (why := vllm_cpu.available()):
        parser.error(f"--peers: {why}")
    kept = not args.fresh_memory and keep_freed_memory(RECYCLED_BYTES)
    rounds, bandwidth, wrong = timing.Rounds(), 0.0, False
    for number in range(1, args.sweeps + 1):
        bandwidth = max(bandwidth, run.read_bandwidth())
        print(
            f"{records.chip_name()}, JAX {jax.__version__}; best read bandwidth so far: {bandwidth / 1e9:.1f} GB/s;"
            f" freed memory is {'kept' if kept else 'given back'}; sweep {number} of {args.sweeps}"
        )
        rows = sweep(args, number, bandwidth, rounds, kept)
        wrong |= any(row.get("wrong") for row in rows)
    return int(wrong)


def sweep(args, number: int, bandwidth: float, rounds: timing.Rounds, kept: bool) -> list[dict]:
    """Everything once; the rows hold the rounds of all sweeps so far, and targets are judged from them."""
    rows = []
    for bench, measured in produce(args, bandwidth, rounds):
        measured = [row | {"memory_kept": kept, "sweeps": number} for row in measured]
        rows += measured
        if number == args.sweeps:  # at once: a run of an hour may end early
            records.write(measured, bench, records.folder_of(args))
    if args.all:
        print("\n".join(map(str, targets.judge(rows))), flush=True)
    return rows


def produce(args, bandwidth: float, rounds: timing.Rounds) -> Iterator[tuple[str, list[dict]]]:
    """(benchmark, its rows), one measurement after the other."""
    if not args.features or args.all:
        for case in dict.fromkeys(case for part in args.case.split(",") for case in named.find(part)):
            yield "attention", measure(case, args, bandwidth, rounds)
    if args.features or args.all:
        yield "features", features(args, bandwidth, rounds)
    if args.all:
        yield write.BENCH, write.table("cpu_native", 1024, 30)


def measure(case: named.Case, args, bandwidth: float, rounds: timing.Rounds) -> list[dict]:
    """One row for each implementation, cpu_native first; the others have their ratio to it."""
    given = inputs.make(case)
    calls = {"cpu_native": caller(given, "cpu_native", args.isa)}
    if args.peers:
        peer = vllm_cpu.VllmCpu(case, given)
        calls["vllm"] = peer.call
    if args.slow:
        calls["sdpa"] = caller(given, "sdpa")
        if given.meta.max_query_len == 1:
            calls["naive"] = naive.caller(given)
    if args.per_core and args.peers:
        peer.use_threads(1)
    times = rounds.add(case.name, (processor_time if args.per_core else timing.in_turn)(calls, args.rounds))
    error = run.check(case, given, calls["cpu_native"]())
    rows = []
    for name, spent in times.items():
        row = run.row_of(case, name, spent, bandwidth)
        row["clock"] = "processor" if args.per_core else "wall"
        if name == "cpu_native":
            row |= {"isa": args.isa, "refcheck_max_err": error, "wrong": error > run.tolerance(case)}
        else:
            row |= {
                "ratio_to_native": timing.ratio(times, name, "cpu_native"),
                "best_ratio_to_native": spent.best / times["cpu_native"].best,
            }
        rows.append(row)
    report(case, rows)
    return rows


def processor_time(calls: dict, rounds: int) -> dict[str, timing.Times]:
    """Seconds of processor time, all threads together: other work on this machine hardly counts."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            begin = time.process_time()
            jax.block_until_ready(call())
            if number:
                seen[name].append(time.process_time() - begin)
    return {name: timing.Times(tuple(values)) for name, values in seen.items()}


def report(case: named.Case, rows: list[dict]) -> None:
    """One line a case."""
    own = rows[0]
    line = f"{case.name:22} {own['best_ms']:8.2f} ms best {own['ms']:8.2f} median"
    if case.name.startswith("dec"):
        line += f"  {own['best_ms'] / own['floor_ms']:.2f}x floor"
    else:
        line += f"  {case.flop / own['best_ms'] / 1e6:.0f} GFLOP/s"
    for row in rows[1:]:
        line += f" | {row['backend']} / native {row['ratio_to_native']:.2f} (best {row['best_ratio_to_native']:.2f})"
        if row["backend"] == "vllm":
            least = targets.vllm_over_native(case.name)
            line += f" target {least:.2f} {'met' if row['ratio_to_native'] >= least else 'MISSED'}"
    print(line + ("  WRONG" if own["wrong"] else ""), flush=True)


def caller(given: inputs.Inputs, backend: str, isa: str = "auto"):
    """The compiled attention call of one backend; the plan is made once before, as a server makes it once a step."""
    attn = jattn.PagedAttention(given.spec, given.cache.spec, backend=backend)
    if isa != "auto":
        object.__setattr__(attn, "impl", dataclasses.replace(attn.impl, isa=isa))
    built = jax.tree.map(jax.numpy.asarray, attn.build(given.meta))
    step = jax.jit(lambda q, cache, m, params: attn.attend(q, cache, m, params))
    compiled = step.lower(given.q, given.cache, built, given.params).compile()
    return lambda: compiled(given.q, given.cache, built, given.params)


def features(args, bandwidth: float, rounds: timing.Rounds) -> list[dict]:
    """What each feature costs in decode and prefill, and a window of 512 in a context of 8192."""
    rows, clock = [], processor_time if args.per_core else timing.in_turn
    for case in (*named.find("dec_16x4k_p16_bf16"), *named.find("pre_1x2k_bf16")):
        calls = {}
        for name, options in FEATURES.items():
            calls[name] = caller(inputs.make(case, spec_options=options), "cpu_native")
        rows += costs(case, rounds.add(f"features {case.name}", clock(calls, args.rounds)), "off", bandwidth)
    long, short = named.decode("dec_16x8k_window512", 16, 8192), named.decode("dec_16x512", 16, 512)
    calls = {
        "context_512": caller(inputs.make(short), "cpu_native"),
        "window_512": caller(inputs.make(long, spec_options={"sliding_window": 512}), "cpu_native"),
    }
    return rows + costs(long, rounds.add(long.name, clock(calls, args.rounds)), "context_512", bandwidth)


def costs(case: named.Case, times: dict[str, timing.Times], base: str, bandwidth: float) -> list[dict]:
    """One row a variant: its time over that of the variant `base`."""
    rows = []
    for name, spent in times.items():
        median, best = timing.ratio(times, name, base), spent.best / times[base].best
        print(f"{case.name:22} {name:12} {spent.best * 1e3:8.2f} ms  x{median:.2f} (best x{best:.2f}) of {base}")
        row = run.row_of(case, "cpu_native", spent, bandwidth)
        rows.append(row | {"variant": name, "cost": median, "best_cost": best, "base": base})
    return rows


if __name__ == "__main__":
    sys.exit(main())
