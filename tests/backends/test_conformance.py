"""Every backend x every row of the covering set: the witness's numbers, or a refusal that says why.

A refusal is a result too, and is checked like one; nothing is skipped.
"""

import numpy as np
import pytest

import jattn
from tests.backends.rows import ROWS
from tests.problem import Problem, step


def assert_refused(name: str, problem: Problem) -> None:
    """The report has reasons, and the door raises with the same ones."""
    report = {r.name: r for r in jattn.explain(problem.spec, problem.cache_spec)}[name]
    assert report.reasons and all(report.reasons)
    with pytest.raises(jattn.UnsupportedError) as refusal:
        jattn.PagedAttention(problem.spec, problem.cache_spec, backend=name)
    assert refusal.value.reasons[name] == report.reasons
    assert all(reason in str(refusal.value) for reason in report.reasons)


def refuses_the_batch(attn: jattn.PagedAttention, problem: Problem) -> bool:
    """Causality is known only with the batch: True when the plan is refused, with reasons."""
    if problem.feature.causal is True:
        return False
    try:
        attn.build(problem.meta)
    except jattn.UnsupportedError as refusal:
        assert refusal.reasons[attn.backend_name], "a refusal must say why"
        return True
    return False


def slots_in(problem: Problem, cache: jattn.PagedKV) -> list[np.ndarray]:
    """Each pool's bit patterns, [N * S, bytes of a slot]."""
    pools = [np.asarray(pool) for pool in cache.logical()]
    return [pool.reshape(problem.num_blocks * problem.block_size, -1).view(np.uint32) for pool in pools]


@pytest.mark.parametrize("problem", ROWS)
@pytest.mark.parametrize("backend", jattn.list_backends())
def test_a_backend_agrees_with_the_witness_or_refuses(backend, problem):
    supported = {r.name: r.supported for r in jattn.explain(problem.spec, problem.cache_spec)}[backend]
    if not supported:
        return assert_refused(backend, problem)
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
    if refuses_the_batch(attn, problem):
        return None
    before = problem.cache(new=False)
    new = problem.new(problem.keys), problem.new(problem.values)
    after, state = step(attn, before, problem.q, *new, problem.meta, problem.params)
    assert state.out.dtype == problem.q.dtype and state.lse.dtype == np.float32
    problem.answer(after).check(state)
    written = {slot for r, first in enumerate(problem.case.computed) for slot in problem.slots(r, first)}
    others = np.setdiff1d(np.arange(problem.num_blocks * problem.block_size), list(written))
    for old, held in zip(slots_in(problem, before), slots_in(problem, after), strict=True):
        np.testing.assert_array_equal(held[others], old[others], err_msg="a slot that nobody wrote has changed")
    return None
