"""Registers of the warp-level kernel on every chip: decode spills none, and a mixed batch at most 64 bytes.

It needs another Python, with JAX's CUDA plugin and ptxas: benchmarks/gpu/registers.py lists the packages, and
JATTN_AOT_PYTHON names the program. No GPU is needed.
"""

import json
import os
import subprocess

import pytest

from pallas_kernels.gpu.config_sm80 import CHIPS
from tests.rooms import tree

PYTHON = os.environ.get("JATTN_AOT_PYTHON")
SHAPES = ("decode_d64_bf16", "decode_d128_bf16", "decode_d256_bf16", "decode_d128_every_option", "mixed_d128_bf16")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="JATTN_AOT_PYTHON names no Python with JAX's CUDA plugin")
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_stay_within_their_registers(chip):
    here = os.environ | {"PYTHONPATH": str(tree.ROOT), "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [str(PYTHON), "-m", "benchmarks.gpu.registers", chip, *SHAPES]
    done = subprocess.run(command, env=here, capture_output=True, text=True, check=True, timeout=290)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["shape"] for row in rows} == set(SHAPES)
    for row in rows:
        assert row["spill_stores"] <= (0 if row["shape"].startswith("decode") else 64), row
