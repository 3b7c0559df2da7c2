"""Lists of names on command lines: what is not known is refused before anything runs."""

import pytest

from benchmarks import gradient_cpu
from benchmarks.gpu import check, jobs, sanitize, served, sweep, table, trace, write
from benchmarks.tpu import aot, options
from jattn import device
from jattn.device import Chip
from tests import on_card
from tests.models import on_card as models_on_card

CALLS = {
    "served": served.main,
    "aot": aot.main,
    "on_card": on_card.main,
    "models.on_card": models_on_card.main,
    "sanitize": sanitize.main,
    "check": check.main,
    "table": table.main,
    "trace": trace.main,
    "write": write.main,
    "sweep": sweep.main,
    "gradient_cpu": gradient_cpu.main,
    "options": options.main,
}
REFUSED = [
    ("served", ["--only", "llama_9b"], "--only: no case llama_9b; there are llama_8b, llama_8b int4_g64"),
    ("served", ["--only", "llama_8b r2"], "no case llama_8b r2"),
    ("served", ["--only", "llama_8b r1,,r64"], "no case r64"),
    ("served", ["--list", "--only", "llama_9b"], "no case llama_9b"),
    ("served", ["--only", ","], "--only: ',' has no name"),
    ("served", ["--only", "llama_8b r1"], "it needs a GPU; this process runs on cpu"),
    ("served", ["--list", "--kernels", "-1"], "--kernels: -1 is less than 0"),
    ("aot", ["--only", "tall"], "--only: no shape tall"),
    ("aot", ["--chips", "v5e,v9"], "--chips: no chip v9; there are"),
    ("on_card", ["--only", "no such label"], "--only: no label has 'no such label'"),
    ("sanitize", ["--list", "--only", "packed,mixtures"], "--only: no variant for mixtures; there are "),
    ("check", ["--only", "dec_65"], "--only: no case for dec_65; there are "),
    ("table", ["--only", "dec_64x4k,dec_65"], "--only: no case for dec_65; there are "),
    ("trace", ["--small", "--only", "trace_2b"], "--only: no case trace_2b; there are "),
    ("write", ["--only", "write_9k"], "--only: no case for write_9k; there are "),
    ("sweep", ["--only", "no such batch"], "--only: no batch has 'no such batch' in its name"),
    ("gradient_cpu", ["--only", "int8"], "--only: no case for int8; there are "),
    ("options", ["--only", "no such cell"], "--only: no cell of "),
    ("models.on_card", ["--only", "lama"], "--only: no model lama; there are llama_1b, "),
    ("models.on_card", ["--only", "bert"], "no model bert"),
    ("models.on_card", ["--only", "llama int5"], "no form int5 of llama; there are int4_g64"),
    ("models.on_card", ["--only", "llama int8 nvfp4"], "no form int8 nvfp4 of llama"),
    ("models.on_card", ["--only", " , "], "--only: ' , ' has no name"),
    ("models.on_card", ["--only", "llama", "--processes", "0"], "--processes: 0 is less than 1"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "argv", "error"), REFUSED, ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_what_is_not_known_is_refused(program, argv, error, monkeypatch, capsys):
    monkeypatch.setattr(device, "detect", lambda: Chip("cpu"))
    with pytest.raises(SystemExit) as refused:
        CALLS[program](argv)
    assert refused.value.code == 2 and error in capsys.readouterr().err


def test_names_may_have_further_spaces(monkeypatch, capsys):
    assert served.main(["--list", "--only", " llama_8b  int4_g64 r1 ,deepseek_v2_lite,"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["llama_8b int4_g64 r1", *(f"deepseek_v2_lite {batch}" for batch in served.BATCHES)]


def test_a_part_that_no_label_of_a_job_has_counts_as_a_fault(capsys):
    label = dict(part="made", case="one")
    main = lambda only: jobs.main("made", "Made up.", lambda: [(label, lambda: dict(ok=True))], 60, ["--only", only])
    assert main("one") == 0 and main("made,one") == 0
    assert main("one,two") == 1
    assert "--only: no label has two" in capsys.readouterr().out
