"""What the tests of the native kernels share: a layer pinned to one instruction set, and whether there is any.

They are skipped only where the library cannot be there. Where a compiler is present and the library is not, they fail.
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

needs_library = pytest.mark.skipif(matrix.is_native_absent(), reason=matrix.excuse() or "it must be there")


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
