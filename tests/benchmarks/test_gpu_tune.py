"""`jattn bench --tune` for a chip of the warp-level kernel, with times made up: the table that it writes is obeyed."""

import json

import pytest

from benchmarks.gpu import cases, check, tune
from jattn.device import Chip
from pallas_kernels.gpu import tile_policy_sm80
from pallas_kernels.gpu.supports_sm80 import supports

CHIP, HOPPER = "sm_86", Chip("gpu", "sm_90")


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The table of a card on which a prompt is fastest in one stage of 64 rows, and one CTA a multiprocessor."""

    def run_case(case, args, **fields):
        config = check.config_of(case, **fields)
        assert args.time and not tune.config_reasons(config)
        slow = config.wide_tiles and (config.tile_halves, config.stages, config.num_ctas) != (1, 1, 84)
        return dict(us=200.0 if slow else 100.0, rel_err=1e-3)

    monkeypatch.setattr(check, "run_case", run_case)
    monkeypatch.setattr(tune, "version_reasons", lambda chip: [])
    monkeypatch.setattr(tune.device, "detect", lambda: HOPPER)
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
    forget()
    after, given = config_of(), config_of(stages=2)
    forget()
    assert (after.tile_halves, after.stages, after.num_ctas) == (1, 1, 84) and before.num_ctas == 168
    assert given.stages == 2


@pytest.fixture
def config_with(tmp_path, monkeypatch):
    """The tiles of a shape where the chip's table is this text."""

    def config_of(text, **fields):
        path = tmp_path / "sm_86.json"
        path.write_text(text)
        monkeypatch.setattr(tile_policy_sm80, "table_path", lambda chip: path)
        forget()
        return tile_policy_sm80.warp_config(**SHAPE | fields)

    yield config_of
    forget()


def forget():
    for cached in (tile_policy_sm80.measured_table, tile_policy_sm80._chosen):
        cached.cache_clear()


SHAPE = dict(chip=CHIP, num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, page_size=16)
ROW = dict(head_dim=128, v_head_dim=128, kv_dtype="bfloat16", kind="long", tile_halves=1, stages=1, ctas=1)
BROKEN_ROWS = (ROW | dict(stages="two"), ROW | dict(ctas=0), {name: ROW[name] for name in ROW if name != "ctas"})
BROKEN = ["", "{", "[]", "{}", '{"rows": 3}', '{"rows": [3]}', "[" * 10**5]
BROKEN += [*(json.dumps(dict(rows=[row])) for row in BROKEN_ROWS)]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:80])
def test_a_file_that_is_no_table_is_refused_by_name(config_with, text):
    with pytest.raises(ValueError, match="sm_86.json is not a table of tile sizes .*jattn bench --tune"):
        config_with(text)


@pytest.mark.parametrize("tiles", [dict(stages=4), dict(tile_halves=3), dict(ctas=9), dict(tile_halves=2, ctas=2)])
def test_a_row_that_the_chip_cannot_have_is_not_used(config_with, tiles):
    """It would take the shape from pallas_gpu, and 'auto' would choose another backend in silence."""
    rule = config_with('{"rows": []}')
    assert config_with(json.dumps(dict(rows=[ROW | tiles]))) == rule and not supports(rule)


@pytest.mark.parametrize("chip", ["nvidia_h200", "tpu_v5e", "../sm_86", "x" * 300])
def test_the_table_of_another_kernel_or_path_is_not_read(chip):
    """The name of a card for that of its chip: an error said to delete the tiles measured on H200s."""
    reasons = supports(tile_policy_sm80.warp_config(**SHAPE | dict(chip=chip)))
    assert any(f"chip {chip}: wanted one of" in reason for reason in reasons)


def test_a_row_of_long_tiles_is_for_no_batch_of_64_rows(config_with):
    """Two halves would compute 64 rows that no request has."""
    table = json.dumps(dict(rows=[ROW | dict(tile_halves=2), ROW | dict(kind="few", stages=2, later_column="x")]))
    assert config_with(table).tile_halves == 2
    assert config_with(table, rows=64).tile_halves == 1
    assert (config_with(table, rows=4).stages, config_with(table, rows=4).num_ctas) == (2, 84)


def test_what_cannot_be_tuned_or_kept_is_refused_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "run_case", lambda *args, **fields: pytest.fail("measured"))
    for here, out, error in (
        (Chip("gpu", "sm_75"), tmp_path / "x.json", "chip sm_75: wanted one of"),
        (Chip("gpu"), tmp_path / "x.json", "chip unknown: wanted one of"),
        (HOPPER, tmp_path / "no" / "x.json", "No such file"),
        (HOPPER, tmp_path, "is a folder"),
        (Chip("cpu"), tmp_path / "x.json", "needs a GPU; this process runs on cpu"),
    ):
        monkeypatch.setattr(tune.device, "detect", lambda here=here: here)
        for chosen in ([], ["--chip", CHIP]) if here == Chip("cpu") else ([],):
            with pytest.raises((ValueError, OSError), match=error):
                tune.main(["--out", str(out), *chosen])
    assert not list(tmp_path.iterdir())


def test_a_card_with_wrong_numbers_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "version_reasons", lambda chip: [])
    monkeypatch.setattr(tune.device, "detect", lambda: HOPPER)
    monkeypatch.setattr(check, "run_case", lambda case, args, **fields: dict(us=1.0, rel_err=0.5))
    with pytest.raises(RuntimeError, match="wrong numbers"):
        tune.main(["--chip", CHIP, "--out", str(tmp_path / "x.json")])
