"""The table of bars on an H200 in one run: every case checked, timed, and judged, beside the ceilings of the same run.

    python -m benchmarks.gpu.table --out DIR [--peers] [--only PARTS]

Rows go to DIR/table.jsonl as they come; the verdicts are printed at the end. Must and aim are the project's own.
"""

import argparse
import json
import pathlib
import sys

from benchmarks.gpu import cases, check, laws, timing, write
from benchmarks.run import provenance

US = {  # case: (must, aim), microseconds of everything an attention call launches
    "dec_64x4k": (262, 255), "dec_16x32k": (500, 490), "dec_1x128k": (135, 128), "dec_256x1k": (272, 262),
    "dec_ragged64": (400, 385), "dec_8x1k": (21, 16), "dec_16x4k": (77, 70), "dec_1x32k": (47, 40),
    "dec_16x32k_fp8": (300, 262), "mixed_32d_2p": (500, 440), "dec_64x32k+window1024": (85, 70),
}  # fmt: skip
TFLOP_S = {"pre_1x8k": (610, 660), "pre_4x4k": (575, 620), "pre_1x32k": (610, 660), "chunk_2k_of_32k": (650, 690)}
FEATURE_COST = {"dec_64x4k": 0.03, "pre_1x8k": 0.10}  # of soft cap, sinks, ALiBi over the plain case
COPY_SHARE = 0.7  # of write_8k
LIST_US = 10.0  # a decode step's launches beside write, attention and merge


def verdicts(rows: list[dict]) -> list[tuple[str, float, str, float, float | None]]:
    """(what, seen, '<=' or '>=', must, aim) of every bar that these rows can judge."""
    by = {row["case"]: row for row in rows if "error" not in row}
    found = [(name, by[name]["us"], "<=", *bars) for name, bars in US.items() if name in by]
    found += [(f"{name}, TFLOP/s", by[name]["tflop_s"], ">=", *bars) for name, bars in TFLOP_S.items() if name in by]
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
    """(case, what to run)."""
    options = argparse.Namespace(no_check=False, samples=12, time=True, iterations=iterations)
    yield "write_8k", lambda: _with_share(write.measure("write_8k", iterations), copy_tb_s)
    yield "decode_step_64x4k", _decode_step
    for case in cases.BENCH:
        yield case.name, lambda case=case: _attention(case, options, peers)


def _attention(case, options, peers: bool) -> dict:
    row = check.run_case(case, options)
    if peers:
        from benchmarks.gpu import peers as others

        row["peers_us"] = others.measure(case)
    return row | dict(ok=row["rel_err"] < 6e-3 and row["lse_err"] < 1e-4 and row["same_bits"])


def _with_share(row: dict, copy_tb_s: float) -> dict:
    return row | dict(share_of_copy=row["tb_s"] / copy_tb_s)


def _decode_step() -> dict:
    row = laws.decode_step()[0]
    known = ("write_kv_pages", "ragged_paged_attention", "join_parts")
    return row | dict(list_us=sum(us for name, us in row["launches"] if not name.startswith(known)))


def main(argv: list[str] | None = None) -> int:
    """Run, print, keep; 1 if an answer was wrong or a bar was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.table", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="parts of case names, separated by commas")
    parser.add_argument("--peers", action="store_true", help="dense peers on the same card take their turns")
    parser.add_argument("--iterations", type=int, default=10, help="of a case, fewer where they would take over 50 ms")
    args = parser.parse_args(argv)
    base, rows = provenance() | check.ceilings() | dict(backend="pallas_gpu"), []
    print(base, flush=True)
    for name, work in parts(args.peers, args.iterations, base["ceiling_copy_tb_s"]):
        if args.only and not any(part in name for part in args.only.split(",")):
            continue
        row = timing.attempt(work)
        rows.append(base | row | dict(case=name))
        shown = ("us", "list_us", "tb_s", "tflop_s", "max_err", "rel_err", "peers_us", "error")
        figures = {k: row[k] for k in shown if k in row}
        print("ok   " if row["ok"] else "WRONG", f"{name:24s}", figures, flush=True)
        with (pathlib.Path(args.out) / "table.jsonl").open("a") as file:
            file.write(json.dumps(rows[-1], default=str) + "\n")
    return _judge(rows)


def _judge(rows: list[dict]) -> int:
    missed = sum(not row["ok"] for row in rows)
    for what, seen, sign, must, aim in verdicts(rows):
        reach = lambda bar, seen=seen, sign=sign: seen <= bar if sign == "<=" else seen >= bar
        word = "SHORT" if not reach(must) else "aim" if aim is not None and reach(aim) else "must"
        missed += word == "SHORT"
        print(f"{what:40s} {seen:9.3f} {sign} {must:<7} aim {aim or '-':<6} {word}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
