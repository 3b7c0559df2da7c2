"""The small form of the benchmark of several devices runs on a CPU."""

from benchmarks import records
from benchmarks.gpu import tensor_parallel


def test_a_step_and_a_prompt_are_measured_on_each_number_of_devices(tmp_path):
    tensor_parallel.main(["--small", "--ranks", "1", "2", "--dispatches", "1", "--out", str(tmp_path)])
    rows = records.read(tmp_path / "tensor_parallel.jsonl")
    cases = ["tp_small_decode_r2", "tp_small_prefill_64"]
    assert [(row["case"], row["ranks"]) for row in rows] == [(case, ranks) for ranks in (1, 2) for case in cases]
    assert all(row["ms"] > 0 and row["to_one_device"] > 0 for row in rows)
    assert all(row["to_one_device"] == 1 for row in rows[:2])


def test_a_step_on_two_data_ranks_is_measured(tmp_path):
    tensor_parallel.main(["--small", "--ranks", "2", "--data", "2", "--dispatches", "1", "--out", str(tmp_path)])
    (row,) = records.read(tmp_path / "tensor_parallel.jsonl")
    assert row["case"] == "dp2_small_decode_r2" and row["ranks"] == 2 and row["ms"] > 0
