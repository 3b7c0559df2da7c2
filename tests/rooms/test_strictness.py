"""The suite's own strictness: conftest.py and pyproject.toml keep what they promise."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import HOST_DEVICES


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros(3) + jnp.zeros((2, 3))


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host's devices are counted on CPU only")
def test_there_are_several_devices():
    assert jax.device_count() >= HOST_DEVICES


def test_floats_are_32_bit():
    assert jnp.asarray(1.0).dtype == jnp.float32


def test_the_trace_counter_counts_shapes_not_calls(compiles):
    @jax.jit
    def doubled(x):
        return x * 2

    inputs = [jnp.zeros(n) for n in (3, 3, 4)]
    with compiles() as seen:
        for x in inputs:
            doubled(x)
    assert seen.of("doubled") == 2
    assert seen.total >= 2
    doubled(jnp.zeros(5))
    assert seen.of("doubled") == 2  # outside the `with`, nothing is counted
