"""A soft cap on the PTX model: the polynomial within its range, tanh elsewhere, score by score."""

import numpy as np

from pallas_kernels.gpu import soft_cap_sm90 as cap
from tests.kernels.gpu.simt import Fragment, Machine, emulated

SCALE, CAP = np.float32(0.3), 20.0
BY_FMA = np.arange(16) // 2 % cap.EVERY == 0


def capped(values):
    """Of values [16, 128], those of each thread."""
    x = Fragment((64, 32), cap.plgpu.Layout.WGMMA)
    flat = x.registers.reshape(-1)
    for i in range(flat.size):
        flat[i] = (values[2 * i], values[2 * i + 1])
    with emulated(cap, Machine(128, 0)):
        out = cap.capped(x, np.full(128, SCALE), CAP)
    return np.array([value for pair in out.registers.flat for value in pair])


def drawn(spread: float):
    return np.random.default_rng(0).uniform(-spread, spread, (16, 128)).astype(np.float32) / SCALE


def test_some_scores_are_computed_by_a_polynomial_within_its_range():
    values = drawn(cap.MAX_INPUT)
    error = abs(capped(values) / (CAP * np.tanh(values.astype(np.float64) * SCALE)) - 1)
    assert error.max() < 2**-13
    exact = error < 1e-6
    assert exact[~BY_FMA].all() and not exact[BY_FMA].all()


def test_scores_beyond_it_are_tanh():
    values = drawn(5.0)
    values[0, 3], values[1, 40], values[8, 100] = np.inf, -np.inf, np.nan
    got, want = capped(values), CAP * np.tanh(values.astype(np.float64) * SCALE)
    beyond = ~(abs(values * SCALE) <= cap.MAX_INPUT)
    np.testing.assert_allclose(got[beyond], want[beyond], rtol=1e-6)
    np.testing.assert_allclose(got[~beyond], want[~beyond], rtol=2**-13)


def test_a_score_does_not_depend_on_its_warp():
    values = drawn(cap.MAX_INPUT)
    among_large = np.where(np.arange(128) % 32 < 4, values, values * 8)
    same = among_large == values
    assert capped(values)[same].tobytes() == capped(among_large)[same].tobytes()
