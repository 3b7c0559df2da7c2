"""The work list of the attention kernel: which CTA computes what. Built from traced lengths, inside jit.

    tile    up to 128 packed rows of one request, or 192 where three warpgroups compute: row p is token p // G and head
            p % G of a kv head's group. Where each CTA has two pipelines, up to 64 rows, and a pipeline stands for the
            CTA in what follows
    unit    one (tile, kv head). It costs its number of key blocks times the cost of a block, plus unit_cost
    piece   a range of a unit's key blocks: what a CTA computes at a time

The ranked list, for any batch:

1. Kv heads are taken in sets, one set after the other. Where the keys of a prefill's heads exceed L2 together, a set is
   one head: its keys stay in L2 while all its queries pass over them. Elsewhere one set holds all heads.
2. Within a set, units are sorted by cost: longest first in the last set, shortest first in the one before it, and so
   on, so that the cost does not jump from one set to the next.
3. With C CTAs, the first W * C units are assigned whole, in snake order. W is the largest number of such waves that
   gives no CTA more than an equal share of the total.
4. The remaining units are laid end to end on a line, which is cut so that every CTA ends with the same total. A cut
   within a unit makes two pieces with partial results, so at most C - 1 units are merged, whatever the batch. Shapes
   are static and there is no number of splits to tune. Where giving out these units whole, in snake order too, makes
   the longest CTA hardly longer (see CUTS_COST), or with config.whole_units, nothing is cut. Where the keys of few long
   units exceed L2, and equally many parts of each are hardly longer than an equal share (see EVEN_SHARE), each CTA gets
   one part.

The flat list, where every request has one tile (decode): step 4 alone, cut at equal numbers of blocks, nothing sorted.
Its waves are the tiles of padding tokens: they have one block each, so that on the line one CTA would have all of them,
at 2 us each. They are given out in snake order; with config.moves_padding CTAs without a part of the line come first.
XLA makes few kernels of it. A cut within a unit of few keys (see FLAT_WHOLE_KEYS), or of any number with
config.whole_units or where units are about equal and fill whole waves (see CUTS_KEYS), moves to the nearer end of the
unit. With config.in_waves, where no unit need be cut (see WAVES_SHARE), all are given out whole, longest first, in
waves in snake order: a run of the line would be the heads of one request. Where some are cut, requests stay in their
order: on a sorted line the last CTAs would have all short units, hundreds of them, and each costs 2 us.

Tokens past query_start_loc[R] (padding) belong to a ghost request without keys, so that their rows are written as
(0, -inf). A flat list begins with the ghost's tiles, as many as if all tokens were padding; those past the
padding have no rows. Then each request has one tile. In waves, longest first, those of padding are the last with rows.

    info  i32[tiles, 16]   one row a tile; the columns TOK0 .. CAUSAL below
    cta   i32[C, 16]       one row a CTA: W, the first unit of its part of the line and the first block of that unit,
                           the end unit and end block, BACKWARD, SET_UNITS, SET_HEADS; from JOIN on: a unit to merge
                           (or -1), the first and the last CTA that hold a part of it; of flat lists only FROM, UNTIL:
                           the same two CTAs of the unit in which this CTA's part begins, and PLACE: the CTA's place
                           within the first wave, if config.moves_padding
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.token_ranges import bounds_of_tokens
from pallas_kernels.gpu.config import WARPGROUP_ROWS, GpuKernelConfig
from pallas_kernels.gpu.gather_sm90 import gather

TOK0, ROW0, NROWS, BLK0, NBLK, FULL0, FULL1, KSTART, KSTOP, REQ, QPOS0, SEQ, CAUSAL = range(13)
"""Columns of info. TOK0: first token of the request; ROW0, NROWS: packed rows of the tile; BLK0, NBLK: its key blocks;
FULL0, FULL1: blocks, counted from BLK0, that every row sees whole (half open); KSTART, KSTOP: key positions that
some row sees (half open); REQ, QPOS0, SEQ: the request, the position of its first query, its number of keys; CAUSAL: 1
if it is causal, plus twice the rank. If several ranks hold the keys, those of BLK0 .. KSTOP and SEQ are one rank's.
With spans in the mask, the rows of info after the tiles hold two numbers a token: see algebra/token_ranges.py."""

INFO_COLUMNS = 16
WAVES, LINE_UNIT0, LINE_BLK0, LINE_UNIT1, LINE_BLK1, BACKWARD, SET_UNITS, SET_HEADS = range(8)
JOIN, FROM, UNTIL, PLACE, CTA_COLUMNS = 8, 11, 12, 13, 16
"""Columns of cta, see the module's docstring; JOIN is the first of three."""

TILE_ROWS = 2 * WARPGROUP_ROWS  # of a tile, at most, and of a slot of partial results, where two warpgroups compute
SHORT_ROWS = WARPGROUP_ROWS
"""A tile of at most this many rows is computed by all warpgroups, each on a share of the keys, or by its pipeline's."""
L2_BYTES = 40 << 20  # keys and values beyond this do not stay in a Hopper's 50 MB of L2 while a wave of tiles passes
CUTS_SHARE, CUTS_COST, CUTS_COST_8BIT = 1.04, 66, 28
"""Units stay whole while the longest CTA has at most CUTS_SHARE times, or CUTS_COST more than, an equal share; costs
are like config.unit_cost, 11 for 2 us. To cut takes a second piece on each CTA, and parts to write and to merge. Whole
units of one head also pass over its keys at the same time, so that they are read into L2 once. An H200, 2026-11-30,
whole and cut: 32 decodes and two prompts of 8 heads on one kv head, of which the longest CTA has 45 more than a share,
94 and 108 us, 34 requests of 4 kv heads, 39 more, 150 and 161; over 8-bit caches a batch with 23 more 65 and 70, one
with 31 more 155 and 151, one with 54 more 110 and 110."""
WIDE, WIDE_CUTS_SHARE, WIDE_CUTS_COST = 192, 1.12, 110
"""Both for heads wider than that in 16 bits, whose partial results are as wide. Five short prompts of heads of 256, of
which the longest CTA has 49 more than a share when whole, take 54 us, and 75 in pieces; one prompt of 1324, 60 more, 37
and 59."""
EVEN_SHARE = 1.06
"""Long units are cut into equal parts, one for each CTA, while the longest part has at most so many times an equal
share. The tiles of one head then pass over its keys at the same time, so that they are read into L2 once; cut at equal
shares of the line, each CTA begins at another key."""
CUTS_KEYS = 256
"""The same in keys, for a flat list: a merge and a second piece take as long as these."""
FLAT_WHOLE_KEYS = 512
"""A unit of so many keys, or of twice as many where there are units enough for all CTAs, is not cut in a flat list: a
piece costs about 2 us besides its keys, and a merge 2 to 5."""
WAVES_SHARE = 1.06
"""With config.in_waves, units that the flat list would cut stay whole while the longest CTA has at most so many times
an equal share."""
ANY_POSITION = 2**30  # more than any length
FEW = 0.05  # share of a batch's cost below which its decodes do not change how its prefills are arranged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuWorkList:
    """The two arrays of the module's docstring."""

    info: jax.Array
    cta: jax.Array


def capacity(num_tokens: int, num_reqs: int, config: GpuKernelConfig) -> int:
    """Static upper bound of the tiles: the sum of ceil(q_len * G / tile_rows), the ghost request included."""
    return num_tokens * config.group // config.tile_rows + num_reqs + 1


def build_work_list(
    query_start_loc, seq_lens, num_tokens: int, config: GpuKernelConfig, causal=None, rank=None, local_lens=None,
    ranges=None, query_lens=None,
) -> GpuWorkList:  # fmt: skip
    """Once a step, for all layers of a config: i32[R+1] starts, i32[R] lengths -> GpuWorkList. No host sync.

    causal bool[R] replaces config.mask.causal request by request; it is given exactly when config.per_request_causal.
    rank, local_lens i32[R]: if several ranks hold the keys (config.shards), this one and its number of them.
    ranges i32[T, 2]: with config.mask.spans, the keys that each token sees, half open: see algebra/token_ranges.py.
    query_lens i32[R]: new tokens of each request, or 0 for one that is left out, whose rows nothing writes; None: all.
    """
    if (rank is not None, local_lens is not None) != (config.shards.world > 1,) * 2:
        raise ValueError(f"{config.shards=} needs {'rank and local_lens' if config.shards.world > 1 else 'no rank'}")
    if (causal is not None) != config.per_request_causal:
        raise ValueError(f"{config.per_request_causal=} but causal {'was' if causal is not None else 'was not'} given")
    if (ranges is not None) != config.mask.spans:
        raise ValueError(f"{config.mask.spans=} but ranges {'were' if ranges is not None else 'were not'} given")
    query_lens = jnp.diff(query_start_loc.astype(jnp.int32)) if query_lens is None else query_lens
    args = (query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges)
    if config.flat_list:
        return _with_token_ranges(_flat(*args), ranges)
    info, cost = _tiles(*args)
    order = jnp.argsort(-cost, stable=True)
    info, cost = info[order], cost[order]
    return _with_token_ranges(_assign(info, cost, config), ranges)


def _with_token_ranges(work: GpuWorkList, ranges) -> GpuWorkList:
    if ranges is None:
        return work
    rows = _range_rows(ranges.shape[0])
    flat = jnp.pad(ranges.reshape(-1), (0, rows * INFO_COLUMNS - ranges.size))
    return dataclasses.replace(work, info=jnp.concatenate([work.info, flat.reshape(rows, INFO_COLUMNS)]))


def _range_rows(num_tokens: int) -> int:
    """Rows of info that hold the ranges of the tokens."""
    return cdiv(2 * num_tokens, INFO_COLUMNS)


def token_range(info, num_tokens: int, token, layout):
    """(first key, key after the last) that each token sees, in the kernel: i32 fragments like `token`."""
    first = (info.shape[0] - _range_rows(num_tokens)) * INFO_COLUMNS
    place = first + 2 * jnp.minimum(token, num_tokens - 1)  # a tile's last rows may be none
    return gather(info, place, layout), gather(info, place + 1, layout)


def _tiles(query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges):
    """All tiles in the order of requests: (info i32[tiles, 16], cost i32[tiles]); cost 0: the row of info is unused."""
    num_reqs = seq_lens.shape[0]
    starts = query_start_loc.astype(jnp.int32)
    q_lens = jnp.append(query_lens, num_tokens - starts[-1])
    seqs = jnp.append(seq_lens.astype(jnp.int32), 0)
    seqs = jnp.where(q_lens > 0, seqs, 0)
    ends = jnp.cumsum(cdiv(q_lens * config.group, config.tile_rows))
    tile = jnp.arange(capacity(num_tokens, num_reqs, config), dtype=jnp.int32)
    req = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    valid = req <= num_reqs
    req = jnp.minimum(req, num_reqs)
    q_len, seq = q_lens[req], seqs[req]
    row0 = (tile - (ends[req] - cdiv(q_len * config.group, config.tile_rows))) * config.tile_rows
    nrows = jnp.where(valid, jnp.clip(q_len * config.group - row0, 0, config.tile_rows), 0)
    tile_causal = None if causal is None else jnp.append(causal, True)[req]
    held = None if rank is None else (rank, jnp.where(q_len > 0, jnp.append(local_lens, 0)[req], 0))
    tile_req = jnp.minimum(req, num_reqs - 1)
    info = _info(config, starts[req], row0, nrows, tile_req, q_len, seq, tile_causal, held, ranges)
    weight = jnp.where(nrows <= SHORT_ROWS, config.short_weight, config.long_weight)
    return jnp.stack(info, axis=1), jnp.where(nrows > 0, info[NBLK] * weight + config.unit_cost, 0)


def visible_keys(config, q_first, q_last, keys, causal, rank):
    """key_range among the keys that this rank holds, `keys` in number: all of a request's, or its share of them.

    Positions ascend with the index of a key, so a range of positions is a range of indices on every rank. Spans are
    left out: they show more keys, see token_range.
    """
    rule = dataclasses.replace(config.mask, spans=False, clamp_spans=False)
    if config.shards.world == 1:
        return key_range(rule, q_first, q_last, keys, causal)
    bounds = key_range(rule, q_first, q_last, jnp.full_like(keys, ANY_POSITION), causal)
    count = lambda position: config.shards.count_below(jnp.maximum(position, 0), rank)
    start, stop = (jnp.minimum(count(bound), keys) for bound in bounds)
    return start, stop


def _info(config, tok0, row0, nrows, req, q_len, seq, causal, held, ranges):
    """The 16 columns of info, i32[tiles] each. causal: bool[tiles], or None for the rule's. held: None, or the rank and
    the keys i32[tiles] that it holds. ranges: None, or the keys i32[T, 2] that each token sees."""
    rule, block = config.mask, config.block_kv
    qpos0 = seq - q_len
    rank, seq = held or (0, seq)
    q_first = qpos0 + row0 // config.group
    q_last = qpos0 + (row0 + jnp.maximum(nrows, 1) - 1) // config.group
    if ranges is None:
        start, stop = visible_keys(config, q_first, q_last, seq, causal, rank)
        last_start, _ = visible_keys(config, q_last, q_last, seq, causal, rank)
        _, first_stop = visible_keys(config, q_first, q_first, seq, causal, rank)
    else:
        tokens = (tok0 + row0 // config.group, tok0 + (row0 + nrows - 1) // config.group)
        start, stop, last_start, first_stop = bounds_of_tokens(ranges, *tokens)
    start, stop = jnp.maximum(start, 0), jnp.maximum(stop, 0)
    blk0 = start // block
    nblk = jnp.maximum(cdiv(stop, block) - blk0, 1)
    full0 = jnp.clip(cdiv(jnp.maximum(last_start, 0), block) - blk0, 0, nblk)
    full1 = jnp.clip(jnp.maximum(first_stop, 0) // block - blk0, full0, nblk)
    if rule.mask_fn is not None:
        full1 = full0
    if config.qq_bias:  # computed with the blocks that have a mask: those of a request's new tokens
        full1 = jnp.clip(qpos0 // block - blk0, full0, full1)
    flag = (jnp.full_like(seq, int(rule.causal)) if causal is None else causal) + 2 * rank
    columns = [tok0, row0, nrows, blk0, nblk, full0, full1, start, stop, req, qpos0, seq, flag]
    columns += [jnp.zeros_like(seq)] * (INFO_COLUMNS - len(columns))
    return [column.astype(jnp.int32) for column in columns]


def _flat(query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges) -> GpuWorkList:
    """The flat list: no request has more than WARPGROUP_ROWS rows. A tile without rows has no blocks."""
    starts, num_reqs = query_start_loc.astype(jnp.int32), seq_lens.shape[0]
    ghosts, pads = cdiv(num_tokens * config.group, config.tile_rows), num_tokens - starts[-1]

    def tiles_of(tile):
        """(is it a ghost's, the columns of info) of each; the ghost's tiles come before the requests'."""
        is_ghost, req = tile < ghosts, jnp.maximum(tile - ghosts, 0)
        row0 = jnp.where(is_ghost, tile * config.tile_rows, 0)
        q_len = jnp.where(is_ghost, pads, query_lens[req])
        nrows = jnp.clip(q_len * config.group - row0, 0, config.tile_rows)
        seq = jnp.where(is_ghost | (q_len == 0), 0, seq_lens.astype(jnp.int32)[req])
        tok0 = jnp.where(is_ghost, starts[-1], starts[req])
        tile_causal = None if causal is None else is_ghost | jnp.asarray(causal)[req]
        held = None if rank is None else (rank, jnp.where(is_ghost | (q_len == 0), 0, local_lens[req]))
        info = _info(config, tok0, row0, nrows, req, q_len, seq, tile_causal, held, ranges)
        info[NBLK] = jnp.where(nrows > 0, info[NBLK], 0)
        return is_ghost, info

    tile = jnp.arange(ghosts + num_reqs, dtype=jnp.int32)
    is_ghost, info = tiles_of(tile)
    nblk, padding = jnp.where(is_ghost, 0, info[NBLK]), cdiv(pads * config.group, config.tile_rows)
    cut, whole = _cut_line(nblk, ghosts, config), jnp.bool_(False)
    if config.in_waves:
        order, in_order = _longest_first(nblk, padding)
        whole = _whole_in_waves(in_order, config)
        _, info = tiles_of(jnp.where(whole, order, tile))
        cut = jnp.where(whole, _only_waves(nblk.shape[0], config), cut)
    place = cut[:, PLACE]
    if not config.moves_padding:
        place = jnp.arange(config.workers, dtype=jnp.int32)
    tiles = padding + jnp.where(whole, jnp.sum(nblk > 0, dtype=jnp.int32), 0)
    full, rest = _divmod(tiles * config.num_kv_heads, config.workers)
    waves = full + (_snake(full, place, config.workers) < rest)
    cut = jnp.where(jnp.arange(CTA_COLUMNS) == WAVES, waves[:, None], cut)
    return GpuWorkList(info=jnp.stack(info, axis=1), cta=cut)


def _longest_first(nblk, padding):
    """(i32[tiles], the tiles in the order of waves; their blocks): requests, those with most blocks first, then the
    first `padding` tiles, for the CTAs with fewer keys, then what has no rows. By counting, which XLA fuses: a sort
    takes many kernels."""
    tile = jnp.arange(nblk.shape[0], dtype=jnp.int32)
    key = jnp.where(tile < padding, 1, 2 * nblk)
    before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (tile[None, :] < tile[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    here = place[None, :] == tile[:, None]
    order, in_order = (jnp.sum(jnp.where(here, each[None, :], 0), axis=1) for each in (tile, nblk))
    return order, in_order


def _whole_in_waves(nblk, config):
    """bool: are all units given out whole, in waves? Where none is longer than the flat list would cut, or the CTA with
    most blocks has hardly more than an equal share; but the line serves long units that are about equal as well, by 1 %
    less time. nblk: of the tiles in their order.
    """
    heads, ctas, tiles = config.num_kv_heads, config.workers, nblk.shape[0]
    wave = jnp.arange(cdiv(tiles * heads, ctas), dtype=jnp.int32)[:, None]
    unit = wave * ctas + _snake(wave, jnp.arange(ctas, dtype=jnp.int32)[None, :], ctas)
    load = jnp.sum(jnp.where(unit < tiles * heads, nblk[jnp.minimum(_divmod(unit, heads)[0], tiles - 1)], 0), axis=0)
    longest, total = jnp.max(nblk), jnp.sum(nblk) * heads
    even = (jnp.max(load) * ctas <= total * WAVES_SHARE) & ~_fills_waves(nblk, total, config)
    return even | (longest <= _whole_blocks(longest, total, config))


def _fills_waves(nblk, total, config):
    """Are units about equal, and do they fill whole waves, so that the line has no need to be cut?"""
    units = jnp.sum(nblk > 0, dtype=jnp.int32) * config.num_kv_heads
    most = cdiv(units, config.workers) * jnp.max(nblk, initial=0) - CUTS_KEYS // config.block_kv
    return most * config.workers <= total.astype(jnp.float32) * CUTS_SHARE


def _whole_blocks(nblk, total, config):
    """Up to how many blocks a unit of the flat list is whole: see FLAT_WHOLE_KEYS."""
    keys = jnp.where(total * 2 >= config.workers * nblk, 2 * FLAT_WHOLE_KEYS, FLAT_WHOLE_KEYS)
    return keys // config.block_kv


def _only_waves(tiles: int, config):
    """The array cta where no CTA has a part of the line; WAVES is left open."""
    me = jnp.arange(config.workers, dtype=jnp.int32)
    every = lambda x: jnp.full_like(me, x)
    nowhere, heads = every(ANY_POSITION), config.num_kv_heads
    line = [every(0), nowhere, every(0), nowhere, every(0)]
    return _columns([*line, every(0), every(tiles * heads), every(heads)], [every(-1), *[every(0)] * 4, me])


def _snake(wave, me, ctas: int):
    """The place of a CTA's unit within a wave: from CTA 0 on in even waves, back in odd ones."""
    return jnp.where(wave % 2 == 0, me, ctas - 1 - me)


def _cut_line(nblk, ghosts: int, config):
    """The array cta: all units but those of the first `ghosts` tiles, end to end, cut at equal numbers of blocks.

    CTA c begins at block c * total // C.
    """
    heads, ctas, tiles = config.num_kv_heads, config.workers, nblk.shape[0]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(tile[None, :] <= tile[:, None], nblk[None, :], 0), axis=1) * heads
    total = ends[-1]
    cut = lambda c: c * total // ctas
    # the tile of each cut, its first block on the line, the blocks of one of its units: masked sums, which XLA fuses
    point, even = cut(jnp.arange(ctas + 1, dtype=jnp.int32)), jnp.bool_(False)
    if config.piece_blocks:
        even, points = _even_cuts(nblk, ends - nblk * heads, total, config)
        point = jnp.where(even, points, point)
    starts, stops, point = point[:-1], point[1:], point[:, None]
    begins = (ends - nblk * heads)[None, :]
    before = (ends[None, :] <= point) & (begins < total)  # trailing requests without rows come after every cut
    here = ~before & (begins <= point)
    found = jnp.sum(before, axis=1, dtype=jnp.int32)
    first = jnp.sum(jnp.where(before, nblk[None, :], 0), axis=1) * heads
    each = jnp.maximum(jnp.sum(jnp.where(here, nblk[None, :], 0), axis=1), 1)

    # each cut's unit and the block within it; past the end, the unit after the last
    inside = point[:, 0] - first
    quotient, remainder = _divmod(inside, each)
    whole = each <= _whole_blocks(each, total, config)
    unit = found * heads + quotient
    alike = _fills_waves(nblk, total, config) & (config.piece_blocks == 0)  # else not measured
    whole = jnp.bool_(True) if config.whole_units else (whole | alike) & ~even
    unit = jnp.where(whole & (2 * remainder >= each), unit + 1, unit)
    unit = jnp.where(total > 0, unit, ghosts * heads)
    block = jnp.where(whole, 0, remainder)

    me = jnp.arange(ctas, dtype=jnp.int32)
    u0, b0, u1, b1 = unit[:-1], block[:-1], unit[1:], block[1:]
    some = jnp.maximum(total, 1)
    begin = stops - b1  # of the unit that this CTA's end cuts
    end = begin + each[me + 1]
    last = cdiv(end * ctas, some) - 1  # the CTA that computes its last block
    if config.piece_blocks:
        last = jnp.where(even, jnp.sum(starts[None, :] < end[:, None], axis=1, dtype=jnp.int32) - 1, last)
    joins = [jnp.where((b1 > 0) & (begin >= starts), u1, -1), me, last]
    own = starts - b0  # where the unit begins in which this CTA begins
    joins += [((own + 1) * ctas - 1) // some, cdiv((own + each[me]) * ctas, some) - 1]
    nothing, every = jnp.zeros_like(me), lambda x: jnp.full_like(me, x)
    # With up to C blocks a CTA has one or none, so that `cut` counts those before that have one. Even pieces are in the
    # first CTAs.
    place = jnp.where(starts < stops, ctas - total + starts, me - starts)
    place = jnp.where(even, ctas - 1 - me, jnp.where(total <= ctas, place, me))
    return _columns([nothing, u0, b0, u1, b1, nothing, every(tiles * heads), every(heads)], [*joins, place])


def _even_cuts(nblk, begins, total, config):
    """(bool: does it fit, i32[C+1] cuts): every unit in pieces of about equal length, one piece a CTA.

    It fits if the longest piece needs at most piece_blocks more than an equal share of all blocks.
    """
    heads, ctas = config.num_kv_heads, config.workers
    most = cdiv(total, ctas) + jnp.arange(config.piece_blocks + 1, dtype=jnp.int32)  # candidates for the longest piece
    fits = jnp.sum(cdiv(nblk[None, :], jnp.maximum(most, 1)[:, None]), axis=1) * heads <= ctas
    pieces = cdiv(nblk, jnp.maximum(jnp.min(jnp.where(fits, most, total + 1)), 1))  # of one unit of each tile
    tile, me = jnp.arange(nblk.shape[0], dtype=jnp.int32), jnp.arange(ctas + 1, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(tile[None, :] <= tile[:, None], pieces[None, :], 0), axis=1) * heads
    here = (ends[None, :] > me[:, None]) & ((ends - pieces * heads)[None, :] <= me[:, None])
    of_tile = lambda x: jnp.sum(jnp.where(here, x[None, :], 0), axis=1)
    blocks, count = of_tile(nblk), jnp.maximum(of_tile(pieces), 1)
    head, number = _divmod(me - of_tile(ends - pieces * heads), count)
    cuts = of_tile(begins) + head * blocks + _divmod(number * blocks, count)[0]
    return fits.any(), jnp.where(here.any(axis=1), cuts, total)


def place_of(unit, set_units, heads: int, set_heads: jax.Array | int):
    """Unit -> (tile, kv head). set_units: units of one set of heads. Works on arrays and on scalars of the kernel."""
    of_set, within = _divmod(unit, set_units)
    sets, _ = _divmod(heads, set_heads)
    down = _divmod(sets + of_set, 2)[1] == 1  # the last set goes from the first tile to the last
    within = jnp.where(down, within, set_units - 1 - within)
    tile, head = _divmod(within, set_heads)
    return tile, of_set * set_heads + head


def _divmod(x, y):
    """(x // y, x % y) of i32 that are not negative. Mosaic takes 0.2 s to lower the signs of // and %."""
    x, y = jnp.broadcast_arrays(jnp.asarray(x, jnp.int32), jnp.asarray(y, jnp.int32))
    return lax.div(x, y), lax.rem(x, y)


def _assign(info, cost, config) -> GpuWorkList:
    """Ranked tiles -> whole waves and cuts of the line."""
    heads, ctas = config.num_kv_heads, config.workers
    cost, shift = _in_32_bits(cost, heads)
    few, keys = _kinds(info, cost)
    tiles = jnp.sum(cost > 0, dtype=jnp.int32)
    exceeds_l2 = _prefill_exceeds_l2(few, keys, config)
    set_heads = jnp.where(exceeds_l2 & (tiles >= ctas), 1, config.heads_together or heads).astype(jnp.int32)
    num_units, set_units = tiles * heads, jnp.maximum(tiles, 1) * set_heads
    unit = jnp.arange(cdiv(cost.shape[0] * heads, ctas) * ctas, dtype=jnp.int32)
    tile, _ = place_of(unit, set_units, heads, set_heads)
    tile = jnp.where(unit < num_units, tile, cost.shape[0] - 1)
    each = jnp.where(unit < num_units, cost[tile], 0)
    ends = jnp.cumsum(each)
    total = ends[-1]
    waves, load, longest = _whole_waves(each.reshape(-1, ctas), num_units // ctas, total)
    ratio, more = _worth_cutting(config)
    few_cuts_gain = longest <= jnp.maximum(total / ctas * ratio, total / ctas + more)
    whole = jnp.bool_(True) if config.whole_units else few_cuts_gain
    share = jnp.maximum(total / ctas - load, 0.0)
    base = jnp.where(waves > 0, ends[jnp.maximum(waves * ctas - 1, 0)], 0)
    rest = (total - base).astype(jnp.float32)
    cuts = jnp.floor(jnp.cumsum(share) * (rest / jnp.maximum(jnp.sum(share), 1e-6))).astype(jnp.int32) + base
    cuts = jnp.clip(jnp.concatenate([base[None], cuts[:-1], total[None]]), base, total)
    fits, even_cuts = _equal_parts(each, ends, ctas)
    even = fits & exceeds_l2
    cuts, waves = jnp.where(even, even_cuts, cuts), jnp.where(even, 0, waves)
    at = jnp.sum(ends[None, :] <= cuts[:, None], axis=1, dtype=jnp.int32)
    at_end, at = at >= num_units, jnp.minimum(at, num_units - 1)
    units, blocks = _snap(at, (cuts - (ends[at] - each[at])) << shift, info[tile[at]], config)
    units, blocks = jnp.where(at_end, num_units, units), jnp.where(at_end, 0, blocks)
    u0, b0, u1, b1 = units[:-1], blocks[:-1], units[1:], blocks[1:]
    joins = [jnp.where(whole, -1, join) if n == 0 else join for n, join in enumerate(_joins(units, blocks))]
    waves = jnp.where(whole, num_units // ctas, waves)
    me = jnp.arange(ctas, dtype=jnp.int32)
    own = waves * ctas + _snake(waves, me, ctas)  # of the last wave, which may not reach every CTA
    u0 = jnp.where(whole, jnp.minimum(own, num_units), u0)
    u1 = jnp.where(whole, jnp.minimum(own + 1, num_units), u1)
    b0, b1 = (jnp.where(whole, 0, b) for b in (b0, b1))
    mixed = (few > FEW) & (few < 1 - FEW)  # then every other CTA walks its pieces backward: decodes beside prefills
    backward = jnp.where(mixed, jnp.arange(ctas) % 2, 0)
    spread = lambda x: jnp.broadcast_to(x, (ctas,))
    columns = [spread(waves), u0, b0, u1, b1, backward, spread(set_units), spread(set_heads)]
    return GpuWorkList(info=info, cta=_columns(columns, joins))


def _worth_cutting(config) -> tuple[float, int]:
    """(times an equal share, cost more than it): what the longest CTA has at least where units are cut."""
    if config.quantised:
        return CUTS_SHARE, CUTS_COST_8BIT
    return (WIDE_CUTS_SHARE, WIDE_CUTS_COST) if config.head_dim > WIDE else (CUTS_SHARE, CUTS_COST)


def _in_32_bits(cost, heads: int):
    """(cost >> shift, shift): the costs of all units, of `heads` for each tile, then add up to less than 2 ** 31.

    Those of one prompt of 600 000 tokens with 32 query heads add up to 3e9.
    """
    total = jnp.sum(cost.astype(jnp.float32)) * heads
    shift = jnp.sum(total >= 2.0 ** jnp.arange(30, 60), dtype=jnp.int32)
    return jnp.where(cost > 0, jnp.maximum(cost >> shift, 1), 0), shift


def _equal_parts(each, ends, ctas):
    """(bool: does it fit, i32[C+1] cuts): each long unit in the same number of parts, one part a CTA; the CTAs that are
    left share the short units. each, ends: costs of the units, longest first, and their running sum."""
    total, share = ends[-1], ends[-1] / ctas
    long = jnp.sum(2 * each > each[0], dtype=jnp.int32)
    parts, _ = _divmod(ctas, jnp.maximum(long, 1))
    divisor, me = jnp.maximum(parts, 1), jnp.arange(ctas + 1, dtype=jnp.int32)
    unit, part = _divmod(me, divisor)
    unit = jnp.minimum(unit, each.shape[0] - 1)
    cuts = ends[unit] - each[unit] + _divmod(part * each[unit], divisor)[0]
    left, rest = ctas - long * parts, total - ends[jnp.maximum(long - 1, 0)]
    of_rest = total - rest + _divmod(jnp.maximum(me - long * parts, 0) * rest, jnp.maximum(left, 1))[0]
    cuts = jnp.where(me < long * parts, cuts, jnp.where(me < ctas, of_rest, total))
    fits = (parts >= 2) & (each[0] <= parts * share * EVEN_SHARE) & (rest <= left * share * EVEN_SHARE)
    return fits, cuts


def _kinds(info, cost):
    """(share of the cost in requests of few rows, number of key tokens of the other requests)."""
    first, rows = info[:, ROW0] == 0, info[:, NROWS]
    few = first & (rows > 0) & (rows <= SHORT_ROWS)  # with two pipelines, the first tile of each prompt too
    share = jnp.sum(jnp.where(few, cost, 0)) / jnp.maximum(jnp.sum(cost), 1)
    return share, jnp.sum(jnp.where(first & (rows > SHORT_ROWS), info[:, SEQ], 0))


def _prefill_exceeds_l2(few, keys, config: GpuKernelConfig):
    """Do the keys of a prefill exceed L2? A window reads few of them at any time. Not where decodes cost more than FEW,
    which share no keys, and where config.heads_together already says how heads are taken."""
    if config.heads_together or config.mask.left >= 0 or config.mask.chunk > 0:
        return jnp.bool_(False)
    large = keys.astype(jnp.float32) * (config.key_bytes * config.num_kv_heads) > L2_BYTES
    return large & (few < FEW)


def _whole_waves(cost, most, total):
    """Costs [waves, C] of units in order -> (the most waves whose largest load is within a share, f32[C] their loads,
    the largest load of all waves).

    Even waves go from CTA 0 to CTA C - 1, odd waves back. A load may exceed the share by 1 %: more cuts cost more.
    """
    wave = jnp.arange(cost.shape[0])[:, None]
    loads = jnp.cumsum(jnp.where(wave % 2 == 1, cost[:, ::-1], cost), axis=0)
    fits = (loads.max(axis=1) * (cost.shape[1] / 1.01) <= total) & (wave[:, 0] < most)
    waves = jnp.sum(fits, dtype=jnp.int32)
    return waves, jnp.where(waves > 0, loads[jnp.maximum(waves - 1, 0)], 0).astype(jnp.float32), loads[-1].max()


def _snap(unit, inside, info, config):
    """Cost `inside` a unit -> (unit, block within it); moved to the unit's start or end if that is within min_split.

    What is at a unit's start stays there: the waves end at one, and the line begins at it.
    """
    weight = jnp.where(info[:, NROWS] <= SHORT_ROWS, config.short_weight, config.long_weight)
    block = (jnp.maximum(inside - config.unit_cost // 2, 0) + weight // 2) // weight
    up = (block > 0) & (info[:, NBLK] - block < config.min_split)
    return jnp.where(up, unit + 1, unit), jnp.where(up | (block < config.min_split), 0, block)


def _columns(pieces, joins):
    """The array `cta` from columns i32[C]."""
    columns = [*pieces, *[jnp.zeros_like(pieces[-1])] * (JOIN - len(pieces)), *joins]
    columns += [jnp.zeros_like(pieces[-1])] * (CTA_COLUMNS - len(columns))
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _joins(unit, block):
    """i32[C] each, for the CTA in which a split unit begins: the unit, the first and the last CTA with a part of it."""
    ctas = unit.shape[0] - 1
    me = jnp.arange(ctas, dtype=jnp.int32)
    u0, b0, u1, b1 = unit[:-1], block[:-1], unit[1:], block[1:]
    begins = (b1 > 0) & ((u1 > u0) | (b0 == 0))
    # the unit's last part is in the CTA before the first CTA that starts past the unit
    past = (unit[None, :] > u1[:, None]) & (jnp.arange(ctas + 1)[None, :] > me[:, None])
    last = jnp.where(past.any(axis=1), jnp.argmax(past, axis=1), ctas) - 1
    return [jnp.where(begins, u1, -1), me, last]
