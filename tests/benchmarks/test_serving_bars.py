"""The table of serving bars: a figure that is missing or short is MISSED, and the command then fails."""

import argparse
import json

import pytest

from benchmarks.gpu import serving_bars
from benchmarks.gpu.serving_bars import BARS


def rows_that_meet(bars):
    """{file: rows} in which each figure is at its limit."""
    files: dict = {}
    for bar in bars:
        rows = files.setdefault(bar.bench, {})
        rows.setdefault((bar.case, bar.variant), dict(case=bar.case, variant=bar.variant))[bar.figure] = bar.limit
    return {bench: list(rows.values()) for bench, rows in files.items()}


def judged(monkeypatch, capsys, files) -> tuple[int, str]:
    """(exit code, what was printed) if the benchmarks leave these rows."""

    def leave_rows(args, folder):
        for bench, rows in files.items():
            (folder / f"{bench}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(serving_bars, "run_all", leave_rows)
    return serving_bars.main([]), capsys.readouterr().out


def test_all_bars_met(monkeypatch, capsys):
    code, table = judged(monkeypatch, capsys, rows_that_meet(BARS))
    assert code == 0
    assert "MISSED" not in table


@pytest.mark.parametrize("bar", BARS, ids=str)
@pytest.mark.parametrize("change", ["worse", "missing"])
def test_one_bar_missed(bar, change, monkeypatch, capsys):
    files = rows_that_meet(BARS)
    row = next(row for row in files[bar.bench] if (row["case"], row["variant"]) == (bar.case, bar.variant))
    if change == "worse":
        row[bar.figure] += -0.001 if bar.at_least else 0.001
    else:
        del row[bar.figure]
    code, table = judged(monkeypatch, capsys, files)
    assert code == 1
    assert table.count("MISSED") == 1


def test_a_benchmark_that_hangs_is_cut_off(monkeypatch, tmp_path, capfd):
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(serving_bars, "RUNS", (("stuck",), ("later",)))
    serving_bars.run_all(argparse.Namespace(seconds=1.5, small=False), tmp_path)
    printed = capfd.readouterr().out
    assert "stuck: exit cut off (-9)" in printed
    assert "later: no time left" in printed
