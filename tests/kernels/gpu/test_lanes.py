"""Maxima and sums over lanes by products: every lane on the PTX model, against numpy."""

import numpy as np
import pytest

from pallas_kernels.gpu import lanes_sm80 as lanes
from tests.kernels.gpu.simt import Machine, emulated
from tests.kernels.gpu.test_wide_mma import fragment_of, matrix

TO_16_BITS = 2.0**-16  # of a number: what a maximum may differ by


def rows_of(fragment):
    """[4 lanes, 64 rows]: what each lane of a row holds."""
    out, lane = np.full((4, 64), np.nan, np.float32), np.arange(128)
    for second in range(2):
        out[lane % 4, lane // 32 * 16 + lane % 32 // 4 + 8 * second] = fragment.registers.reshape(-1)[second][0]
    return out


def drawn(seed=0, shape=(64, 64)):
    return (np.random.default_rng(seed).normal(size=shape) * 100).astype(np.float32)


@pytest.mark.parametrize("masked", [0, 40, 64])
def test_a_rows_maximum_is_the_same_in_its_lanes(masked):
    numbers = drawn()
    numbers[::2, 64 - masked :] = -np.inf
    with emulated(lanes, Machine(128, 0)):
        found = rows_of(lanes.row_maxima(fragment_of(numbers)))
    want = np.maximum(numbers.max(axis=1), np.float32(lanes.LOWEST))
    assert (found == found[0]).all() and np.isfinite(found).all()
    assert (abs(found[0] - want) <= TO_16_BITS * abs(want)).all()


def test_sums_of_rows_are_complete_once_lanes_are_added():
    numbers = abs(drawn(1))
    with emulated(lanes, Machine(128, 0)):
        parts = lanes.partial_row_sums(fragment_of(numbers))
        found = rows_of(lanes.complete_row_sums(parts))
    assert (found == found[0]).all()
    assert not (rows_of(parts) == rows_of(parts)[0]).all()
    np.testing.assert_allclose(found[0], numbers.astype(np.float64).sum(axis=1), rtol=2e-7)
    assert (matrix(fragment_of(numbers)) == numbers).all()


def test_columns_are_joined_over_the_lanes_of_equal_remainder():
    pair = drawn(2, (2, 128))
    by_lane = pair.reshape(2, 4, 8, 4)  # warp, g, t
    with emulated(lanes, Machine(128, 0)):
        tops, sums = lanes.column_maxima(list(pair)), lanes.column_sums(list(pair))
    for e in range(2):
        top, total = (np.asarray(x[e]).reshape(4, 8, 4) for x in (tops, sums))
        want = by_lane[e].max(axis=1, keepdims=True)
        assert (top == top[:, :1]).all() and (abs(top - want) <= TO_16_BITS * abs(want)).all()
        np.testing.assert_allclose(total, np.broadcast_to(by_lane[e].sum(axis=1, keepdims=True), top.shape), atol=1e-4)
