"""R-49: each Pallas kernel reads each of its operands. An operand that is not read is a bug, or a needless copy; one
that is passed twice, to be read in one place, is neither: kernels take it where an option is off. The test traces the
kernels, which any machine can, and examines their jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jattn
from jattn.device import Chip
from pallas_kernels.gpu.rotate_write_sm90 import RotateWrite, rotate_and_write
from pallas_kernels.gpu.write_sm90 import write_rows
from tests.cases import CASES, FEATURES, Feature
from tests.problem import Problem

KERNELS = ("pallas_call", "mpmd_map", "core_map")
WRITES = ("swap", "masked_swap", "addupdate")  # to their first operand


def inner(value):
    """The jaxprs within a parameter of an equation."""
    if hasattr(value, "eqns"):
        return [value]
    if hasattr(value, "jaxpr"):
        return [value.jaxpr]
    return [j for x in value for j in inner(x)] if isinstance(value, (tuple, list)) else []


def bodies(equation):
    """(jaxpr, its variables for the operands of the equation, in order; None: not passed) of each sub-program."""
    operands, params = list(equation.invars), equation.params
    name = equation.primitive.name
    if name == "while":
        at, of = params["cond_nconsts"], params["body_nconsts"]
        cond, body = inner(params["cond_jaxpr"])[0], inner(params["body_jaxpr"])[0]
        carry = len(operands) - at - of
        yield cond, [*cond.invars[:at], *[None] * of, *cond.invars[at:]]
        yield body, [*[None] * at, *body.invars]
        assert len(body.invars) == of + carry
        return
    for jaxpr in (j for value in params.values() for j in inner(value)):
        if name == "cond":
            yield jaxpr, [None, *jaxpr.invars]
        elif len(jaxpr.constvars) == len(operands) and operands:
            yield jaxpr, list(jaxpr.constvars)  # run_scoped: its closed-over variables
        else:
            yield jaxpr, list(jaxpr.invars)


def is_read(jaxpr, variable) -> bool:
    """Does an operation of the program, or of a sub-program, read this variable?"""
    for equation in jaxpr.eqns:
        places = [i for i, x in enumerate(equation.invars) if x is variable]
        if not places:
            continue
        programs = list(bodies(equation))
        if not programs and not (equation.primitive.name in WRITES and places == [0]):
            return True
        for program, names in programs:
            assert len(names) >= len(equation.invars), f"{equation.primitive} hands its operands down in a way unknown"
            if any(names[i] is not None and is_read(program, names[i]) for i in places):
                return True
    return False


def kernels(jaxpr):
    """The equations of all kernels, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in KERNELS:
            yield equation
        else:
            for value in equation.params.values():
                for program in inner(value):
                    yield from kernels(program)


def unread(function, *args) -> list[list[int]]:
    """For each kernel that the function launches: the operands that it reads in no place where it gets them."""
    found = []
    for equation in kernels(jax.make_jaxpr(function)(*args).jaxpr):
        programs = [j for value in equation.params.values() for j in inner(value) if len(j.invars)]
        names = [j.constvars if len(j.constvars) == len(equation.invars) else j.invars for j in programs]
        operands = list(equation.invars)
        read = [any(is_read(j, mine[i]) for j, mine in zip(programs, names, strict=True)) for i in range(len(operands))]
        seen = {id(x) for x, was_read in zip(operands, read, strict=True) if was_read}
        found.append([i for i, x in enumerate(operands) if id(x) not in seen])
    return found


def copying(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...]


def adding(x_ref, y_ref, out_ref):
    @pl.when(x_ref[0] > 0)
    def _():
        out_ref[...] = x_ref[...] + y_ref[...]


@pytest.mark.parametrize(("kernel", "missing"), [(copying, [1]), (adding, [])])
def test_the_checker_sees_an_operand_that_nobody_reads(kernel, missing):
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)
    assert unread(call, jnp.ones(8), jnp.ones(8)) == [missing]


RICH = dict(sliding_window=40, logits_soft_cap=1.5, has_alibi=True, has_sinks=True)
SCALES = ("q_scale[]", "k_scale[]", "v_scale[]")
CHIP = dict(head_dim=128, block_size=16, dtype="bfloat16", layout="HND")
ROWS = {
    "pallas_cpu, plain": ("pallas_cpu", "cpu", "", dict(case=CASES["mixed"])),
    "pallas_cpu, everything": ("pallas_cpu", "cpu", "", dict(feature=FEATURES["everything_two_ways"])),
    "pallas_cpu, token scales": ("pallas_cpu", "cpu", "", dict(cache_dtype="int8", quant="per_token_head")),
}
for platform, generation in (("gpu", "sm_90"), ("tpu", "v6e")):
    rich = Feature("rich", RICH, ("alibi_slopes", "sinks", *(SCALES if platform == "gpu" else ("q_scale[]",))))
    chip = (f"pallas_{platform}", platform, generation)
    ROWS |= {
        f"{chip[0]}, plain": (*chip, CHIP),
        f"{chip[0]}, rich": (*chip, CHIP | dict(feature=rich)),
        f"{chip[0]}, per request": (*chip, CHIP | dict(feature=FEATURES["per_request_causal"])),
        f"{chip[0]}, fp8": (*chip, CHIP | dict(cache_dtype="float8_e4m3fn", quant="per_tensor")),
    }
ROWS["pallas_gpu, token scales"] = (
    "pallas_gpu",
    "gpu",
    "sm_90",
    CHIP | dict(cache_dtype="int8", quant="per_token_head"),
)


@pytest.mark.parametrize("row", ROWS)
def test_r49_every_operand_of_an_attention_kernel_is_read(row):
    backend, platform, generation, changes = ROWS[row]
    problem = Problem(**changes)
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend, Chip(platform, generation), problem.dtype)
    attend = lambda q, cache, meta, params: attn.attend(q, cache, attn.build(meta), params)
    arguments = (problem.q, problem.cache(storage="native"), problem.meta, problem.params)
    found = unread(attend, *arguments)
    assert found and not any(found), found


@pytest.mark.parametrize("scaled", [False, True])
def test_r49_every_operand_of_the_page_writer_is_read(scaled):
    dtype = jnp.int8 if scaled else jnp.bfloat16
    rows, pools = (jnp.ones((8, 2, 128), dtype),) * 2, (jnp.ones((4, 2, 16, 128), dtype),) * 2
    scales = ((jnp.ones((8, 2)),) * 2, (jnp.ones((4, 2, 16)),) * 2) if scaled else ((), ())
    write = lambda rows, scales, slots, pools, old: write_rows(
        rows, scales, slots, pools, old, page_size=16, heads_first=True
    )
    found = unread(write, rows, scales[0], np.arange(8, dtype=np.int32), pools, scales[1])
    written_in_place = [[i for i in missing if i < 2 + 2 * scaled + 1] for missing in found]  # the pools are the rest
    assert found and not any(written_in_place), found


def test_r49_every_operand_of_the_kernel_that_quantises_and_writes_is_read():
    rows, pools = (jnp.ones((8, 2, 128), jnp.bfloat16),) * 2, (jnp.ones((4, 2, 16, 128), jnp.int8),) * 2
    write = lambda rows, divisors, slots, pools: write_rows(
        rows, (), slots, pools, (), page_size=16, heads_first=True, divisors=divisors
    )
    found = unread(write, rows, (jnp.ones(2),) * 2, np.arange(8, dtype=np.int32), pools)
    assert found and not any(i < 5 for missing in found for i in missing), found


def test_r49_every_operand_of_the_kernel_that_rotates_and_writes_is_read():
    sizes = RotateWrite(
        tokens=8,
        heads=4,
        kv_heads=2,
        head_dim=128,
        v_head_dim=128,
        dim=64,
        blocks=4,
        page=16,
        heads_first=True,
        counters=132,
    )
    pools, angles = (jnp.ones((4, 2, 16, 128), jnp.bfloat16),) * 2, jnp.ones((8, 32))
    call = lambda rows, cos, sin, slots, pools: rotate_and_write(rows, cos, sin, slots, pools, sizes)
    found = unread(call, jnp.ones((8, sizes.width), jnp.bfloat16), angles, angles, np.arange(8, dtype=np.int32), pools)
    assert found and not any(i < 4 for missing in found for i in missing), found
