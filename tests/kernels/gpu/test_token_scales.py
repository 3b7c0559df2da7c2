"""How the scales of a block's keys are found, and what values' scales do to the weights: against numpy."""

import numpy as np
import pytest

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.gpu import token_scales_sm90 as token_scales
from pallas_kernels.gpu.tile_policy import default_config
from tests.kernels.gpu.simt import Machine, emulated
from tests.kernels.gpu.test_lanes import rows_of
from tests.kernels.gpu.test_wide_mma import fragment_of

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


def test_weights_times_scales_fit_float16_and_their_sums_are_those_of_the_weights():
    """Scales from 1e-9 to 80 in one block, zero among them: of each row, float16 holds the largest product."""
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-9, 1.9, 64)
    scales[5], scales[9] = 0.0, 80.0
    logits, values = rng.normal(size=(64, 64)) * 5, rng.normal(size=(64, 16))
    logs, reciprocals = (np.asarray(x, np.float64) for x in token_scales.in_logits(scales.astype(np.float32)))
    y = logits + logs
    p = np.exp2(y - y.max(axis=1, keepdims=True))
    with emulated(token_scales, Machine(128, 0)):
        factors = np.broadcast_to(reciprocals, p.shape)
        sums = token_scales.weighted_row_sums(
            fragment_of(p.astype(np.float32)), fragment_of(factors.astype(np.float32))
        )
    found = p.astype(np.float16).astype(np.float64) @ values / rows_of(sums).sum(axis=0)[:, None]
    weights = np.exp2(logits)
    wanted = (weights * scales) @ values / weights.sum(axis=1, keepdims=True)
    error = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert error.max() < 1e-3


def test_only_weights_times_scales_that_are_parts_of_logits_are_float16():
    shape: dict = dict(num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=16)
    config = default_config(**shape, logits=LogitRule(scale=0.1), kv_dtype="int8", token_scales=True)
    assert (config.value_dtype, config.weight_dtype) == ("bfloat16", "float16")


def test_a_row_of_zeros_keeps_its_weight_beside_the_largest_values():
    """As exponentials are computed on a GPU: those below the smallest normal float32 are 0."""
    scales = np.where(np.arange(64) == 9, 1e4, 0.0).astype(np.float32)
    logs, reciprocals = (np.asarray(x, np.float64) for x in token_scales.in_logits(scales))
    logits = np.where(scales > 0, 0.0, -20.0)
    y = logits + logs
    p = np.exp2(y - y.max())
    sums = (np.where(p < 2.0**-126, 0, p) * reciprocals).sum()
    np.testing.assert_allclose(sums * np.exp2(y.max()), np.exp2(logits).sum(), rtol=1e-6)
