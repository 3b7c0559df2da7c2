"""The static shapes of dispatches: few, known in advance, and one for each plan."""

import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from jattn.engine import Limits, StepPlan
from jattn.engine.scheduler import Row
from jattn.engine.shapes import StepShapes
from tests.rooms.tree import ROOT


@hypothesis.given(st.data(), st.integers(1, 70), st.integers(0, 200), st.booleans(), st.booleans())
def test_every_plan_within_the_limits_has_a_shape_that_was_announced(data, rows, more, deterministic, coarse):
    least = data.draw(st.none() | st.integers(1, rows))
    limits = Limits(rows, rows + more, 100)
    shapes = StepShapes(limits, 16, deterministic, is_coarse=coarse, least_sharing_rows=least)
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=rows))
    hypothesis.assume(sum(sizes) <= rows + more)
    samples = data.draw(st.booleans())
    plan = StepPlan(tuple(Row(str(i), 0, n, samples) for i, n in enumerate(sizes)))
    shape = shapes.of(plan, data.draw(st.booleans()))
    assert shape in shapes.all()
    tokens, requests, decode, shares = shape
    assert not shares or (decode and least is not None and requests >= least)
    assert tokens >= plan.num_tokens and tokens >= requests >= len(sizes)
    if deterministic:
        assert requests >= plan.num_tokens and decode
    elif decode:
        assert plan.is_decode and tokens == requests < (4 if coarse else 2) * len(sizes) + 1


def test_there_are_few_of_them():
    assert len(StepShapes(Limits(64, 2048, 4096), 16).all()) == 7 + 6
    assert len(StepShapes(Limits(64, 2048, 4096), 16, is_coarse=True).all()) == 4 + 4
    coarse = lambda rows: StepShapes(Limits(rows, 64, 8), 4, is_coarse=True).buckets.reqs
    assert [coarse(rows) for rows in (1, 3, 8, 12, 33)] == [(4,), (4,), (4, 8), (4, 12), (4, 16, 32, 33)]
    assert StepShapes(Limits(64, 64, 4096), 16, True).all() == ((64, 64, True, False),)
    assert [shape[:3] for shape in StepShapes(Limits(3, 3, 8), 4).all()] == [
        (1, 1, True), (2, 2, True), (3, 3, True), (3, 3, False)
    ]  # fmt: skip
    sharing = [shape for shape in StepShapes(Limits(9, 9, 8), 4, least_sharing_rows=4).all() if shape.shares_prefix]
    assert sharing == [(4, 4, True, True), (8, 8, True, True), (9, 9, True, True)]


LATE_SETTING = """
import logging
import jax
from jax._src import config
from jattn.engine import Engine, SamplingParams
from tests.engine import fake

made = []

def forward(*args, **options):
    if not made:  # as an import in the midst of a trace does
        named = dict(name="jattn_test_late_setting", default=False, help="", include_in_jit_key=True)
        made.append(config.bool_state(**named, include_in_trace_context=True))
    return fake.forward(*args, **options)

sizes = dict(num_blocks=30, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
engine = Engine(fake.FakeConfig(), fake.PARAMS, forward=forward, **sizes)
engine.warmup()
jax.config.update("jax_log_compiles", True)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("jax").addHandler(handler)
engine.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=9, ignore_eos=True))
assert made and not [line for line in said if "Compiling jit(dispatch)" in line], said
"""


@pytest.mark.slow
def test_a_setting_that_the_first_trace_registers_compiles_nothing_later():
    """On a GPU the kernel's first trace imports a part of JAX that does this; a batch of one row then compiled anew."""
    done = subprocess.run([sys.executable, "-c", LATE_SETTING], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
