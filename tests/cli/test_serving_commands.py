"""generate, bench, serve, doctor and the second half of demo, with the embedded model."""

import argparse
import ast
import dataclasses
import io
import json
import re
import types

import jax
import pytest

from jattn import cli
from jattn.cli import bench, doctor, generate, options, screen
from jattn.cli.trace import Arrival, make_trace
from jattn.device import Chip
from jattn.embedded import show
from jattn.engine import request as outputs
from jattn.engine.stats import Stats

# One set of shapes for all, so that they share their programs; --deterministic has a single one.
SMALL = ["--num-blocks", "25", "--block-size", "4", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
SMALL += ["--max-model-len", "64", "--deterministic", "--backend", "sdpa"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_generate_adds_and_streams(capsys):
    assert cli.main(["generate", "740+583=", "--stop", r"\n", *SMALL]) == 0
    assert capsys.readouterr().out == "2340\n"


def test_a_terminal_shows_that_generate_waits_for_its_first_token(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", err := Terminal())
    assert cli.main(["generate", "740+583=", "--stop", r"\n", *SMALL]) == 0
    assert capsys.readouterr().out == "2340\n" and "waiting for the first token" in err.getvalue()


def test_a_terminal_shows_how_many_prompts_are_done(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", err := Terminal())
    monkeypatch.setattr(screen, "_console", lambda stream: None)
    assert cli.main(["generate", "740+583=", "100+200=", "--stop", r"\n", *SMALL]) == 0
    assert capsys.readouterr().out == "740+583=2340\n100+200=3000\n"
    assert err.getvalue().endswith("generating 1/2: prompts\ngenerating 2/2: prompts\n")


def test_generate_on_two_devices(capsys):
    assert cli.main(["generate", "740+583=", "--stop", r"\n", *SMALL, "--tensor-parallel", "2"]) == 0
    assert capsys.readouterr().out == "2340\n"


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["serve"], ["bench", "serving"]], ids=lambda command: command[0]
)
def test_the_dtype_of_the_weights_is_that_of_the_option(command, capsys):
    parsed = lambda *more: cli.make_parser().parse_args([*command, *SMALL, *more])
    dtypes = lambda args: {x.dtype.name for x in jax.tree.leaves(options.make_engine(args).params)}
    for more, wanted in (([], "bfloat16"), (["--dtype", "auto"], "bfloat16"), (["--dtype", "float16"], "float16")):
        assert dtypes(parsed(*more)) == {wanted}
    with pytest.raises(SystemExit):
        parsed("--dtype", "int8")
    assert "invalid choice: 'int8'" in capsys.readouterr().err


def test_generate_reads_a_file_and_writes_json(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("740+583=\n\n100+100=\n")
    assert cli.main(["generate", "--file", str(file), "--stop", r"\n", "--json", *SMALL]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["prompt"]: row["outputs"][0]["text"] for row in rows} == {"740+583=": "2340", "100+100=": "2000"}
    assert cli.main(["generate", "740+583=", "100+100=", "--stop", r"\n", *SMALL]) == 0
    assert capsys.readouterr().out == "740+583=2340\n100+100=2000\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temperature", "-1", "--top-p", "2"], "temperature=-1.0.*top_p=2.0"),
        (["generate", "x", "--model", "no-such-folder"], "no-such-folder"),
        (["generate", "x", "--model", ""], "--model is empty"),
        (["generate", "x", "--chat", *SMALL], "no chat template"),
        (["generate", "x", "--file", "y"], "not both"),
        (["generate", "x", "a\udcff", "--model", "no-such-folder"], r"prompt 2, 'a\\udcff', is not UTF-8"),
        (["generate", "x", *SMALL, "--max-num-seqs", "99"], "max_num_batched_tokens=32 must be at least"),
        (["generate", "x", *SMALL, "--backend", "sdpb"], "sdpb"),
        (["generate", "x", *SMALL, "--tensor-parallel", "999"], "tensor_parallel=999: 999 devices are needed"),
        (["generate", "x", *SMALL, "--data-parallel", "64"], "data_parallel=64: 64 devices are needed"),
        (
            ["generate", "x", *SMALL, "--decode-context-parallel", "64"],
            "decode_context_parallel=64: 64 devices are needed",
        ),
        (["serve", "--api-key-env", "JATTN_TEST_UNSET"], "JATTN_TEST_UNSET"),
        (["serve", "--model-name", "", "--model", "no-such-folder"], "--model-name is empty"),
        (["serve", "--grace", "inf"], "grace=inf must be a finite number of seconds"),
        (["bench", "serving", *SMALL, "--mean-input", "1e300"], r"--mean-input 1e\+300 must be at most 64"),
        (["bench", "serving", *SMALL, "--mean-output", "1e308"], r"--mean-output 1e\+308 must be at most 64"),
        (["bench", "serving", *SMALL, "--max-model-len", "2"], "at least 3 tokens, and 2"),
        (["generate", "x", *SMALL, "--process-timeout", "5"], "belong together"),
        (["generate", "x", *SMALL, "--coordinator", "127.0.0.1:1"], "belong together"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_traceback(arguments, words, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("jattn: ") and re.search(words, said) and "Traceback" not in said


def test_a_prompt_that_is_too_long_fails_aloud(capsys):
    assert cli.main(["generate", "1" * 70, *SMALL]) == 1
    assert "70 tokens" in capsys.readouterr().err


def test_stop_texts_are_kept_but_for_their_escapes(capsys):
    """The expected text is what Python reads from the literal."""
    read = lambda text: options.unescaped("--stop", text)
    for literal in (r"\n", r"a\tb", r"é\n", "é€😀", r"\x41\u20ac\U0001f600é", r"\\n", r"\0\012", "", r"\\é", r"\'"):
        assert read(literal) == ast.literal_eval(f'"{literal}"')
    for bad in ("\\x", "x\\", "\\q", "\\€", r"\ud800", r"\U00110000", r"\u12", "\udce9"):
        assert cli.main(["generate", "x", "--stop", bad, *SMALL]) == 2
        assert re.match(r"jattn: --stop '.*' cannot be read: ", capsys.readouterr().err), bad


def test_json_is_written_in_any_encoding_and_text_that_it_lacks_is_a_sentence(monkeypatch, capsys):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    few = ["--max-tokens", "1", *SMALL]
    assert cli.main(["generate", "é=", "--json", *few]) == 0
    assert json.loads(written.getvalue())["prompt"] == "é="
    assert cli.main(["generate", "1=", "é=", *few]) == 2
    assert r"ascii, has no '\xe9': set PYTHONIOENCODING" in capsys.readouterr().err


def test_a_prompts_file_has_a_prompt_a_line_and_other_separators_are_text(tmp_path, monkeypatch, capsys):
    wanted = ["a\u2028b", "c\x0bd\x85e\rf", "é"]
    data = "\ufeffa\u2028b\r\n\nc\x0bd\x85e\rf\né".encode()
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    args = argparse.Namespace(prompts=[], file=file)
    assert generate._prompts(args) == wanted
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert generate._prompts(argparse.Namespace(prompts=[], file=None)) == wanted
    file.write_bytes(b"ab\xff")
    assert cli.main(["generate", "--file", str(file), *SMALL]) == 2
    assert "prompts.txt is not UTF-8 (invalid start byte at byte 2)" in capsys.readouterr().err


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_gets_tables_and_bars_and_without_rich_plain_text(has_rich, monkeypatch):
    """The words are the same in both cases, square brackets included."""
    out, err = Terminal(), Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    if not has_rich:
        monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: None)
    screen.table(("who", "what"), [("a", "jattn[models]"), ("b", "2")], plain="who what: plain")
    with screen.progress("compiling") as report:
        report(0, 2, "16 tokens [of 4]")
    if has_rich:
        assert "jattn[models]" in out.getvalue() and "plain" not in out.getvalue()
        assert "16 tokens [of 4]" in err.getvalue() and "0%" in err.getvalue()
    else:
        assert out.getvalue() == "who what: plain\n" and err.getvalue() == "compiling 1/2: 16 tokens [of 4]\n"


def test_a_log_gets_a_line_of_a_long_task_now_and_then_and_none_of_a_short_one(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 12.0, 12.5, 13.0, 30.0, 30.5])  # the second and the last report are 10 s after a line
    monkeypatch.setattr(screen.time, "monotonic", lambda: next(clock))
    with screen.progress("compiling") as report:
        for done in range(4):
            report(done, 4, f"{done} tokens")
    assert capsys.readouterr().err == "compiling 2/4: 1 tokens\ncompiling 4/4: 3 tokens\n"


def test_bench_measures_what_it_served(tmp_path, capsys):
    out = tmp_path / "figures.jsonl"
    load = ["--requests", "5", "--mean-input", "12", "--mean-output", "4", "--rate", "50"]
    assert cli.main(["bench", "serving", *load, *SMALL, "--out", str(out)]) == 0
    (figures,) = map(json.loads, out.read_text().splitlines())
    assert figures["requests"] == 5 and figures["failed"] == 0
    assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"] <= figures["seconds"] * 1e3
    assert figures["output_tokens_per_s"] == pytest.approx(figures["output_tokens"] / figures["seconds"])
    assert "output_tokens_per_s" in capsys.readouterr().out
    clocks = {field.name for field in dataclasses.fields(Stats) if field.name.endswith("_seconds")}
    assert clocks >= {"host_seconds", "device_seconds"} and clocks <= figures.keys()
    assert figures["host_share"] == pytest.approx(figures["host_seconds"] / figures["seconds"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--requests", "0"], "--requests 0 must be 1 or more"),
        (["--rate", "0"], "--rate 0.0 must be a number above 0"),
        (["--mean-input", "-1"], "--mean-input -1.0 must be a number above 0"),
        (["--mean-output", "nan"], "--mean-output nan must be a number above 0"),
        (["--shared", "2"], "--shared 2.0 must be from 0 to 1"),
        (["--out", "/nowhere/at/all.jsonl"], "/nowhere/at/all.jsonl"),
    ],
)
def test_a_load_that_cannot_be_made_is_refused_before_the_model_loads(wrong, words, capsys, monkeypatch):
    monkeypatch.setattr(options, "make_engine", lambda *args, **options: pytest.fail("the model was loaded"))
    assert cli.main(["bench", "serving", *wrong]) == 2 and words in capsys.readouterr().err


def test_a_trace_is_what_was_asked_for():
    options = dict(vocab_size=99, max_len=512, mean_input=60, mean_output=30, shared=0.5)
    trace = make_trace(400, rate=10, seed=1, **options)
    assert trace == make_trace(400, rate=10, seed=1, **options) != make_trace(400, rate=10, seed=2, **options)
    times = [arrival.seconds for arrival in trace]
    assert times == sorted(times) and times[-1] == pytest.approx(40, rel=0.2)
    assert sum(len(a.prompt) for a in trace) / 400 == pytest.approx(60, rel=0.25)
    assert sum(a.max_tokens for a in trace) / 400 == pytest.approx(30, rel=0.25)
    assert all(len(a.prompt) + a.max_tokens <= 512 for a in trace)
    starts = [a.prompt[:30] for a in trace]
    common = [start for start in starts if starts.count(start) > 20]
    assert len(common) == pytest.approx(200, rel=0.2) and len(set(common)) == 4
    assert all(arrival.seconds == 0 for arrival in make_trace(3, rate=None, seed=0, **options))


@pytest.mark.parametrize("mean_input", [0.5, 3, 40, 64])
@pytest.mark.parametrize("max_len", [64, 65, 3])
def test_a_trace_has_requests_that_the_engine_can_serve(max_len, mean_input):
    means = dict(mean_input=min(mean_input, max_len), mean_output=max_len)
    trace = make_trace(200, vocab_size=9, max_len=max_len, rate=None, shared=0.5, seed=0, **means)
    assert all(0 < len(arrival.prompt) < max_len and arrival.max_tokens > 0 for arrival in trace)


def test_a_load_may_wait_longer_than_a_clock_can_count(monkeypatch):
    """time.sleep raises OverflowError then; here the first wait ends the test."""
    engine, slept = types.SimpleNamespace(has_work=False), []

    def sleep(seconds):
        slept.append(seconds)
        raise InterruptedError

    monkeypatch.setattr(bench.time, "sleep", sleep)
    with pytest.raises(InterruptedError):
        bench.measure(engine, [Arrival(1e300, (5,), 1)])
    assert slept == [bench.MAX_SLEEP]


def test_doctor_says_what_is_here(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in ("device 0: cpu", "extra models: safetensors", "native CPU library: ", "agrees with numpy"):
        assert words in said


@pytest.mark.parametrize("generation", ["sm_80", "sm_90"])
def test_doctor_offers_the_jax_for_hopper_on_hopper_alone(generation, monkeypatch, capsys):
    """The warp-level kernels of other chips need JAX 0.12."""
    monkeypatch.setattr(doctor, "detect", lambda: Chip("gpu", generation))
    monkeypatch.setattr(doctor, "keeps_registers", lambda: False)
    monkeypatch.setattr("jattn.demo.run", lambda: 0)
    assert cli.main(["doctor"]) == 0
    assert ("jattn[hopper]" in capsys.readouterr().out) == (generation == "sm_90")


def test_the_model_adds_what_it_never_saw_and_preemption_changes_nothing(capsys, monkeypatch):
    monkeypatch.setattr(show, "OPTIONS", show.OPTIONS | {"deterministic": True, "backend": "sdpa"})
    assert show.run() == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said
    figures = {line.split("  ")[1]: line for line in said.splitlines() if line.startswith("  ")}
    assert "preemptions" in figures and not figures["preemptions"].endswith(" 0")
    assert "prefix cache" in figures and " 0 of " not in figures["prefix cache"]


def test_the_demo_without_safetensors_names_both_ways_out(capsys, monkeypatch):
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)
    assert show.run() == 1
    said = capsys.readouterr().out
    assert "pip install 'jattn[models]'" in said and "jattn demo --backends-only" in said


def test_the_demo_fails_where_an_answer_is_not_the_models(capsys, monkeypatch):
    monkeypatch.setattr(show, "OPTIONS", show.OPTIONS | {"deterministic": True, "backend": "sdpa"})
    real = show.judge
    lie = lambda output: outputs.RequestOutput(
        output.id, output.prompt_token_ids, (outputs.Completion(0, "1", (output.token_ids[0] ^ 1,)),)
    )
    monkeypatch.setattr(show, "judge", lambda engine, asked, got: real(engine, asked, [lie(got[0]), *got[1:]]))
    assert show.run() == 1
    assert "WRONG" in capsys.readouterr().out
