"""benchmarks.gpu.sanitize with a program in the place of compute-sanitizer: a process for each run, verdicts, logs."""

import json
import pathlib
import time
from unittest import mock

import jax
import pytest

from benchmarks.gpu import cases, faults, sanitize

SAID = {
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "memcheck": "========= ERROR SUMMARY: 2 errors",
    "synccheck": "",
}
PROGRAM = """#!/bin/sh
while [ "$1" != --log-file ]; do
  [ "$1" = --tool ] && tool=$2
  shift
done
log=$2; shift 2
case "$tool $*" in
  *--case\\ control*) {control};;
  racecheck*) echo "{racecheck}" > "$log"; exit 0;;
  memcheck*) echo "{memcheck}" > "$log"; exit 9;;
  *) exit 0;;
esac
"""
SEES = 'echo "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)" > "$log"; exit 1'
ARGS = ["--only", "attention mix_fp8,layer_tail", "--jobs", "1"]


@pytest.fixture
def called(tmp_path):
    """Calls the benchmark with a program in the place of the sanitizer; (exit code, rows)."""

    def call(*args, control=SEES, **said):
        program = tmp_path / "compute-sanitizer"
        program.write_text(PROGRAM.format(**SAID | said, control=control))
        program.chmod(0o755)
        (tmp_path / "summary.jsonl").unlink(missing_ok=True)
        code = sanitize.main(["--sanitizer", str(program), "--log", str(tmp_path), *ARGS, *args])
        return code, [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]

    return call


def test_each_run_has_a_process_and_a_verdict(called, tmp_path):
    """A tool that ends without its summary has crashed, whatever its exit code is."""
    code, rows = called()
    assert code == 1
    found = {(row["tool"], row["verdict"]) for row in rows if not row["case"].startswith("control")}
    assert found == {("racecheck", "clean"), ("memcheck", "hazards"), ("synccheck", "crashed")}
    assert {row["case"] for row in rows} == {"attention mix_fp8", "layer_tail", "control race", "control bounds"}
    assert len(rows) == 8 and sum(row["verdict"] == "seen" for row in rows) == 2
    assert f"##### racecheck layer_tail: clean\n{SAID['racecheck']}" in (tmp_path / "logs.txt").read_text()
    assert called("--tools", "racecheck")[0] == 0
    assert called("--tools", "racecheck", "--seconds", "1") == (1, []), "what was skipped is not clean"


def test_a_tool_that_does_not_see_a_planted_fault_proves_nothing(called):
    """A filter of names that matches no kernel, or a device that is not supported, would leave every run clean."""
    for control in ('echo "RACECHECK SUMMARY: 0 hazards displayed" > "$log"; exit 0', "echo not supported; exit 255"):
        code, rows = called("--tools", "racecheck", control=control)
        assert code == 1 and [row["verdict"] for row in rows] == ["blind"]
    assert "not supported" in rows[0]["said"]


def test_what_runs_for_too_long_ends_with_its_children(called, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "LEAST", 0)
    endless = f'sh -c "echo \\$\\$ > {tmp_path}/child; exec sleep 600"; exit 0'
    code, rows = called("--tools", "racecheck", "--seconds", "3", control=endless)
    assert code == 1 and rows[0]["verdict"] == "blind" and rows[0]["code"] is None
    child = pathlib.Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    alive = lambda: child.exists() and child.read_text().split()[2] not in "ZX"
    end = time.monotonic() + 60
    while alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive()


def test_the_program_that_is_checked_gets_a_share_of_the_memory(called, tmp_path):
    """And the parent touches no device: with one backend that is not there, it would fail."""
    kept = f'env > "{tmp_path}/env"; {SEES}'
    assert called("--tools", "memcheck", "--only", "layer_tail", control=kept)[0] == 1
    env = (tmp_path / "env").read_text().splitlines()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in env and "XLA_PYTHON_CLIENT_ALLOCATOR=platform" in env


def test_says_that_there_is_no_sanitizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    with pytest.raises(SystemExit):
        sanitize.main(["--log", str(tmp_path), *ARGS])
    assert "--sanitizer PATH says where it is" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["race", "bounds"])
def test_planted_faults_lower_for_cuda(fault):
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    with mock.patch.object(faults, "_run", faults.kernel_of):
        kernel = getattr(faults, fault)()["out"]
    assert jax.export.export(kernel, platforms=["cuda"], disabled_checks=[check])().out_avals[0].shape == (128,)


@pytest.mark.parametrize(
    ("code", "text", "wanted"),
    [
        (8, "ERROR SUMMARY: 0 errors", "wrong"),
        (-9, "ERROR SUMMARY: 0 errors", "crashed"),
        (9, "", "crashed"),
        (0, "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", "hazards"),
    ],
)
def test_wrong_numbers_and_crashes_are_not_clean(code, text, wanted):
    assert sanitize.verdict(code, text) == wanted


def test_every_case_of_the_attention_kernel_is_a_variant():
    names = set(sanitize.variants_by_name())
    assert {f"attention {case.name}" for case in cases.CHECKED} <= names
    assert {name.split()[0] for name in names} == {
        "attention", "warp", "few", "mla", "write", "packed8", "packed70", "many_rows", "experts",
        "draw", "sampling_floor", "layer_tail", "tail_norms_after", "tail_pairs", "mixture", "control",
    }  # fmt: skip
