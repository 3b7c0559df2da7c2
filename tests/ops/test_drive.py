"""One tile after the other, or all side by side: both give the witness's numbers."""

import dataclasses

import jax
import numpy as np
import pytest

from jattn.ops.attend import Plan, numbers
from jattn.ops.drive import OutShape, all_at_once, one_by_one
from jattn.ops.keys import PagedKeys
from jattn.ops.levels import flat
from jattn.ops.ragged import CLASSES, classes_for, index_tiles
from tests.cases import CASES, FEATURES, Case, Feature
from tests.problem import Problem


def drive(problem: Problem, how: str):
    """The state of this problem, tiles visited in the given way."""
    cache, meta, spec, params = problem.cache(), problem.meta, problem.spec, problem.params

    @jax.jit
    def run(q, cache, meta, params):
        level = flat(meta, spec.attn_type)
        plan = Plan(spec, meta.is_causal, level.max_query_len, level.max_seq_len, on_cpu=True)
        keys = PagedKeys.of(cache, level.block_table)
        shape = OutShape(level.max_query_len, spec.v_head_dim, problem.dtype)
        args = (q, level.batch, keys, plan.rules, numbers(spec, params), shape)
        if how == "one by one":
            return one_by_one(*args, bits=True)
        return all_at_once(*args, static_trips=how == "differentiable")

    return run(problem.q, cache, meta, params), cache


@pytest.mark.parametrize("how", ["one by one", "all at once", "differentiable", "in groups"])
@pytest.mark.parametrize("case", ["decode", "mixed"])
@pytest.mark.parametrize("feature", ["plain", "chunk_alibi_sinks"])
def test_every_way_of_visiting_the_tiles_gives_the_witness_answer(how, case, feature, monkeypatch):
    if how == "in groups":
        monkeypatch.setattr("jattn.ops.drive.ROWS_AT_ONCE", 64)
    problem = Problem(case=CASES[case], feature=FEATURES[feature])
    state, cache = drive(problem, how)
    problem.answer(cache).check(state)


LADDERS = Case("ladders", (1, 1, 1, 2, 300, 5, 140), (100, 500, 1300, 640, 700, 513, 140))
"""Contexts that end in a long chunk and in short ones, and a last tile that would stick out of the batch."""


@pytest.mark.parametrize("how", ["one by one", "differentiable"])
@pytest.mark.parametrize("block_size", [16, 48, 64, 600])  # chunks of 8 to 32 pages, of 2 to 8, of 4 in place, of one
@pytest.mark.parametrize(
    "feature", [FEATURES["plain"], Feature("window_300", dict(sliding_window=300)), FEATURES["rswa_mm_prefix_sqrt"]]
)
def test_every_key_is_read_once_whatever_the_sizes_of_chunks(how, block_size, feature):
    problem = Problem(case=LADDERS, feature=feature, block_size=block_size, pad_tokens=0)
    state, cache = drive(problem, how)
    problem.answer(cache).check(state)


@pytest.mark.parametrize("shares", [1, 2, 3])  # 3: of 1, 1 and 2 heads
def test_shares_of_the_heads_give_what_all_give_together(shares, monkeypatch):
    monkeypatch.setattr("jattn.ops.drive.shares_of", lambda rows, num_kv: shares)
    of_four = dict(heads=8, kv_heads=4, cache_dtype="int8", quant="per_token_head")
    problem = Problem(case=LADDERS, feature=FEATURES["chunk_alibi_sinks"], **of_four)
    state, cache = drive(problem, "one by one")
    problem.answer(cache).check(state)


def test_the_classes_of_tiles_split_all_query_lengths_between_them():
    for length in range(1, 200):
        assert sum(kind.shortest <= length <= kind.longest for kind in CLASSES) == 1
    assert [kind.rows for kind in classes_for(1)] == [1]
    assert classes_for(10**6) == CLASSES


def test_tiles_cover_every_query_once_and_never_exceed_their_capacity():
    rng = np.random.default_rng(0)
    for _ in range(20):
        query_lens = rng.choice([0, 1, 2, 7, 8, 9, 64, 65, 200], size=rng.integers(1, 12))
        start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        covered = np.zeros(start[-1], int)
        batch = _Lengths(query_len=np.diff(start))
        for kind in CLASSES:
            index = index_tiles(batch, kind)
            assert int(index.total) <= kind.capacity(int(start[-1]), len(query_lens))
            for t in range(int(index.total)):
                req, number = (int(x) for x in index.locate(t))
                first = number * kind.rows
                covered[start[req] + first : start[req] + min(first + kind.rows, query_lens[req])] += 1
        assert (covered == 1).all()


@dataclasses.dataclass
class _Lengths:
    query_len: np.ndarray
