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
        start = [wide_mma._fragment([[np.float32(i)] * 4 for i in range(v_dim // 8)]) for _ in range(halves)]
        weights = [packed(x, TYPES[dtype]) for x in dots]
        accs = wide_mma.add_weighted_values(start, weights, v_at, block=BLOCK, dim=v_dim, dtype=dtype)
    for half in range(halves):
        want = q[half].astype(np.float64) @ k.astype(np.float64).T
        np.testing.assert_allclose(matrix(dots[half]), want, atol=1e-4)
        rounded = matrix(dots[half]).astype(np.float32).astype(TYPES[dtype]).astype(np.float64)
        want = rounded @ v.astype(np.float64) + np.arange(v_dim) // 8
        np.testing.assert_allclose(matrix(accs[half]), want, rtol=1e-4, atol=1e-3)
