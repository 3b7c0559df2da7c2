"""Sizes of the TPU kernel's blocks and tiles compared by their bundles, one changed at a time.

    python -m benchmarks.tpu.sweep [--write | --out DIR] [--chips v5e,v6e] [--jobs decode,prefill]

The cases of benchmarks.tpu.static. A row is one set of sizes on one chip; a table of the best ends the run. Of
a decode, which memory limits, the best is the one with the fewest bundles for 200 keys among those within 2 % of the
least time of a long context. Static figures: a TPU must confirm them before the kernel's defaults change.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from unittest import mock

from benchmarks import records
from benchmarks.tpu import aot, llo, model, own_process

SIZES = {
    "decode": dict(block_kv=(512, 1024, 2048), part_kv=(128, 512), short_heads=(4,)),
    "prefill": dict(block_kv=(1024, 2048), part_kv=(128, 512), chunk_rows=(64, 256), long_heads=(2,), tile_rows=(256,)),
}
"""Fields of TpuKernelConfig and the values that are tried beside the default."""


def candidates(job: str) -> list[dict[str, int]]:
    """The default, then each other value of each size."""
    return [{}, *({name: value} for name, values in SIZES[job].items() for value in values)]


def name_of(sizes: dict[str, int]) -> str:
    """The variant of a row."""
    return " ".join(f"{name}={value}" for name, value in sizes.items()) or "default"


def one(chip: str, job: str, sizes: dict[str, int], folder: str) -> dict:
    """The figures of one set of sizes, in a process that was started with the flags of the dump."""
    from benchmarks.tpu import static
    from jattn.backends import pallas_tpu

    default = pallas_tpu.default_config
    with mock.patch.object(
        pallas_tpu, "default_config", lambda **fields: dataclasses.replace(default(**fields), **sizes)
    ):
        measured = static.ours(chip, job)
        row = dict(chip=chip, case=job) | measured(llo.read(folder, "ragged_paged_attention"))
    return row | model.least(row)


def best(rows: list[dict]) -> dict:
    """The best of the rows of one chip and job; see the module's docstring."""
    able = [row for row in rows if "error" not in row]
    least = min(row["ns"] for row in able)
    near = [row for row in able if row["ns"] <= 1.02 * least]
    return min(near, key=lambda row: row.get("bundles_at_200", row["ns"]))


def main(argv: list[str] | None = None) -> int:
    """Compile and print; 1 if the default does not compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu.sweep", description=__doc__.splitlines()[0])
    records.add_options(parser)
    parser.add_argument("--chips", default=",".join(aot.TOPOLOGIES))
    parser.add_argument("--jobs", default=",".join(SIZES))
    parser.add_argument("--one", nargs=4, metavar=("CHIP", "JOB", "SIZES", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        chip, job, sizes, folder = args.one
        print(json.dumps(one(chip, job, json.loads(sizes), folder)))
        return 0
    origin = records.provenance() | dict(libtpu=importlib.metadata.version("libtpu"))
    folder, failed, table = records.RESULTS / "tpu" if args.write else args.out, 0, []
    for chip in args.chips.split(","):
        for job in args.jobs.split(","):
            rows = []
            for sizes in candidates(job):
                figures = own_process.row_of_dump("benchmarks.tpu.sweep", chip, job, json.dumps(sizes))
                rows.append(origin | dict(chip=chip, case=job) | figures | dict(variant=name_of(sizes)))
                print(json.dumps(rows[-1]), flush=True)
                records.write(rows[-1:], "sweep", folder)
            failed += "error" in rows[0]
            if found := [row for row in rows if "error" not in row]:
                table.append(f"{chip:6} {job:8} {best(found)['variant']}")
    print("\n".join(table))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
