"""The commands report their result in words and in the exit code."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jattn
from jattn import cli, demo
from jattn.cli import options
from jattn.device import Chip
from jattn.errors import EngineDeadError

LAYER = ["--num-heads", "32", "--num-kv-heads", "8", "--head-dim", "128"]


def test_explain_names_every_backend(capsys):
    assert cli.main(["explain", *LAYER]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in jattn.list_backends())


@pytest.mark.parametrize("spec", [jattn.AttentionSpec, jattn.KVCacheSpec])
def test_explain_has_a_flag_for_every_field(spec, capsys):
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    help_text = capsys.readouterr().out
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(spec)}
    assert {flag for flag in flags if flag not in help_text} == set()


@pytest.mark.parametrize(
    "extra", [["--sliding-window", "128"], ["--sliding-window", "64,3"], ["--quant", "per_tensor"]]
)
def test_explain_passes_a_flag_on(extra, monkeypatch, capsys):
    """The result equals that of the same call in Python, so no flag is ignored."""
    asked = []
    real = jattn.explain
    monkeypatch.setattr(jattn, "explain", lambda *args, **kwargs: asked.append(args) or real(*args, **kwargs))
    dtype = ["--dtype", "int8"] if "--quant" in extra else []
    assert cli.main(["explain", *LAYER, *extra, *dtype]) in (0, 1)
    window = {"128": 128, "64,3": (64, 3)}.get(extra[1])
    spec = jattn.AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, sliding_window=window)
    quant = dict(dtype="int8", quant="per_tensor") if dtype else {}
    cache_spec = jattn.KVCacheSpec(num_blocks=1024, block_size=16, num_kv_heads=8, head_dim=128, **quant)
    assert asked == [(spec, cache_spec)]


@pytest.mark.parametrize(
    "name, chip",
    [("sm_86", Chip("gpu", "sm_86")), ("v6e", Chip("tpu", "v6e")), ("tpu7x", Chip("tpu", "tpu7x")), ("cpu", "cpu")],
)
def test_explain_takes_a_chip_that_is_not_here(name, chip, monkeypatch, capsys):
    asked, real = [], jattn.explain
    monkeypatch.setattr(jattn, "explain", lambda *a, platform: asked.append(platform) or real(*a, platform=platform))
    assert cli.main(["explain", *LAYER, "--platform", name]) == 0
    assert asked == [chip]
    with pytest.raises(SystemExit):
        cli.main(["explain", *LAYER, "--platform", "sm_x"])
    assert "platform='sm_x' is not known; use one of cpu, gpu, tpu, a chip (sm_86, v6e)" in capsys.readouterr().err


def test_explain_says_what_is_wrong_with_a_layer(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", "--num-heads", "32", "--num-kv-heads", "7", "--head-dim", "128"])
    assert stop.value.code == 2
    assert "num_kv_heads" in capsys.readouterr().err


def test_the_demo_agrees(capsys):
    assert cli.main(["demo", "--backends-only"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in jattn.list_backends())
    assert "WRONG" not in printed


@pytest.mark.parametrize("lie", [1.02, np.nan])
def test_the_demo_fails_where_numbers_differ(lie, monkeypatch, capsys):
    backend = demo._run_backend
    monkeypatch.setattr(demo, "_run_backend", lambda *args: (backend(*args)[0] * lie, 1.0))
    assert cli.main(["demo", "--backends-only"]) == 1
    assert "WRONG" in capsys.readouterr().out


def typed(line: str, **variables: str) -> subprocess.CompletedProcess:
    """A command line for bash that begins with jattn; the exit code is that of jattn."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | variables
    line = f"{sys.executable} -m jattn {line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("platform", "command"),
    [("foo", "doctor"), ("cuda", "explain --num-heads 4 --head-dim 64"), ("foo", "generate x"), ("cuda", "demo")],
)
def test_a_platform_that_jax_cannot_start_is_a_sentence(command, platform):
    done = typed(command, JAX_PLATFORMS=platform)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert said.startswith(f"jattn: JAX finds no device with JAX_PLATFORMS={platform}: ") and "unset" in said


def test_a_transfer_guard_is_a_sentence(capsys, monkeypatch):
    with jax.transfer_guard("disallow"):
        assert cli.main(["generate", "1+1="]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jattn: jax_transfer_guard forbids") and said.endswith("allow them\n")
    assert said.count("\n") == 1
    monkeypatch.setenv("JAX_TRANSFER_GUARD", "disallow")
    with jax.transfer_guard("disallow"):
        assert cli.main(["generate", "1+1="]) == 2
    assert capsys.readouterr().err.startswith("jattn: JAX_TRANSFER_GUARD=disallow forbids")


def test_an_engine_without_compilation_is_a_sentence(capsys):
    with jax.disable_jit():
        assert cli.main(["generate", "1+1="]) == 2
    assert capsys.readouterr().err == (
        "jattn: JAX_DISABLE_JIT is set, and an engine runs compiled programs only: unset it\n"
    )


def test_a_broken_engine_is_a_sentence(capsys, monkeypatch):
    def broken(args, **_):
        raise EngineDeadError("the device no longer computes")

    monkeypatch.setattr(options, "make_engine", broken)
    assert cli.main(["generate", "1+1="]) == 1
    assert capsys.readouterr().err == "jattn: the engine is broken: the device no longer computes\n"


@pytest.mark.parametrize(
    "command", ["explain --num-heads 4 --head-dim 64", "explain --help", "generate x --max-tokens 2"]
)
def test_a_reader_that_has_gone_is_no_error(command):
    """`true` reads nothing and exits before the first line is written."""
    done = typed(f"{command} | true")
    assert (done.returncode, done.stderr, done.stdout) == (141, "", "")


def test_a_reader_of_complaints_that_has_gone_is_no_error():
    done = typed("generate x --model no-such-folder 2>&1 | true")
    assert (done.returncode, done.stderr, done.stdout) == (141, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("command", ["--version", "models"])  # written at the end; and on the way, by print
def test_a_full_disk_is_a_sentence_with_the_way_out(command):
    done = typed(f"{command} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == (
        "jattn: the output cannot be written (No space left on device): "
        "free space where it goes, or send it elsewhere\n"
    )


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "jattn", "explain", *LAYER], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("backend")
