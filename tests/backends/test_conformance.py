"""Each backend on each row of the covering set gives the oracle's result, or refuses with a reason.

A refusal is checked too: no row is skipped.
"""

import jax
import pytest

import jattn
from tests.backends.rows import CHIP_ROWS, ROWS
from tests.problem import Problem
from tests.running import conform, run, takes

LSE_OF_HARDWARE = {"pallas_gpu": 2.0**-15, "pallas_gpu_invariant": 2.0**-15}
"""Chips whose exponential, logarithm and tanh are approximate: their lse may differ by this, far below 16 bits."""

FIRST_CHOICE = {"cpu": "cpu_native", "gpu": "pallas_gpu", "tpu": "pallas_tpu"}


def assert_refused(name: str, problem: Problem) -> None:
    """The report has reasons and the construction raises them; or the batch is refused with a reason of its own."""
    report = {r.name: r for r in jattn.explain(problem.spec, problem.cache_spec)}[name]
    if report.supported:  # causality and per-head scales are known only with the batch
        with pytest.raises(jattn.UnsupportedError) as refusal:
            run(problem, name)
        assert refusal.value.reasons[name]
        return
    assert report.reasons and all(report.reasons)
    with pytest.raises(jattn.UnsupportedError) as refusal:
        jattn.PagedAttention(problem.spec, problem.cache_spec, backend=name)
    assert refusal.value.reasons[name] == report.reasons
    assert all(reason in str(refusal.value) for reason in report.reasons)


@pytest.mark.parametrize("problem", ROWS)
@pytest.mark.parametrize("backend", jattn.list_backends())
def test_a_backend_agrees_with_the_witness_or_refuses(backend, problem):
    judge(backend, problem)


@pytest.mark.parametrize("problem", CHIP_ROWS)
def test_the_first_choice_of_this_platform_agrees_in_the_sizes_that_chips_are_made_for(problem):
    judge(FIRST_CHOICE.get(jax.default_backend(), "sdpa"), problem)


def judge(backend: str, problem: Problem) -> None:
    """The oracle's result, and no other slot written; or reasons, where the support matrix has a refusal."""
    if takes(backend, problem):  # AssertionError unless the support matrix says the same
        conform(problem, backend, lse_floor=LSE_OF_HARDWARE.get(backend, 0.0))
    else:
        assert_refused(backend, problem)
