"""The picture of what the kernel reaches: which of the kept records it draws."""

import json

from benchmarks import plot


def test_the_newest_plain_row_of_each_case_is_drawn(tmp_path):
    row = lambda case, us, **more: json.dumps(dict(case=case, us=us, ceiling_read_tb_s=4.6) | more)
    (tmp_path / "a_run1.jsonl").write_text("\n".join([row("dec_x", 1.0), row("dec_y", 2.0), row("dec_x+alibi", 9.0)]))
    (tmp_path / "a_run2.jsonl").write_text(row("dec_x", 3.0) + "\n" + json.dumps(dict(case="dec_y", rel_err=0.1)))
    assert {case: kept["us"] for case, kept in plot.newest(tmp_path).items()} == {"dec_x": 3.0, "dec_y": 2.0}


def test_every_row_that_is_drawn_has_what_the_picture_needs():
    rows = plot.newest()
    for _, names, size, rate, ceiling, *_ in plot.PANELS:
        chosen = [row for case, row in rows.items() if case.startswith(names)]
        assert chosen and all(0 < row[rate] < row[ceiling] and row[size] > 0 for row in chosen)
