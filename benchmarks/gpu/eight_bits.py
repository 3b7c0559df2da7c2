"""8-bit caches on the GPU: attention beside numpy float64, the quantising write beside XLA's bits, then times of both.

    python -m benchmarks.gpu.eight_bits KIND [--write | --out DIR] [--seconds 60] [--only PARTS] [--meet DIR --beside N]

exact: tiles are decoded and multiplied in 16 bits. rounded: compute_dtype, queries and weights of 8 bits; `rel_err` is
beside float64 with the same rounding, `exact_rel_err` beside float64 without. scales: one for each token and head.
write: of new keys and values. --meet: N processes with different kinds compile and check side by side, meet in that
folder, and take their times in turn.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks import records
from benchmarks.gpu import cases, check, jobs, write
from pallas_kernels.gpu.config import FP8

BOUND, LSE_BOUND = 6e-3, 1e-3
ROUNDED_BOUND = 2e-2  # weights near the middle of two values of 8 bits may be rounded to either
BY_NAME = {case.name: case for case in cases.CHECKED + cases.TIMED}
EIGHT = dict(kv_dtype=FP8)
ROUNDED, SCALES = dict(compute_dtype=FP8), dict(token_scales=True)
SMALL = (("window", 300), ("soft_cap", 20.0), ("alibi", True), ("has_sinks", True))


def mix(name: str, **fields) -> cases.KernelCase:
    """A small mixed batch with poisoned pages, padding requests and padding tokens."""
    return cases.KernelCase(name=f"mix_{name}", lengths=cases.MIX, pad_tokens=37, pad_reqs=3, **EIGHT | fields)


def of(name: str, **fields) -> cases.KernelCase:
    """A batch of the benchmark over an 8-bit cache."""
    return dataclasses.replace(BY_NAME[name], name=f"{name}_fp8", **EIGHT | fields)


CHECKED = {
    "exact": [
        (mix("int8_all", kv_dtype="int8", options=SMALL), dict(layout="NHD")),
        (mix("fp8_d256", head_dim=256, v_head_dim=256), {}),
        (mix("e5m2_d64_p64", kv_dtype="float8_e5m2", head_dim=64, v_head_dim=64, page=64), {}),
        (cases.KernelCase(name="rows_64", lengths=((16, 700), (9, 133), (0, 0), (16, 4096)), **EIGHT), {}),
    ],
    "rounded": [
        (mix("fp8_all", options=SMALL), ROUNDED | dict(layout="NHD")),
        (mix("fp8_d64_p64", head_dim=64, v_head_dim=64, page=64), ROUNDED),
        (mix("fp8_d192_v128", head_dim=192), ROUNDED),
    ],
    "scales": [(mix("int8_all", kv_dtype="int8", page=64, options=SMALL), SCALES | dict(layout="NHD"))],
    "write": [],
}
TIMED = {
    "exact": [(of("pre_1x8k"), {}), (of("mixed_32d_2p"), {})],
    "rounded": [
        (of("pre_1x8k"), ROUNDED), (of("mixed_32d_2p"), ROUNDED), (BY_NAME["dec_16x32k_fp8"], ROUNDED),
        (of("dec_1x128k"), ROUNDED),
    ],
    "scales": [
        (BY_NAME["dec_16x32k_fp8"], {}), (BY_NAME["dec_16x32k_fp8"], SCALES), (of("pre_1x8k"), SCALES),
    ],
    "write": [("write_8k_fp8_token", 2), ("write_8k_fp8", 2), ("write_8k_fp8_token", 1)],
}  # fmt: skip


class Turns:
    """What is timed waits for the checks of this process and of those beside it, then for its turn."""

    def __init__(self, checks: int, folder: pathlib.Path | None, beside: int, seconds: float):
        self.left, self.folder, self.beside = checks, folder or pathlib.Path(tempfile.mkdtemp()), beside
        self.until, self.changed = time.time() + seconds, threading.Condition()
        self.folder.mkdir(parents=True, exist_ok=True)

    def checked(self) -> None:
        """One check less is to be done."""
        with self.changed:
            self.left -= 1
            if self.left == 0:
                (self.folder / f"checked_{os.getpid()}").touch()
            self.changed.notify_all()

    def meet(self) -> None:
        """Returns when every check is done, or the time is up."""
        while len([*self.folder.glob("checked_*")]) < self.beside and time.time() < self.until:
            time.sleep(0.05)

    @contextlib.contextmanager
    def turn(self):
        """Nothing else is timed meanwhile."""
        with open(self.folder / "turn", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def attention(turns: Turns, case: cases.KernelCase, fields: dict, timed: threading.Event | None) -> dict:
    """One row: errors against numpy float64, and microseconds when `timed` is set, if it is given."""
    done = threading.Event()

    def checked():
        if not done.is_set():
            done.set()
            turns.checked()

    def wait():
        checked()
        assert timed is not None
        timed.wait()

    args = argparse.Namespace(samples=8, time=timed is not None, iterations=8, no_check=False, before_timing=wait)
    try:
        row = check.run_case(case, args, **fields)
    finally:
        checked()
    bound = ROUNDED_BOUND if "compute_dtype" in fields else BOUND
    return row | dict(ok=bool(row["rel_err"] < bound and row["lse_err"] < LSE_BOUND and row["same_bits"]))


def jobs_of(kind: str, pool: ThreadPoolExecutor, turns: Turns) -> Iterator[jobs.Job]:
    """The checks, compiled side by side, then the times, one after the other."""
    names = lambda case, fields: dict(case=case.name, variant=",".join(fields) or "default")
    if kind == "write":
        turns.checked()
        turns.meet()
        for name, chunks in TIMED[kind]:
            yield dict(case=name, variant=f"chunks={chunks}"), functools.partial(write.measure, name, 6, chunks)
        return
    waiting = []
    for case, fields in TIMED[kind]:
        event = threading.Event()
        waiting.append((names(case, fields), event, pool.submit(attention, turns, case, fields, event)))
    checks = [(names(c, f), pool.submit(attention, turns, c, f, None)) for c, f in CHECKED[kind]]
    turns.meet()
    for label, event, found in waiting:

        def work(event=event, found=found):
            event.set()
            return found.result()

        yield label, work
    for label, found in checks:
        yield label, found.result


def taking_turns(turns: Turns, todo: Iterator[jobs.Job]) -> Iterator[jobs.Job]:
    """The same jobs, each in a turn of its own."""

    def alone(work: Callable[[], dict]) -> dict:
        with turns.turn():
            return work()

    for label, work in todo:
        yield label, functools.partial(alone, work)


def main(argv: list[str] | None = None) -> None:
    """Run what the time allows; ends the process with 1 if a result was wrong."""
    parser = jobs.parser_of("eight_bits", __doc__, seconds=60)
    parser.add_argument("kind", choices=CHECKED)
    parser.add_argument("--meet", type=pathlib.Path, help="folder of the processes beside this one")
    parser.add_argument("--beside", type=int, default=1, help="processes, this one included")
    parser.add_argument("--checks", type=float, default=45, help="seconds after which the times do not wait for checks")
    args = parser.parse_args(argv)
    origin, count = records.provenance(), len(CHECKED[args.kind]) + len(TIMED[args.kind])
    turns = Turns(1 if args.kind == "write" else count, args.meet, args.beside, args.checks)
    print(args.kind, origin, flush=True)
    with ThreadPoolExecutor(12) as pool:
        failed = jobs.run(taking_turns(turns, jobs_of(args.kind, pool, turns)), args, origin, "eight_bits")
        sys.stdout.flush()
        os._exit(int(failed > 0))  # a thread whose turn did not come waits for ever


if __name__ == "__main__":
    main()
