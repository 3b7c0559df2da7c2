"""Kernel times by CUPTI: the sum over every kernel that a call launches.

After about 50 ms of dense products an H200 reaches its power limit of 700 W and lowers its clocks by a sixth, so a
kernel's time depends on what ran just before. `micros` measures before that point, `sustained` after it.
"""

import collections
import contextlib
import fcntl
import os
import time
import traceback

import numpy as np

COOL_US = 50_000
HOT_US = 400_000
NAME = 56  # letters of a kernel's name that are kept; kernels that agree in them are added up


@contextlib.contextmanager
def alone():
    """No other process that is within `alone` times anything, if the file BENCH_LOCK is named in the environment.

    So that processes compile and check side by side on one card, and time in turn.
    """
    name = os.environ.get("BENCH_LOCK")
    if not name:
        yield
        return
    with open(name, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _series(f, args, count: int) -> list[list[tuple[str, float]]]:
    from jax.experimental.mosaic.gpu import profiler

    runs = profiler.measure(f, aggregate=False, iterations=count)(*args)[1]
    return [runs] if count == 1 else runs


def micros(f, *args, iterations: int = 10, pick=np.median) -> tuple[float, dict[str, float]]:
    """(microseconds of a call, those of each kernel in the last one): a short series on a cool card."""
    first = sum(ms for _, ms in _series(f, args, 1)[0]) * 1e3
    runs = _series(f, args, int(np.clip(COOL_US / first, 3, max(iterations, 3))))
    times = [sum(ms for _, ms in one) * 1e3 for one in runs]
    parts = collections.Counter()
    for name, ms in runs[-1]:
        parts[name[:NAME]] += ms * 1e3
    return float(pick(times)), {name: round(us, 2) for name, us in parts.items()}


def sustained(f, *args, us: float) -> float:
    """Microseconds of a call in the second half of a long series of them; us: of one on a cool card."""
    runs = _series(f, args, int(np.clip(HOT_US / us, 10, 200)))
    return float(np.median([sum(ms for _, ms in one) * 1e3 for one in runs[len(runs) // 2 :]]))


def attempt(work) -> dict:
    """The row of `work`, or of its error: one broken case must not hide the others; with the seconds it took."""
    begin = time.time()
    try:
        row = work()
    except Exception as error:
        traceback.print_exc(limit=-2)
        row = dict(ok=False, error=f"{type(error).__name__}: {error}"[:300])
    return row | dict(wall_s=round(time.time() - begin, 1))
