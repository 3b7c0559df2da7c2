"""benchmarks.gpu.two_cards: parts in processes of their own, of which one that fails or hangs stops no other."""

import sys
import time

import pytest

from benchmarks.gpu import large_model, two_cards

PART = """
import pathlib, sys, time
name, what, shared = sys.argv[1:]
here = pathlib.Path(shared)
if what == "never ready": sys.exit(3)
(here / f"{name}.ready").touch()
while not (here / f"{name}.go").exists(): time.sleep(0.01)
order = here / "order"
order.write_text((order.read_text() if order.exists() else "") + name)
if what == "hang": time.sleep(1000)
if what == "fail": raise ValueError("this part fails")
print("figures of", name, flush=True)
"""


@pytest.fixture
def parts(tmp_path):
    made = []

    def start(**whats):
        for name, what in whats.items():
            command = [sys.executable, "-c", PART, name, what, str(tmp_path)]
            made.append(two_cards.Process(name, command, str(tmp_path)))
        return made

    yield start
    for process in made:
        process.end()


def test_parts_that_fail_or_hang_stop_no_other(parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(two_cards.LIMITS, "b", 1)
    processes = parts(a="fail", b="hang", c="never ready", d="ok")
    assert two_cards.run_in_turn(processes, time.perf_counter() + 100) == 3
    said = capsys.readouterr().out
    assert "ValueError: this part fails" in said and "== b: ended, out of time" in said
    assert "== c: did not start" in said and "figures of d" in said
    assert (tmp_path / "order").read_text() == "abd"  # one at a time
    assert all(process.process.poll() is not None for process in processes)


def test_no_part_begins_at_the_end(parts, tmp_path, capsys):
    assert two_cards.run_in_turn(parts(a="ok"), time.perf_counter() + 5) == 0
    assert "skipped for time: a" in capsys.readouterr().out and not (tmp_path / "order").exists()


def test_agreement_counts_tokens_before_the_first_other_one():
    assert two_cards.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [0, 5, 6]]) == dict(
        first_equal=0.5, equal_before=1.0
    )


def test_the_folder_of_a_large_model_loads(tmp_path):
    from jattn import models

    config = large_model.CONFIG | large_model.SMALL
    large_model.write_folder(tmp_path, config)
    read, params = models.load(tmp_path)
    assert len(read.layers) == 4 and params["embed"].dtype == "bfloat16"
    stds = [params["layers"][i]["mlp"]["down"]["kernel"].astype("float32").std() * 256**0.5 for i in range(4)]
    assert all(0.9 < std < 1.1 for std in stds)
    assert not (params["layers"][0]["attn"]["q"]["kernel"] == params["layers"][1]["attn"]["q"]["kernel"]).all()
    cut, of_cut = models.load(large_model.cut_folder(tmp_path, config))
    assert len(cut.layers) == large_model.CUT
    assert (of_cut["layers"][1]["mlp"]["up"]["kernel"] == params["layers"][1]["mlp"]["up"]["kernel"]).all()
