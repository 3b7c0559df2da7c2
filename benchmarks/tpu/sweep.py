"""Sizes of the TPU kernel's blocks and tiles compared by their bundles, one changed at a time.

    python -m benchmarks.tpu.sweep [--write | --out DIR] [--tables] [--chips v5e,v6e] [--jobs decode,prefill]
                                   [--sizes values_behind,early_heads]

The cases of benchmarks.tpu.static. A row is one set of sizes on one chip; a table of the best ends the run, and
--tables writes it to pallas_kernels/tuning for tile_policy.py. Of a decode, which memory limits, the best is the one
with the fewest bundles for 200 keys among those within 2 % of the least time of a long context. Of a prefill, the one
with the fewest bundles of prompts of 512 and of 8192 among those whose bodies have fewer than 200 loads and stores of
spilled registers each; if none has, the one that spills least. Static figures: no TPU has confirmed them. The tables
that are kept say when and with which commit they were made.
"""

import argparse
import dataclasses
import json
import sys
from unittest import mock

from benchmarks.tpu import command, llo, model, own_process
from pallas_kernels.tuning import table_path

SIZES = {
    "decode": dict(block_kv=(512, 1024, 2048), part_kv=(128, 512), short_heads=(4,)),
    "prefill": dict(values_behind=(0, 1), early_heads=(1, 2), step_kv=(768,), chunk_rows=(64, 256), long_heads=(2,)),
}
"""Fields of TpuKernelConfig and the values that are tried beside the default."""

MOST_SPILLS = 200
"""A body of many rows has fewer loads and stores of spilled registers."""

FIGURES = {"decode": ("bundles_per_key", "bundles_at_200"), "prefill": ("prompt_512", "prompt_8k")}
"""What a table keeps of the best row."""


def candidates(job: str, names: list[str] | None = None) -> list[dict[str, int]]:
    """The default, then each other value of each of the sizes `names`; None: of all."""
    tried = SIZES[job] if names is None else {name: SIZES[job][name] for name in names if name in SIZES[job]}
    return [{}, *({name: value} for name, values in tried.items() for value in values)]


def name_of(sizes: dict[str, int]) -> str:
    """The variant of a row."""
    return " ".join(f"{name}={value}" for name, value in sizes.items()) or "default"


def one(chip: str, job: str, sizes: dict[str, int], folder: str) -> dict:
    """The figures of one set of sizes, in a process that was started with the flags of the dump."""
    from benchmarks.tpu import static
    from jattn.backends import pallas_tpu

    default = pallas_tpu.default_config
    changed = lambda chip="", **fields: dataclasses.replace(default(**fields), **sizes)  # without the chip's table
    with mock.patch.object(pallas_tpu, "default_config", changed):
        measured = static.ours(chip, job)
        row = dict(chip=chip, case=job) | measured(llo.read(folder, "ragged_paged_attention"))
    return row | model.least(row)


def row_of(chip: str, job: str, sizes: dict[str, int]) -> dict:
    """The row of one set of sizes; only `error` and what was tried if it does not compile."""
    figures = own_process.row_of_dump("benchmarks.tpu.sweep", chip, job, json.dumps(sizes))
    return dict(chip=chip, case=job) | figures | dict(variant=name_of(sizes), sizes=sizes)


def best(rows: list[dict]) -> dict:
    """The best of the rows of one chip and job; see the module's docstring."""
    able = [row for row in rows if "error" not in row]
    if "prompt_8k" not in able[0]:
        least = min(row["ns"] for row in able)
        near = [row for row in able if row["ns"] <= 1.02 * least]
        return min(near, key=lambda row: row.get("bundles_at_200", row["ns"]))
    spills = lambda row: max(row["spills"], *row["spills_of_parts"])
    near = [row for row in able if spills(row) < MOST_SPILLS] or [min(able, key=spills)]
    return min(near, key=lambda row: row["prompt_512"] * row["prompt_8k"])


def write_table(chip: str, rows: dict[str, list[dict]], origin: dict) -> None:
    """The best sizes of a chip, by job, as tile_policy.py reads them."""
    found = []
    for job, tried in rows.items():
        row = best(tried)
        figures = {name: row[name] for name in (*FIGURES[job], "spills")}
        found.append(dict(kind=job, sizes=row["sizes"], **figures, tried=len(tried)))
    note = "bundles of the compiled kernel, by benchmarks.tpu.sweep; no TPU has confirmed them"
    path = table_path(f"tpu_{chip}")
    path.write_text(json.dumps(origin | dict(chip=chip, note=note, rows=found), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Compile and print; 1 if the default does not compile."""
    parser = command.parser("benchmarks.tpu.sweep", str(__doc__))
    parser.add_argument("--jobs", default=",".join(SIZES))
    parser.add_argument("--sizes", help="of SIZES, separated by commas (default: all)")
    parser.add_argument("--tables", action="store_true", help="write pallas_kernels/tuning/tpu_*.json")
    parser.add_argument("--one", nargs=4, metavar=("CHIP", "JOB", "SIZES", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        chip, job, sizes, folder = args.one
        print(json.dumps(one(chip, job, json.loads(sizes), folder)))
        return 0
    names = None if args.sizes is None else args.sizes.split(",")
    if unknown := sorted({*(names or ())}.difference(*SIZES.values())):
        parser.error(f"--sizes: no job has {', '.join(unknown)}")
    failed, table = 0, []
    for chip in args.chips.split(","):
        by_job = {
            job: command.print_and_keep("sweep", args, (row_of(chip, job, sizes) for sizes in candidates(job, names)))
            for job in args.jobs.split(",")
        }
        for job, tried in by_job.items():
            failed += "error" in tried[0]
            if found := [row for row in tried if "error" not in row]:
                table.append(f"{chip:6} {job:8} {best(found)['variant']}")
        if args.tables and not failed:
            write_table(chip, by_job, command.origin())
    print("\n".join(table))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
