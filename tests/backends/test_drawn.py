"""Problems drawn at random: every backend of this platform agrees with the witness, or refuses with a reason."""

import pytest

import jattn
from tests.drawn import fields_of
from tests.problem import Problem
from tests.running import conform

SEEDS = range(1000, 1012)
WORK = 50_000


@pytest.mark.parametrize("seed", SEEDS)
def test_sdpa_computes_every_one(seed):
    conform(Problem(**fields_of(seed, WORK)), "sdpa")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_choice_agrees(seed):
    conform(Problem(**fields_of(seed, WORK)), "auto")


def test_other_backends_refuse_some_and_give_reasons():
    refused = 0
    for seed in SEEDS:
        problem = Problem(**fields_of(seed, WORK))
        for report in jattn.explain(problem.spec, problem.cache_spec):
            assert report.supported == (not report.reasons)
            refused += not report.supported
    assert refused
