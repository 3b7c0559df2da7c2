"""The build of the native library: once for many processes, with a compiler that may fail, hang or be absent.

The compiler is a shell script.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from pallas_kernels.cpu.native import build, kept, library, toolchain

ROOT = pathlib.Path(__file__).parents[3]
WHICH_LIBRARY = "from pallas_kernels.cpu.native import build; print(build.library().path)"
TWO_LAYERS = """
import jattn
cache_spec = jattn.KVCacheSpec(num_blocks=2, block_size=2, num_kv_heads=1, head_dim=8)
for heads in (1, 2):
    attn = jattn.PagedAttention(jattn.AttentionSpec(num_heads=heads, num_kv_heads=1, head_dim=8), cache_spec)
    print(attn.backend_name)
print("REASON", *next(r.reasons for r in jattn.explain(attn.spec, cache_spec) if r.name == "cpu_native"))
"""


EMPTY = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'


def start(code: str) -> subprocess.Popen:
    """A Python of this environment, as a user would start it in the checkout."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), **pipes)


def answering(folder: pathlib.Path, version: str) -> str:
    """Makes the fake compiler report this version; returns its path."""
    script = folder / "c++"
    script.write_text(
        script.read_text().replace("# says", f'case "$*" in *--version*) echo "{version}"; exit;; esac #')
    )
    return str(script)


def test_where_a_compiler_is_the_library_is_too():
    """With a compiler but without a library, the tests of the kernels must fail instead of being skipped."""
    try:
        toolchain.isas(), toolchain.compiler()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    assert library.status().available, library.status().reason


def test_processes_that_start_together_build_once(pretended, monkeypatch):
    monkeypatch.setenv("JATTN_TEST_LINK_SECONDS", "0.4")
    running = [start(WHICH_LIBRARY) for _ in range(4)]
    answers = [process.communicate(timeout=250) for process in running]
    paths = {out.strip() for out, _ in answers}
    assert len(paths) == 1 and pathlib.Path(paths.pop()).read_text() == "made\n", answers
    assert (pretended / "log").read_text() == "link\n"
    assert sum("built the native CPU kernels" in err for _, err in answers) == 1
    assert sum("builds them once, or waits" in err for _, err in answers) >= 1


def test_a_library_that_is_there_needs_no_compiler(pretended, monkeypatch):
    made = build.library().path
    monkeypatch.setenv("CXX", str(pretended / "nothing"))
    assert build.library().path == made and made.is_relative_to(pretended / ".cache")


def test_another_compiler_or_another_version_builds_anew(pretended, monkeypatch):
    """A newer compiler may know more instruction sets. The older library stays for users of that compiler."""
    first = build.library().path
    answering(pretended, "g++ 99")
    second = build.library().path
    monkeypatch.setenv("CXX", f"{pretended / 'c++'} -fast")
    third = build.library().path
    assert len({first, second, third}) == 3 and (pretended / "log").read_text() == "link\n" * 3
    assert build.library().path == third and first.exists()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(pretended):
    says = "ffi.cc:1: fatal error: no such thing"
    (pretended / "c++").write_text(f'#!/bin/sh\ncase "$*" in *.cc*) echo "{says}"; exit 1;; esac\n')
    with pytest.raises(toolchain.BuildError, match=f"the build failed: .* printed: {says}"):
        build.library()
    assert os.listdir(pretended / ".cache" / "jattn") == [kept.LOCK]


def alive(process: int) -> bool:
    """False once the process has ended, also if its parent has not yet waited for it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    shown = pathlib.Path("/proc", str(process), "stat")
    return not (shown.exists() and ") Z" in shown.read_text())


def hanging(at: str) -> str:
    """Makes the fake compiler hang where its arguments have this one; what it started is in the file `child`."""
    return f'case "$*" in *{at}*) cd "$HOME"; sleep 3600 & echo $! > new; mv new child; wait;; esac'


def happens(true) -> bool:
    """Whether it becomes true within minutes."""
    return any(true() or time.sleep(0.05) for _ in range(4000))


def num_children(process: subprocess.Popen) -> int:
    shown = pathlib.Path("/proc", str(process.pid), "task", str(process.pid), "children")
    if not shown.exists():  # no Linux
        time.sleep(2)
        return 2
    return len(shown.read_text().split())


@pytest.mark.parametrize("hangs_at", ["--version", "-fsyntax-only", "-shared"])
def test_a_compiler_that_hangs_is_stopped_with_all_it_started(pretended, monkeypatch, hangs_at):
    """The clock jumps when the compiler hangs."""
    script, child = (pretended / "c++").read_text(), pretended / "child"
    (pretended / "c++").write_text(script.replace("# says", hanging(hangs_at)))
    clock = types.SimpleNamespace(monotonic=lambda: 1e6 * child.exists(), sleep=time.sleep)
    monkeypatch.setattr(toolchain, "time", clock)
    with pytest.raises(toolchain.BuildError, match="did not finish in time and was stopped; set CXX"):
        build.library()
    assert happens(lambda: not alive(int(child.read_text()))), "its child process still runs"


@pytest.mark.parametrize("talks_at", ["--version", "-fsyntax-only", "-shared"])
def test_a_compiler_that_never_stops_talking_is_stopped_before_the_disk_is_full(pretended, talks_at):
    script = (pretended / "c++").read_text()
    (pretended / "c++").write_text(script.replace("# says", f'case "$*" in *{talks_at}*) yes;; esac'))
    with pytest.raises(toolchain.BuildError, match="wrote messages without end and was stopped; set CXX"):
        build.library()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_compiler_ends_with_the_process_that_started_it(pretended, how):
    script = (pretended / "c++").read_text()
    (pretended / "c++").write_text(script.replace("# says", hanging("-shared")))
    process = start(WHICH_LIBRARY)
    assert happens((pretended / "child").exists)
    child = int((pretended / "child").read_text())
    assert happens(lambda: num_children(process) == 2), "the compiler, and a moment later its guard"
    process.send_signal(how)
    process.communicate(timeout=250)
    assert happens(lambda: not alive(child)), "its child process still runs"


@pytest.mark.parametrize("makes", ["nothing", "an empty file"])
def test_a_compiler_that_makes_nothing_is_named_and_not_the_folder(pretended, makes):
    """As CXX=/bin/true does."""
    (pretended / "c++").write_text("#!/bin/sh\n" + ("" if makes == "nothing" else EMPTY))
    with pytest.raises(toolchain.BuildError, match=r"c\+\+ ended without an error but made no library; set CXX"):
        build.library()


@pytest.mark.parametrize("variable", ["CXX", "JATTN_NATIVE_FLAGS"])
def test_a_variable_that_is_no_command_line_is_a_reason_and_no_crash(pretended, monkeypatch, variable):
    monkeypatch.setenv(variable, '-Dx="y')
    with pytest.raises(toolchain.BuildError, match=rf"\${variable}=.* cannot be read as a command line: No closing"):
        build.library()
    assert "No closing quotation" in library._load().reason


def test_messages_in_any_encoding_are_quoted(pretended):
    (pretended / "c++").write_text("""#!/bin/sh\ncase "$*" in *.cc*) printf 'error: \\351t\\351\\n'; exit 1;; esac\n""")
    with pytest.raises(toolchain.BuildError, match="printed: error: \ufffdt\ufffd"):
        build.library()


def test_the_installed_xla_names_its_version(pretended):
    version = ".".join(map(str, toolchain.ffi_version()))
    assert build.library().path.name.startswith(f"{kept.PREFIX}{toolchain.source_hash()}-ffi{version}-")
    assert toolchain.ffi_version() >= (0, 1)


WITHOUT = {
    "no such compiler": (dict(CXX="/nonexistent"), "/nonexistent is not a program on this machine; install one"),
    "nothing on the path": (dict(PATH=""), "no C++ compiler (c++, g++, clang++) on this machine; install one"),
    "a compiler that fails": (dict(CXX="false"), "false --version failed"),
    "a folder of others": (dict(JATTN_CACHE_DIR="."), "the folder '.' is not an absolute path"),
}


def without(monkeypatch, why: str) -> str:
    """Sets this situation up; returns the sentence that the reason must contain."""
    changed, sentence = WITHOUT[why]
    if "CXX" not in changed:
        monkeypatch.delenv("CXX")
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    return sentence


@pytest.mark.parametrize("why", WITHOUT)
def test_every_way_to_have_no_library_is_a_reason(pretended, monkeypatch, why):
    sentence = without(monkeypatch, why)
    found = library._load()
    assert (
        not found.available and found.reason.startswith("the native library is absent: ") and sentence in found.reason
    )


@pytest.mark.parametrize("why", ["no such compiler", "a compiler that fails"])
def test_without_a_library_attention_falls_to_sdpa_and_one_line_says_why(pretended, monkeypatch, why):
    """The log has one line; `explain` repeats the reason."""
    sentence = without(monkeypatch, why)
    out, err = start(TWO_LAYERS).communicate(timeout=250)
    assert out.splitlines()[:2] == ["sdpa", "sdpa"], err
    told = [line for line in err.splitlines() if "plain XLA" in line]
    assert len(told) == 1 and sentence in told[0], err
    assert sentence in out.split("REASON", 1)[1]
