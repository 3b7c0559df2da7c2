"""benchmarks.gpu.sanitize with a program in the place of compute-sanitizer: a process for each run, verdicts, logs."""

import json

import pytest

from benchmarks.gpu import cases, sanitize

SAID = {
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed",
    "memcheck": "========= ERROR SUMMARY: 2 errors",
    "synccheck": "",
}
PROGRAM = """#!/bin/sh
while [ "$1" != --log-file ]; do
  [ "$1" = --tool ] && tool=$2
  shift
done
case $tool in
  racecheck) echo "{racecheck}" > "$2"; exit 0;;
  memcheck) echo "{memcheck}" > "$2"; exit 9;;
  *) exit 0;;
esac
"""


def test_each_run_has_a_process_a_log_and_a_verdict(tmp_path, capsys):
    """A tool that ends without its summary has crashed, whatever its exit code is."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(PROGRAM.format(**SAID))
    program.chmod(0o755)
    args = ["--sanitizer", str(program), "--log", str(tmp_path / "log"), "--only", "attention mix_fp8,layer_tail"]
    assert sanitize.main(args) == 1
    rows = [json.loads(line) for line in (tmp_path / "log" / "summary.jsonl").read_text().splitlines()]
    assert {(row["tool"], row["verdict"]) for row in rows} == {
        ("racecheck", "clean"), ("memcheck", "hazards"), ("synccheck", "crashed")
    }  # fmt: skip
    assert {row["case"] for row in rows} == {"attention mix_fp8", "layer_tail"} and len(rows) == 6
    assert (tmp_path / "log" / "racecheck_layer_tail.txt").read_text().strip() == SAID["racecheck"]
    assert sanitize.main([*args, "--tools", "racecheck"]) == 0
    assert sanitize.main([*args, "--tools", "racecheck", "--seconds", "1"]) == 1, "what was skipped is not clean"


@pytest.mark.parametrize(
    ("code", "text", "wanted"),
    [(8, "ERROR SUMMARY: 0 errors", "wrong"), (-9, "ERROR SUMMARY: 0 errors", "crashed"), (9, "", "crashed")],
)
def test_wrong_numbers_and_crashes_are_not_clean(code, text, wanted):
    assert sanitize.verdict(code, text) == wanted


def test_every_case_of_the_attention_kernel_is_a_variant():
    names = set(sanitize.variants_by_name())
    assert {f"attention {case.name}" for case in cases.CHECKED} <= names
    assert {name.split()[0] for name in names} == {
        "attention", "warp", "few", "mla", "write", "packed", "many_rows", "layer_tail"
    }  # fmt: skip
