"""`jattn bench --tune` for a chip of the warp-level kernel, with times made up: the table that it writes is obeyed."""

import json

import pytest

from benchmarks.gpu import cases, check, tune
from pallas_kernels.gpu import tile_policy_sm80

CHIP = "sm_86"


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The table of a card on which a prompt is fastest in one stage of 64 rows, and one CTA a multiprocessor."""

    def run_case(case, args, **fields):
        config = check.config_of(case, **fields)
        assert args.time and not tune.config_reasons(config)
        slow = config.wide_tiles and (config.tile_halves, config.stages, config.num_ctas) != (1, 1, 84)
        return dict(us=200.0 if slow else 100.0, rel_err=1e-3)

    monkeypatch.setattr(check, "run_case", run_case)
    path = tmp_path / "sm_86.json"
    assert tune.main(["--chip", CHIP, "--out", str(path)]) == 0
    return path


def test_the_table_has_every_shape_and_decides_the_tiles(tuned, monkeypatch):
    rows = json.loads(tuned.read_text())["rows"]
    shapes = {(row["head_dim"], row["kv_dtype"], row["kind"]) for row in rows}
    types = ("bfloat16", "float8_e4m3fn")
    assert shapes == {(d, dtype, kind) for d in (64, 128, 256) for dtype in types for kind in ("few", "long")}
    assert all(row["us"] == 100.0 and row["tried"] >= 1 for row in rows)
    prompt = cases.KernelCase(name="prompt", lengths=((4096, 4096),))
    config_of = lambda **fields: check.config_of(prompt, chip=CHIP, **fields)
    before = config_of()
    monkeypatch.setattr(tile_policy_sm80, "table_path", lambda chip: tuned)
    for cached in (tile_policy_sm80.measured_table, tile_policy_sm80._chosen):
        cached.cache_clear()
    after, given = config_of(), config_of(stages=2)
    for cached in (tile_policy_sm80.measured_table, tile_policy_sm80._chosen):
        cached.cache_clear()
    assert (after.tile_halves, after.stages, after.num_ctas) == (1, 1, 84) and before.num_ctas == 168
    assert given.stages == 2


def test_a_card_with_wrong_numbers_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "run_case", lambda case, args, **fields: dict(us=1.0, rel_err=0.5))
    with pytest.raises(RuntimeError, match="wrong numbers"):
        tune.main(["--chip", CHIP, "--out", str(tmp_path / "x.json")])
