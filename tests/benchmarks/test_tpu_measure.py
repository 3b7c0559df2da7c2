"""The TPU kernel's timing and its sweep of sizes, as far as they go without a TPU."""

import dataclasses
import runpy
import sys

import pytest

import jattn
from benchmarks import records
from benchmarks.tpu import aot, measure, sweep
from jattn.backends.pallas_tpu import kernel_config
from pallas_kernels import tuning
from pallas_kernels.tpu import tile_policy
from pallas_kernels.tpu.config import TpuKernelConfig

LEAST = dict(ns=2.0, limit="memory")


def test_without_a_tpu_the_command_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measure"])
    with pytest.raises(SystemExit) as end, pytest.warns(RuntimeWarning, match="found in sys.modules"):
        runpy.run_module("benchmarks.tpu.measure", run_name="__main__")
    assert end.value.code == 2 and "not a TPU" in capsys.readouterr().out


def test_a_time_refutes_what_it_contradicts():
    assert measure.refuted(2.2, LEAST, 0.001) == []
    (low,) = measure.refuted(1.8, LEAST, 0.001)
    assert "lower limit: measured 0.90" in low
    (high,) = measure.refuted(3.0, LEAST, 0.001)
    assert "measured 1.50 times the least time" in high
    wrong, unknown = measure.refuted(2.0, None, 0.5)
    assert "differ by 0.5" in wrong and "none for this one" in unknown


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_a_prompt_that_takes_exactly_its_bundles_refutes_nothing(chip, monkeypatch):
    """The records of a prompt of 8192 are another sum of the same bodies."""
    known = records.newest(records.read(records.RESULTS / "tpu" / "static.jsonl"))
    row = next(row for row in known if (row["chip"], row["case"]) == (chip, "prefill"))
    cache_spec = jattn.KVCacheSpec(num_blocks=64, block_size=128, num_kv_heads=8, head_dim=128)
    config = kernel_config(aot.layer_of(aot.PREFILL), cache_spec, chip=chip)
    ns = lambda milli: milli / row["milli_bundles"] * row["ns_bundles"]
    assert measure.least_of(row, 8192, config)["ns"] == pytest.approx(ns(row["prompt_8k_visible"]), rel=2e-3)
    least = measure.least_of(row, 2048, config)
    assert row["ns"] * 1.15 < least["ns"] < ns(row["prompt_512_visible"]) and least["limit"] == "bundles"
    monkeypatch.setattr(measure, "CASES", {"prefill": ((130,) * 2, 130)})
    monkeypatch.setattr(measure, "CALLS", 1)
    assert measure.measure("prefill", chip, backend="sdpa")["least_ns"] > ns(row["prompt_512_visible"])


def test_a_case_is_computed_and_compared_with_sdpa(monkeypatch):
    """On this machine with sdpa in place of the kernel."""
    monkeypatch.setattr(measure, "CASES", {"decode": ((1,) * 6, 200), "prefill": ((130,) * 2, 130)})
    monkeypatch.setattr(measure, "CALLS", 1)
    for case, pairs in (("decode", 6 * 200), ("prefill", 2 * 130 * 131 // 2)):
        row = measure.measure(case, "v6e", backend="sdpa")
        assert measure.pairs(*measure.CASES[case]) == pairs
        assert row["ms"] * 1e6 == pytest.approx(row["ns"] * pairs, rel=0.01) and row["difference"] < measure.TOLERANCE


def test_one_size_is_changed_at_a_time():
    assert sweep.candidates("decode")[0] == {} and all(len(sizes) < 2 for sizes in sweep.candidates("prefill"))
    tried = [{}, dict(values_behind=0), dict(values_behind=1)]
    assert sweep.candidates("prefill", ["values_behind", "block_kv"]) == tried
    assert sweep.name_of({}) == "default" and sweep.name_of(dict(block_kv=512)) == "block_kv=512"


def test_the_best_sizes_are_those_that_short_contexts_like_among_equals():
    rows = [
        dict(variant="default", ns=2.0, bundles_at_200=900),
        dict(variant="a", ns=2.01, bundles_at_200=700),
        dict(variant="b", ns=3.0, bundles_at_200=100),
        dict(variant="c", error="out of VMEM"),
    ]
    assert sweep.best(rows)["variant"] == "a"
    assert sweep.best([dict(variant="x", ns=0.09), dict(variant="y", ns=0.0899)])["variant"] == "y"


def test_the_best_sizes_of_prefill_are_the_fastest_that_spill_little_and_make_the_table(tmp_path, monkeypatch):
    row = dict(spills=200, spills_of_parts=[50, 60], prompt_512=147.0, prompt_8k=134.0, sizes={})
    behind = row | dict(spills=199, prompt_8k=135.0, sizes=dict(values_behind=0))
    rows = [row, behind, row | dict(spills=1, prompt_8k=136.0)]
    assert sweep.best(rows) is rows[1]
    assert sweep.best([row, row | dict(spills=0, spills_of_parts=[0, 300], prompt_8k=90.0)]) is row
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "__init__.py"))
    sweep.write_table("v9", dict(prefill=rows), dict(libtpu="1"))
    tile_policy.tuned_sizes.cache_clear()
    assert tile_policy.tuned_sizes("v9") == dict(values_behind=0) and tile_policy.tuned_sizes("v8") == {}
    tile_policy.tuned_sizes.cache_clear()


def test_each_generation_has_a_table_of_sizes_that_the_kernel_has():
    fields = {field.name for field in dataclasses.fields(TpuKernelConfig)}
    for chip in aot.TOPOLOGIES:
        assert tile_policy.tuned_sizes(chip).keys() <= fields
        assert tuning.table_path(f"tpu_{chip}").is_file()
