"""The backend that users get by default is available here, so that the suite tests it."""

import os
import subprocess
import sys

import jax
import pytest

import jattn
from jattn.backends import registry
from pallas_kernels.cpu.native import library
from tests import matrix
from tests.backends import test_conformance
from tests.cases import FEATURES
from tests.laws.judge import able
from tests.problem import Problem
from tests.rooms.tree import ROOT
from tests.running import takes

WORD = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
PLAIN = Problem(heads=8, head_dim=64, block_size=16, dtype=WORD.get(jax.default_backend(), "float32"))


def test_where_there_is_a_compiler_there_is_a_native_library():
    """Otherwise the tests of the default backend would test another one."""
    if matrix.is_native_absent():
        pytest.skip(matrix.excuse())
    assert library.status().available, library.status().reason


def test_auto_gives_this_platforms_first_choice():
    if jax.default_backend() == "cpu" and matrix.is_native_absent():
        pytest.skip(matrix.excuse())
    chosen = jattn.PagedAttention(PLAIN.spec, PLAIN.cache_spec).backend_name
    assert chosen == test_conformance.FIRST_CHOICE[jax.default_backend()]


def test_every_backend_of_this_platform_is_able():
    """The expected names come from the document, not from the backends."""
    platform, table = jax.default_backend(), matrix.rows()["platforms"]
    here = {name for name, cell in table.items() if platform in cell}
    here -= {"cpu_native"} if matrix.is_native_absent() else set()
    assert here and set(able(PLAIN)) == here


@pytest.fixture
def tired(monkeypatch):
    """A backend that refuses every layer with a reason."""
    backend = registry.load("pallas_cpu")
    monkeypatch.setattr(backend, "layer_reasons", classmethod(lambda cls, *layer: ("tired",)))
    jattn.backends.registry._cached_reports.cache_clear()
    yield "pallas_cpu"
    monkeypatch.undo()
    jattn.backends.registry._cached_reports.cache_clear()


def test_a_backend_that_begins_to_refuse_everything_fails_the_suite(tired):
    for check in (takes, lambda name, problem: test_conformance.judge(name, problem)):
        with pytest.raises(AssertionError, match="pallas_cpu takes this"):
            check(tired, PLAIN)
    with pytest.raises(AssertionError, match="pallas_cpu takes this"):
        able(PLAIN)


def test_a_backend_that_takes_what_the_matrix_refuses_fails_the_suite(monkeypatch):
    backend, problem = registry.load("pallas_cpu"), PLAIN.replace(feature=FEATURES["qq_bias"])
    assert not takes("pallas_cpu", problem)
    monkeypatch.setattr(backend, "features", backend.features | {jattn.backends.Feature.QQ_BIAS})
    jattn.backends.registry._cached_reports.cache_clear()
    with pytest.raises(AssertionError, match="pallas_cpu refuses this"):
        takes("pallas_cpu", problem)
    monkeypatch.undo()
    jattn.backends.registry._cached_reports.cache_clear()


def test_a_value_between_two_that_the_matrix_tries_is_taken_where_both_are():
    dims = [PLAIN.replace(head_dim=dim) for dim in (16, 512, 513, 577)]
    assert [matrix.says("cpu_native", problem) for problem in dims] == [jax.default_backend() == "cpu"] * 2 + [
        False
    ] * 2
    assert all(matrix.says("sdpa", problem) for problem in dims)
    latent = next(name for name in jattn.list_backends() if registry.load(name).is_mla())
    assert not matrix.says(latent, PLAIN)


EXCUSE = "from tests import matrix; print(matrix.excuse())"


@pytest.mark.parametrize(
    ("environment", "word"), [({"CXX": "/nonexistent"}, "/nonexistent"), ({"JATTN_NATIVE": "0"}, "JATTN_NATIVE=0")]
)
def test_without_a_compiler_or_switched_off_there_is_an_excuse_that_says_so(environment, word):
    env = os.environ | environment
    done = subprocess.run([sys.executable, "-c", EXCUSE], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert word in done.stdout
