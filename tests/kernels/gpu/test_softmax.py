"""Shifts and weights of a block's softmax: every lane on the PTX model, against numpy's softmax in float64."""

import numpy as np
import pytest

from pallas_kernels.gpu import lanes_sm80 as lanes
from pallas_kernels.gpu import softmax_sm90 as softmax
from tests.kernels.gpu.simt import HALF, Machine, emulated
from tests.kernels.gpu.test_lanes import rows_of
from tests.kernels.gpu.test_wide_mma import fragment_of, matrix, rows_fragment

FACTOR = np.float32(0.7)
BLOCKS, KEYS, COLUMNS = 4, 64, 32


def start():
    zeros = np.zeros(64)
    acc = fragment_of(np.zeros((64, COLUMNS), np.float32))
    return acc, rows_fragment(zeros - 1e38), rows_fragment(zeros)


def weights_after_raise(x, factor, state, dtype=None):
    """What tiles_sm90.softmax_step computes from the state of raise_shift; its weights are rounded later."""
    acc, m, total = softmax.raise_shift(x, factor, state)
    shifts, factors = rows_of(m)[0], np.full(64, FACTOR) if factor is FACTOR else rows_of(factor)[0]
    p = np.exp2(matrix(x) * factors[:, None] - shifts[:, None]).astype(np.float32)
    parts = lanes.partial_row_sums(fragment_of(p))
    flat = total.registers.reshape(-1)
    for second in range(2):
        flat[second] = (flat[second][0] + parts.registers.reshape(-1)[second][0],)
    return p, (acc, m, total)


def weights_first(x, factor, state, dtype="bfloat16"):
    words, state = softmax.weights_first(x, factor, state, dtype=dtype)
    halves = [word.view(HALF["bf16" if dtype == "bfloat16" else "f16"]).reshape(-1, 2) for word in words.registers.flat]
    for k, pair in enumerate(halves):
        x.registers.reshape(-1)[k] = tuple(pair[:, e].astype(np.float32) for e in range(2))
    return matrix(x), state


WAYS = {"raise_shift": weights_after_raise, "weights_first": weights_first}


def attention_of(way, logits, values):
    """(output, log2-sum-exp) of blocks of logits [64, keys] and values [keys, COLUMNS], block after block."""
    with emulated(softmax, Machine(128, 0)), emulated(lanes, Machine(128, 0)):
        state = start()
        for block, v in zip(np.split(logits, BLOCKS, axis=1), np.split(values, BLOCKS), strict=True):
            p, (acc, m, total) = way(fragment_of(block.astype(np.float32)), FACTOR, state)
            state = fragment_of((matrix(acc) + p @ v).astype(np.float32)), m, total
        acc, m, total = state
        total = rows_of(total).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return matrix(acc) / total[:, None], rows_of(m)[0] + np.log2(total)


def drawn(spread=3.0):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, BLOCKS * KEYS)) * spread
    logits[5, KEYS:] += np.arange(3 * KEYS)  # rises in every block
    logits[21] -= 400  # far below 0
    logits[40, : 2 * KEYS] = -np.inf  # sees no key of the first two blocks
    return logits.astype(np.float32), rng.normal(size=(BLOCKS * KEYS, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("spread", [3.0, 60.0])
@pytest.mark.parametrize("name", WAYS)
def test_blocks_add_up_to_softmax(name, spread):
    logits, values = drawn(spread)
    out, lse = attention_of(WAYS[name], logits, values)
    exact = logits.astype(np.float64) * np.float64(FACTOR)
    top = exact.max(axis=1, keepdims=True)
    weights = np.exp2(exact - top)
    np.testing.assert_allclose(out, weights @ values / weights.sum(axis=1, keepdims=True), atol=2e-2)
    np.testing.assert_allclose(lse, top[:, 0] + np.log2(weights.sum(axis=1)), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", WAYS)
def test_a_row_without_keys_and_one_with_nan_stay_what_they_are(name):
    logits, values = drawn()
    logits[7] = -np.inf
    logits[9, KEYS + 3] = np.nan
    out, lse = attention_of(WAYS[name], logits, values)
    assert np.isneginf(lse[7]) and np.isnan(lse[9]) and np.isnan(out[9]).all()
    others = np.delete(np.arange(64), [7, 9])
    assert np.isfinite(out[others]).all() and np.isfinite(lse[others]).all()


@pytest.mark.parametrize("name", WAYS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(name):
    logits, values = drawn()
    out, lse = attention_of(WAYS[name], logits, values)
    others = logits * 1
    others[np.arange(64) != 30] = logits[np.arange(64) != 30] * 40  # they raise their shifts in other blocks
    again, again_lse = attention_of(WAYS[name], others, values)
    assert out[30].tobytes() == again[30].tobytes() and lse[30] == again_lse[30]


def test_shifts_rise_in_few_blocks():
    """So is the work of a warp whose rows keep theirs."""
    logits, _ = drawn()
    with emulated(softmax, Machine(128, 0)):
        acc, m, total = softmax.raise_shift(fragment_of(logits[:, :KEYS]), FACTOR, start())
        for block in range(1, BLOCKS):
            before = rows_of(m)[0]
            x = fragment_of(logits[:, block * KEYS : (block + 1) * KEYS])
            acc, m, total = softmax.raise_shift(x, FACTOR, (acc, m, total))
            risen = np.flatnonzero(rows_of(m)[0] != before)
            assert set(risen) <= {5, 40}, "the rows whose logits rise"


def test_shifts_of_weights_of_8_bits_are_whole_and_leave_them_room():
    logits, _ = drawn()
    with emulated(softmax, Machine(128, 0)):
        state = start()
        for block in np.split(logits, BLOCKS, axis=1):
            acc, m, total = state = softmax.raise_shift(fragment_of(block), FACTOR, state, eight_bits=True)
            shifts, seen = rows_of(m)[0], ~np.isneginf(block).all(axis=1)
            top = np.exp2(block.max(axis=1) * FACTOR - shifts)[seen]
            assert (shifts[seen] == np.round(shifts[seen])).all() and top.max() <= 256
    first = logits[:, :KEYS].max(axis=1) * FACTOR
    with emulated(softmax, Machine(128, 0)):
        shifts = rows_of(softmax.raise_shift(fragment_of(logits[:, :KEYS]), FACTOR, start(), eight_bits=True)[1])[0]
    weights = np.exp2(first - shifts)[np.isfinite(first)]
    assert (weights > 64).all() and (weights <= 128).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_fit_their_dtype(dtype):
    """The largest weight that weights_first keeps, and a factor of each row's own."""
    factors = np.linspace(0.5, 2, 64).astype(np.float32)
    logits = np.random.default_rng(1).normal(size=(64, KEYS)).astype(np.float32) * 8
    with emulated(softmax, Machine(128, 0)):
        by_row = rows_fragment(factors)
        acc, _, total = start()
        state = acc, rows_fragment(np.zeros(64)), total  # a shift of 0: no row has a maximum yet
        p, (_, m, total) = weights_first(fragment_of(logits), by_row, state, dtype)
        shifts, sums = rows_of(m)[0], rows_of(total).sum(axis=0)
    exact = np.exp2(logits.astype(np.float64) * factors[:, None] - shifts[:, None])
    assert (0 < shifts).any() and (shifts == 0).any() and p.max() <= softmax.MOST_SUM
    np.testing.assert_allclose(p, exact, rtol=2e-2, atol=1e-6)
    np.testing.assert_allclose(sums, exact.sum(axis=1), rtol=1e-4)


@pytest.mark.parametrize("name", WAYS)
def test_shifts_are_the_maxima_so_far_where_they_are_raised(name):
    """A row's rise is that of its largest logit, by the row's own factor; factors are those of 8-bit queries."""
    factors = np.where(np.arange(64) // 8 % 2, 2.0**-20, 4.0).astype(np.float32)  # a lane has one row of each kind
    logits = np.random.default_rng(2).normal(size=(64, KEYS)).astype(np.float32) * 50
    exact = logits.astype(np.float64)
    with emulated(softmax, Machine(128, 0)), emulated(lanes, Machine(128, 0)):
        x, by_row = fragment_of((logits / factors[:, None]).astype(np.float32)), rows_fragment(factors)
        p, (_, m, total) = WAYS[name](x, by_row, start(), "float16")
        shifts, sums = rows_of(m), rows_of(total).sum(axis=0)
    np.testing.assert_allclose(shifts, np.broadcast_to(exact.max(axis=1), (4, 64)), rtol=1e-6)
    np.testing.assert_allclose(p, np.exp2(exact - exact.max(axis=1, keepdims=True)), rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(shifts[0] + np.log2(sums), np.log2(np.exp2(exact).sum(axis=1)), rtol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_weights_of_a_shift_that_stays_fit_float16(name):
    """Rows whose logits exceed their shift by 0 to 20 in one lane's columns, and one by exactly 16."""
    logits = np.full((64, KEYS), -np.inf, np.float32)
    logits[:, 3], logits[40, 3] = np.linspace(0, 20, 64), 16
    with emulated(softmax, Machine(128, 0)), emulated(lanes, Machine(128, 0)):
        acc, _, total = start()
        state = acc, rows_fragment(np.zeros(64)), total
        p, (_, m, _) = WAYS[name](fragment_of(logits), rows_fragment(np.ones(64, np.float32)), state, "float16")
    assert (rows_of(m) == rows_of(m)[0]).all() and set(rows_of(m)[0]) > {0, 16, 20}
    np.testing.assert_allclose(np.float16(p[:, 3]), np.exp2(logits[:, 3] - rows_of(m)[0]), rtol=1e-3)
