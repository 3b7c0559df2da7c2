"""The small forms of the engine's benchmarks on a GPU run on a CPU, and their rows have their names."""

import pytest

from benchmarks import records
from benchmarks.gpu import engine_step, warmup


def test_a_decode_step_is_measured_for_each_number_of_requests(tmp_path):
    engine_step.main(["--small", "--requests", "1", "2", "--dispatches", "2", "--rounds", "1", "--out", str(tmp_path)])
    rows = records.read(tmp_path / "decode_step.jsonl")
    assert [row["case"] for row in rows] == ["step_small_r1", "step_small_r2"]
    for row in rows:
        assert row["ms"] == pytest.approx(row["served_ms"] / engine_step.BURST) and row["device_ms"] > 0


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_one_stored(tmp_path):
    assert warmup.main(["--small", "--only", "warmup", "--out", str(tmp_path)]) == 0
    cold, disk = records.read(tmp_path / "warmup.jsonl")
    assert (cold["case"], cold["cache"], disk["case"], disk["cache"]) == (
        "warmup_small",
        "cold",
        "warmup_small",
        "disk",
    )
    assert cold["programs"] == disk["programs"] <= cold["stored"] and cold["loaded"] == cold["compiled_later"] == 0
    assert disk["needed_in_warmup"] == disk["stored"] == disk["jaxpr_to_mlir_module_duration"] == 0
    assert cold["preemptions"] > 0 and cold["cached_tokens"] > 0
