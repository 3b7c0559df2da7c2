"""The work list against a numpy twin that walks it the way a CTA does: everything is done once, and evenly."""

import jax
import numpy as np
import pytest

from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu import work_list as wl

BATCHES = {
    "decode": [(1, 4096)] * 64,
    "one long": [(1, 131072)],
    "ragged": [(1, 128 * (37 * i % 97 + 1)) for i in range(64)],
    "prefill": [(1024, 1024), (2048, 2048)],
    "mixed": [(1, 4096)] * 8 + [(512, 2048), (0, 0), (7, 7), (300, 301)],
    "one token": [(1, 1)],
    "empty": [(0, 0)],
}
RULES = {
    "causal": MaskRule(),
    "window": MaskRule(left=100),
    "both sides": MaskRule(causal=False, left=77, right=30),
    "chunk": MaskRule(chunk=192),
    "full": MaskRule(causal=False),
}


def make(batch, rule, group=4, heads=8, pad=5, ctas=132):
    config = wl.ListConfig(rule=rule, group=group, num_kv_heads=heads, block_kv=128, num_ctas=ctas)
    q_lens, seqs = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    tokens = int(starts[-1]) + pad
    work = jax.jit(lambda a, b: wl.build(a, b, tokens, config))(starts, seqs)
    return config, starts, seqs, tokens, *map(np.asarray, (work.info, work.cta, work.join))


def pieces_of(cta_row, me, info, config):
    """(unit, lo, hi) of one CTA, in the kernel's own terms."""
    waves, u0, b0, u1, b1 = (int(x) for x in cta_row[:5])
    for j in range(waves + (u1 - u0) + (b1 > 0)):
        snake = me if j % 2 == 0 else config.num_ctas - 1 - me
        unit = j * config.num_ctas + snake if j < waves else u0 + j - waves
        nblk = int(info[unit // config.num_kv_heads, wl.NBLK])
        yield unit, b0 if unit == u0 else 0, b1 if unit == u1 else nblk


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_block_of_every_unit_is_done_once(batch, rule):
    config, starts, _, tokens, info, cta, join = make(BATCHES[batch], RULES[rule])
    parts = {}
    for me in range(config.num_ctas):
        for unit, lo, hi in pieces_of(cta[me], me, info, config):
            parts.setdefault(unit, []).append((lo, hi, me))
    rows = sum(info[t, wl.NROWS] for t in range(len(info)))
    assert rows == tokens * config.group  # padding tokens included: they are the ghost request's
    tiles = int((info[:, wl.NROWS] > 0).sum())
    assert sorted(parts) == list(range(tiles * config.num_kv_heads))
    joins = {int(j[0]): (int(j[1]), int(j[2])) for j in join if j[0] >= 0}
    for unit, done in parts.items():
        done.sort()
        assert done[0][0] == 0 and done[-1][1] == info[unit // config.num_kv_heads, wl.NBLK]
        assert all(a[1] == b[0] for a, b in zip(done, done[1:], strict=False))
        if len(done) > 1:
            assert joins.pop(unit) == (done[0][2], done[-1][2]), "the merge must find exactly these CTAs"
    assert not joins


@pytest.mark.parametrize("batch", ["decode", "one long", "ragged", "prefill"])
def test_load_is_even(batch):
    config, *_, info, cta, _ = make(BATCHES[batch], RULES["causal"])
    load = []
    for me in range(config.num_ctas):
        total = 0
        for unit, lo, hi in pieces_of(cta[me], me, info, config):
            short = info[unit // config.num_kv_heads, wl.NROWS] <= wl.SHORT_ROWS
            total += (hi - lo) * (config.short_weight if short else config.long_weight)
        load.append(total)
    block = config.short_weight if "prefill" not in batch else config.long_weight
    assert max(load) - np.mean(load) <= 4 * block


@pytest.mark.parametrize("rule", RULES)
def test_tile_ranges_cover_what_the_predicate_shows(rule):
    config, starts, seqs, _, info, _, _ = make(BATCHES["mixed"], RULES[rule])
    mask = RULES[rule]
    for row in info[info[:, wl.NROWS] > 0]:
        if row[wl.TOK0] == starts[-1]:
            continue  # the ghost
        token = (row[wl.ROW0] + np.arange(row[wl.NROWS])) // config.group
        q, kv = (token + row[wl.QPOS0])[:, None], np.arange(row[wl.SEQ])[None]
        seen = np.ones((len(token), row[wl.SEQ]), bool)
        seen &= (kv <= q) if mask.causal else True
        seen &= (kv >= q - mask.left) if mask.left >= 0 else True
        seen &= (kv <= q + mask.right) if mask.right >= 0 else True
        seen &= (kv // mask.chunk == q // mask.chunk) if mask.chunk else True
        keys = np.flatnonzero(seen.any(axis=0))
        assert row[wl.KSTART] <= keys[0] and keys[-1] < row[wl.KSTOP]
        first, blocks = row[wl.BLK0] * 128, row[wl.NBLK]
        assert first <= keys[0] and keys[-1] < first + blocks * 128
        whole = seen[:, first + row[wl.FULL0] * 128 : first + row[wl.FULL1] * 128]
        assert whole.all(), "blocks called full must be visible to every row"


def test_capacity_bounds_the_tiles():
    rng = np.random.default_rng(0)
    for _ in range(20):
        q_lens = rng.integers(0, 70, size=9)
        need = sum(-(-q * 6 // wl.TILE_ROWS) for q in q_lens)
        assert need <= wl.capacity(int(q_lens.sum()), 9, 6)
