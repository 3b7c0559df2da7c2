"""The figures that a user of the engine meets, from one run: each beside what it must reach, and what was missed.

    python -m benchmarks.gpu.serving_bars [--seconds 500] [--write | --out DIR] [--small]

Runs benchmarks.gpu.engine_step, trace and warmup one after another, each in a process of its own with the whole GPU and
an otherwise idle host, until the time is over; their rows are kept as each of them keeps its own. At the end it prints
a table, and exits with 1 if a figure missed its bar or was not measured. --small tries the script on a CPU; its figures
have no bars.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks import records

RUNS = (
    ("benchmarks.gpu.engine_step",),
    ("benchmarks.gpu.trace",),
    ("benchmarks.gpu.warmup", "--only", "warmup"),
    ("benchmarks.gpu.warmup", "--only", "compile"),
)
"""The most important first: the last may be cut off."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a figure of a row must reach: a lower limit if `at_least`, else an upper one."""

    bench: str
    case: str
    figure: str
    limit: float
    at_least: bool = False
    variant: str | None = None

    def of(self, rows: list[dict]) -> float | None:
        """The figure, if one of these rows has it."""
        found = [row for row in rows if row["case"] == self.case and row.get("variant") == self.variant]
        return found[-1].get(self.figure) if found else None

    def line(self, measured: float | None) -> str:
        """One line of the table."""
        name = " ".join(filter(None, (self.case, self.variant, self.figure)))
        sign = ">=" if self.at_least else "<="
        seen = "not measured" if measured is None else f"{measured:.6g}"
        return f"{name:45} {seen:>12} {sign} {self.limit:<8g} {'' if self.met(measured) else 'MISSED'}".rstrip()

    def met(self, measured: float | None) -> bool:
        """Is it measured, and within the limit?"""
        return measured is not None and (measured >= self.limit if self.at_least else measured <= self.limit)


BARS = (
    Bar("trace", "trace_1b_r64", "output_tokens_per_s", 20_000, at_least=True),
    Bar("trace", "trace_1b_r64", "device_busy", 0.85, at_least=True),
    Bar("trace", "trace_1b_r64", "compiled_later", 0),
    Bar("trace", "trace_1b_r256", "output_tokens_per_s", 45_000, at_least=True),
    Bar("trace", "trace_1b_r256", "device_busy", 0.85, at_least=True),
    Bar("trace", "trace_1b_r256", "compiled_later", 0),
    Bar("trace", "ttft_1b_8k", "ms", 44),
    Bar("trace", "ttft_1b_8k", "over_floor", 1.3),
    Bar("decode_step", "step_1b_r1", "ms", 0.80),
    Bar("decode_step", "step_1b_r32", "ms", 1.15),
    Bar("warmup", "warmup_1b_r64", "seconds", 40, variant="cold"),
    Bar("warmup", "warmup_1b_r64", "compiled_later", 0, variant="cold"),
    Bar("warmup", "warmup_1b_r64", "seconds", 8, variant="disk"),
    Bar("warmup", "compile_80_over_16", "ratio", 1.5),
)


def run_all(args: argparse.Namespace, folder: pathlib.Path) -> None:
    """Each benchmark in turn, with what is left of the time; one that fails does not stop the others."""
    end = time.monotonic() + args.seconds
    for command in RUNS:
        name, left = " ".join(command), end - time.monotonic()
        if left < 1:
            print(f"{name}: no time left", flush=True)
            continue
        begin = time.monotonic()
        options = ["--out", str(folder), *(["--small"] if args.small else [])]
        run = subprocess.Popen([sys.executable, "-m", *command, *options], start_new_session=True)
        try:
            code = run.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # with the processes that it started: they hold the GPU's memory
            code = f"cut off ({run.wait()})"
        print(f"{name}: exit {code}, {time.monotonic() - begin:.0f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, keep the rows; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.serving_bars", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=500, help="for all benchmarks together (default: 500)")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    records.add_options(parser)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)  # of this run only: no figure of an earlier one can stand in for a missing one
        run_all(args, folder)
        found = {path.stem: records.read(path) for path in sorted(folder.glob("*.jsonl"))}
    if keep := records.folder_of(args):
        for bench, rows in found.items():
            records.write(rows, bench, keep)
    measured = [(bar, bar.of(found.get(bar.bench, []))) for bar in BARS]
    if args.small:
        print("\n".join(f"{bench} {row['case']}" for bench, rows in found.items() for row in rows))
        return 0
    print("\n".join(bar.line(value) for bar, value in measured))
    return int(not all(bar.met(value) for bar, value in measured))


if __name__ == "__main__":
    sys.exit(main())
