"""The table of options compiled for TPUs, and a few of its cells if libtpu is installed."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.tpu import aot, options
from tests.rooms import tree


def test_a_sample_has_every_option_on_every_chip_and_every_pair_of_head_dim_and_dtype():
    chips = list(aot.TOPOLOGIES)
    sample = options.cells(list(options.OPTIONS), chips, 0)
    assert set(sample) <= set(options.cells(list(options.OPTIONS), chips))
    wide = [name for name in options.OPTIONS if name != "hnd128"]  # which has one head dim of these
    assert {(x[0], x[3]) for x in sample} >= {(name, chip) for name in wide for chip in chips}
    assert {x[1:3] for x in sample} == {(dim, dtype) for dim in options.DIMS for dtype in options.DTYPES}


def test_a_row_keeps_each_cell_but_what_failed_is_tried_again():
    seen = {"int8 64": "compiled", "int8 80": "refused: why", "float32 64": "refused: why", "float32 80": "failed: x"}
    row = options.row_of("v6e", "alibi", seen)
    assert options.seen_of(row) == {cell: result for cell, result in seen.items() if not result.startswith("failed")}
    assert options.table([row]).splitlines()[1].split() == ["alibi", "1", "r2", "F1"]


@pytest.mark.skipif(not aot.available(), reason="the libtpu wheel is not installed: pip install libtpu")
def test_options_together_compile_and_a_refusal_has_its_reason(tmp_path):
    """A prompt and a batch of decodes with all options that go together; a page that the kernel refuses."""
    program = """
from benchmarks.tpu import options
cells = [("together_tree", 80, "int8"), ("decode_together_tree", 80, "int8"), ("decode_mha", 80, "int8")]
found = options.results("v6e", cells)
options.OPTIONS["page_24"] = dict(cache=dict(block_size=24))
import json
print(json.dumps([list(found.values()), *options.results("v6e", [("page_24", 80, "int8")]).values()]))
"""
    environment = os.environ | aot.environment()
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tree.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    together, refused = json.loads(done.stdout.splitlines()[-1])
    assert together == ["compiled"] * 3 and refused.startswith("refused: ")
