"""Freed memory is kept: measured in page faults, which do not depend on the load of the machine."""

import platform
import subprocess
import sys

import pytest

from jattn.engine import memory

FAULTS = """
import resource, statistics, sys
from jattn.engine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() == (sys.argv[2] == "glibc")
import jax, jax.numpy as jnp
x, double = jnp.ones((10 << 20,), jnp.float32), jax.jit(lambda x: x * 2)
seen = []
for _ in range(60):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    double(x).block_until_ready()
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(seen[30:]))
"""


def faults(how: str) -> float:
    """Page faults of a call whose result has 40 MiB, 10240 pages of 4 KiB."""
    command = [sys.executable, "-c", FAULTS, how, platform.libc_ver()[0]]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_a_large_result_costs_no_fresh_pages():
    assert faults("keep") <= faults("leave") / 4 or platform.libc_ver()[0] != "glibc"


def test_another_libc_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory.ctypes, "CDLL", None)
    assert memory.keep_freed_memory() is False
