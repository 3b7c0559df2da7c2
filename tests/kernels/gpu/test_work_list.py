"""The work list, walked in numpy as a CTA walks it: every block is computed once, and the load is even."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.token_ranges import token_ranges
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config

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
    q_lens, seqs = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    tokens = int(starts[-1]) + pad
    work = jax.jit(lambda a, b: wl.build_work_list(a, b, tokens, config))(starts, seqs)
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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_block_of_every_unit_is_done_once(batch, rule):
    check_once(*make(BATCHES[batch], RULES[rule]))


@pytest.mark.parametrize(("batch", "rule", "group"), [("prefill", "causal", 7), ("mixed", "lookback", 71)])
def test_tiles_of_192_rows_hold_every_row_once(batch, rule, group):
    """Group sizes that do not divide 192: a tile ends within a token's heads."""
    config, starts, seqs, tokens, info, cta, join = make(BATCHES[batch], RULES[rule], group=group, computing=3)
    check_once(config, starts, seqs, tokens, info, cta, join)
    count = np.zeros(tokens * group, int)
    for row in info[info[:, wl.NROWS] > 0]:
        begin = row[wl.TOK0] * group + row[wl.ROW0]
        count[begin : begin + row[wl.NROWS]] += 1
    assert (count == 1).all() and info[:, wl.NROWS].max() == 192
    for me in range(config.workers):
        pieces = [(lo, hi < info[tile, wl.NBLK]) for (tile, _), lo, hi in pieces_of(cta[me], me, info, config)]
        parts = [lo == 0 for lo, ends_early in pieces if lo > 0 or ends_early]
        assert len(parts) == len(set(parts)), "each has a slot of its own"


def test_no_unit_is_lost_between_waves_and_the_line_with_a_larger_min_split():
    """The line's first unit has one block, fewer than min_split."""
    batch = [(0, 0), (13, 13), (669, 1072), (8, 8), (0, 0), (10, 233)]
    check_once(*make(batch, MaskRule(chunk=192), group=16, heads=1, pad=0, ctas=7, computing=3, min_split=2))


@pytest.mark.parametrize("piece_blocks", [0, 4])
def test_ctas_without_keys_have_the_padding(piece_blocks):
    """One of four rows of a batch is a request: its blocks and the tiles of the padding are on different CTAs."""
    made = make([(1, 600)], MaskRule(), pad=60, flat=True, piece_blocks=piece_blocks)
    config, _, _, _, info, cta, _ = made
    check_once(*made)
    of_cta = [[(tile, lo < hi) for (tile, _), lo, hi in pieces_of(cta[me], me, info, config)] for me in range(132)]
    has_padding = [any(tile < 2 for tile, _ in pieces) for pieces in of_cta]
    has_keys = [any(tile >= 2 and some for tile, some in pieces) for pieces in of_cta]
    assert sum(has_keys) in (8, 40) and sum(has_padding) == 16, "whole units, or their blocks; two tiles of 8 heads"
    assert not np.logical_and(has_keys, has_padding).any()


@pytest.mark.parametrize("batch", FLAT)
def test_where_padding_is_not_moved_it_is_given_out_in_snake_order(batch, monkeypatch):
    monkeypatch.setattr(GpuKernelConfig, "moves_padding", False)
    requests, pad, ctas = FLAT[batch]
    check_once(*make(requests, MaskRule(), pad=pad + 300, ctas=ctas, flat=True))


@pytest.mark.parametrize("batch", [*BATCHES, *(f"flat: {name}" for name in FLAT)])
def test_whole_units_are_never_cut(batch):
    requests, pad, ctas = FLAT[batch[6:]] if batch.startswith("flat: ") else (BATCHES[batch], 5, 132)
    flat = batch.startswith("flat: ")
    config, *rest, info, cta, join = make(requests, RULES["causal"], pad=pad, ctas=ctas, flat=flat, whole=True)
    check_once(config, *rest, info, cta, join)
    assert (join[:, 0] == -1).all()
    for me in range(config.workers):
        for (tile, _), lo, hi in pieces_of(cta[me], me, info, config):
            assert (lo, hi) == (0, info[tile, wl.NBLK])


@pytest.mark.parametrize("batch", [*BATCHES, *(f"flat: {name}" for name in FLAT)])
def test_two_pipelines_of_a_cta_share_out_tiles_of_64_rows(batch):
    requests, pad, ctas = FLAT[batch[6:]] if batch.startswith("flat: ") else (BATCHES[batch], 5, 132)
    flat = batch.startswith("flat: ")
    config, *rest, info, cta, join = make(requests, RULES["causal"], pad=pad, ctas=ctas, flat=flat, pipelines=2)
    check_once(config, *rest, info, cta, join)
    assert len(cta) == 2 * ctas and info[:, wl.NROWS].max() <= 64


@pytest.mark.parametrize("pipelines", [1, 2])
def test_tiles_of_padding_are_shared_out_in_a_flat_list(pipelines):
    """128 requests in a batch of 512: 12 or 24 tiles of padding tokens, of 8 heads each, were all one CTA's."""
    batch = [(1, 1024)] * 128 + [(0, 0)] * 384
    config, *rest, info, cta, join = make(batch, RULES["causal"], pad=384, flat=True, pipelines=pipelines)
    check_once(config, *rest, info, cta, join)
    pieces = [len(list(pieces_of(cta[me], me, info, config))) for me in range(config.workers)]
    assert max(pieces) <= 10


@pytest.mark.parametrize(("lengths", "cut"), [([4096] * 64, 0), ([4096, 900] * 32, 131), ([4096] * 33, 0)])
def test_a_flat_list_cuts_nothing_where_whole_units_fill_the_waves(lengths, cut):
    """64 requests of 8 kv heads are 512 units: 4 for the busiest of 132 CTAs where an equal share is 3.9."""
    *_, join = make([(1, n) for n in lengths], RULES["causal"], flat=True, pad=0)
    assert (join[:, 0] >= 0).sum() <= cut and bool((join[:, 0] >= 0).any()) == bool(cut)


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_sets_of_heads_are_done_once_and_one_after_the_other(batch, together):
    config, *rest, info, cta, join = make(BATCHES[batch], RULES["causal"], together=together)
    check_once(config, *rest, info, cta, join)
    for me in range(config.workers):
        sets = [head // together for (_, head), _, _ in pieces_of(cta[me], me, info, config)]
        assert sets == sorted(sets)


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_list_does_every_block_once_and_evenly(name):
    batch, pad, ctas = FLAT[name]
    config, *rest, info, cta, join = make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True)
    check_once(config, *rest, info, cta, join)
    load = [sum(hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)) for me in range(ctas)]
    whole = [int(row[wl.NBLK]) for row in info if 0 < row[wl.NBLK] * config.block_kv <= 2 * wl.FLAT_WHOLE_KEYS]
    assert max(load) - np.mean(load) <= 1 + max(whole, default=0)
    if not any(seq <= 2 * wl.FLAT_WHOLE_KEYS for _, seq in batch):
        assert max(load) - min(load) <= 1
    trailing = len(batch) - 1 - max((r for r, (q, _) in enumerate(batch) if q), default=-1)
    units = (len(info) - trailing) * config.num_kv_heads
    assert cta[:, wl.LINE_UNIT1].max() <= units, "padding requests at the end are nobody's pieces"


EVEN = {  # name -> batch, kv heads, pieces: a CTA has one each
    "a request each": ([(1, 8192)] * 128, 1, 128),
    "two CTAs a unit": ([(1, 16384)] * 32, 2, 128),
    "eight CTAs a request": ([(1, 8192)] * 16, 1, 128),
    "holes": ([(1, 8192), (0, 99)] * 16 + [(0, 0)] * 5, 1, 128),
    "lengths differ": ([(1, 12800)] * 13 + [(1, 25600)] * 26, 2, 130),
    "no even cuts fit": ([(1, 128 * n) for n in range(40, 140)], 1, None),
}


@pytest.mark.parametrize("name", EVEN)
def test_a_flat_list_cuts_a_unit_into_even_pieces_where_a_second_piece_costs_more(name):
    batch, heads, count = EVEN[name]
    config, *rest, info, cta, join = make(batch, RULES["causal"], heads=heads, flat=True, pad=0, piece_blocks=4)
    check_once(config, *rest, info, cta, join)
    pieces = [list(pieces_of(cta[me], me, info, config)) for me in range(config.workers)]
    sizes = [[hi - lo for _, lo, hi in mine if hi > lo] for mine in pieces]
    if count is None:
        assert max(map(len, sizes)) > 1
        return
    assert sum(map(len, sizes)) == count and max(map(len, sizes)) == 1
    blocks = sum(map(sum, sizes))
    assert max(map(sum, sizes)) <= -(-blocks // config.workers) + 4


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_list_with_a_cost_of_pieces_does_every_block_once(name):
    batch, pad, ctas = FLAT[name]
    check_once(*make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True, piece_blocks=4))


@pytest.mark.parametrize("count", [1, 7, 32, 100, 300])
@pytest.mark.parametrize("length", [1, 130, 450, 512])
def test_short_decodes_are_not_cut_and_loads_differ_by_a_unit(count, length):
    config, *rest, info, cta, join = make([(1, length)] * count, RULES["causal"], pad=0, flat=True)
    check_once(config, *rest, info, cta, join)
    assert (join[:, 0] == -1).all()
    units = [len(list(pieces_of(cta[me], me, info, config))) for me in range(config.workers)]
    assert max(units) == -(-count * config.num_kv_heads // config.workers)


WAVES = {  # name -> requests, rows of padding, kv heads, the longest pipeline's share over an equal one at most
    "ragged": ([(1, 50 + 37 * i % 751) for i in range(256)], 0, 8, 1.05),
    "beside padding": ([(1, 360 + 97 * i % 240) for i in range(200)] + [(0, 0)] * 56, 56, 8, 1.1),  # 6.2 units each
    "one head": ([(1, 50 + 37 * i % 751) for i in range(512)], 0, 1, 1.1),
    "long alike": ([(1, 4096)] * 66, 0, 8, 1.01),
    "speculative, a window of holes": ([(3, 300), (0, 0), (1, 40)] * 90, 9, 8, 1.06),
}


@pytest.mark.parametrize("name", WAVES)
def test_a_list_in_waves_gives_out_whole_units_longest_first(name):
    batch, pad, heads, most = WAVES[name]
    made = make(batch, RULES["causal"], pad=pad, heads=heads, flat=True, in_waves=True, pipelines=2, short_weight=1)
    check_once(*made)
    config, *_, info, cta, join = made
    assert (join[:, 0] == -1).all()
    loads = [sum(hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)) for me in range(config.workers)]
    assert max(loads) <= max(most * np.mean(loads), info[:, wl.NBLK].max()) + 1
    blocks = info[info[:, wl.REQ] >= 0][:, wl.NBLK]
    requests = blocks[pad * config.group // config.tile_rows + (pad * config.group % config.tile_rows > 0) :]
    assert (np.diff(requests) <= 0).all()


@pytest.mark.parametrize(("name", "is_cut"), [("ragged", False), ("one long", True), ("speculative, holes", True)])
def test_a_list_in_waves_cuts_a_unit_that_is_longer_than_a_share(name, is_cut):
    batch, pad, ctas = FLAT[name]
    for pipelines in (1, 2):
        made = make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True, in_waves=True, pipelines=pipelines)
        check_once(*made)
        assert (made[-1][:, 0] >= 0).any() == is_cut or pipelines == 2, "of 264 pipelines, some units are"


@pytest.mark.parametrize("seed", range(16))
def test_any_list_in_waves_does_every_block_once(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, (70, 700, 9000)[seed % 3], rng.integers(1, 90))
    batch = [(int(rng.integers(0, 5)), int(n)) for n in lengths]
    rule, sizes = RULES[sorted(RULES)[seed % len(RULES)]], dict(heads=(1, 3, 8)[seed // 3 % 3], ctas=(3, 20)[seed % 2])
    pad = int(rng.integers(0, 200))
    check_once(*make(batch, rule, flat=True, in_waves=True, pipelines=seed // 2 % 2 + 1, pad=pad, **sizes))


def test_a_flat_list_has_the_windows_of_the_ranked_one():
    """Tile by tile the same columns, whatever the order."""
    rule = MaskRule(left=77, chunk=192)
    ranked, flat = (make(HOLES, rule, flat=flat)[4] for flat in (False, True))
    rows = lambda info: sorted(map(tuple, info[info[:, wl.SEQ] > 0]))  # padding tokens may name any request
    assert rows(ranked) == rows(flat)


@pytest.mark.parametrize(
    ("batch", "whole"),
    [([(512, 512)], True), ([(512, 65536)], True), ([(1024, 1024)] * 5, True), ([(100, 9000)], False)],
)
def test_units_stay_whole_where_cutting_saves_less_than_it_costs(batch, whole):
    """A prompt of 512 is 128 units for 132 CTAs: cut evenly, each CTA had two parts, and all of them were merged."""
    config, starts, seqs, tokens, info, cta, join = make(batch, RULES["causal"], pad=0)
    check_once(config, starts, seqs, tokens, info, cta, join)
    assert (join[:, 0] == -1).all() == whole


@pytest.mark.parametrize(
    "batch", [[(31_000, 2_000_000)], [(20_000, 2_000_000), (1, 1_500_000), (30_000, 900_000), (0, 0), (7, 2_000_000)]]
)
def test_costs_of_more_than_32_bits_are_shared_out(batch):
    """As those of one prompt of 600 000 tokens with 32 query heads, of which most tiles had no CTA."""
    config, *rest, info, cta, join = make(batch, RULES["causal"], group=8)
    check_once(config, *rest, info, cta, join)
    blocks = info[:, wl.NBLK].astype(np.int64)
    load = [sum(hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)) for me in range(config.workers)]
    assert np.sum(blocks * (info[:, wl.NROWS] > 0)) * config.num_kv_heads * config.long_weight > 2**31
    assert max(load) <= 1.05 * np.mean(load)


@pytest.mark.parametrize(("requests", "flat"), [(900, True), (1024, False)])
def test_a_flat_list_is_left_where_32_bits_do_not_count_its_blocks(requests, flat):
    """Blocks times workers: requests of 262144 keys that share most of them fit in a card."""
    keys = 262_144
    config = default_config(**SHAPE, num_heads=32, num_kv_heads=8, rows=4, keys=keys, requests=requests)
    assert config.flat_list == flat and not supports(config)
    starts, seqs = np.arange(requests + 1, dtype=np.int32), np.full(requests, keys, np.int32)
    work = jax.jit(lambda a, b: wl.build_work_list(a, b, requests, config))(starts, seqs)
    info, cta = np.asarray(work.info), np.asarray(work.cta)
    check_once(config, starts, seqs, requests, info, cta, cta[:, wl.JOIN :])


@pytest.mark.parametrize(
    ("batch", "group", "pad", "parts"),
    [
        ([(512, 32768)], 2, 0, 2),  # 64 units
        ([(500, 32768)], 2, 12, 2),  # padding goes to the CTAs that are left
        ([(128, 16384)], 4, 0, 4),
        ([(64, 65536), (64, 65000)], 4, 0, 4),
        ([(512, 32768), (512, 9000)], 2, 0, None),  # one is longer
        ([(512, 8192)], 2, 0, None),  # its keys stay in L2
        ([(700, 32768)], 2, 0, None),  # 88 units
        ([(512, 32768)] + [(1, 9000)] * 32, 2, 0, None),
    ],
)
def test_the_tiles_of_a_head_pass_over_its_keys_together(batch, group, pad, parts):
    """A CTA has a part of one unit, and parts of the same number begin at the same key, but for a block or two."""
    config, starts, seqs, tokens, info, cta, join = make(batch, RULES["causal"], group=group, pad=pad)
    check_once(config, starts, seqs, tokens, info, cta, join)
    begins, long = {}, info[:, wl.NROWS] * (info[:, wl.SEQ] > 0) > wl.SHORT_ROWS
    for me in range(config.workers):
        mine = [(unit, lo) for unit, lo, hi in pieces_of(cta[me], me, info, config) if long[unit[0]] and hi > lo]
        if parts is not None:
            assert len(mine) <= 1
        for unit, lo in mine:
            begins.setdefault(unit, []).append(lo)
    if parts is None:
        assert len({len(each) for each in begins.values()}) > 1
        return
    table = np.array(list(begins.values()))
    assert table.shape == (long.sum() * config.num_kv_heads, parts)
    assert (np.ptp(table, axis=0) <= 2 + np.ptp(info[long, wl.NBLK])).all()


def test_no_batch_size_is_a_cliff():
    """From B to B + 1 decodes (B = 1 .. 512), the longest CTA's time over the even share never grows by 1.3 or more."""
    most, piece_overhead = 512, 2  # a piece costs about as much as two blocks on top of its own
    config = GpuKernelConfig(**SHAPE, num_heads=32, num_kv_heads=8, flat_list=True)
    build = jax.jit(lambda starts, seqs: wl.build_work_list(starts, seqs, most, config))
    waste = []
    for reqs in range(1, most + 1):
        seqs = np.where(np.arange(most) < reqs, 1000 + 700 * (np.arange(most) % 3), 0).astype(np.int32)
        work = build(np.minimum(np.arange(most + 1), reqs).astype(np.int32), seqs)
        blocks, cta = np.repeat(np.asarray(work.info)[:, wl.NBLK], config.num_kv_heads), np.asarray(work.cta)
        before = np.concatenate([[0], np.cumsum(blocks)])
        u0, b0, u1, b1 = cta[:, wl.LINE_UNIT0 : wl.LINE_BLK1 + 1].T
        load = before[u1] + b1 - before[u0] - b0 + piece_overhead * (u1 - u0 + (b1 > 0))
        load += (1 + piece_overhead) * cta[:, wl.WAVES]
        waste.append(load.max() / (before[-1] / config.workers + piece_overhead))
    waste = np.array(waste)
    assert (waste[1:] / waste[:-1]).max() < 1.3 and waste.max() < 3


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
    assert not joins


@pytest.mark.parametrize(
    ("batch", "rule", "heads"),
    [
        ([(8192, 8192)], "causal", 8),  # 33 MB of keys
        ([(16384, 16384)], "causal", 1),
        ([(4096, 4096)] * 4 + [(1, 100)], "causal", 1),
        ([(64, 90000)], "causal", 8),  # 1 tile of each head: all of them run at the same time
        ([(16384, 16384)], "window", 8),
        ([(1, 8192)] * 64 + [(2000, 16384)], "causal", 8),  # decodes beside it
        ([(1, 8192)] * 64, "causal", 8),
    ],
)
def test_heads_go_one_by_one_where_the_keys_of_a_prefill_exceed_l2(batch, rule, heads):
    *_, cta, _ = make(batch, RULES[rule])
    assert set(cta[:, wl.SET_HEADS]) == {heads}


@pytest.mark.parametrize(
    ("batch", "mixed"), [([(1000, 1000)], 0), ([(1000, 1000), (1, 50)], 0), ([(1000, 1000)] + [(1, 4000)] * 64, 1)]
)
def test_every_other_cta_walks_backward_where_many_decodes_meet_a_prefill(batch, mixed):
    *_, cta, _ = make(batch, RULES["causal"])
    assert cta[:, wl.BACKWARD].tolist() == [me % 2 * mixed for me in range(132)]


LOADS = [(name, n, 11) for name in ("decode", "one long", "ragged", "prefill") for n in (0, 2)]


@pytest.mark.parametrize(("batch", "together", "unit_cost"), [*LOADS, ("few long", 0, 22)])
def test_load_is_even(batch, together, unit_cost):
    lengths = (BATCHES | {"few long": [(1, 100)] * 200 + [(1, 12800)] * 8})[batch]
    config, *_, info, cta, _ = make(lengths, RULES["causal"], together=together, unit_cost=unit_cost)
    load = []
    for me in range(config.workers):
        total = 0
        for (tile, _), lo, hi in pieces_of(cta[me], me, info, config):
            short = info[tile, wl.NROWS] <= wl.SHORT_ROWS
            total += (hi - lo) * (config.short_weight if short else config.long_weight) + (lo == 0) * config.unit_cost
        load.append(total)
    block = config.short_weight if "prefill" not in batch else config.long_weight
    assert max(load) - np.mean(load) <= 4 * block + 0.01 * np.mean(load)


PROMPTS = [(n, n) for n in (93, 776, 1324, 139, 80)]


@pytest.mark.parametrize(
    ("batch", "dim", "kv_dtype", "is_cut"),
    [
        (PROMPTS, 128, "int8", True), (PROMPTS, 128, "bfloat16", False), (PROMPTS, 256, "bfloat16", False),
        ([(512, 900)], 128, "bfloat16", True), ([(512, 900)], 256, "bfloat16", False),
        ([(512, 32768)], 256, "bfloat16", True),
    ],
)  # fmt: skip
def test_what_cuts_cost_depends_on_the_heads_and_the_cache(batch, dim, kv_dtype, is_cut):
    shape = SHAPE | dict(head_dim=dim, v_head_dim=dim, block_kv=64, kv_dtype=kv_dtype)
    config = GpuKernelConfig(**shape, num_heads=16, num_kv_heads=8, mask=MaskRule(causal=True), num_ctas=132)
    q_lens, seqs = np.array(batch, np.int32).T
    starts = np.append(0, np.cumsum(q_lens)).astype(np.int32)
    work = wl.build_work_list(jnp.asarray(starts), jnp.asarray(seqs), int(starts[-1]), config)
    assert bool((np.asarray(work.cta)[:, wl.JOIN] >= 0).any()) == is_cut


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
        back = q // mask.chunk - kv // mask.chunk if mask.chunk else np.zeros_like(kv)
        seen &= (back >= 0) & (back <= mask.lookback)
        keys = np.flatnonzero(seen.any(axis=0))
        assert row[wl.KSTART] <= keys[0] and keys[-1] < row[wl.KSTOP]
        first, blocks = row[wl.BLK0] * 128, row[wl.NBLK]
        assert first <= keys[0] and keys[-1] < first + blocks * 128
        whole = seen[:, first + row[wl.FULL0] * 128 : first + row[wl.FULL1] * 128]
        assert whole.all(), "blocks called full must be visible to every row"


REACHES = {
    "spans": MaskRule(spans=True),
    "spans, window": MaskRule(left=100, spans=True),
    "spans, clamped": MaskRule(left=100, spans=True, clamp_spans=True),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", REACHES)
def test_ranges_of_tokens_are_the_keys_of_spans_and_prefixes(name, flat):
    """Every request has a span from its first new token on. A prefix of 37 keys is what of it is before that range."""
    mask, batch = REACHES[name], HOLES if flat else BATCHES["mixed"]
    config = GpuKernelConfig(**SHAPE, num_heads=32, num_kv_heads=8, mask=mask, flat_list=flat)
    q_lens, seqs = (np.array(x, np.int32) for x in zip(*batch, strict=True))
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    tokens, prefixes = int(starts[-1]) + 5, np.full(len(batch), 37, np.int32)
    first, last = seqs - q_lens, seqs - q_lens + np.minimum(150, q_lens) - 1
    spans, owner = np.full((tokens, 2), -1, np.int32), np.repeat(np.arange(len(batch)), q_lens)
    q_pos = np.arange(starts[-1]) - starts[owner] + first[owner]
    inside = q_pos <= last[owner]
    spans[: starts[-1]][inside] = np.stack([first, last], 1)[owner][inside]
    own = token_ranges(starts, seqs, tokens, mask, spans=spans)
    before = np.asarray(token_ranges(starts, seqs, tokens, mask, spans=spans, prefix_lens=prefixes))
    info = np.asarray(wl.build_work_list(starts, seqs, tokens, config, ranges=own).info)
    tiles = len(info) - -(-2 * tokens // 16)
    ranges = info[tiles:].reshape(-1)[: 2 * tokens].reshape(-1, 2)
    live = slice(starts[-1])
    assert not before[:, 0].any() and (before[live, 1] == np.minimum(ranges[live, 0], 37)).all()
    for row in info[:tiles][info[:tiles, wl.NROWS] > 0]:
        if row[wl.TOK0] == starts[-1]:
            continue  # the ghost
        token = np.unique((row[wl.ROW0] + np.arange(row[wl.NROWS])) // 4) + row[wl.TOK0]
        q, kv = q_pos[token][:, None], np.arange(row[wl.SEQ])[None]
        near = kv >= q - mask.left if mask.left >= 0 else kv >= 0
        both = (kv >= spans[token, :1]) & (kv <= spans[token, 1:]) & (near if mask.clamp_spans else True)
        shown = (kv <= q) & near | both
        for seen, bounds in zip(shown, ranges[token], strict=True):
            assert (seen == (kv[0] >= bounds[0]) & (kv[0] < bounds[1])).all()
        keys = np.flatnonzero(shown.any(axis=0))
        assert row[wl.KSTART] <= keys[0] and keys[-1] < row[wl.KSTOP]
        begin = row[wl.BLK0] * 128
        assert begin <= keys[0] and keys[-1] < begin + row[wl.NBLK] * 128
        assert shown[:, begin + row[wl.FULL0] * 128 : begin + row[wl.FULL1] * 128].all()
    assert not ranges[starts[-1] :].any() and not before[starts[-1] :].any()


def test_blocks_with_new_tokens_are_computed_with_a_mask_under_a_bias():
    config = GpuKernelConfig(**SHAPE, num_heads=32, num_kv_heads=8, qq_bias=True)
    starts, seqs = np.array([0, 16, 17, 300], np.int32), np.array([1000, 128, 600], np.int32)
    info = np.asarray(wl.build_work_list(starts, seqs, 300, config).info)
    for row in info[info[:, wl.NROWS] > 0]:
        assert (row[wl.BLK0] + row[wl.FULL1]) * 128 <= row[wl.QPOS0]


@pytest.mark.parametrize("flat", [True, False])
def test_requests_that_are_left_out_have_no_rows(flat):
    lens, seqs, kept = (
        np.array([3, 1, 5, 0, 2]),
        np.array([40, 700, 300, 9, 2]),
        np.array([True, False, True, True, False]),
    )
    starts = np.append(0, np.cumsum(lens)).astype(np.int32)
    config = GpuKernelConfig(**SHAPE, num_heads=8, num_kv_heads=2, flat_list=flat)
    left = np.where(kept, lens, 0).astype(np.int32)
    info = np.asarray(wl.build_work_list(starts, seqs, 14, config, query_lens=left).info)
    rows = {int(t): int(n) for t, n in zip(info[:, wl.TOK0], info[:, wl.NROWS], strict=True) if n}
    assert rows == {0: 12, 4: 20, 11: 12}  # requests 0 and 2, and three padding tokens


@pytest.mark.parametrize("pipelines", [1, 2])
def test_capacity_bounds_the_tiles(pipelines):
    rng, config = np.random.default_rng(0), GpuKernelConfig(**SHAPE, num_heads=6, num_kv_heads=1, pipelines=pipelines)
    for _ in range(20):
        q_lens = rng.integers(0, 70, size=9)
        need = sum(-(-q * 6 // config.tile_rows) for q in q_lens)
        assert need <= wl.capacity(int(q_lens.sum()), 9, config)


@pytest.mark.parametrize("name", FLAT)
def test_every_part_knows_the_ctas_of_its_unit(name):
    """So that the CTA that stores the last part can merge them: as many parts are stored as CTAs from first to last."""
    batch, pad, ctas = FLAT[name]
    config, *_, info, cta, join = make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True)
    parts = {}
    for me in range(ctas):
        for unit, lo, hi in pieces_of(cta[me], me, info, config):
            if lo > 0 or hi < info[unit[0], wl.NBLK]:
                known = (me, join[me, 2]) if lo == 0 else (cta[me, wl.FROM], cta[me, wl.UNTIL])
                parts.setdefault(unit, []).append((me, tuple(map(int, known))))
    assert parts or name == "empty"
    for stored in parts.values():
        first, last = stored[0][0], stored[-1][0]
        assert [me for me, _ in stored] == list(range(first, last + 1))
        assert {known for _, known in stored} == {(first, last)}
    starts = [stored[0][0] for stored in parts.values()]
    assert len(set(starts)) == len(starts), "a counter of its own for each unit"


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_one_cta_merges_each_cut_unit_when_all_parts_are_stored(seed):
    """By counters of which each has one unit: every CTA stores its parts in order, and counts each of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9000 if seed % 2 else 1500, size=int(rng.integers(1, 40)))
    batch = [(int(min(rng.integers(1, 5), length)), int(length)) for length in lengths]
    ctas = int(rng.choice([7, 78, 132]))
    config, *_, info, cta, join = make(batch, RULES["window" if seed == 3 else "causal"], ctas=ctas, flat=True)
    waiting = {me: list(pieces_of(cta[me], me, info, config)) for me in range(ctas)}
    cut = {}
    for me, pieces in waiting.items():
        for unit, lo, hi in pieces:
            if lo > 0 or hi < info[unit[0], wl.NBLK]:
                cut.setdefault(unit, set()).add(me)
    counters, stored, merged = np.zeros(ctas, int), {unit: set() for unit in cut}, []
    while waiting:
        me = int(rng.choice(list(waiting)))
        if not waiting[me]:
            del waiting[me]
            continue
        unit, lo, hi = waiting[me].pop(0)
        if lo > 0 or hi < info[unit[0], wl.NBLK]:
            first, last = (me, join[me, 2]) if lo == 0 else (cta[me, wl.FROM], cta[me, wl.UNTIL])
            stored[unit].add(me)
            counters[first] += 1
            if counters[first] == last - first + 1:
                assert stored[unit] == cut[unit] == set(range(first, last + 1))
                merged.append(unit)
    assert sorted(merged) == sorted(cut)
    assert cut or seed != 1
