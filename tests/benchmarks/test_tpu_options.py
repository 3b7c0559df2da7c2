"""The cells of options compiled for TPUs, and a few of them if libtpu is installed."""

import itertools
import json
import os
import subprocess
import sys

import pytest

import jattn
from benchmarks import records
from benchmarks.tpu import aot, options
from benchmarks.tpu.covering import covering
from tests.rooms import tree


def test_a_covering_array_has_each_possible_pair_and_no_other():
    factors = dict(a=("0", "1", "2"), b=("0", "1", "2"), c=("0", "1"), d=("0", "1"))
    possible = lambda cell: not (cell.get("a") == "0" and cell.get("c") == "1")
    wanted = {
        ((x, v), (y, w))
        for x, y in itertools.combinations(factors, 2)
        for v, w in itertools.product(factors[x], factors[y])
        if possible({x: v, y: w})
    }
    pairs = lambda cell: set(itertools.combinations([(name, cell[name]) for name in factors], 2))
    for turn in range(3):
        first = [dict(a="2", b="2", c="0", d="0")] * turn
        cells = covering(factors, possible, first, turn)
        assert set.union(*map(pairs, cells)) == wanted and cells[:turn] == first and len(cells) <= 12
        assert cells == covering(factors, possible, first, turn)


def test_a_pair_that_no_cell_can_have_is_left_out():
    none = lambda cell: not (cell.get("a") == cell.get("b") == "1" and "c" in cell)
    cells = covering(dict.fromkeys("abc", ("0", "1")), none)
    assert cells and not [cell for cell in cells if cell["a"] == cell["b"] == "1"]


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_two_options_that_are_possible_together_are_in_a_cell_that_the_backend_takes(chip):
    cells = options.cells(chip)
    seen = {pair for cell in cells for pair in itertools.combinations(sorted(cell.items()), 2)}
    names = sorted(options.FACTORS)
    missing = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(((a, x) for x in options.FACTORS[a]), ((b, x) for x in options.FACTORS[b]))
        if options.possible(dict(pair)) and pair not in seen
    }
    assert not missing and len(cells) < 100 and len({options.name_of(cell) for cell in cells}) == len(cells)
    for cell in cells:
        aot.call(options.shape_of(cell), chip)


REFUSALS = "=True needs |with quant=|with head_dim=|'pallas_tpu' does not support this layer"


@pytest.mark.parametrize("conflict", options.CONFLICTS, ids=str)
def test_options_that_are_left_out_are_refused_together(conflict):
    for values in itertools.product(*conflict.values()):
        cell = options.PLAIN | dict(zip(conflict, values, strict=True))
        for name in conflict:  # without one of them the others are taken
            aot.call(options.shape_of(_with_needs(cell | {name: options.PLAIN[name]}, conflict.keys() - {name})))
        with pytest.raises((ValueError, jattn.UnsupportedError), match=REFUSALS):
            aot.call(options.shape_of(_with_needs(cell, conflict.keys())))


def _with_needs(cell, kept):
    """The cell with what its options need, but for the factors `kept`."""
    needs = dict(range="window") if cell["rswa"] != options.OFF or cell["mm_prefix"] == "clamped" else {}
    needs |= dict(dtype="int8") if cell["scales"] != "one" else {}
    needs |= dict(head_dim="64") if cell["layout"] == "HND128" else {}
    return cell | {name: value for name, value in needs.items() if name not in kept}


def test_the_record_has_each_cell_compiled_and_no_other():
    rows = records.read(records.RESULTS / "tpu" / "options.jsonl")
    found = {(row["chip"], row["case"]): row["result"] for row in rows}
    wanted = {(chip, options.name_of(cell)) for chip in aot.TOPOLOGIES for cell in options.cells(chip)}
    assert found == dict.fromkeys(wanted, "compiled")


@pytest.mark.skipif(not aot.available(), reason="the libtpu wheel is not installed: pip install libtpu")
def test_options_together_compile_and_a_refusal_has_its_reason():
    """A prompt and two batches of decodes with all options that go together; keys on ranks, each a device of the mesh;
    a page that the kernel refuses."""
    program = """
from benchmarks.tpu import aot, options
found = options.results("v6e", [*options.TOGETHER[6:9], options.PLAIN | dict(ranks="2 ranks", job="decodes")])
(shape,) = [shape for shape in aot.SHAPES if shape.name == "keys_on_4_ranks"]
row = aot.compile_one(shape, "v6e")
found.append("compiled" if row["ok"] else row["error"])
options.FACTORS["page"]["24"] = dict(cache=dict(block_size=24))
import json
print(json.dumps(found + options.results("v6e", [options.PLAIN | dict(page="24")])))
"""
    environment = os.environ | aot.environment()
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tree.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *together, refused = json.loads(done.stdout.splitlines()[-1])
    assert together == ["compiled"] * 5 and refused.startswith("refused: ")
