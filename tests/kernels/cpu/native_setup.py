"""Shared by the tests of the native kernels: a layer with a given instruction set, and the mark `needs_library`.

The mark skips only where the library cannot be built. With a compiler but without the library, the tests fail.
"""

import dataclasses

import jax
import pytest

import jattn
from pallas_kernels.cpu.native import library
from tests import matrix
from tests.problem import Problem

STATUS = library.status()
ISAS = STATUS.isas or ("auto",)

needs_library = pytest.mark.skipif(matrix.is_native_absent(), reason=matrix.excuse() or "the library is required")


def layer(problem: Problem, isa: str = "auto") -> jattn.PagedAttention:
    """A PagedAttention of this problem on `cpu_native`, on this instruction set."""
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend="cpu_native")
    object.__setattr__(attn, "impl", dataclasses.replace(attn.impl, isa=isa))
    return attn


def run(problem: Problem, isa: str = "auto"):
    """(cache, state) of one step that writes and attends."""
    attn = layer(problem, isa)
    call = jax.jit(lambda cache, q, k, v, meta, params: attn(q, k, v, cache, attn.build(meta), params))
    new = problem.new(problem.keys), problem.new(problem.values)
    return call(problem.cache(new=False), problem.q, *new, problem.meta, problem.params)
