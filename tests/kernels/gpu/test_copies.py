"""Copies of pages by cp.async: every lane's addresses on the PTX model, against numpy."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import copies_sm80 as copies
from tests.kernels.gpu.simt import Machine, emulated
from tests.kernels.gpu.test_warp_mma import place_tile

PAGES, HEADS, COLUMNS, REQUESTS = 12, 3, 20, 4
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
CASES = [
    # D, dtype, page, block, first key of the block, keys wanted, HND
    (128, "bfloat16", 8, 64, 64, (0, 1000), True),
    (128, "bfloat16", 16, 64, 64, (70, 101), False),
    (64, "float16", 128, 64, 192, (3, 250), True),
    (80, "bfloat16", 16, 64, 0, (0, 64), True),
    (256, "bfloat16", 32, 32, 32, (40, 64), False),
    (16, "bfloat16", 8, 64, 64, (0, 127), True),
    (96, "int8", 8, 64, 64, (0, 99), False),
    (32, "int8", 64, 64, 64, (0, 128), True),
]


@pytest.mark.parametrize(("dim", "dtype", "page", "block", "kv0", "wanted", "heads_first"), CASES)
def test_a_tile_holds_the_wanted_keys_and_zeros(dim, dtype, page, block, kv0, wanted, heads_first):
    rng, (start, stop), head, req = np.random.default_rng(dim + page), wanted, 1, 2
    table = np.full((REQUESTS, COLUMNS), 2**31 - 1, np.int32)
    first, last = max(start, kv0) // page, -(-min(stop, kv0 + block) // page)
    table[req, first:last] = rng.permutation(PAGES)[: last - first]
    order = (HEADS, page) if heads_first else (page, HEADS)
    raw = rng.integers(0, 255, (PAGES, *order, dim * np.dtype(TYPES[dtype]).itemsize)).astype(np.uint8)
    at_pool, at_table, size = 0, raw.size, raw.size + table.nbytes
    at_tile = -(-size // 1024) * 1024
    row_bytes = raw.shape[-1]
    at_box = at_tile + block * row_bytes
    machine = Machine(128, at_box + 4 * block)
    machine.memory[:at_table] = raw.reshape(-1)
    machine.memory[at_table:size] = table.reshape(-1).view(np.uint8)
    machine.memory[at_tile:at_box] = 0xEE
    number = np.int32
    with emulated(copies, machine):
        where = [number(n) for n in (kv0, start, stop)]
        at, kind = np.full(128, at_table, np.int64), dict(page=page, heads=HEADS, heads_first=heads_first)
        own_rows = copies.pool_rows(at, number(req), number(head), *where, block=block, columns=COLUMNS, **kind)
        pool, tile = np.full(128, at_pool, np.int64), np.full(128, at_tile, np.int32)
        flat, box = own_rows.registers.reshape(-1), np.full(128, at_box, np.int32)
        flat[0] = (flat[0][0].astype(np.int32),)
        copies.put_rows(box, own_rows, block=block)
        copies.copy_block(pool, tile, box, block=block, dim=dim, dtype=TYPES[dtype])
    want = np.zeros((block, row_bytes), np.uint8)
    for key in range(max(start, kv0), min(stop, kv0 + block)):
        line = raw[table[req, key // page]]
        want[key - kv0] = line[head, key % page] if heads_first else line[key % page, head]
    expected = np.zeros(block * row_bytes, np.uint8)
    place_tile(expected, 0, want)
    np.testing.assert_array_equal(machine.memory[at_tile:at_box], expected)
