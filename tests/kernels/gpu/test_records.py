"""Records of measurements: what is kept, what is drawn, and how targets and tuned tiles are read from them."""

import pytest

from benchmarks import plot, records
from benchmarks.gpu import cases, flash2, table, warp
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config, measured_table


def test_a_new_row_replaces_the_one_that_answers_the_same_question(tmp_path):
    row = lambda case, us, **more: dict(case=case, us=us, chip="x") | more
    records.write([row("a", 1.0), row("b", 2.0), row("a", 3.0, variant="v")], "attention", tmp_path)
    records.write([row("a", 4.0)], "attention", tmp_path)
    records.write([row("a", 5.0)], "kv_write", None)
    kept = records.read(tmp_path / "attention.jsonl")
    assert [(r["case"], r["us"]) for r in kept] == [("b", 2.0), ("a", 3.0), ("a", 4.0)]
    assert {r["bench"] for r in kept} == {"attention"} and not (tmp_path / "kv_write.jsonl").exists()


def test_every_kept_row_says_what_when_and_where():
    for path in records.RESULTS.glob("*/*"):
        rows = records.read(path)
        assert path.suffix == ".jsonl" and rows == records.newest(rows), path
        for row in rows:
            assert row["bench"] == path.stem and all(row[name] for name in ("case", "date", "commit", "chip", "jax")), (
                row
            )


def test_the_work_of_a_case_is_that_of_its_visible_pairs():
    lengths, window = ((1, 40), (7, 7), (5, 60)), 16
    pairs = lambda left: sum(s - q + i >= k > s - q + i - left for q, s in lengths for i in range(q) for k in range(s))
    kind = dict(name="x", lengths=lengths, num_heads=3, head_dim=64, v_head_dim=32)
    assert cases.KernelCase(**kind).flops() == pairs(99) * 3 * 2 * 96
    assert cases.KernelCase(**kind, options=(("window", window),)).flops() == pairs(window) * 3 * 2 * 96


def test_a_peer_is_given_the_same_case():
    assert flash2.case_of("pre_1x8k_d256").head_dim == flash2.case_of("pre_1x8k_d256").v_head_dim == 256
    for name in ("mixed_32d_2p", "pre_1x8k+window1024", "dec_64x32k+window1024"):
        assert flash2.case_of(name) == next(case for case in cases.TIMED if case.name == name)


def test_a_card_gets_a_row_of_the_table():
    row = lambda case, us, **more: dict(case=case, us=us, ok=True) | more
    rows = [
        row("read_4g", 9.0, tb_s=4.0), row("dec_64x4k", 250.0, tb_s=3.6, variant="default"),
        row("dec_64x4k", 400.0, variant="flash2"), row("pre_1x8k", 1600.0, variant="default"),
        row("pre_1x8k_d64", 7.0, variant="default", ok=False), row("mixed_32d_2p", 5.0, variant="hopper"),
    ]  # fmt: skip
    cells = dict(zip(("card", *warp.TABLE), warp.table_row("A100", rows).strip("| ").split(" | "), strict=False))
    assert {name: cell for name, cell in cells.items() if cell.strip()} == {
        "card": "A100", "dec_64x4k": "250, 90 %, x1.60", "pre_1x8k": "1600"
    }  # fmt: skip


def test_a_plain_row_with_its_ceilings_is_drawn():
    row = lambda case, us, **more: dict(case=case, us=us, ceiling_read_tb_s=4.6) | more
    rows = [row("dec_x", 1.0), row("dec_x+alibi", 9.0), dict(case="dec_y", rel_err=0.1), dict(case="dec_z", us=2.0)]
    assert plot.drawable(rows) == rows[:1]


def test_every_row_that_is_drawn_has_what_the_picture_needs():
    rows = plot.drawable(records.read(plot.RECORDS))
    for _, names, size, rate, ceiling, *_ in plot.PANELS:
        chosen = [row for row in rows if row["case"].startswith(names)]
        assert chosen and all(0 < row[rate] < row[ceiling] and row[size] > 0 for row in chosen)


def test_the_table_says_which_targets_are_met():
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


@pytest.mark.parametrize("card", ["nvidia_h200", "nvidia_h100_80gb_hbm3"])
def test_what_was_tuned_is_a_kernel_that_fits_and_is_used(card):
    assert {kind for *_, kind in measured_table(card)} == {"long", "few", "narrow"}
    for (head_dim, v_head_dim, kv_dtype, kind), tiles in measured_table(card).items():
        rows = {"long": None, "few": 16, "narrow": 4}[kind]
        shape = dict(head_dim=head_dim, v_head_dim=v_head_dim, kv_dtype=kv_dtype, page_size=16)
        config = default_config(**shape, rows=rows, num_heads=32, num_kv_heads=8, card=card)
        assert not supports(config) and (config.block_kv, config.stages) == (tiles["block_kv"], tiles["stages"])
        assert (not config.has_short_tiles, config.long_tiles) == (kind == "narrow", kind == "long")


def test_a_card_without_a_table_takes_the_h200s():
    assert measured_table("nvidia_gh200") == measured_table("") == measured_table("nvidia_h200")
    assert measured_table("nvidia_h100_80gb_hbm3") != measured_table("")
