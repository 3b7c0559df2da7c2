"""Measures the best block of keys and number of stages for every shape on this card, and writes the table of tiles.

    python -m jattn bench --tune [--out pallas_kernels/tuning/nvidia_h200.json]

Every candidate that fits is checked against numpy float64 and timed. It replaces the choice of
`tile_policy.largest_tiles` only if it is at least 1 % faster. About three minutes.
"""

import argparse
import json
import pathlib
import sys

from benchmarks import records
from benchmarks.gpu import cases, check
from pallas_kernels.gpu import tile_policy
from pallas_kernels.gpu.supports import supports

FILE = pathlib.Path(__file__).resolve().parents[2] / "pallas_kernels" / "tuning" / "nvidia_h200.json"
DIMS = ((64, 64), (128, 128), (256, 256))
LENGTHS = {"few": ((1, 4096),) * 64, "narrow": ((1, 4096),) * 64, "long": ((4096, 4096),)}
KINDS = {"bfloat16": ("few", "long"), "float8_e4m3fn": ("narrow", "long")}
MOST_OF_RULE = 0.99  # a candidate replaces the rule's choice below this share of its time


def shapes() -> list[tuple[cases.KernelCase, str]]:
    """(case, kind) of every shape that is tuned."""
    return [
        (cases.KernelCase(name=f"tune_{kind}", lengths=LENGTHS[kind], head_dim=d, v_head_dim=v, kv_dtype=dtype), kind)
        for dtype, kinds in KINDS.items()
        for d, v in DIMS
        for kind in kinds
    ]


def rule(case: cases.KernelCase) -> dict[str, int]:
    """The tiles for shapes that the table lacks."""
    return tile_policy.largest_tiles(tile_policy.TileRequest(check.config_of(case), rows=None, decided=frozenset()))


def candidates(case: cases.KernelCase, kind: str) -> list[dict[str, int]]:
    """The rule's choice, then every other one that the kernel supports; empty if it refuses this shape."""
    blocks = (128,) if kind == "narrow" else (64, 128)
    every = [dict(block_kv=block, stages=stages) for block in blocks for stages in range(2, 7)]
    every = [tiles for tiles in every if not supports(check.config_of(case, **tiles))]
    first = rule(case)
    return [first, *(tiles for tiles in every if tiles != first)] if not supports(check.config_of(case)) else []


def tune(case: cases.KernelCase, kind: str, report) -> dict:
    """The row of one shape."""
    args = argparse.Namespace(no_check=False, samples=4, time=True, iterations=8)
    timed = []
    for tiles in candidates(case, kind):
        report(tiles)
        row = check.run_case(case, args, **tiles)
        if row["rel_err"] < 6e-3:
            timed.append((row["us"], tiles))
    first, best = timed[0], min(timed, key=lambda pair: pair[0])
    us, tiles = best if best[0] < MOST_OF_RULE * first[0] else first
    shape = dict(head_dim=case.head_dim, v_head_dim=case.v_head_dim, kv_dtype=case.kv_dtype, kind=kind)
    return shape | tiles | dict(us=round(us, 1), rule=first[1], rule_us=round(first[0], 1), tried=len(timed))


def main(argv: list[str] | None = None) -> int:
    """Tune, show how far it is, write the file."""
    parser = argparse.ArgumentParser(prog="python -m jattn bench --tune", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=FILE)
    args = parser.parse_args(argv)
    todo, rows = shapes(), []
    note = "block_kv and stages by measurement; gpu/tile_policy.py has a rule for other shapes"
    for number, (case, kind) in enumerate(todo, 1):
        what = f"[{number}/{len(todo)}] D {case.head_dim} {case.kv_dtype} {kind}"
        report = lambda tiles, what=what: print(f"{what}: {tiles}".ljust(90), end="\r", file=sys.stderr, flush=True)
        if not candidates(case, kind):
            print(f"{what}: refused")
            continue
        rows.append(tune(case, kind, report))
        print(rows[-1], flush=True)
        text = json.dumps(records.provenance() | dict(note=note, rows=rows), indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")  # after each: what is measured stays
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
