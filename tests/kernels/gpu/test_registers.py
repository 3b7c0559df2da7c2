"""Registers and spills of the warp-level kernel and the KV writes, of each chip: as recorded, and as compiled now.

The records are benchmarks/results/<chip>/registers.jsonl. Compiling needs JAX 0.12, its CUDA plugin and ptxas, and no
GPU: `make gpu-aot PYTHON=python3.12 VENV=.venv-cuda`. Elsewhere only the records are checked.
"""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import records
from benchmarks.gpu import registers
from pallas_kernels.gpu.config_sm80 import CHIPS
from tests.rooms import tree

COMPILED = (
    "decode_d64_bf16", "decode_d128_bf16", "decode_d256_e4m3_tokens", "decode_d128_int8_tokens_every_option",
    "mixed_d64_bf16", "mixed_d128_bf16_every_option", "mixed_d128_e4m3", "mixed_d256_bf16", "mixed_d256_e4m3_tokens",
    "write_kv_pages", "rotate_and_write",
)  # fmt: skip
MORE_REGISTERS = 8  # than recorded: another version of ptxas may need some
MISSING = registers.missing()


def recorded(chip, compiler):
    """The rows of a chip, by case; empty where none was kept."""
    rows = records.read(records.RESULTS / chip / "registers.jsonl")
    return {row["case"]: row for row in rows if row["variant"] == compiler}


@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_is_recorded_and_decode_spills_nothing(chip):
    rows = recorded(chip, "ptxas")
    assert rows.keys() == set(registers.CASES)
    for case, row in rows.items():
        assert row["registers"] <= 255 and row.get("smem", 0) <= CHIPS[chip].smem_cta, row
        assert case.startswith("mixed") or row["spill_stores"] == row["spill_loads"] == 0, row


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"it needs {MISSING}")
@pytest.mark.parametrize("chip", CHIPS)
def test_no_kernel_needs_more_than_is_recorded(chip):
    """Where a kernel was changed on purpose: python -m benchmarks.gpu.registers sm_86 --write, for every chip.

    A case without a row needs only compile.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.registers", chip, *COMPILED]
    env = os.environ | registers.environment() | {"PYTHONPATH": str(tree.ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=590)
    found = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == set(COMPILED), done.stderr[-2000:]
    before = recorded(chip, registers.compiler())
    for case in found.keys() & before.keys():
        assert found[case]["registers"] <= before[case]["registers"] + MORE_REGISTERS, (found[case], before[case])
        assert found[case]["spill_stores"] <= before[case]["spill_stores"], (found[case], before[case])
