"""Batches whose work lists are tested, and the lists walked in numpy as a CTA walks them."""

import jax
import numpy as np

from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.work_list import build_work_list

SHAPE = dict(head_dim=128, v_head_dim=128, page_size=16, block_kv=128)
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
    "lookback": MaskRule(chunk=160, lookback=2),
    "full": MaskRule(causal=False),
}
HOLES = [(5, 700), (0, 0), (1, 9000), (16, 16), (0, 0), (2, 300), (0, 0)]
FLAT = {  # batch, padding tokens, CTAs
    "ragged": (BATCHES["ragged"], 0, 132),
    "one long": (BATCHES["one long"], 0, 132),
    "speculative, holes": (HOLES, 70, 132),
    "few CTAs": (HOLES, 5, 7),
    "empty": (BATCHES["empty"], 1, 132),
}


def make(
    batch, rule, group=4, heads=8, pad=5, ctas=132, flat=False, together=0, piece_blocks=0, whole=False, pipelines=1,
    **fields,
):  # fmt: skip
    config = GpuKernelConfig(
        **SHAPE, num_heads=heads * group, num_kv_heads=heads, mask=rule, heads_together=together, num_ctas=ctas,
        flat_list=flat, piece_blocks=piece_blocks, whole_units=whole, pipelines=pipelines, **fields,
    )  # fmt: skip
    return listed(config, batch, pad)


def listed(config, batch, pad=0):
    """(config, starts, lengths, tokens, info, cta, columns of merges) of a batch of (new tokens, total tokens)."""
    q_lens, seqs = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    tokens = int(starts[-1]) + pad
    work = jax.jit(lambda a, b: build_work_list(a, b, tokens, config))(starts, seqs)
    info, cta = np.asarray(work.info), np.asarray(work.cta)
    return config, starts, seqs, tokens, info, cta, cta[:, wl.JOIN :]


def place_of(unit, sets, config):
    """(tile, kv head) of a unit: sets of heads one after the other, tiles up and down in turn, down in the last."""
    set_units, together = sets
    of_set, within = divmod(unit, set_units)
    if (config.num_kv_heads // together - 1 - of_set) % 2:
        within = set_units - 1 - within
    return within // together, of_set * together + within % together


def pieces_of(cta_row, me, info, config):
    """((tile, head), lo, hi) of one CTA, in the kernel's own terms."""
    waves, u0, b0, u1, b1, _, *sets = (int(x) for x in cta_row[:8])
    for j in range(waves + (u1 - u0) + (b1 > 0)):
        place = int(cta_row[wl.PLACE]) if config.moves_padding else me
        place = place if j % 2 == 0 else config.workers - 1 - place
        unit = j * config.workers + place if j < waves else u0 + j - waves
        tile, head = place_of(unit, sets, config)
        yield (tile, head), b0 if unit == u0 else 0, b1 if unit == u1 else int(info[tile, wl.NBLK])


def check_once(config, starts, seqs, tokens, info, cta, join):
    """Walks every CTA's pieces: all rows have tiles, all blocks are done, and the merge knows every cut unit."""
    parts = {}
    for me in range(config.workers):
        for unit, lo, hi in pieces_of(cta[me], me, info, config):
            parts.setdefault(unit, []).append((lo, hi, me))
    rows = sum(info[t, wl.NROWS] for t in range(len(info)))
    assert rows == tokens * config.group  # padding tokens included: they are the ghost request's
    tiles = np.flatnonzero(info[:, wl.NROWS] > 0)
    parts = {unit: done for unit, done in parts.items() if info[unit[0], wl.NROWS] > 0}
    assert sorted(parts) == [(tile, head) for tile in tiles for head in range(config.num_kv_heads)]
    place = lambda unit: place_of(int(unit), cta[0, wl.SET_UNITS : wl.SET_HEADS + 1].tolist(), config)
    joins = {place(j[0]): (int(j[1]), int(j[2])) for j in join if j[0] >= 0}
    for unit, done in parts.items():
        done.sort()
        assert done[0][0] == 0 and done[-1][1] == info[unit[0], wl.NBLK]
        assert all(a[1] == b[0] for a, b in zip(done, done[1:], strict=False))
        if len(done) > 1:
            assert joins.pop(unit) == (done[0][2], done[-1][2]), "the merge must find exactly these CTAs"
        if len(done) > 1 and config.flat_list:
            for _, _, me in done[1:]:
                assert tuple(cta[me, [wl.FROM, wl.UNTIL]]) == (done[0][2], done[-1][2]), "who merges inside the launch"
    assert not joins
