"""A request that is computed in several steps, with any number of tokens in each, through one cache."""

import numpy as np

import jattn
from tests.cases import Case
from tests.problem import Problem
from tests.running import step


def whole(problem: Problem) -> Problem:
    """The same requests, computed in a single step."""
    case = problem.case
    return problem.replace(case=Case(f"{case.name}, one shot", case.seq_lens, case.seq_lens))


def serve(problem: Problem, pieces: list[tuple[int, ...]], backend: str, num_tokens: int) -> jattn.AttentionState:
    """`problem` is a one-shot batch; pieces[i] says how many tokens of each request step i computes.

    Every step is padded to `num_tokens`. Returns the state of all tokens in the packing of `problem`.
    """
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
    lens = problem.case.seq_lens
    first = np.cumsum([0, *lens[:-1]])
    cache, done = problem.cache(new=False), np.zeros(len(lens), int)
    q, k, v = problem.q, problem.new(problem.keys), problem.new(problem.values)
    out = np.zeros((problem.num_tokens, problem.heads, problem.v_dim))
    lse = np.full((problem.num_tokens, problem.heads), -np.inf)
    for piece in pieces:
        rows = np.concatenate([first[r] + done[r] + np.arange(n) for r, n in enumerate(piece)])
        done += piece
        meta = jattn.CommonAttentionMetadata.from_lengths(
            piece, done, problem.block_table[: len(lens)], problem.block_size,
            num_tokens=num_tokens, num_reqs=problem.num_reqs, **problem.feature.reach_of_batch(problem.lengths),
        )  # fmt: skip
        meta = meta.replace(block_table=problem.block_table)
        pad = lambda x: np.concatenate([x[rows], np.full((num_tokens - len(rows), *x.shape[1:]), np.nan, x.dtype)])  # noqa: B023
        cache, state = step(attn, cache, pad(q), pad(k), pad(v), meta, problem.params)
        out[rows], lse[rows] = np.asarray(state.out)[: len(rows)], np.asarray(state.lse)[: len(rows)]
    assert (done == lens).all(), "the pieces must add up to the requests"
    problem.stored(cache)  # the right values were written
    return jattn.AttentionState(out=out, lse=lse)
