"""Runs measurements within a time: each prints a line and writes a row, and one that fails does not stop the others."""

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import name_lists, records
from benchmarks.gpu import cupti
from jattn import device

FIGURES = ("us", "xla_us", "differ", "list_us", "tb_s", "tflop_s", "rel_err", "lse_err", "exact_rel_err", "error")
LAST_SECONDS = 15  # nothing begins in them
Job = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def parser_of(program: str, doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options of benchmarks.gpu.`program`: the time, the cases, where rows are written. doc: of its module."""
    description = (doc or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{program}", description=description)
    records.add_options(parser)
    parser.add_argument("--seconds", type=float, default=seconds, help=f"nothing begins in the last {LAST_SECONDS}")
    parser.add_argument("--stuck", type=float, default=60, help="seconds of one case after which the process ends")
    parser.add_argument("--only", default="", help="parts of labels, separated by commas")
    return parser


def main(
    program: str, doc: str | None, jobs_of: Callable[[], Iterable[Job]], seconds: float, argv: list[str] | None
) -> int:
    """Run a program without options of its own; its rows go to the file of its name. 1 if a result was wrong."""
    args = parser_of(program, doc, seconds).parse_args(argv)
    origin = records.provenance()
    print(origin, device.processors(), "multiprocessors", flush=True)
    return int(run(jobs_of(), args, origin, program) > 0)


def is_wanted(label: str, args: argparse.Namespace) -> bool:
    """Does --only name a part of this label, or is it absent?"""
    parts = name_lists.names_in(args.only)
    return not parts or any(part in label for part in parts)


def run(jobs: Iterable[Job], args: argparse.Namespace, origin: dict[str, Any], file: str) -> int:
    """The number of wrong results, and of parts of --only that no label has. A job: the columns that name it, and the
    work, which returns the others.

    A kernel that waits for ever cannot be stopped, so a case that is stuck ends the process. A case for which the card
    has too little memory says nothing about the numbers, and is not counted.
    """
    begin, failed, skipped, unknown = time.time(), 0, [], name_lists.names_in(args.only)
    for names, work in jobs:
        label = " ".join(str(name) for name in names.values())
        unknown = [part for part in unknown if part not in label]
        if not is_wanted(label, args):
            continue
        if time.time() - begin > args.seconds - LAST_SECONDS:
            skipped.append(label)
            continue
        guard = threading.Timer(args.stuck, _end_process, [label])
        guard.daemon = True
        guard.start()
        row = names | cupti.attempt(work)
        guard.cancel()
        lacks_memory = "RESOURCE_EXHAUSTED" in str(row.get("error", ""))
        failed += not row["ok"] and not lacks_memory
        cells = [f"{k}={row[k]:.4g}" if isinstance(row[k], float) else f"{k}={row[k]}" for k in FIGURES if k in row]
        verdict = "ok   " if row["ok"] else "no memory" if lacks_memory else "WRONG"
        print(verdict, f"{label:60s}", *cells, f"({row['wall_s']} s)", flush=True)
        records.write([origin | row], file, records.folder_of(args))
    print(f"{failed} wrong; skipped for time: {skipped or 'none'}; {time.time() - begin:.0f} s", flush=True)
    if unknown:
        print(f"--only: no label has {', '.join(unknown)}", flush=True)
    return failed + len(unknown)


def _end_process(label: str) -> None:
    print("STUCK", label, flush=True)
    os._exit(3)
