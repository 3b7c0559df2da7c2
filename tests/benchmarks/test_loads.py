"""The loads of benchmarks.gpu.loads, with the small model: every kind is served, and over HTTP too."""

import pytest

from benchmarks import records
from benchmarks.gpu import loads, trace


def test_the_small_form_serves_every_load_and_keeps_its_rows(tmp_path):
    assert loads.main(["--small", "--only", "greedy,mixed,http,http_mixed,http_paced", "--out", str(tmp_path)]) == 0
    rows = {row["case"]: row for row in records.read(tmp_path / "loads.jsonl")}
    total = sum(new for _, new in trace.SMALL_TRACE.work(512))
    assert list(rows) == ["greedy", "mixed", "http", "http_mixed", "http_paced"]
    assert rows["greedy"]["output_tokens"] == rows["http_paced"]["output_tokens"] == total and total > 100
    for row in rows.values():
        assert 0 < row["output_tokens"] <= total and row["compiled_later"] == 0 and not row.get("errors", 0)
        assert row["over_greedy"] == row["output_tokens_per_s"] / rows["greedy"]["output_tokens_per_s"]


def test_words_are_read_back():
    words = loads.Words(30)
    assert words.encode(words.decode([3, 17, 18])) == [3, 17, 18]


def test_requests_arrive_at_their_pace_and_need_the_rate_that_sets_it():
    work = [([1], 100)] * 500
    at = loads.arrivals_of(work, 1000.0)
    assert at == sorted(at) and abs(at[-1] / (500 * 100 / 700) - 1) < 0.1
    with pytest.raises(SystemExit):
        loads.main(["--small", "--only", "http_paced"])
