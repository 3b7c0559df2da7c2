"""The benchmarks' arrays: what the device fills is what the witness computes, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import drawn


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_witness_computes_what_the_device_fills(dtype):
    shape = (7, 8, 16, 32)
    filled = np.asarray(jax.jit(lambda seed: drawn.fill(seed, shape, jnp.dtype(dtype)))(jnp.uint32(3)))
    at = np.array([3, 0, 6]), 4, np.array([5, 15, 0])
    assert drawn.Drawn(3, shape, jnp.dtype(dtype))[at].tobytes() == filled[at].tobytes()
    numbers = filled.astype(np.float32)
    assert abs(numbers.mean()) < 0.02 and abs(numbers.std() - 1) < 0.02
