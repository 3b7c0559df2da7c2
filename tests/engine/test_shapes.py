"""The static shapes of a server: few, known in advance, and enough for every plan."""

import hypothesis
from hypothesis import strategies as st

from jattn.engine import Limits, StepPlan
from jattn.engine.scheduler import Row
from jattn.engine.shapes import StepShapes


@hypothesis.given(st.data(), st.integers(1, 70), st.integers(0, 200), st.booleans())
def test_every_plan_within_the_limits_has_a_shape_that_was_announced(data, rows, more, deterministic):
    shapes = StepShapes(Limits(rows, rows + more, 100), 16, deterministic)
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=rows))
    hypothesis.assume(sum(sizes) <= rows + more)
    samples = data.draw(st.booleans())
    plan = StepPlan(tuple(Row(str(i), 0, n, samples) for i, n in enumerate(sizes)))
    tokens, requests, decode = shapes.of(plan)
    assert (tokens, requests, decode) in shapes.all()
    assert tokens >= plan.num_tokens and tokens >= requests >= len(sizes)
    if deterministic:
        assert requests >= plan.num_tokens and decode
    elif decode:
        assert plan.is_decode and tokens == requests < 2 * len(sizes) + 1


def test_there_are_few_of_them():
    assert len(StepShapes(Limits(64, 2048, 4096), 16).all()) == 7 + 6
    assert StepShapes(Limits(64, 64, 4096), 16, True).all() == ((64, 64, True),)
    assert StepShapes(Limits(3, 3, 8), 4).all() == ((1, 1, True), (2, 2, True), (3, 3, True), (3, 3, False))
