"""The work list, walked in numpy as a CTA walks it: every block is computed once, and the load is even."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.token_ranges import token_ranges
from pallas_kernels.gpu import ranked_list
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.work_list import build_work_list
from tests.kernels.gpu.work_lists import BATCHES, FLAT, HOLES, RULES, SHAPE, check_once, make, pieces_of


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


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_sets_of_heads_are_done_once_and_one_after_the_other(batch, together):
    config, *rest, info, cta, join = make(BATCHES[batch], RULES["causal"], together=together)
    check_once(config, *rest, info, cta, join)
    for me in range(config.workers):
        sets = [head // together for (_, head), _, _ in pieces_of(cta[me], me, info, config)]
        assert sets == sorted(sets)


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
    build = jax.jit(lambda starts, seqs: build_work_list(starts, seqs, most, config))
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
    ("batch", "group", "heads", "together"),
    [
        ([(2000, 2000)] * 4, 1, 40, 4),  # 64 tiles: 256 units
        ([(3000, 3000)] * 3, 1, 32, 2),
        ([(2048, 30000)], 4, 8, 4),
        ([(2000, 2000)] * 4, 1, 37, 37),  # no sets of equal size
        ([(1, 500)] * 40 + [(2000, 2000)] * 4, 1, 40, 40),  # decodes beside them
        ([(1, 500)] * 200 + [(2048, 30000)], 4, 8, 8),  # which fill no CTAs
        ([(1, 500)] * 40 + [(8192, 30000)], 4, 8, 1),
    ],
)
def test_a_set_has_as_few_heads_as_keep_every_cta_busy(batch, group, heads, together):
    config, starts, seqs, tokens, info, cta, join = make(batch, RULES["causal"], group=group, heads=heads)
    assert set(cta[:, wl.SET_HEADS]) == {together}
    check_once(config, starts, seqs, tokens, info, cta, join)


@pytest.mark.parametrize(
    ("batch", "mixed"), [([(1000, 1000)], 0), ([(1000, 1000), (1, 50)], 0), ([(1000, 1000)] + [(1, 4000)] * 64, 1)]
)
def test_every_other_cta_walks_backward_where_many_decodes_meet_a_prefill(batch, mixed):
    *_, cta, _ = make(batch, RULES["causal"])
    assert cta[:, wl.BACKWARD].tolist() == [me % 2 * mixed for me in range(132)]


def weight_of(rows: int, config) -> int:
    """What a block costs of a tile with so many rows."""
    if rows <= config.narrow_rows:
        return config.narrow_weight
    return config.short_weight if rows <= wl.SHORT_ROWS else config.long_weight


LOADS = [(name, n, {}) for name in ("decode", "one long", "ragged", "prefill") for n in (0, 2)]
EIGHT_BITS = dict(unit_cost=22, narrow_rows=8, narrow_weight=4, short_weight=7, kv_dtype="int8")


@pytest.mark.parametrize(
    ("batch", "together", "fields"),
    [*LOADS, ("few long", 0, dict(unit_cost=22)), ("decodes and a chunk", 0, EIGHT_BITS)],
)
def test_load_is_even(batch, together, fields):
    more = {
        "few long": [(1, 100)] * 200 + [(1, 12800)] * 8,
        "decodes and a chunk": [(1, 50 + 7 * i) for i in range(90)] + [(37, 23137)],
    }
    lengths = (BATCHES | more)[batch]
    config, *_, info, cta, _ = make(lengths, RULES["causal"], together=together, **fields)
    load = []
    for me in range(config.workers):
        total = 0
        for (tile, _), lo, hi in pieces_of(cta[me], me, info, config):
            total += (hi - lo) * weight_of(info[tile, wl.NROWS], config) + (lo == 0) * config.unit_cost
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
    work = build_work_list(jnp.asarray(starts), jnp.asarray(seqs), int(starts[-1]), config)
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
    info = np.asarray(build_work_list(starts, seqs, tokens, config, ranges=own).info)
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
    info = np.asarray(build_work_list(starts, seqs, 300, config).info)
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
    info = np.asarray(build_work_list(starts, seqs, 14, config, query_lens=left).info)
    rows = {int(t): int(n) for t, n in zip(info[:, wl.TOK0], info[:, wl.NROWS], strict=True) if n}
    assert rows == {0: 12, 4: 20, 11: 12}  # requests 0 and 2, and three padding tokens


@pytest.mark.parametrize("pipelines", [1, 2])
def test_max_tiles_bounds_the_tiles(pipelines):
    rng, config = np.random.default_rng(0), GpuKernelConfig(**SHAPE, num_heads=6, num_kv_heads=1, pipelines=pipelines)
    for _ in range(20):
        q_lens = rng.integers(0, 70, size=9)
        need = sum(-(-q * 6 // config.tile_rows) for q in q_lens)
        assert need <= ranked_list.max_tiles(int(q_lens.sum()), 9, config)
