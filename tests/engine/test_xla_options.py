"""The options of dispatches: only those that XLA knows, only on CUDA; and a jit that reads them at its first call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.engine import SamplingParams, warming, xla_options
from jattn.engine.dispatch import dispatch
from jattn.engine.xla_options import PlatformJit, options_of
from tests.engine import test_mesh as on_mesh
from tests.engine.rows import choose_once, penalties_of, sampling_rows


@pytest.fixture
def no_cache():
    options_of.cache_clear()
    yield
    options_of.cache_clear()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_than_cuda_have_no_options(platform):
    assert options_of(platform, True) == options_of(platform, False) == {}


def test_options_that_the_installed_xla_does_not_know_are_left_out(monkeypatch, no_cache):
    wanted = {"xla_no_such_option": 1, "xla_gpu_graph_min_graph_size": "many", "xla_cpu_enable_fast_math": False}
    monkeypatch.setattr(xla_options, "CUDA_OPTIONS", wanted)
    assert options_of("gpu", True) == {"xla_cpu_enable_fast_math": False}


def test_this_xla_knows_the_options_of_the_engine(no_cache):
    assert options_of("gpu", True) == xla_options.CUDA_OPTIONS
    assert options_of("gpu", False) == xla_options.CUDA_OPTIONS | xla_options.CUDA_OPTIONS_MANY_TOKENS


def test_dispatches_on_several_devices_have_options_of_their_own(no_cache):
    assert options_of("gpu", True, True) == xla_options.CUDA_OPTIONS | xla_options.CUDA_OPTIONS_ON_MESH
    added = dict(options_of("gpu", False, True).items() - options_of("gpu", False).items())
    assert added == xla_options.CUDA_OPTIONS_ON_MESH | xla_options.CUDA_OPTIONS_MANY_TOKENS_ON_MESH


def test_the_platform_is_read_at_the_first_call(monkeypatch):
    monkeypatch.setattr(xla_options, "options_of", lambda *asked: seen.append(asked) or {})
    seen, f = [], PlatformJit(lambda x, n: x * n, lambda x, n: 1, lambda x, n: n == 4, static_argnums=1)
    assert not seen
    assert f(jnp.float32(2), 3) == 6
    assert f(jnp.float32(2), 4) == 8
    assert seen == [(jax.default_backend(), True, False), (jax.default_backend(), True, True)]


def test_each_set_of_options_has_a_function_of_its_own(monkeypatch):
    optimise = lambda platform, few, on_mesh: {"xla_backend_optimization_level": 2 if few else 0}
    monkeypatch.setattr(xla_options, "options_of", optimise)
    f = PlatformJit(lambda x: x + 1, lambda x: x.shape[0])
    for size in (xla_options.FEW_TOKENS - 1, xla_options.FEW_TOKENS, xla_options.FEW_TOKENS + 1):
        np.testing.assert_array_equal(f(jnp.zeros(size)), np.ones(size))
    few, many = f._jitted.values()
    assert (few._cache_size(), many._cache_size()) == (2, 1)


def test_a_call_finds_what_was_compiled_ahead(compiles):
    f = PlatformJit(lambda x: jnp.sin(x) + 1, lambda x: len(x))
    x = jnp.arange(5.0)
    f.lower(x).compile()
    with compiles() as seen:
        f(x)
    assert not seen.total


def loops(jaxpr, inside=False):
    """(equation, is it in a loop?) at any depth."""
    for equation in jaxpr.eqns:
        yield equation, inside
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from loops(inner, inside or equation.primitive.name in ("scan", "while"))


def slices_by_a_loop(function, *args) -> list[str]:
    """The operations that slice or stack by the counter of a loop; XLA may copy for them outside command buffers."""
    found = []
    for equation, inside in loops(jax.make_jaxpr(function)(*args).jaxpr):
        name = equation.primitive.name
        if name == "scan":
            body = equation.params["jaxpr"].jaxpr
            shapes = lambda variables: [x.aval.shape for x in variables]
            found += ["scan over arrays"] * (shapes(equation.invars) != shapes(body.invars))
            found += ["scan that stacks"] * (shapes(equation.outvars) != shapes(body.outvars))
        if inside and name in ("dynamic_slice", "dynamic_update_slice"):
            found.append(name)
    return found


def test_no_loop_of_sampling_slices_an_array():
    params = [SamplingParams(temperature=0.7, top_k=3, top_p=0.9), SamplingParams(frequency_penalty=0.5)]
    args = (
        jnp.zeros((2, 50)), sampling_rows(params, [1, 2], [0, 0], [9, 9], [(), ()], 2),
        penalties_of(params, [[1], [2]], [1, 1], 2, 8), jnp.zeros((4, 2), jnp.int32), np.bool_(True),
    )  # fmt: skip
    assert slices_by_a_loop(choose_once, *args) == []


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x[0], None, length=3)[1], ["scan that stacks"]),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, None), x[0], x)[0], ["scan over arrays"]),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + x[i], x[0]), ["dynamic_slice"]),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i, x[0]), []),
    ],
)
def test_the_check_sees_slices(function, found):
    assert slices_by_a_loop(function, jnp.zeros(5)) == found


@pytest.mark.parametrize("data", [1, 2], ids=["one device", "data ranks that share experts"])
def test_the_loop_of_steps_computes_its_condition(data):
    """On an H200, a CUDA graph whose condition was an element of the carry as it stood went on after the last step."""
    options = {} if data == 1 else dict(mesh=on_mesh.mesh(1, data), expert_parallel=True)
    runner = (served := on_mesh.engine(on_mesh.EXPERTS, **options)).runner
    batch = warming._padding(runner.model, served.shapes, served.shapes.all()[0])
    jaxpr = jax.make_jaxpr(dispatch.function, static_argnums=0)(
        runner.model, runner.params, runner.caches, runner._row_state, batch
    )
    whiles = [equation for equation, _ in loops(jaxpr.jaxpr) if equation.primitive.name == "while"]
    steps = max(whiles, key=lambda equation: len(equation.invars))
    condition = steps.params["cond_jaxpr"].jaxpr
    assert condition.eqns and condition.outvars[0] not in condition.invars
