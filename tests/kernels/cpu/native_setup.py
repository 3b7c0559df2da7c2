"""What the tests of the native kernels share: a layer pinned to one instruction set, and whether there is any."""

import dataclasses

import jax
import pytest

import jattn
from pallas_kernels.cpu.native import library, toolchain
from tests.problem import Problem

STATUS = library.status()
ISAS = STATUS.isas or ("auto",)


def _no_compiler() -> str:
    """Why no library can be built here. Where one can, its absence is a failure: the tests run and say so."""
    try:
        toolchain.isas(), toolchain.compiler()
    except toolchain.BuildError as error:
        return str(error)
    return ""


needs_library = pytest.mark.skipif(not STATUS.available and bool(_no_compiler()), reason=_no_compiler() or "available")


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
