"""The picture of what the kernel reaches: which of the kept records it draws."""

import json

from benchmarks import plot
from benchmarks.gpu import table
from pallas_kernels import tuning
from pallas_kernels.gpu.paged_attention import default_config, supports


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


def test_the_table_says_which_bars_are_met():
    rows = [
        dict(case="dec_64x4k", us=250.0), dict(case="dec_64x4k+alibi", us=260.0), dict(case="pre_1x8k", tflop_s=600.0),
        dict(case="write_8k", share_of_copy=0.8), dict(case="dec_1x32k", error="broken"),
    ]  # fmt: skip
    found = {what: (seen, sign, must) for what, seen, sign, must, _ in table.verdicts(rows)}
    assert found == {
        "dec_64x4k": (250.0, "<=", 262),
        "pre_1x8k, TFLOP/s": (600.0, ">=", 610),
        "dec_64x4k: cost of alibi": (260 / 250 - 1, "<=", 0.03),
        "write_8k, share of the copy ceiling": (0.8, ">=", 0.7),
    }


def test_what_was_tuned_is_a_kernel_that_fits_and_is_used():
    assert {kind for *_, kind in tuning.table()} == {"long", "few", "narrow"}
    for (head_dim, v_head_dim, kv_dtype, kind), tiles in tuning.table().items():
        rows = {"long": None, "few": 4, "narrow": 4}[kind]
        shape = dict(head_dim=head_dim, v_head_dim=v_head_dim, kv_dtype=kv_dtype, page_size=16)
        config = default_config(**shape, rows=rows, num_heads=32, num_kv_heads=8)
        assert not supports(config) and (config.block_kv, config.stages) == (tiles["block_kv"], tiles["stages"])
        assert (config.narrow_rows > 0, config.long_tiles) == (kind == "narrow", kind == "long")
