"""Tiles of an 8-bit cache on their way to wgmma: each thread, on the PTX model, against numpy."""

import math
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import queries_sm90 as queries
from pallas_kernels.gpu import stored_tiles_sm90 as stored
from tests.kernels.gpu.simt import EIGHT, Fragment, Machine, emulated

F8 = "float8_e4m3fn"
TILE, MEMORY = 1 << 16, 1 << 18
CASES = [  # keys, dim, source, target, transposed
    (128, 128, F8, "float16", False),
    (64, 192, "int8", "bfloat16", False),
    (64, 256, F8, "float16", False),
    (64, 32, "float8_e5m2", "float16", False),
    (128, 128, F8, F8, True),
    (128, 64, F8, F8, True),
    (64, 128, F8, F8, True),
    (64, 96, F8, F8, True),
]
ORDER = [16 * h + 8 * j + 2 * t + e for h in range(2) for t in range(4) for j in range(2) for e in range(2)]
"""Keys of a transposed tile, of every 32."""


def chunks_of_tile(base, rows, width):
    """(row, first byte, address) of every 16 bytes of a tile [rows, width bytes], as TMA and wgmma swizzle it."""
    swizzle = math.gcd(width, 128)
    for r in range(rows):
        for c in range(0, width, 16):
            inside = (r % 8) * swizzle + c % swizzle
            inside ^= (inside >> 7 & swizzle // 16 - 1) << 4
            yield r, c, base + ((r // 8) * (width // swizzle) + c // swizzle) * 8 * swizzle + inside


@pytest.mark.parametrize(("keys", "dim", "source", "target", "transposed"), CASES)
def test_each_key_reaches_its_place(keys, dim, source, target, transposed):
    values = np.random.default_rng(dim).integers(-100, 100, (keys, dim)).astype(EIGHT[source])
    tile = stored.StoredTile(keys=keys, dim=dim, source=source, target=target, transposed=transposed)
    machine = Machine(stored.THREADS, MEMORY)
    for r, c, at in chunks_of_tile(0, keys, dim):
        machine.memory[at : at + 16] = values[r, c : c + 16].view(np.uint8)
    full = lambda place: np.full(stored.THREADS, place, np.int32)
    with emulated(stored, machine):
        stored.convert(tile, full(0), full(TILE))
    dtype = jnp.dtype(target)
    found = np.zeros((tile.shape[0], tile.shape[1] * dtype.itemsize), np.uint8)
    for r, c, at in chunks_of_tile(TILE, *found.shape):
        found[r, c : c + 16] = machine.memory[at : at + 16]
    want = values.astype(np.float32)
    if transposed:
        want = want.reshape(-1, 32, dim)[:, ORDER].reshape(keys, dim).T
    np.testing.assert_array_equal(found.view(dtype).astype(np.float32), want)


@pytest.mark.parametrize("dim", [128, 256])
def test_eight_threads_use_different_banks(dim):
    """Of the 16 bytes that each of eight threads loads or stores at a time, no two are in the same four banks."""
    tile, me = stored.StoredTile(keys=64, dim=dim, source=F8, target="float16"), Machine(stored.THREADS, 16)
    with emulated(stored, me):
        key, chunk = tile.place(1)
        base = np.zeros(stored.THREADS, np.int32)
        places = [tile.stored(base, key, chunk)]
        places += [stored.ptx.swizzled(key, chunk * 32 + 16 * half, 2 * dim, np.int32(128)) for half in range(2)]
    for place in places:
        assert all(len(set(eight // 16 % 8)) == 8 for eight in place.reshape(-1, 8))


def test_a_thread_of_a_product_holds_the_weights_of_its_keys():
    """eight_bit_weights: the left operand's place in a K of 32, and the key that stands there in a transposed tile."""
    weights = np.random.default_rng(0).uniform(0, 256, (64, 128)).astype(np.float32)
    lane = np.arange(128)
    row, pair = lane // 32 * 16 + lane % 32 // 4, 2 * (lane % 4)
    p = Fragment((64, 128), queries.plgpu.Layout.WGMMA)
    for i, (second, column) in enumerate(queries.rows.pair_places(p)):
        p.registers.flat[i] = tuple(weights[row + 8 * second, column + pair + e] for e in range(2))
    with emulated(queries, Machine(128, 16)), mock.patch.object(queries, "ir", mock.MagicMock()):
        out = queries.eight_bit_weights(p)
    found = np.zeros((64, 128), np.uint8)
    for word, (second, column) in zip(out.registers.flat, queries.rows.pair_places(out), strict=True):
        four = np.ascontiguousarray(word).view(np.uint8).reshape(128, 4)
        for e in range(4):
            found[row + 8 * second, column + 4 * (lane % 4) + e] = four[:, e]
    want = weights.reshape(64, -1, 32)[:, :, ORDER].reshape(64, 128).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found, want.view(np.uint8))
