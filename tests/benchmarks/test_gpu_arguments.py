"""Arguments and machines that the programs for the warp-level kernel refuse, before anything runs."""

import pytest

from benchmarks.gpu import jobs, registers, warp
from jattn import device
from jattn.device import Chip


@pytest.mark.parametrize(
    ("here", "argv", "error"),
    [
        (Chip("cpu"), [], "needs a GPU; this process runs on cpu"),
        (Chip("cpu"), ["--chip", "sm_86"], "needs a GPU"),
        (Chip("gpu", "sm_90"), ["--chip", "sm_75"], "invalid choice: 'sm_75'"),
        (Chip("gpu", "sm_75"), [], "no kernel for sm_75; --chip takes one of sm_80"),
        (Chip("gpu"), [], "no kernel for this GPU"),
    ],
)
def test_the_check_of_a_card_refuses_another_machine(here, argv, error, monkeypatch, capsys):
    monkeypatch.setattr(device, "detect", lambda: here)
    with pytest.raises(SystemExit):
        warp.main(argv)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "missing", "error"),
    [
        ([], "", "required: chip"),
        (["sm_75"], "", "invalid choice: 'sm_75'"),
        (["sm_86", "write_kv_pages", "decode_d7"], "", "no case decode_d7; there are decode_d16_bf16"),
        (["sm_86"], "ptxas", "it needs ptxas"),
    ],
)
def test_the_compilation_for_a_chip_refuses_what_it_cannot_do(argv, missing, error, monkeypatch, capsys):
    monkeypatch.setattr(registers, "missing", lambda: missing)
    with pytest.raises(SystemExit):
        registers.main(argv)
    assert error in capsys.readouterr().err


def test_a_case_for_which_the_card_is_too_small_is_not_a_wrong_number(tmp_path, capsys):
    def too_large():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes")

    def broken():
        raise RuntimeError("INTERNAL: illegal address")

    args = jobs.parser_of("warp", "Some measurements.", seconds=60).parse_args(["--out", str(tmp_path)])
    assert jobs.run([(dict(case="large"), too_large), (dict(case="broken"), broken)], args, {}, "warp") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no memory large") and lines[1].startswith("WRONG broken")
