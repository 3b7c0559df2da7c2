"""The backend's calls lower for TPU on a machine without one; with the libtpu wheel they compile for four generations.

Lowering makes Mosaic's program and checks none of the chip's limits: only the compiler of libtpu does.
"""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks.tpu import aot
from tests.rooms import tree

LOWERED = ("head_dim_80", "int8_page_16", "mqa_71", "chunk_alibi", "mla_decode", "mla_wide")


@pytest.mark.parametrize("name", [*LOWERED, "decode"])
def test_a_call_lowers_for_tpu(name):
    function, arguments = aot.call(next(shape for shape in aot.SHAPES if shape.name == name))
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(*arguments)
    launches = 2 if name == "mla_wide" else 1  # of a batch with a prompt of 600: the keys before it, and its own
    assert exported.mlir_module().count("stablehlo.custom_call @tpu_custom_call") == launches


@pytest.mark.slow
@pytest.mark.timeout(840)  # a generation takes minutes to compile for
@pytest.mark.skipif(not aot.available(), reason="the libtpu wheel is not installed: pip install libtpu")
@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_shape_compiles(chip):
    command = [sys.executable, "-m", "benchmarks.tpu.aot", "--chips", chip]
    done = subprocess.run(command, env=os.environ | aot.environment(), cwd=tree.ROOT, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(aot.SHAPES) and not [row for row in rows if not row["ok"]], done.stderr
