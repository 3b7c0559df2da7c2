"""The bits of a request's result depend on that request only: not on padding, blocks or other requests."""

import numpy as np
import pytest

import jattn
from tests.cases import CASES, FEATURES, Case
from tests.laws.judge import able
from tests.problem import Problem
from tests.running import run, same_bits

NAMES = ("plain", "cap_sinks_window", "per_request_causal", "chunk_alibi_sinks")
PROBLEMS = {name: Problem(case=CASES["mixed_unsorted"], feature=FEATURES[name]) for name in NAMES}
PAIRS = [
    pytest.param(backend, problem, id=f"{backend}-{name}")
    for name, problem in PROBLEMS.items()
    for backend in able(problem)
]


def rows_of(problem: Problem, state: jattn.AttentionState, r: int) -> list[np.ndarray]:
    """(out, lse) of request r."""
    stop = sum(problem.case.query_lens[: r + 1])
    rows = slice(stop - problem.case.query_lens[r], stop)
    return [np.asarray(state.out)[rows], np.asarray(state.lse)[rows]]


def live(problem: Problem, backend: str) -> list[np.ndarray]:
    """(out, lse) of the live tokens."""
    _, state = run(problem, backend)
    return [np.asarray(x)[: problem.case.num_tokens] for x in (state.out, state.lse)]


@pytest.mark.parametrize(("backend", "problem"), PAIRS)
def test_padding_is_invisible(backend, problem):
    bare = problem.replace(pad_tokens=0, pad_reqs=0, pad_columns=0, spare_blocks=0)
    wide = problem.replace(pad_tokens=21, pad_reqs=5, pad_columns=9, spare_blocks=11)
    assert same_bits(live(bare, backend), live(problem, backend))
    assert same_bits(live(bare, backend), live(wide, backend))


@pytest.mark.parametrize(("backend", "problem"), PAIRS)
def test_blocks_may_be_permuted_and_poison_may_be_anything(backend, problem):
    wanted = live(problem, backend)
    assert same_bits(wanted, live(problem.replace(page_seed=1), backend))
    for poison in (np.inf, -np.inf, 1e30, 0.0):
        assert same_bits(wanted, live(problem.replace(poison=poison), backend)), poison


@pytest.mark.parametrize(("backend", "problem"), PAIRS)
def test_a_request_alone_in_company_and_in_another_order_is_the_same(backend, problem):
    _, together = run(problem, backend)
    count = len(problem.case.query_lens)
    for r in (0, 3):  # six new tokens after computed ones, and a single token: two kinds of tile
        _, alone = run(problem.alone(r), backend)
        assert same_bits(rows_of(problem.alone(r), alone, 0), rows_of(problem, together, r))
    order = [3, 1, 4, 0, 2]
    lens = ([x[i] for i in order] for x in (problem.case.query_lens, problem.case.seq_lens))
    shuffled = problem.replace(case=Case("shuffled", *map(tuple, lens)), ids=tuple(order))
    _, other = run(shuffled, backend)
    for r in range(count):
        assert same_bits(rows_of(shuffled, other, order.index(r)), rows_of(problem, together, r))


@pytest.mark.parametrize("backend", able(Problem()))
def test_r30_static_bounds_and_long_neighbours_do_not_move_a_bit(backend):
    short = Problem(case=Case("short", (1, 5), (40, 37)), block_size=16)
    long = short.replace(case=Case("long", (1, 5, 1, 150), (40, 37, 700, 150)))
    _, base = run(short, backend)
    _, company = run(long, backend)
    for r in (0, 1):
        assert same_bits(rows_of(long, company, r), rows_of(short, base, r))
    attn = jattn.PagedAttention(short.spec, short.cache_spec, backend=backend)
    for bounds in (dict(max_seq_len=4096), dict(max_query_len=64), dict(max_seq_len=64, max_query_len=8)):
        meta = short.meta.replace(**bounds)
        state = attn.attend(short.q, short.cache(), attn.build(meta), short.params)
        for r in (0, 1):
            assert same_bits(rows_of(short, state, r), rows_of(short, base, r)), bounds
