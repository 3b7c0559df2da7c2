"""The paths of jattn.ops.attend, the two forms of the reference and the loop tuned for CPUs, give the same numbers.

All are judged by the witness: the path that this platform prefers in tests/backends, the others here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import device
from jattn.backends.sdpa import fastest_path
from jattn.device import Chip
from jattn.ops import reference
from jattn.ops.cpu_loop import cpu_loop
from jattn.ops.keys import PagedKeys
from jattn.ops.layer import layer_terms
from jattn.ops.levels import single_level
from tests.backends.rows import ROWS
from tests.cases import CASES, FEATURES
from tests.problem import Problem
from tests.running import step

FORMS = {
    "dense": reference.dense,
    "chunked": reference.chunked,
    "differentiable": functools.partial(reference.chunked, differentiable=True),
    "cpu_loop": cpu_loop,
}


def compute(problem: Problem, form: str):
    """(state, cache) of this problem by one form."""
    cache, meta, spec, params = problem.cache(), problem.meta, problem.spec, problem.params

    @jax.jit
    def run(q, cache, meta, params):
        level = single_level(meta, spec.attn_type)
        terms, keys = layer_terms(spec, meta.is_causal, params), PagedKeys.of(cache, level.block_table)
        more = dict(dense=(), cpu_loop=(level.max_query_len, problem.dtype)).get(form, (level.max_query_len,))
        return FORMS[form](terms, q, keys, level.batch, *more)

    return run(problem.q, cache, meta, params), cache


@pytest.mark.parametrize("form", [*FORMS, "in groups"])
@pytest.mark.parametrize("case", ["decode", "mixed"])
@pytest.mark.parametrize("feature", ["plain", "chunk_alibi_sinks"])
def test_every_form_gives_the_witness_answer(form, case, feature, monkeypatch):
    if form == "in groups":
        monkeypatch.setattr(reference, "ROWS_AT_ONCE", 64)
    problem = Problem(case=CASES[case], feature=FEATURES[feature])
    state, cache = compute(problem, "chunked" if form == "in groups" else form)
    problem.answer(cache).check(state)


def judged_here():
    """(path, row) of the reference's forms: `dense` on every row; `chunked`, where this platform does not prefer it, on
    those that are not about sizes only."""
    sizes = ("page", "head_dim", "ratio", "dtype", "case")
    for row in ROWS:
        yield pytest.param("dense", *row.values, id=f"dense-{row.id}")
        if fastest_path(device.chip_of(None)) != "chunked" and row.id.split("-")[0] not in sizes:
            yield pytest.param("chunked", *row.values, id=f"chunked-{row.id}")


@pytest.mark.parametrize(("path", "problem"), list(judged_here()))
def test_a_path_that_sdpa_did_not_choose_agrees_with_the_witness(path, problem):
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend="sdpa")
    object.__setattr__(attn, "impl", dataclasses.replace(attn.impl, path=path))
    new = problem.new(problem.keys), problem.new(problem.values)
    cache, state = step(attn, problem.cache(new=False), problem.q, *new, problem.meta, problem.params)
    problem.answer(cache).check(state)


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("everything_two_ways", {}),
        ("rswa_mm_prefix_sqrt", {}),
        ("qq_bias_alibi_score_fn", {}),
        ("scales", dict(cache_dtype="float8_e4m3fn", quant="per_token_head")),
    ],
)
def test_the_gradients_of_both_forms_agree_and_stale_pages_reach_none(feature, options):
    """Those of `sdpa` are the chunked form's; dense is differentiated by JAX as it stands."""
    problem = Problem(feature=FEATURES[feature], **options)
    cache, meta, spec, is_causal = problem.cache(storage="native"), problem.meta, problem.spec, problem.meta.is_causal
    weight = jnp.asarray(np.random.default_rng(7).standard_normal((problem.num_tokens, 4, 16), np.float32))
    floats = {name: x for name, x in vars(cache).items() if isinstance(x, jax.Array) and x.dtype != jnp.int8}

    def loss(form, q, floats, params):
        level = single_level(meta, spec.attn_type)
        keys = PagedKeys.of(dataclasses.replace(cache, **floats), level.block_table)
        more = () if form == "dense" else (level.max_query_len,)
        state = FORMS[form](layer_terms(spec, is_causal, params), q, keys, level.batch, *more)
        return jnp.sum(state.out * weight) + jnp.sum(jnp.where(jnp.isfinite(state.lse), state.lse, 0.0))

    params = jax.tree.map(jnp.asarray, problem.params)
    grad = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    q = jnp.asarray(problem.q)
    dense, chunked = (jax.tree.leaves(grad(form, q, floats, params)) for form in ("dense", "differentiable"))
    for a, b in zip(dense, chunked, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(a).all() and np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * max(np.abs(a).max(), 1))


@pytest.mark.parametrize(("platform", "path"), [("cpu", "cpu_loop"), ("gpu", "chunked"), ("tpu", "chunked")])
def test_sdpa_chooses_by_platform_alone(platform, path):
    assert fastest_path(Chip(platform)) == path
