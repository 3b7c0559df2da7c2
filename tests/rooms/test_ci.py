"""`.ci/run` with stand-ins for make and Python: a step that fails, hangs, is interrupted or cannot run here."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """#!/usr/bin/env bash
[ "$1" != "${FAILS-}" ] || { echo "$1 is broken"; exit 1; }
if [ "$1" = "${HANGS-}" ]; then
  sleep 120 &
  echo $! >"$PIDS"
  wait
fi
echo "== 3 passed in 0.10s =="
"""
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *--dry-run*"${ABSENT-nothing}"*) exit 1 ;;
  *"pip wheel"*) [ "${FAILS-}" != "pip wheel" ] ;;
  *explain*) echo "cpu_native  yes" ;;
esac
"""
HEEDED = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
"""A shell's background jobs ignore Ctrl-C; a function between fork and exec is no way where JAX has threads."""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("bash"), reason="CI is a bash script for Linux"),
    pytest.mark.timeout(100),  # what hangs takes 120 s
]


class Checkout:
    """A folder with .ci/run and the stand-ins."""

    def __init__(self, root: Path):
        self.root, self.pids, self.temporary = root, root / "pids", root / "temporary"
        for name, text in (("bin/make", MAKE), ("bin/python", PYTHON), (".venv/bin/python", PYTHON)):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        for version in (10, 11, 12, 13):  # of this machine: none runs
            (root / f"bin/python3.{version}").write_text("#!/bin/sh\nexit 1\n")
            (root / f"bin/python3.{version}").chmod(0o755)
        (root / ".ci").mkdir()
        shutil.copy(RUN, root / ".ci" / "run")
        self.temporary.mkdir()

    def start(self, **how: str) -> subprocess.Popen:
        """how: FAILS, HANGS: the target of make; ABSENT: a package that pip cannot have."""
        env = dict(PATH=f"{self.root}/bin:/usr/bin:/bin", HOME=str(self.root), TMPDIR=str(self.temporary))
        env |= dict(PYTHON=str(self.root / "bin/python"), CXX="cat", PIDS=str(self.pids)) | how
        command = [sys.executable, "-c", HEEDED, "bash", str(self.root / ".ci/run")]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ends(self, process: subprocess.Popen) -> tuple[int, str]:
        """The exit code and the output. Nothing that hangs is left, nor a file."""
        output, _ = process.communicate(timeout=60)
        while self.pids.exists() and is_running(int(self.pids.read_text())):  # it is being ended, or this test hangs
            time.sleep(0.05)
        assert not list(self.temporary.iterdir())
        return process.returncode, output


def is_running(pid: int) -> bool:
    """Is there this process, and has it not ended?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path)
    yield made
    if made.pids.exists() and is_running(pid := int(made.pids.read_text() or 0)):
        os.kill(pid, signal.SIGKILL)


def test_a_run_says_what_it_did_and_what_it_could_not_do(checkout):
    code, output = checkout.ends(checkout.start(ABSENT="libtpu"))
    assert code == 0, output
    assert output.splitlines()[-1] == "== 3 passed in 0.10s =="
    _, _, closing = output.partition(" s in all\n")
    assert " s  types, beside others\n" in closing
    _, _, absent = closing.partition("=== not run here:\n")
    assert "the package libtpu==0.0.51 cannot be had here: no make tpu-aot" in absent
    assert "no Python 3.12 here: the newest JAX and JAX 0.11.2 are not tested" in absent


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("lint", "lint"),
        ("types", "types"),
        ("docs", "documentation site"),
        ("pip wheel", "wheel of this machine"),
        (".venv-tpu/.ready-libtpu", "packages of other environments"),
    ],
)
def test_a_step_that_fails_ends_the_run_with_its_name(checkout, target, name):
    """types and docs run beside others. The wheel and libtpu are not the last command of their steps."""
    code, output = checkout.ends(checkout.start(FAILS=target))
    assert code == 1 and f"=== {name} FAILED after" in output
    assert " s in all" not in output and (target == "pip wheel" or f"{target} is broken" in output)


def test_a_step_that_fails_ends_what_runs_beside_it(checkout):
    code, output = checkout.ends(checkout.start(FAILS="notebooks", HANGS="fuzz-server"))
    assert code == 1 and "=== notebooks FAILED after" in output
    assert "=== server, hostile clients: stopped" in output


def test_of_two_steps_that_fail_both_are_shown(checkout):
    """types fails beside the notebooks, which fail later."""
    make = checkout.root / "bin/make"
    make.write_text(MAKE.replace("[ ", '[ "$1" != notebooks ] || { sleep 3; exit 1; }\n[ ', 1))
    code, output = checkout.ends(checkout.start(FAILS="types"))
    assert code == 1 and "=== notebooks FAILED after" in output
    assert "types is broken" in output and "=== types FAILED after" in output


@pytest.mark.parametrize("target", ["lint", "types"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_no_process(checkout, target, number):
    process = checkout.start(HANGS=target)
    while not (checkout.pids.exists() and checkout.pids.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    code, _ = checkout.ends(process)
    assert code == 128 + number


def test_every_test_that_needs_libtpu_is_in_ci():
    """`make test` skips them: libtpu has an environment of its own."""
    tests = RUN.parents[1] / "tests"
    needing = [path for path in tests.rglob("test_*.py") if re.search(r"skipif\(not aot\.available", path.read_text())]
    assert needing
    assert [path.name for path in needing if path.name not in RUN.read_text()] == []


def test_every_test_that_needs_jax_0_12_is_in_ci():
    """Older versions skip them, and the quick subset, which has the newest, leaves them out."""
    tests, named = RUN.parents[1] / "tests", "".join(re.findall(r"^since_012.*", RUN.read_text(), re.MULTILINE))
    why = (
        r"gpu_interpreted import INTERPRETS|not INTERPRETS, reason=WHY|recorded with JAX"
        r"|skipif\(jax.__version_info__ < VMAPS_SINCE"
    )
    needing = [path for path in tests.rglob("test_*.py") if path.stem != "test_ci" and re.search(why, path.read_text())]
    assert needing
    assert [path.name for path in needing if path.name not in named] == []
