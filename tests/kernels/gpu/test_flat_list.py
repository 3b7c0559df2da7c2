"""The flat work list, on its line and in waves, walked in numpy: every block is computed once, and the load is even."""

import bisect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu import flat_list
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.merge_sm90 import split_unit
from pallas_kernels.gpu.mla_config import MlaKernelConfig
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.work_list import build_work_list
from tests.kernels.gpu.work_lists import FLAT, HOLES, RULES, SHAPE, check_once, listed, make, pieces_of


@pytest.mark.parametrize("piece_blocks", [0, 4])
def test_ctas_without_keys_have_the_padding(piece_blocks):
    """A request of one token beside 60 tokens of padding: its blocks and the tiles of padding are on different CTAs."""
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


@pytest.mark.parametrize("pipelines", [1, 2])
def test_tiles_of_padding_are_shared_out_in_a_flat_list(pipelines):
    """128 requests in a batch of 512: 12 or 24 tiles of padding, of 8 heads each. On the line one CTA had all."""
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


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_list_does_every_block_once_and_evenly(name):
    batch, pad, ctas = FLAT[name]
    config, *rest, info, cta, join = make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True)
    check_once(config, *rest, info, cta, join)
    load = [sum(hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)) for me in range(ctas)]
    whole = [int(row[wl.NBLK]) for row in info if 0 < row[wl.NBLK] * config.block_kv <= 2 * config.whole_keys]
    assert max(load) - np.mean(load) <= 1 + max(whole, default=0)
    if not any(seq <= 2 * config.whole_keys for _, seq in batch):
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


def test_whole_units_are_in_no_pieces():
    config, *rest, join = make([(1, 9000)] * 3, RULES["causal"], flat=True, piece_blocks=4, whole=True)
    check_once(config, *rest, join)
    assert (join[:, 0] == -1).all()


@pytest.mark.parametrize("count", [1, 7, 32, 100, 300])
@pytest.mark.parametrize("length", [1, 130, 450, 512])
def test_short_decodes_are_not_cut_and_loads_differ_by_a_unit(count, length):
    config, *rest, info, cta, join = make([(1, length)] * count, RULES["causal"], pad=0, flat=True)
    check_once(config, *rest, info, cta, join)
    assert (join[:, 0] == -1).all()
    units = [len(list(pieces_of(cta[me], me, info, config))) for me in range(config.workers)]
    assert max(units) == -(-count * config.num_kv_heads // config.workers)


WAVES = {  # name -> requests, tokens of padding, kv heads, the most that a pipeline may have, in equal shares
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
    blocks = info[info[:, wl.SEQ] > 0][:, wl.NBLK]
    assert (np.diff(blocks) <= 0).all()


RAGGED = {  # name -> lengths of a decode, kv heads, query heads of each, the most blocks that a CTA may have
    "two units for each CTA": ([450 + 97 * i % 300 for i in range(32)], 8, 4, 12),
    "hardly more units than CTAs": ([450 + 97 * i % 300 for i in range(20)], 8, 4, 10),
    "fewer units than CTAs": ([300 + 97 * i % 600 for i in range(16)], 8, 4, 7),
    "one kv head": ([300 + 97 * i % 600 for i in range(132)], 1, 8, 7),
    "units that are better whole than cut": ([100 + 613 * i % 3900 for i in range(32)], 8, 4, 33),
}


@pytest.mark.parametrize("name", RAGGED)
def test_whole_units_of_a_ragged_decode_are_not_left_to_one_cta(name):
    """On the line a CTA had up to 6 of them, and others none."""
    lengths, kv_heads, group, most = RAGGED[name]
    heads = dict(num_heads=kv_heads * group, num_kv_heads=kv_heads)
    fields = dict(rows=group, keys=4096, requests=len(lengths), **heads, head_dim=128, v_head_dim=128, page_size=16)
    made = listed(default_config(**fields), [(1, n) for n in lengths])
    check_once(*made)
    config, *_, info, cta, _ = made
    loads = [sum(hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)) for me in range(config.workers)]
    assert config.pipelines == 1 and max(loads) <= most


SKEWED = {  # name -> lengths of a decode, fields of the config
    "long before short": ([130_000] * 6 + [80 + 37 * i % 40 for i in range(60)], {}),
    "short before long": ([80 + 37 * i % 40 for i in range(60)] + [130_000] * 6, {}),
    "few kv heads": ([32000] * 3 + [100 + 37 * i % 400 for i in range(60)], dict(num_kv_heads=4)),
    "one kv head": ([32000] + [100 + 37 * i % 400 for i in range(30)], dict(num_kv_heads=1)),
    "eight bits": ([16000] * 3 + [200 + 37 * i % 400 for i in range(30)], dict(kv_dtype="float8_e4m3fn")),
    "wide heads": ([16000] * 3 + [200 + 37 * i % 400 for i in range(30)], dict(head_dim=256, v_head_dim=256)),
    "by a law": (np.exp(np.random.default_rng(2).uniform(4.6, 10.3, 32)).astype(int).tolist(), {}),
}


@pytest.mark.parametrize("name", SKEWED)
def test_short_units_beside_long_ones_are_not_left_to_one_cta(name):
    """A unit takes 2 us besides its keys. On a line of blocks alone one of 264 pipelines had 187 of the first batch."""
    lengths, fields = SKEWED[name]
    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=16) | fields
    rows = 32 // shape["num_kv_heads"]
    made = listed(default_config(rows=rows, keys=131072, requests=len(lengths), **shape), [(1, n) for n in lengths])
    check_once(*made)
    config, *_, info, cta, _ = made
    costs = []
    for me in range(config.workers):
        blocks = [hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)]
        costs.append(sum(blocks) + config.unit_blocks * len(blocks))
    whole = 1024 // config.block_kv  # a cut moves by up to half of a short unit
    assert max(costs) <= 1.02 * np.mean(costs) + whole / 2 + 2 * config.unit_blocks + 1


LATENT = {  # name -> lengths of a decode, query heads, the most that a CTA may have, in blocks, 6 of which are a unit's
    "tiny": ([50 + 37 * i % 750 for i in range(256)], 128, 53),
    "tiny, narrow": ([50 + 37 * i % 750 for i in range(256)], 16, 28),
    "fewer units than CTAs": ([50 + 37 * i % 750 for i in range(64)], 128, 19),
    "long before short": ([32000] * 2 + [100 + 37 * i % 400 for i in range(60)], 128, 34),
    "one very long": ([64000] + [500 + 37 * i % 1000 for i in range(30)], 128, 34),
    "by a law": (np.exp(np.random.default_rng(1).uniform(4.6, 10.3, 64)).astype(int).tolist(), 128, 98),
}


@pytest.mark.parametrize("name", LATENT)
def test_units_of_latents_are_shared_out_evenly(name):
    """On a line of blocks alone the longest CTA had 94, 45, 30, 62, 47 and 133."""
    lengths, heads, most = LATENT[name]
    config = MlaKernelConfig(num_heads=heads, group=min(heads, 64), max_rows=min(heads, 64), page_size=64)
    made = listed(config.list_of(len(lengths)), [(1, n) for n in lengths])
    check_once(*made)
    config, *_, info, cta, _ = made
    pieces = [[hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)] for me in range(config.workers)]
    assert config.unit_blocks == 6 and max(sum(blocks) + 6 * len(blocks) for blocks in pieces) <= most


@pytest.mark.parametrize(("lengths", "most"), [([1000], 1), ([2000], 1), ([700, 1500, 900, 1200], 3), ([6000], 3)])
def test_few_units_are_cut_into_one_piece_for_each_cta(lengths, most):
    """On the line most CTAs had two, each with its start and end."""
    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=16)
    made = listed(default_config(rows=4, keys=8192, requests=len(lengths), **shape), [(1, n) for n in lengths])
    check_once(*made)
    config, *_, info, cta, _ = made
    pieces = [[hi - lo for _, lo, hi in pieces_of(cta[me], me, info, config)] for me in range(config.workers)]
    assert max(map(len, pieces)) == 1 and max(map(sum, pieces)) <= most


@pytest.mark.parametrize("length", [2_120_000_000, 2**31 - 1])
def test_a_unit_of_as_many_keys_as_32_bits_count_is_cut_evenly(length):
    """131 times its blocks is beyond 32 bits, and so is its length rounded up to blocks."""
    shape = dict(num_heads=8, num_kv_heads=1, head_dim=128, v_head_dim=128, page_size=16)
    made = listed(default_config(rows=8, keys=length, requests=1, **shape), [(1, length)])
    check_once(*made)
    config, *_, info, _, _ = made
    assert info[:, wl.NBLK].sum() == -(-length // config.block_kv)


@pytest.mark.parametrize("count", [32, 33, 49])
def test_ctas_with_fewer_keys_have_the_padding_of_a_list_in_waves(count):
    """32 requests of 8 kv heads are 256 units for 264 pipelines, beside 16 of padding: a pipeline had two with keys."""
    batch = [(1, 500)] * count + [(0, 0)] * (64 - count)
    config, *rest, info, cta, join = make(batch, MaskRule(), pad=64 - count, flat=True, in_waves=True, pipelines=2)
    check_once(config, *rest, info, cta, join)
    units = [[info[tile, wl.SEQ] > 0 for (tile, _), _, _ in pieces_of(cta[me], me, info, config)] for me in range(264)]
    assert max(map(sum, units)) == -(-count * 8 // 264) and max(map(len, units)) == -(-(count + 2) * 8 // 264)


@pytest.mark.parametrize(("name", "is_cut"), [("ragged", False), ("one long", True), ("speculative, holes", True)])
def test_a_list_in_waves_cuts_a_unit_that_is_longer_than_a_share(name, is_cut):
    batch, pad, ctas = FLAT[name]
    for pipelines in (1, 2):
        made = make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True, in_waves=True, pipelines=pipelines)
        check_once(*made)
        assert (made[-1][:, 0] >= 0).any() == is_cut or pipelines == 2, "of 264 pipelines, some units are"


def test_where_units_are_cut_no_cta_has_all_of_the_short_ones():
    """Lengths of a log-normal law. On a line that was sorted, one pipeline had 120 units, others 15."""
    lengths = np.exp(np.random.default_rng(0).normal(7.3, 1.2, 256)).astype(int)
    pieces = {}
    for in_waves in (False, True):
        made = make([(1, n) for n in lengths], MaskRule(), pad=0, flat=True, in_waves=in_waves, pipelines=2)
        check_once(*made)
        config, *_, info, cta, join = made
        assert (join[:, 0] >= 0).any()
        pieces[in_waves] = max(len(list(pieces_of(cta[me], me, info, config))) for me in range(config.workers))
    assert pieces[True] <= 1.1 * pieces[False]


HOLES_BETWEEN = {  # name -> slots, requests at each end of them, kv heads
    "long": (256, 8, 8), "short": (128, 20, 1), "few": (16, 1, 8), "one pipeline": (64, 4, 8)
}  # fmt: skip


@pytest.mark.parametrize("name", HOLES_BETWEEN)
def test_requests_without_rows_cost_no_cta_a_piece(name):
    """They end within a burst of the engine. On the line one CTA had all their units: 1920 of the first batch."""
    slots, live, heads = HOLES_BETWEEN[name]
    ends = [(1, 4000 + 97 * i % 400) for i in range(live)]
    batch = ends + [(0, 0)] * (slots - 2 * live) + ends
    shape = dict(num_heads=4 * heads, num_kv_heads=heads, head_dim=128, v_head_dim=128, page_size=16)
    made = listed(default_config(rows=4, keys=8192, requests=slots, **shape), batch)
    check_once(*made)
    config, *_, info, cta, _ = made
    units = 2 * live * heads
    pieces = [len(list(pieces_of(cta[me], me, info, config))) for me in range(config.workers)]
    assert config.flat_list and max(pieces) <= units // config.workers + 2


@pytest.mark.parametrize("piece_blocks", [0, 4])
@pytest.mark.parametrize("name", ["ragged", "one long", "speculative, holes", "few CTAs"])
def test_all_ctas_with_a_part_of_a_unit_but_the_last_merge_it(name, piece_blocks):
    """One alone added up 66 parts of a long request."""
    batch, pad, ctas = FLAT[name]
    made = make(batch, RULES["causal"], pad=pad, ctas=ctas, flat=True, piece_blocks=piece_blocks, unit_blocks=1)
    config, *_, info, cta, _ = made
    parts, helping = {}, {}
    for me in range(ctas):
        for unit, lo, hi in pieces_of(cta[me], me, info, config):
            if hi > lo:
                parts.setdefault(unit, []).append(me)
        found = split_unit(config, jnp.asarray(info), jnp.asarray(cta), jnp.int32(me))
        if found.exists:
            tile = next(t for t in range(len(info)) if (info[t] == [found.info_of(i) for i in range(16)]).all())
            helping.setdefault((tile, int(found.head)), []).append((int(found.helper), int(found.helpers)))
    wanted = {unit: [(i, len(of) - 1) for i in range(len(of) - 1)] for unit, of in parts.items() if len(of) > 1}
    assert helping == wanted


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


@pytest.mark.parametrize("total", [0, 1, 5, 131, 132, 133, 10_007, 2**24 + 1, 2**31 - 9])
@pytest.mark.parametrize("ctas", [1, 3, 132, 264, 528])
def test_equal_cuts_are_exact_where_their_products_need_more_than_32_bits(total, ctas):
    cut, cta_of = flat_list._equal_cuts(jnp.int32(total), ctas)
    wanted = [c * total // ctas for c in range(ctas + 1)]
    np.testing.assert_array_equal(np.asarray(cut(jnp.arange(ctas + 1))), wanted)
    edges = [point + more for point in wanted for more in (-1, 0, 1)]
    blocks = np.array([*range(min(total, 300)), *(x for x in edges if 0 <= x < total)], np.int32)
    found = np.asarray(cta_of(jnp.asarray(blocks))) if len(blocks) else []
    assert list(found) == [bisect.bisect_right(wanted, x) - 1 for x in blocks]


@pytest.mark.parametrize(("requests", "latent"), [(900, False), (1024, False), (2048, True)])
def test_blocks_times_workers_may_need_more_than_32_bits(requests, latent):
    """Requests of 262144 keys that share most of them fit in a card."""
    keys = 262_144
    if latent:
        config = MlaKernelConfig(num_heads=128, group=64, page_size=64).list_of(requests)
    else:
        config = default_config(**SHAPE, num_heads=32, num_kv_heads=8, rows=4, keys=keys, requests=requests)
        assert not supports(config)
    assert config.flat_list
    starts, seqs = np.arange(requests + 1, dtype=np.int32), np.full(requests, keys, np.int32)
    work = jax.jit(lambda a, b: build_work_list(a, b, requests, config))(starts, seqs)
    info, cta = np.asarray(work.info), np.asarray(work.cta)
    check_once(config, starts, seqs, requests, info, cta, cta[:, wl.JOIN :])


TWO = dict(pipelines=2, block_kv=64)


@pytest.mark.parametrize(("heads", "fields", "flat"), [(64, {}, True), (128, {}, False), (64, TWO, False)])
def test_a_flat_list_is_left_where_32_bits_do_not_count_its_blocks(heads, fields, flat):
    many = dict(num_heads=heads, num_kv_heads=heads, rows=1, keys=2**20, requests=2048)
    assert default_config(**SHAPE | many | fields).flat_list == flat


def test_a_window_that_begins_within_a_block_sees_a_block_more():
    """63 487 keys are 992 blocks of 64, or 993."""
    shape: dict = dict(num_heads=8, num_kv_heads=8, rows=1, keys=10**6, requests=1024, mask=MaskRule(left=63_486))
    config = default_config(head_dim=128, v_head_dim=128, page_size=16, **shape)
    starts, seqs = np.arange(1025, dtype=np.int32), np.full(1024, 900_033, np.int32)
    work = jax.jit(lambda a, b: build_work_list(a, b, 1024, config))(starts, seqs)
    info, cta = np.asarray(work.info), np.asarray(work.cta)
    check_once(config, starts, seqs, 1024, info, cta, cta[:, wl.JOIN :])


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
