"""The products of wide tiles: every lane and every fragment on the PTX model, against numpy."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import wide_mma_sm80 as wide_mma
from tests.kernels.gpu.simt import Fragment, Machine, emulated
from tests.kernels.gpu.test_warp_mma import place_tile

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
CASES = [(2, 128, 128, "bfloat16"), (1, 192, 128, "float16"), (2, 80, 48, "float16"), (1, 16, 16, "bfloat16")]
BLOCK = 64


def matrix(fragment):
    """The [64, n] numbers of a fragment's registers."""
    out, lane = np.full(fragment.shape, np.nan), np.arange(128)
    for (second, column), pair in zip(rows.pair_places(fragment), fragment.registers.flat, strict=True):
        for k in range(2):
            out[lane // 32 * 16 + lane % 32 // 4 + 8 * second, column + lane % 4 * 2 + k] = pair[k]
    return out


def packed(fragment, dtype):
    """The same fragment in 16 bits: registers of two numbers in a word."""
    out = Fragment(fragment.shape, wide_mma._WGMMA)
    flat = out.registers.reshape(-1)
    for i, pair in enumerate(fragment.registers.flat):
        flat[i] = np.stack(pair, 1).astype(dtype).view(np.uint32).reshape(-1)
    return out


def fragment_of(numbers):
    """The fragment of [64, n] numbers."""
    out, lane = Fragment(numbers.shape, wide_mma._WGMMA), np.arange(128)
    for flat, (second, column) in enumerate(rows.pair_places(out)):
        row = lane // 32 * 16 + lane % 32 // 4 + 8 * second
        out.registers.reshape(-1)[flat] = tuple(numbers[row, column + lane % 4 * 2 + k] for k in range(2))
    return out


def rows_fragment(numbers):
    """The fragment of (64,) numbers."""
    out, lane = Fragment(numbers.shape, wide_mma._WGMMA.reduce(1)), np.arange(128)
    for second in range(2):
        out.registers.reshape(-1)[second] = (numbers[lane // 32 * 16 + lane % 32 // 4 + 8 * second],)
    return out


def unpacked(fragment):
    """The [64, n] numbers of a fragment of words of two bfloat16."""
    flat, pairs = Fragment(fragment.shape, wide_mma._WGMMA), []
    for word in fragment.registers.flat:
        both = np.ascontiguousarray(word).view(np.uint32).view(np.uint16).reshape(-1, 2)
        pairs.append(tuple(both[:, k].copy().view(ml_dtypes.bfloat16).astype(np.float32) for k in range(2)))
    for i, pair in enumerate(pairs):
        flat.registers.reshape(-1)[i] = pair
    return matrix(flat)


@pytest.mark.parametrize(("halves", "dim", "v_dim", "dtype"), CASES)
def test_products_of_tiles(halves, dim, v_dim, dtype):
    rng = np.random.default_rng(dim)
    draw = lambda *shape: rng.normal(size=shape).astype(TYPES[dtype])
    q, k, v = draw(halves, 64, dim), draw(BLOCK, dim), draw(BLOCK, v_dim)
    at = np.cumsum([0, q.nbytes, k.nbytes])
    machine = Machine(128, at[2] + v.nbytes)
    for half in range(halves):
        place_tile(machine.memory, half * 64 * dim * 2, q[half])
    place_tile(machine.memory, at[1], k)
    place_tile(machine.memory, at[2], v)
    q_at, k_at, v_at = (np.full(128, x, np.int32) for x in at)
    with emulated(wide_mma, machine):
        dots = wide_mma.queries_times_keys(q_at, k_at, halves=halves, block=BLOCK, dim=dim, dtype=dtype)
        start = [wide_mma.fragment_of_quads([[np.float32(i)] * 4 for i in range(v_dim // 8)]) for _ in range(halves)]
        weights = [packed(x, TYPES[dtype]) for x in dots]
        accs = wide_mma.add_weighted_values(start, weights, v_at, block=BLOCK, dim=v_dim, dtype=dtype, ref_dim=v_dim)
    for half in range(halves):
        want = q[half].astype(np.float64) @ k.astype(np.float64).T
        np.testing.assert_allclose(matrix(dots[half]), want, atol=1e-4)
        rounded = matrix(dots[half]).astype(np.float32).astype(TYPES[dtype]).astype(np.float64)
        want = rounded @ v.astype(np.float64) + np.arange(v_dim) // 8
        np.testing.assert_allclose(matrix(accs[half]), want, rtol=1e-4, atol=1e-3)


def test_weights_of_two_parts_are_their_sum():
    """To 2^-16 of each: float16 results keep 2^-11."""
    numbers = np.random.default_rng(0).uniform(0, 300, (64, 64)).astype(np.float32)
    numbers[0, :4] = 0.0, 1e-30, 1.0, 65504.0
    with emulated(wide_mma, Machine(128, 0)):
        words = wide_mma.bfloat16_parts(fragment_of(numbers))
    parts = [unpacked(part) for part in words]
    np.testing.assert_allclose(parts[0] + parts[1], numbers, rtol=2.0**-16)
    assert (parts[0] <= numbers).all()


def test_exponentials():
    rng = np.random.default_rng(1)
    x, top = rng.normal(size=(64, 32)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    x[3] = -np.inf
    with emulated(wide_mma, Machine(128, 0)):
        p = wide_mma.exponentials(fragment_of(x), np.full(128, 0.5, np.float32), rows_fragment(top))
    np.testing.assert_allclose(matrix(p), np.exp2(x * np.float32(0.5) - top[:, None]), rtol=1e-5)


def test_single_registers_hold_the_numbers_of_pairs():
    numbers = np.random.default_rng(2).normal(size=(64, 48)).astype(np.float32)
    with emulated(wide_mma, Machine(128, 0)):
        single = wide_mma.unpaired(fragment_of(numbers))
        assert all(len(register) == 1 for register in single.registers.flat)
        assert (matrix(wide_mma.paired(single, 48)) == numbers).all()
