"""Every backend x every row of the covering set: the witness's numbers, or a refusal that says why.

A refusal is a result too, and is checked like one; nothing is skipped.
"""

import pytest

import jattn
from tests.backends.rows import ROWS
from tests.problem import Problem
from tests.running import conform


def assert_refused(name: str, problem: Problem) -> None:
    """The report has reasons, and the door raises with the same ones."""
    report = {r.name: r for r in jattn.explain(problem.spec, problem.cache_spec)}[name]
    assert report.reasons and all(report.reasons)
    with pytest.raises(jattn.UnsupportedError) as refusal:
        jattn.PagedAttention(problem.spec, problem.cache_spec, backend=name)
    assert refusal.value.reasons[name] == report.reasons
    assert all(reason in str(refusal.value) for reason in report.reasons)


@pytest.mark.parametrize("problem", ROWS)
@pytest.mark.parametrize("backend", jattn.list_backends())
def test_a_backend_agrees_with_the_witness_or_refuses(backend, problem):
    supported = {r.name: r.supported for r in jattn.explain(problem.spec, problem.cache_spec)}[backend]
    if not supported:
        return assert_refused(backend, problem)
    try:
        conform(problem, backend)
    except jattn.UnsupportedError as refusal:  # causality and per-head scales are known only with the batch
        assert backend != "sdpa" and refusal.reasons[backend]
    return None
