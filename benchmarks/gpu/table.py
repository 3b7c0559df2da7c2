"""The targets of the H200 in one run: every case checked, timed and judged, with the card's own rates of the same run.

    python -m benchmarks.gpu.table [--write | --out DIR] [--peers] [--only PARTS]

A run that misses a target exits with 1. A goal is the better figure at which work on a case stops. The project chose
both.
"""

import argparse
import sys

from benchmarks import name_lists, records
from benchmarks.gpu import cases, check, cupti, laws, write

US = {  # case: (target, goal), at most so many microseconds of everything an attention call launches
    "dec_64x4k": (262, 255), "dec_16x32k": (500, 490), "dec_1x128k": (135, 128), "dec_256x1k": (272, 262),
    "dec_ragged64": (400, 385), "dec_8x1k": (21, 16), "dec_16x4k": (77, 70), "dec_1x32k": (47, 40),
    "dec_16x32k_fp8": (300, 262), "mixed_32d_2p": (500, 440), "dec_64x32k+window1024": (85, 70),
}  # fmt: skip
TFLOP_S = {"pre_1x8k": (610, 660), "pre_4x4k": (575, 620), "pre_1x32k": (610, 660), "chunk_2k_of_32k": (650, 690)}
"""case: (target, goal), at least."""
FEATURE_COST = {"dec_64x4k": 0.03, "pre_1x8k": 0.10}
"""At most: time added by soft cap, sinks or ALiBi, as a share of the plain case."""
COPY_SHARE = 0.7
"""At least: the rate of write_8k over the rate at which the card copies memory."""
LIST_US = 10.0
"""At most: the launches of a decode step beside write, attention and merge; they build the work list."""


def verdicts(rows: list[dict]) -> list[tuple[str, float, str, float, float | None]]:
    """(figure, measured, '<=' or '>=', target, goal) of every target that these rows can judge."""
    by = {row["case"]: row for row in rows if "error" not in row}
    found = [(name, by[name]["us"], "<=", *limits) for name, limits in US.items() if name in by]
    found += [
        (f"{name}, TFLOP/s", by[name]["tflop_s"], ">=", *limits) for name, limits in TFLOP_S.items() if name in by
    ]
    for name, most in FEATURE_COST.items():
        for feature in ("softcap", "sinks", "alibi"):
            if name in by and f"{name}+{feature}" in by:
                cost = by[f"{name}+{feature}"]["us"] / by[name]["us"] - 1
                found.append((f"{name}: cost of {feature}", cost, "<=", most, None))
    if "write_8k" in by:
        found.append(("write_8k, share of the copy ceiling", by["write_8k"]["share_of_copy"], ">=", COPY_SHARE, None))
    if "decode_step_64x4k" in by:
        found.append(("decode step, list building", by["decode_step_64x4k"]["list_us"], "<=", LIST_US, None))
    return found


def parts(peers: bool, iterations: int, copy_tb_s: float):
    """(benchmark, case, what measures it)."""
    options = argparse.Namespace(no_check=False, samples=12, time=True, iterations=iterations)
    yield "kv_write", "write_8k", lambda: _with_share(write.measure("write_8k", iterations), copy_tb_s)
    yield "step_launches", "decode_step_64x4k", lambda: laws.decode_step()[0]
    for case in cases.TIMED:
        yield "attention", case.name, lambda case=case: _attention(case, options, peers)


def _attention(case, options, peers: bool) -> dict:
    row = check.run_case(case, options)
    if peers:
        from benchmarks.gpu import peers as others

        row["peers_us"] = others.measure(case)
    return row | dict(ok=row["rel_err"] < 6e-3 and row["lse_err"] < 1e-4 and row["same_bits"])


def _with_share(row: dict, copy_tb_s: float) -> dict:
    return row | dict(share_of_copy=row["tb_s"] / copy_tb_s)


def main(argv: list[str] | None = None) -> int:
    """Run and print; 1 if a result was wrong or a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.table", description=__doc__.splitlines()[0])
    records.add_options(parser)
    parser.add_argument("--only", default="", help="parts of case names, separated by commas")
    parser.add_argument("--peers", action="store_true", help="time dense attention of other projects on the same card")
    parser.add_argument("--iterations", type=int, default=10, help="of a case, fewer where they would take over 50 ms")
    args = parser.parse_args(argv)
    every = [name for _, name, _ in parts(args.peers, args.iterations, 0.0)]
    wanted = name_lists.matching(parser, "--only", args.only, every, "case")
    base, rows = records.provenance() | check.ceilings() | dict(backend="pallas_gpu"), []
    print(base, flush=True)
    for bench, name, work in parts(args.peers, args.iterations, base["ceiling_copy_tb_s"]):
        if name not in wanted:
            continue
        row = cupti.attempt(work)
        rows.append(base | row | dict(case=name))
        columns = ("us", "list_us", "tb_s", "tflop_s", "max_err", "rel_err", "peers_us", "error")
        figures = {k: row[k] for k in columns if k in row}
        print("ok   " if row["ok"] else "WRONG", f"{name:24s}", figures, flush=True)
        records.write(rows[-1:], bench, records.folder_of(args))
    return _judge(rows)


def _judge(rows: list[dict]) -> int:
    missed = sum(not row["ok"] for row in rows)
    for figure, measured, sign, target, goal in verdicts(rows):
        reaches = lambda limit, x=measured, sign=sign: x <= limit if sign == "<=" else x >= limit
        word = "MISSED" if not reaches(target) else "goal" if goal is not None and reaches(goal) else "target"
        missed += word == "MISSED"
        print(f"{figure:40s} {measured:9.3f} {sign} {target:<7} goal {goal or '-':<6} {word}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
