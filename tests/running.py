"""Run a problem on a backend as a server would, and check the state and the cache."""

import dataclasses
import functools

import jax
import numpy as np

import jattn
from tests import matrix
from tests.problem import Problem


@functools.partial(jax.jit, static_argnums=0)
def step(attn: jattn.PagedAttention, cache, q, k, v, meta, params):
    """One layer of one step, the plan included, as a server would compile it."""
    return attn(q, k, v, cache, attn.build(meta), params)


def run(problem: Problem, backend: str = "auto", pages: jattn.PagedKV | None = None):
    """Write the new tokens into the poisoned cache (or `pages`), attend: (cache, state)."""
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
    new = problem.new(problem.keys), problem.new(problem.values)
    pages = problem.cache(new=False) if pages is None else pages
    return step(attn, pages, problem.q, *new, problem.meta, problem.params)


def takes(backend: str, problem: Problem) -> bool:
    """Does this backend take this layer and this batch, here? AssertionError unless the support matrix says so too."""
    try:
        attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
        jax.eval_shape(attn.build, problem.meta)
        if any(np.ndim(x) for name, x in problem.numbers.items() if name.endswith("_scale")):  # known with the call
            jax.eval_shape(
                lambda meta: attn.attend(problem.q, problem.cache(), attn.build(meta), problem.params), problem.meta
            )
    except jattn.UnsupportedError as refusal:
        matrix.check_refusal(backend, problem, refusal)
        return False
    matrix.check_taken(backend, problem)
    return True


def same_bits(a, b) -> bool:
    """Equal bit for bit, leaf by leaf."""
    a, b = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


def conform(problem: Problem, backend: str, lse_floor: float = 0.0) -> None:
    """Write and attend; raise AssertionError unless all is as the witness says.

    Out and lse within tolerances measured on the same data, padding exactly (0, -inf), every written slot right, and
    every other slot of the poisoned cache unchanged bit for bit. `lse_floor`: the error of a chip's approximate
    functions.
    """
    before = problem.cache(new=False)
    after, state = run(problem, backend, before)
    assert state.out.dtype == (problem.spec.output_dtype or problem.q.dtype) and state.lse.dtype == np.float32
    answer = problem.answer(after)
    dataclasses.replace(answer, lse_limit=np.maximum(answer.lse_limit, lse_floor)).check(state)
    written = {slot for r, first in enumerate(problem.case.computed) for slot in problem.slots(r, first)}
    others = np.setdiff1d(np.arange(problem.num_blocks * problem.block_size), list(written))
    for old, held in zip(_slots(problem, before), _slots(problem, after), strict=True):
        np.testing.assert_array_equal(held[others], old[others], err_msg="a slot that was not written has changed")


def _slots(problem: Problem, cache: jattn.PagedKV) -> list[np.ndarray]:
    """Each pool's bit patterns, [N * S, numbers of a slot]."""
    pools = [np.asarray(pool) for pool in cache.logical()]
    return [pool.reshape(problem.num_blocks * problem.block_size, -1).view(np.uint32) for pool in pools]
