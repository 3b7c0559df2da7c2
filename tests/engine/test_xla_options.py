"""The options of dispatches: only those that XLA knows, only on CUDA; and a jit that reads them at its first call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.engine import xla_options
from jattn.engine.xla_options import PlatformJit, options_of


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


def test_the_platform_is_read_at_the_first_call(monkeypatch):
    monkeypatch.setattr(xla_options, "options_of", lambda platform, few: seen.append((platform, few)) or {})
    seen, f = [], PlatformJit(lambda x, n: x * n, lambda x, n: 1, static_argnums=1)
    assert not seen
    assert f(jnp.float32(2), 3) == 6
    assert f(jnp.float32(2), 4) == 8
    assert seen == [(jax.default_backend(), True), (jax.default_backend(), False)]


def test_few_and_many_tokens_have_their_own_options(monkeypatch):
    optimise = lambda platform, few: {"xla_backend_optimization_level": 2 if few else 0}
    monkeypatch.setattr(xla_options, "options_of", optimise)
    f = PlatformJit(lambda x: x + 1, lambda x: x.shape[0])
    for size in (xla_options.FEW_TOKENS, xla_options.FEW_TOKENS + 1):
        np.testing.assert_array_equal(f(jnp.zeros(size)), np.ones(size))
    few, many = f._jitted[True], f._jitted[False]
    assert (few._cache_size(), many._cache_size()) == (1, 1)


def test_a_call_finds_what_was_compiled_ahead(compiles):
    f = PlatformJit(lambda x: jnp.sin(x) + 1, lambda x: len(x))
    x = jnp.arange(5.0)
    f.lower(x).compile()
    with compiles() as seen:
        f(x)
    assert not seen.total
