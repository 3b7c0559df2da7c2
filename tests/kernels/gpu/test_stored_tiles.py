"""Tiles of an 8-bit cache on their way from pages to shared memory: each thread, on the PTX model, against numpy."""

import math
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import queries_sm90 as queries
from pallas_kernels.gpu import stored_tiles_sm90 as stored
from tests.kernels.gpu.simt import EIGHT, Fragment, Machine, emulated

PAGES, HEADS, COLUMNS, PAGE = 12, 3, 12, 16
POOL, STAGING, TILE, MEMORY = 4096, 1 << 18, (1 << 18) + (1 << 15), 1 << 20
F8 = "float8_e4m3fn"
CASES = [  # keys, dim, source, target, transposed, first key of the block, keys start <= key < stop
    (128, 128, F8, "float16", False, 0, 5, 100),
    (64, 192, "int8", "bfloat16", False, 64, 0, 129),
    (64, 32, "float8_e5m2", "float16", False, 0, 0, 64),
    (128, 96, F8, F8, False, 0, 0, 128),
    (128, 128, F8, F8, True, 0, 3, 128),
    (128, 64, F8, F8, True, 0, 0, 70),
    (64, 256, F8, F8, True, 64, 0, 128),
    (64, 96, F8, F8, True, 0, 0, 61),
]


def read_tile(memory, base, shape, dtype):
    """A tile [rows, columns] as TMA and wgmma swizzle it."""
    dtype = np.dtype(dtype)
    width = shape[1] * dtype.itemsize
    swizzle, out = math.gcd(width, 128), np.zeros((shape[0], width), np.uint8)
    for r in range(shape[0]):
        for c in range(0, width, 16):
            inside = (r % 8) * swizzle + c % swizzle
            inside ^= (inside >> 7 & swizzle // 16 - 1) << 4
            at = base + ((r // 8) * (width // swizzle) + c // swizzle) * 8 * swizzle + inside
            out[r, c : c + 16] = memory[at : at + 16]
    return out.view(dtype)


@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
@pytest.mark.parametrize(("keys", "dim", "source", "target", "transposed", "kv0", "start", "stop"), CASES)
def test_each_key_reaches_its_place(keys, dim, source, target, transposed, kv0, start, stop, heads_first):
    """Slots without a token hold NaN, and are read as 0; unused columns of the table hold garbage."""
    rng, kind = np.random.default_rng(dim), EIGHT[source]
    shape = (PAGES, HEADS, PAGE) if heads_first else (PAGES, PAGE, HEADS)
    pool = rng.integers(-100, 100, (*shape, dim)).astype(kind)
    table = np.full((2, COLUMNS), 2**31 - 1, np.int32)
    used = -(-stop // PAGE)
    table[1, :used] = rng.permutation(PAGES)[:used]
    key = kv0 + np.arange(keys)
    known = (key >= start) & (key < stop)
    page = table[1, np.where(known, key, 0) // PAGE]
    at = (page, 2, key % PAGE) if heads_first else (page, key % PAGE, 2)
    want = np.where(known[:, None], pool[at].astype(np.float32), 0)
    if transposed:
        order = [16 * h + 8 * j + 2 * t + e for h in range(2) for t in range(4) for j in range(2) for e in range(2)]
        want = want.reshape(-1, 32, dim)[:, order].reshape(keys, dim).T
    tile = stored.StoredTile(
        keys=keys, dim=dim, source=source, target=target, page=PAGE, heads=HEADS, heads_first=heads_first,
        transposed=transposed,
    )  # fmt: skip
    machine = Machine(stored.THREADS, MEMORY)
    for place, array in ((0, table), (POOL, pool)):
        machine.memory[place : place + array.nbytes] = array.view(np.uint8).ravel()
    full = lambda place: np.full(stored.THREADS, place, np.int64)
    where = [np.int32(x) for x in (kv0, start, stop)]
    with emulated(stored, machine):
        ids = stored.load_page_ids(tile, full(0), np.int32(1), *where, columns=COLUMNS)
        words = stored.load_chunks(tile, full(POOL), ids, np.int32(2), np.int32(kv0))
        staging = full(STAGING).astype(np.int32) if transposed else None
        stored.put_chunks(tile, words, full(TILE).astype(np.int32), staging)
    found = read_tile(machine.memory, TILE, tile.shape, jnp.dtype(target))
    np.testing.assert_array_equal(found.astype(np.float32), want)
    assert tile.steps <= 8  # 128 bytes of a thread


def test_a_thread_of_a_product_holds_the_weights_of_its_keys():
    """eight_bit_weights: the left operand's place in a K of 32, and the key that stands there in a transposed tile."""
    weights = np.random.default_rng(0).uniform(0, 256, (64, 128)).astype(np.float32)
    lane = np.arange(128)
    row, pair = lane // 32 * 16 + lane % 32 // 4, 2 * (lane % 4)
    layout = queries.plgpu.Layout.WGMMA
    p = Fragment((64, 128), layout)
    for i, (second, column) in enumerate(queries.rows.pair_places(p)):
        p.registers.flat[i] = tuple(weights[row + 8 * second, column + pair + e] for e in range(2))
    machine, flat = Machine(128, 16), {}
    with emulated(queries, machine), mock.patch.object(queries, "ir", mock.MagicMock()):
        out = queries.eight_bit_weights(p)
    for word, (second, column) in zip(out.registers.flat, queries.rows.pair_places(out), strict=True):
        flat[second, column] = np.ascontiguousarray(word).view(np.uint8).reshape(128, 4)
    found = np.zeros((64, 128), np.uint8)
    for (second, column), four in flat.items():
        for e in range(4):
            found[row + 8 * second, column + 4 * (lane % 4) + e] = four[:, e]
    order = [16 * h + 8 * j + 2 * t + e for h in range(2) for t in range(4) for j in range(2) for e in range(2)]
    want = weights.reshape(64, -1, 32)[:, :, order].reshape(64, 128).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found, want.view(np.uint8))
