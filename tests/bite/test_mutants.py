"""Each mutant of the shared algebra makes the conformance comparison fail.

So the comparison can fail. The problem of each mutant runs first without the mutant, so that a failure is due to the
mutant.
"""

import dataclasses
import functools
import importlib

import numpy as np
import pytest

import jattn
from tests.bite.mutants import MUTANTS, Mutant
from tests.cases import Case
from tests.problem import Problem
from tests.running import conform

PAIRS = [
    pytest.param(backend, mutant, 20 + i, id=f"{backend}-{name.replace(' ', '_')}")
    for i, (name, mutant) in enumerate(MUTANTS.items())
    for backend in mutant.backends
]


@functools.cache
def healthy(problem: Problem, backend: str) -> bool:
    """The same problem without a mutant passes."""
    conform(problem, backend)
    return True


def infect(monkeypatch, mutant: Mutant) -> None:
    """Replace the original by the mutant wherever it is imported."""
    for target in mutant.targets:
        module, _, name = target.rpartition(".")
        module = importlib.import_module(module)
        monkeypatch.setattr(module, name, mutant.make(getattr(module, name)))


@pytest.mark.parametrize(("backend", "mutant", "spare_blocks"), PAIRS)
def test_a_mutant_is_caught(backend, mutant, spare_blocks, monkeypatch):
    assert healthy(mutant.problem, backend)
    infect(monkeypatch, mutant)
    with pytest.raises(AssertionError):
        conform(mutant.problem.replace(spare_blocks=spare_blocks), backend)


def test_an_output_that_aliases_the_query_or_is_constant_is_caught():
    """With N(0, 1) data and the tolerance, q itself, zeros and the mean of v are all rejected."""
    problem = Problem()
    cache = problem.cache()
    answer, state = problem.answer(cache), jattn.paged_attention(problem.q, cache, problem.meta, problem.spec)
    answer.check(state)
    blank = np.isneginf(answer.lse)[..., None]
    for fake in (problem.q, np.zeros_like(answer.out), np.full_like(answer.out, answer.out.mean())):
        with pytest.raises(AssertionError, match="out"):
            answer.check(dataclasses.replace(state, out=np.where(blank, 0, fake)))


def test_a_wrong_long_request_beside_a_right_short_one_is_caught():
    """Two keys give a large result, 900 a small one: the tolerance of one request would be too large for the other."""
    problem = Problem(case=Case("short_and_long", (1, 1), (2, 900)), block_size=16, dtype="bfloat16")
    cache = problem.cache()
    answer, state = problem.answer(cache), jattn.paged_attention(problem.q, cache, problem.meta, problem.spec)
    answer.check(state)
    short, long = answer.out_limit[0, 0, 0], answer.out_limit[1, 0, 0]
    assert short > 4 * long > 0
    wrong = np.array(state.out, np.float32)
    wrong[1] += short / 2
    with pytest.raises(AssertionError, match=r"out: .* at \(1, "):
        answer.check(dataclasses.replace(state, out=wrong))


def test_values_that_leak_into_padding_are_caught():
    problem = Problem()
    cache = problem.cache()
    state = jattn.paged_attention(problem.q, cache, problem.meta, problem.spec)
    leaked = np.array(state.out)
    leaked[-1] = 1e-30
    with pytest.raises(AssertionError, match="padding"):
        problem.answer(cache).check(dataclasses.replace(state, out=leaked))


def test_the_written_cache_is_judged_by_the_witness():
    """A cache with a value of the wrong rounding, or off by two steps, is rejected."""
    problem = Problem(cache_dtype="float8_e4m3fn", quant="per_tensor")
    pages = problem.cache()
    problem.stored(pages)
    off = dataclasses.replace(pages, k=pages.k + np.ones((), pages.k.dtype))  # the next code, in each place
    with pytest.raises(AssertionError):
        problem.stored(off)
