"""How the memory warpgroup finds the scales of a block's keys: each thread, on the PTX model, against numpy."""

import numpy as np
import pytest

from pallas_kernels.gpu import token_scales_sm90 as token_scales
from tests.kernels.gpu.simt import Machine, emulated

PAGES, HEADS, REQS, COLUMNS = 12, 3, 2, 5


@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
@pytest.mark.parametrize(("block", "page", "kv0", "start", "stop"), [(64, 16, 0, 5, 50), (128, 32, 128, 0, 150)])
def test_a_block_gets_its_own_scales_and_zeros_where_no_token_is(block, page, kv0, start, stop, heads_first):
    """Scales of slots without a token of the request are NaN, and unused columns of the table hold garbage."""
    rng = np.random.default_rng(block)
    shape = (PAGES, HEADS, page) if heads_first else (PAGES, page, HEADS)
    pools = rng.uniform(1, 2, (2, *shape)).astype(np.float32)
    table = np.full((REQS, COLUMNS), 2**31 - 1, np.int32)
    used = -(-stop // page)
    table[1, :used] = rng.permutation(PAGES)[:used]
    head, req, key = 2, 1, kv0 + np.arange(block)
    known = (key >= start) & (key < stop)
    page_of = table[req, np.where(known, key, 0) // page]
    at = (page_of, head, key % page) if heads_first else (page_of, key % page, head)
    want = np.where(known, [pool[at] for pool in pools], 0).ravel()
    live = np.zeros(shape, bool)
    live[tuple(x[known] if np.ndim(x) else x for x in at)] = True
    pools[:, ~live] = np.nan
    machine = Machine(128, 1 << 14)
    places = dict(table=0, k=1024, v=8192)
    for place, array in ((0, table), (1024, pools[0]), (8192, pools[1])):
        machine.memory[place : place + array.nbytes] = array.view(np.uint8).ravel()
    full = {name: np.full(128, place, np.int64) for name, place in places.items()}
    where, kind = (np.int32(x) for x in (kv0, start, stop)), dict(block=block, page=page)
    where = tuple(where)
    with emulated(token_scales, machine):
        ids = token_scales.load_ids(full["table"], np.int32(req), *where, **kind, columns=COLUMNS)
        order = dict(heads=HEADS, heads_first=heads_first)
        scales = token_scales.load_scales(full["k"], full["v"], ids, np.int32(head), *where, **kind, **order)
    np.testing.assert_array_equal(np.concatenate([register[0] for register in scales.registers.flat]), want)
