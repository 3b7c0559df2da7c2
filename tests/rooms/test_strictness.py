"""The suite is as strict as conftest.py and pyproject.toml set it."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import HOST_DEVICES
from tests.rooms.tree import ROOT


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros(3) + jnp.zeros((2, 3))


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)


HANGS = """
import ctypes, threading

def test_before():
    pass

def test_that_waits_for_a_thread():
    threading.Event().wait()

def test_that_holds_the_interpreter():
    ctypes.PyDLL(None).sleep(100)

def test_behind():
    pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the C library's sleep is called")
def test_a_test_that_hangs_fails_by_name_and_the_others_run(tmp_path):
    """With the suite's own options but for the seconds: a blocked thread, and code that never gives the lock back."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    clocks = "-o timeout=2 -o faulthandler_timeout=5 -n 1 -p no:cacheprovider".split()
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), *clocks]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    for name in ("test_that_waits_for_a_thread", "test_that_holds_the_interpreter"):
        assert f"crashed while running 'test_hangs.py::{name}'" in done.stdout, done.stdout
    assert done.returncode == 1 and "2 failed, 2 passed" in done.stdout, done.stdout


def test_a_parametrisation_over_nothing_fails(tmp_path):
    (tmp_path / "test_none.py").write_text(
        "import pytest\n@pytest.mark.parametrize('x', [])\ndef test_each(x):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 2 and "Empty parameter set in 'test_each'" in done.stdout, done.stdout


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host's devices are counted on CPU only")
def test_there_are_several_devices():
    assert jax.device_count() >= HOST_DEVICES


def test_floats_are_32_bit():
    assert jnp.asarray(1.0).dtype == jnp.float32


def test_the_trace_counter_counts_shapes_not_calls(compiles):
    @jax.jit
    def doubled(x):
        return x * 2

    inputs = [jnp.zeros(n) for n in (3, 3, 4)]
    with compiles() as seen:
        for x in inputs:
            doubled(x)
    assert seen.of("doubled") == 2
    assert seen.total >= 2
    doubled(jnp.zeros(5))
    assert seen.of("doubled") == 2  # outside the `with`, nothing is counted
