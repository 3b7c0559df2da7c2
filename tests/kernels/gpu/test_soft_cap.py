"""tanh of a soft cap, on the PTX model: the polynomial within the cap, tanh beyond it, warp by warp."""

import numpy as np
import pytest

from pallas_kernels.gpu import soft_cap_sm90 as cap
from tests.kernels.gpu.simt import Fragment, Machine, emulated


@pytest.mark.parametrize("fourths", [1, 2, 4])
def test_elements_are_tanh_by_polynomial_unless_their_warp_is_beyond_the_cap(fourths):
    machine, scale = Machine(128, 0), np.float32(0.3)
    values = np.random.default_rng(0).uniform(-1, 1, (16, 128)).astype(np.float32) / scale
    values[:, 32:64] *= 6  # the second warp is beyond the cap
    x = Fragment((64, 32), cap.plgpu.Layout.WGMMA)
    flat = x.registers.reshape(-1)
    for i in range(flat.size):
        flat[i] = (values[2 * i], values[2 * i + 1])
    with emulated(cap, machine):
        out = cap.tanh_of_scaled(x, np.full(128, scale), fourths)
    got, want = np.array([value for pair in out.registers.flat for value in pair]), np.tanh(values * scale)
    error = abs(got / want - 1)
    assert error.max() < 2**-13.5
    by_fma = np.arange(16) // 2 % 4 < fourths
    exact = error < 1e-6
    assert exact[~by_fma].all() and exact[:, 32:64].all(), "these are tanh's"
    assert not exact[by_fma][:, :32].all(), "these are the polynomial's"
