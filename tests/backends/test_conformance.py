"""Every backend x every row of the covering set: the witness's numbers, or a refusal that says why.

A refusal is a result too, and is checked like one; nothing is skipped.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jattn
from tests.backends.rows import CHIP_ROWS, ROWS
from tests.problem import Problem, run

LSE_OF_HARDWARE = {"pallas_gpu": 2.0**-15}
"""Chips whose exponential, logarithm and tanh are approximate: their lse may differ by this, far below 16 bits."""

FIRST_CHOICE = {"cpu": "cpu_native", "gpu": "pallas_gpu"}


def assert_refused(name: str, problem: Problem) -> None:
    """The report has reasons, and the door raises with the same ones."""
    report = {r.name: r for r in jattn.explain(problem.spec, problem.cache_spec)}[name]
    assert report.reasons and all(report.reasons)
    with pytest.raises(jattn.UnsupportedError) as refusal:
        jattn.PagedAttention(problem.spec, problem.cache_spec, backend=name)
    assert refusal.value.reasons[name] == report.reasons
    assert all(reason in str(refusal.value) for reason in report.reasons)


def slots_in(problem: Problem, cache: jattn.PagedKV) -> list[np.ndarray]:
    """Each pool's bit patterns, [N * S, bytes of a slot]."""
    pools = [np.asarray(pool) for pool in cache.logical()]
    return [pool.reshape(problem.num_blocks * problem.block_size, -1).view(np.uint32) for pool in pools]


@pytest.mark.parametrize("problem", ROWS)
@pytest.mark.parametrize("backend", jattn.list_backends())
def test_a_backend_agrees_with_the_witness_or_refuses(backend, problem):
    judge(backend, problem)


@pytest.mark.parametrize("problem", CHIP_ROWS)
def test_the_first_choice_of_this_platform_agrees_in_the_sizes_that_chips_are_made_for(problem):
    judge(FIRST_CHOICE[jax.default_backend()], problem)


def judge(backend: str, problem: Problem) -> None:
    """The backend gives the witness's numbers and writes nothing it should not, or refuses with reasons."""
    supported = {r.name: r.supported for r in jattn.explain(problem.spec, problem.cache_spec)}[backend]
    if not supported:
        return assert_refused(backend, problem)
    before = problem.cache(new=False)
    try:
        after, state = run(problem, backend, before)
    except jattn.UnsupportedError as refusal:  # causality and per-head scales are known only with the batch
        assert backend != "sdpa" and refusal.reasons[backend]
        return None
    assert state.out.dtype == problem.q.dtype and state.lse.dtype == np.float32
    answer = problem.answer(after)
    lse_limit = max(answer.lse_limit, LSE_OF_HARDWARE.get(backend, 0.0))
    dataclasses.replace(answer, lse_limit=lse_limit).check(state)
    written = {slot for r, first in enumerate(problem.case.computed) for slot in problem.slots(r, first)}
    others = np.setdiff1d(np.arange(problem.num_blocks * problem.block_size), list(written))
    for old, held in zip(slots_in(problem, before), slots_in(problem, after), strict=True):
        np.testing.assert_array_equal(held[others], old[others], err_msg="a slot that nobody wrote has changed")
    return None
