"""Where the native library comes from: found, built once by many processes, or honestly absent. No compiler runs."""

import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.cpu.native import build, toolchain

ROOT = pathlib.Path(__file__).parents[3]
FAKE_COMPILER = """#!/bin/sh
# Slow enough for others to come while it links; writes what it was asked to write.
case "$*" in *-shared*) echo link >> "$JATTN_TEST_LOG"; sleep 0.4;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
"""
WHICH_LIBRARY = "from pallas_kernels.cpu.native import build; print(build.library())"
TWO_LAYERS = """
import jattn
cache_spec = jattn.KVCacheSpec(num_blocks=2, block_size=2, num_kv_heads=1, head_dim=8)
for heads in (1, 2):
    attn = jattn.PagedAttention(jattn.AttentionSpec(num_heads=heads, num_kv_heads=1, head_dim=8), cache_spec)
    print(attn.backend_name)
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A home of its own and a compiler that pretends."""
    if sys.platform == "win32":
        pytest.skip("a shell script stands for the compiler")
    fake = tmp_path / "c++"
    fake.write_text(FAKE_COMPILER)
    fake.chmod(0o755)
    for name in ("JATTN_CACHE_DIR", "XDG_CACHE_HOME", "JATTN_NATIVE", "JATTN_NATIVE_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    for name, value in {"HOME": tmp_path, "CXX": fake, "JATTN_TEST_LOG": tmp_path / "log", "TMPDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def start(code: str) -> subprocess.Popen:
    """A Python of this environment, as a user would start it in the checkout."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), **pipes)


def test_processes_that_start_together_build_once(environment):
    running = [start(WHICH_LIBRARY) for _ in range(4)]
    answers = [process.communicate(timeout=60) for process in running]
    paths = {out.strip() for out, _ in answers}
    assert len(paths) == 1 and pathlib.Path(paths.pop()).read_text() == "made\n", answers
    assert (environment / "log").read_text() == "link\n"
    assert sum("built the native CPU kernels" in err for _, err in answers) == 1


def test_a_library_that_is_there_needs_no_compiler(environment, monkeypatch):
    made = build.library()
    monkeypatch.setenv("CXX", str(environment / "nothing"))
    assert build.library() == made and made.is_relative_to(environment / ".cache")


def test_a_home_that_cannot_be_written_is_no_error(environment, monkeypatch):
    monkeypatch.setenv("HOME", str(environment / "c++"))  # a file: nothing can be made below it, not even by root
    made = build.library()
    assert made.exists() and made.parent.parent == environment and made.parent.name.startswith("jattn-")
    assert made.parent.stat().st_mode & 0o077 == 0, "others could put code there"


def test_a_failing_compiler_is_quoted_and_leaves_nothing(environment):
    says = "ffi.cc:1: fatal error: no such thing"
    (environment / "c++").write_text(f'#!/bin/sh\ncase "$*" in *.cc*) echo "{says}"; exit 1;; esac\n')
    with pytest.raises(toolchain.BuildError, match=f"the build failed: .* said: {says}"):
        build.library()
    assert not list((environment / ".cache" / "jattn").glob("*.so"))


def test_only_a_library_of_these_sources_that_xla_serves_is_taken(tmp_path, monkeypatch):
    """XLA serves what was compiled against its own major version and up to its minor one."""
    monkeypatch.setattr(toolchain, "ffi_version", lambda: (0, 3))
    stem = toolchain.stem()
    for name in (f"{stem}-ffi0.4.so", f"{stem}-ffi1.3.so", "libjattn_cpu-0123456789abcdef-ffi0.3.so"):
        (tmp_path / name).touch()
    assert toolchain.find(tmp_path) is None
    for minor in (1, 3):
        (tmp_path / f"{stem}-ffi0.{minor}.so").touch()
        assert toolchain.find(tmp_path).name == f"{stem}-ffi0.{minor}.so"
    monkeypatch.setenv("JATTN_NATIVE_FLAGS", "-fsanitize=undefined")
    assert toolchain.find(tmp_path) is None, "flags are part of what a library is"


def test_the_installed_xla_names_its_version():
    assert toolchain.name() == f"{toolchain.stem()}-ffi{'.'.join(map(str, toolchain.ffi_version()))}.so"
    assert toolchain.ffi_version() >= (0, 1)


@pytest.mark.parametrize("hidden", [{"CXX": "/nonexistent"}, {"PATH": ""}])
def test_without_a_compiler_attention_falls_to_sdpa_and_one_line_says_why(environment, monkeypatch, hidden):
    monkeypatch.delenv("CXX")
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    out, err = start(TWO_LAYERS).communicate(timeout=120)
    assert out.split() == ["sdpa", "sdpa"], err
    told = [line for line in err.splitlines() if "plain XLA" in line]
    assert len(told) == 1 and "apt-get install g++" in told[0], err
    assert ("/nonexistent" if "CXX" in hidden else "no C++ compiler") in told[0]
