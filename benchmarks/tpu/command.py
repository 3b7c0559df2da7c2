"""What the commands of this folder share: their options, and rows that are printed and kept one by one."""

import argparse
import importlib.metadata
import itertools
import json
from collections.abc import Iterable

from benchmarks import records
from benchmarks.tpu import aot


def parser(module: str, about: str) -> argparse.ArgumentParser:
    """A parser with the options of all: where rows are kept, and the chips. about: the module's docstring."""
    found = argparse.ArgumentParser(prog=f"python -m {module}", description=about.splitlines()[0])
    records.add_options(found)
    found.add_argument("--chips", default=",".join(aot.TOPOLOGIES))
    return found


def each(chips: str, cases: str) -> Iterable[tuple[str, str]]:
    """(chip, case) of the values of two options, chip by chip."""
    return itertools.product(chips.split(","), cases.split(","))


def origin() -> dict[str, str]:
    """Where and when a row comes from."""
    return records.provenance() | dict(libtpu=importlib.metadata.version("libtpu"))


def folder_of(args: argparse.Namespace):
    """The folder of the rows: that of TPUs, though another machine compiles for them; None: they are not kept."""
    return records.RESULTS / "tpu" if args.write else args.out


def print_and_keep(bench: str, args: argparse.Namespace, rows: Iterable[dict]) -> list[dict]:
    """The rows with their origin, each printed and kept before the next is asked for."""
    found, where, folder = [], origin(), folder_of(args)
    for row in rows:
        found.append(where | row)
        print(json.dumps(found[-1]), flush=True)
        records.write(found[-1:], bench, folder)
    return found


def exit_code(rows: Iterable[dict]) -> int:
    """1 if one has an error in place of its figures."""
    return int(any("error" in row for row in rows))
