"""The small forms of the engine's benchmarks on a GPU run on a CPU, and their rows have their names."""

import pytest

from benchmarks import records
from benchmarks.gpu import engine_step, programs, shared_prompt, warmup


def test_a_decode_step_is_measured_for_each_number_of_requests(tmp_path):
    engine_step.main(["--small", "--requests", "1", "2", "--dispatches", "2", "--rounds", "1", "--out", str(tmp_path)])
    rows = records.read(tmp_path / "decode_step.jsonl")
    assert [row["case"] for row in rows] == ["step_small_r1", "step_small_r2"]
    for row in rows:
        assert row["ms"] == pytest.approx(row["served_ms"] / engine_step.BURST) and row["device_ms"] > 0


@pytest.mark.slow
def test_a_shared_prompt_is_served_with_and_without_cascade_attention(tmp_path):
    sizes = ["--requests", "2", "4", "--system", "64", "--layers", "1"]
    assert shared_prompt.main(["--small", *sizes, "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "shared_prompt.jsonl")
    assert [row["case"] for row in rows] == ["system_64_r2", "system_64_r4"]
    assert all(row["same_tokens"] == 1 and row["compiled_later"] == 0 for row in rows)


@pytest.mark.slow
def test_a_program_is_compared_as_the_engine_calls_it(capsys, monkeypatch):
    """It takes the caches and the row state in place."""
    monkeypatch.setattr("sys.argv", ["programs", "--small", "--only", "r2 engine"])
    programs.main()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("r2 engine"))
    assert line.endswith("equal 1.000")


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
