"""The targets of the CPU's benchmarks are judged rightly, on rows made up here: nothing is timed."""

import json

from benchmarks import cases, roofline, targets, timing


def row(case, backend="cpu_native", ms=1.0, **more):
    return {"case": case, "backend": backend, "ms": ms, **more}


def verdict(*rows):
    return [(found.target, found.met) for found in targets.judge(list(rows))]


def test_every_case_has_a_target():
    assert all(targets.vllm_over_native(case.name) >= 1.0 for case in cases.CPU)
    assert targets.vllm_over_native("dec_1x32k_bf16") == 1.5 and targets.vllm_over_native("dec_64x4k_p16_f32") == 1.25


def test_ratios_costs_and_writes_are_judged_on_the_right_side():
    assert verdict(row("pre_1x2k_bf16", "vllm", ratio_to_native=1.71)) == [(1.7, True)]
    assert verdict(row("pre_1x2k_bf16", "vllm", ratio_to_native=1.69)) == [(1.7, False)]
    assert verdict(row("pre_1x2k_bf16", variant="sinks", cost=1.16, base="off")) == [(1.15, False)]
    assert verdict(row("dec_16x8k_window512", variant="window_512", cost=1.2, base="context_512")) == [(1.3, True)]
    assert verdict(row("dec_16x8k_window512", variant="context_512", cost=1.0, base="context_512")) == []
    assert verdict(row("write_64_bf16_16mib", ms=0.3, temp_mib=0.0)) == [(0.2, False), (0.01, True)]
    assert verdict(row("write_64_bf16_16mib", ms=0.1, temp_mib=32.0)) == [(0.2, True), (0.01, False)]
    assert verdict(row(targets.FP8, ms=2.0), row(targets.FP8_AS_BF16, ms=1.0)) == [(1.0, False)]


def test_a_figure_of_several_sweeps_is_that_of_all_their_rounds():
    rounds = timing.Rounds()
    rounds.add("dec", {"own": timing.Times((1.0, 1.0)), "other": timing.Times((5.0, 5.0))})  # a busy minute
    rounds.add("dec", {"own": timing.Times((1.0, 1.0, 0.5)), "other": timing.Times((2.0, 2.0, 1.0))})
    pre = rounds.add("pre", {"own": timing.Times((3.0,)), "other": timing.Times((3.0,))})
    dec = rounds.add("dec", {"own": timing.Times((1.0, 1.0)), "other": timing.Times((2.0, 2.0))})
    assert timing.ratio(dec, "other", "own") == 2.0 and dec["own"].best == 0.5 and len(dec["own"].rounds) == 7
    assert timing.ratio(pre, "other", "own") == 1.0


def test_pure_xla_is_judged_where_it_has_a_target():
    def both(case, vllm, sdpa):
        return verdict(row(case, "vllm", ratio_to_native=vllm), row(case, "sdpa", ratio_to_native=sdpa))[1:]

    assert both("dec_16x4k_p128_bf16", 3.0, 4.0) == [(0.75, True)]
    assert both("pre_1x2k_f32", 2.0, 3.0) == [(0.7, False)]
    assert both("dec_16x4k_p16_f32", 2.0, 3.0) == both("dec_1x32k_bf16", 2.0, 3.0) == both(targets.FP8, 2.0, 3.0) == []


def test_the_roofline_takes_the_newest_rows_by_wall_clock(tmp_path):
    shape = dict(flop=4e9, bytes=2e9, clock="wall", read_gb_s=40.0)
    old, new = row("a", best_ms=9.0, **shape), row("a", best_ms=100.0, **shape)
    rows = [old, new, row("a", best_ms=1.0, **shape | {"clock": "processor"}), row("b", cost=1.0, **shape)]
    assert roofline.drawable(rows) == [new]
    assert roofline.point(new) == (2.0, 40.0)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows[2]) + "\n")
    assert roofline.main(["--rows", str(path)]) == 1
