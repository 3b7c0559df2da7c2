"""Records: one JSON row a measurement, in `results/<chip>/<benchmark>.jsonl`; git keeps what a newer row replaced.

Each row says what was measured (`bench`, `case`, and `backend` or `variant` where one case has several) and where and
when (`chip`, `jax`, `commit`, `date`). A new row replaces the row with the same QUESTION columns.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess

import jax

from jattn import device

RESULTS = pathlib.Path(__file__).parent / "results"
QUESTION = ("bench", "chip", "case", "backend", "variant", "tiles_of", "isa", "clock")
"""Columns that tell two measurements apart; a column that a row lacks counts as None. tiles_of: a chip, whose tiles."""
CPU_FAMILIES = {
    ("AuthenticAMD", "25", "17"): "amd_zen4",
    ("AuthenticAMD", "26"): "amd_zen5",
    ("GenuineIntel", "6", "106"): "intel_ice_lake",
    ("GenuineIntel", "6", "143"): "intel_sapphire_rapids",
}
"""(vendor, family) or (vendor, family, model) of /proc/cpuinfo: virtual machines hide the model in its name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """--write and --out, for `folder_of`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--write", action="store_true", help="keep the rows in benchmarks/results/<chip>")
    where.add_argument("--out", type=pathlib.Path, metavar="DIR", help="keep the rows in this folder instead")


def folder_of(args: argparse.Namespace) -> pathlib.Path | None:
    """The folder for the rows of this run; None: the rows are not kept."""
    return RESULTS / chip_folder() if args.write else args.out


def read(path: pathlib.Path) -> list[dict]:
    """The rows of one file; none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def newest(rows: list[dict]) -> list[dict]:
    """The last row of each question, in the order of those rows."""
    last = {tuple(row.get(column) for column in QUESTION): number for number, row in enumerate(rows)}
    return [rows[number] for number in sorted(last.values())]


def write(rows: list[dict], bench: str, folder: pathlib.Path | None) -> None:
    """Keep the rows in `folder/bench.jsonl`, each in the place of the one that it replaces; None keeps nothing."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}.jsonl"
    kept = newest([*read(path), *({"bench": bench} | row for row in rows)])
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in kept), encoding="utf-8")


def provenance() -> dict[str, str]:
    """Where and when a figure comes from; COMMIT in the environment serves a copy of the tree without git."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "jax": jax.__version__,
        "chip": chip_name(),
        "commit": os.environ.get("COMMIT") or head.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


def chip_name() -> str:
    """The accelerator's own name, or the processor's with its number of cores."""
    if device.detect().platform != "cpu":
        return jax.devices()[0].device_kind
    return f"{_cpuinfo('model name') or platform.machine()} x {os.cpu_count()}"


def chip_folder() -> str:
    """The folder of this machine's records: nvidia_h200, amd_zen5."""
    if device.detect().platform != "cpu":
        return device.slug(chip_name())
    found = tuple(_cpuinfo(name) for name in ("vendor_id", "cpu family", "model"))
    known = CPU_FAMILIES.get(found) or CPU_FAMILIES.get(found[:2])
    return known or device.slug("_".join(part for part in found if part) or platform.machine())


def _cpuinfo(name: str) -> str:
    """A field of the first processor; empty where there is none."""
    path = pathlib.Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found.group(1) if found else ""
