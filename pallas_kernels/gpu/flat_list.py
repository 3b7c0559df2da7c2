"""The work list where every request has one tile (decode). The terms are in work_list.py.

A batch is arranged in one of two ways, by a comparison of both in the program:

    line     The units of all requests are laid end to end, in the order of requests, and cut into parts of equal cost.
             A unit costs its blocks and config.unit_blocks more; its length on the line is its cost, its blocks first,
             and a point of the line is the cost of all before it. A cut within a unit of few keys (see _whole_blocks),
             or of any number with config.whole_units or where units are about equal and fill whole waves, moves to the
             nearer end of the unit. So one CTA may have two whole units where others have one or none. With
             config.piece_blocks every unit is in equal pieces instead, one a CTA, where they fit: see _equal_pieces.
    waves    With config.in_waves: all units whole, those with most keys first, in waves in snake order. Requests are
             sorted by counting, because a sort takes XLA many kernels. See WAVES_SHARE.

Requests without rows, such as those that ended within a burst, come after all others, where no CTA looks at them.

Tiles of padding tokens have one block each. On the line one CTA would have all of them, at 2 us each, so they are in
waves in any case; with config.moves_padding CTAs without a part of the line come first.

A list begins with the tiles of the ghost request, as many as if all tokens were padding; those past the padding have
no rows. Then each request has one tile. In waves, longest first, those of padding are the last with rows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu.ranked_list import CUTS_SHARE
from pallas_kernels.gpu.work_columns import (
    ANY_POSITION,
    CTA_COLUMNS,
    NBLK,
    PLACE,
    WAVES,
    GpuWorkList,
    cta_columns,
    divmod_i32,
    info_columns,
    snake,
)

CUT_KEYS = 256
"""A second piece and a merge take as long as so many keys. Units that are about equal stay whole while the longest
CTA has at most CUTS_SHARE times an equal share and so many keys."""
UNIT_BYTES = 128 << 10, 32 << 10
"""Bytes of keys and values that are read in the time that a unit takes besides its own, where an SM has one worker and
where it has two, of which one reads while the other begins or ends a unit. With units that cost nothing one CTA had all
short ones beside long ones: 3 requests of 32000 keys and 60 of 100 to 500 over 4 kv heads take 62 instead of 85 us, 5
of 32000 and 200 of 100 to 300 with heads of 64 112 instead of 134, 32 of 100 to 30000 138 instead of 183."""
WAVES_SHARE = 1.06
"""A batch is in waves if the units of the longest CTA then cost at most WAVES_SHARE times those of the longest CTA on
the line, and CUT_KEYS more if the line cuts a unit: 32 requests of 100 to 4000 keys take 58.5 us instead of 62.8, 150
of 300 to 2000 and one kv head 28.9 instead of 32.3."""
MOST_SORTED = 2048
"""Requests up to which a list may be in waves: sorting compares each request with each other. There are 5 more
kernels, of 1 us each for 256 requests. us with two pipelines: 512 tiny decodes of heads of 64 122 instead of 137, 256
over float8 70 instead of 94; with one: 16 decodes of 450 to 750 keys 17.3 instead of 20.6, 32 of them 27.4 instead of
31.9, 32 of 100 to 4000 over float8 35.6 instead of 49."""


def may_be_in_waves(config, requests: int) -> bool:
    """May the flat list of so many requests (0: unknown) be in waves? Yes where the line might give one CTA two whole
    units and another none."""
    may_share = config.flat_list and 2 * requests * config.num_kv_heads > config.workers
    return may_share and requests <= MOST_SORTED and not config.piece_blocks


def blocks_of_a_unit(config, workers: int) -> int:
    """Blocks that take as long as what a unit costs besides its own, where an SM has so many workers."""
    return max(UNIT_BYTES[min(workers, 2) - 1] // (config.block_kv * config.key_bytes), 1)


def build(query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges) -> GpuWorkList:
    """The flat list; the arguments are those of build_work_list. No request has more than WARPGROUP_ROWS rows. A tile
    without rows has no blocks."""
    starts, num_reqs = query_start_loc.astype(jnp.int32), seq_lens.shape[0]
    ghost_tiles, pad_tokens = cdiv(num_tokens * config.group, config.tile_rows), num_tokens - starts[-1]

    def tiles_of(tile):
        """(is it the ghost's, the columns of info) of each; the ghost's tiles come before the requests'."""
        is_ghost, req = tile < ghost_tiles, jnp.maximum(tile - ghost_tiles, 0)
        row0 = jnp.where(is_ghost, tile * config.tile_rows, 0)
        q_len = jnp.where(is_ghost, pad_tokens, query_lens[req])
        nrows = jnp.clip(q_len * config.group - row0, 0, config.tile_rows)
        seq = jnp.where(is_ghost | (q_len == 0), 0, seq_lens.astype(jnp.int32)[req])
        tok0 = jnp.where(is_ghost, starts[-1], starts[req])
        tile_causal = None if causal is None else is_ghost | jnp.asarray(causal)[req]
        held = None if rank is None else (rank, jnp.where(is_ghost | (q_len == 0), 0, local_lens[req]))
        info = info_columns(config, tok0, row0, nrows, req, q_len, seq, tile_causal, held, ranges)
        info[NBLK] = jnp.where(nrows > 0, info[NBLK], 0)
        return is_ghost, info

    tile = jnp.arange(ghost_tiles + num_reqs, dtype=jnp.int32)
    is_ghost, info = tiles_of(tile)
    nblk, pad_tiles = jnp.where(is_ghost, 0, info[NBLK]), cdiv(pad_tokens * config.group, config.tile_rows)
    order, tiles_so_far = _with_rows_first(is_ghost | (nblk > 0))
    line, whole = _cut_line(nblk, tiles_so_far, config), jnp.bool_(False)
    cta = line.cta
    if config.in_waves:
        longest_first, in_order = _longest_first(nblk, pad_tiles)
        whole = _is_better_in_waves(in_order, line, config)
        order = jnp.where(whole, longest_first, order)
        cta = jnp.where(whole, _only_waves(nblk.shape[0], config), cta)
    _, info = tiles_of(order)
    place = cta[:, PLACE]
    if not config.moves_padding:
        place = jnp.arange(config.workers, dtype=jnp.int32)
    tiles = pad_tiles + jnp.where(whole, jnp.sum(nblk > 0, dtype=jnp.int32), 0)
    full, rest = divmod_i32(tiles * config.num_kv_heads, config.workers)
    waves = full + (snake(full, place, config.workers) < rest)
    cta = jnp.where(jnp.arange(CTA_COLUMNS) == WAVES, waves[:, None], cta)
    return GpuWorkList(info=jnp.stack(info, axis=1), cta=cta)


def _with_rows_first(has_rows):
    """(the tiles in the order of the line: those that have rows or are the ghost's, then the others; how many of the
    first there are up to each tile), i32[tiles]. By counting, which XLA fuses."""
    tile = jnp.arange(has_rows.shape[0], dtype=jnp.int32)
    before = tile[None, :] <= tile[:, None]
    tiles_so_far = jnp.sum(before & has_rows[None, :], axis=1, dtype=jnp.int32)
    last = jnp.sum(has_rows, dtype=jnp.int32) + tile - tiles_so_far
    place = jnp.where(has_rows, tiles_so_far - 1, last)
    order = jnp.sum(jnp.where(place[None, :] == tile[:, None], tile[None, :], 0), axis=1)
    return order, tiles_so_far


def _longest_first(nblk, pad_tiles):
    """(i32[tiles], the tiles in the order of waves; their blocks): requests, those with most blocks first, then the
    first `pad_tiles` tiles, for the CTAs with fewer keys, then what has no rows. By counting, which XLA fuses: a sort
    takes many kernels."""
    tile = jnp.arange(nblk.shape[0], dtype=jnp.int32)
    key = jnp.where(tile < pad_tiles, 1, 2 * nblk)
    before = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (tile[None, :] < tile[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    here = place[None, :] == tile[:, None]
    order, in_order = (jnp.sum(jnp.where(here, each[None, :], 0), axis=1) for each in (tile, nblk))
    return order, in_order


@dataclasses.dataclass(frozen=True)
class _Line:
    """All units of requests end to end, cut."""

    cta: jax.Array
    most: jax.Array  # the cost of the part that costs most
    is_cut: jax.Array  # is a unit?
    is_long_and_even: jax.Array  # units are about equal, fill whole waves, and have more keys than are never cut


def _is_better_in_waves(nblk, line: _Line, config):
    """bool: are units better given out whole, in waves? nblk: blocks of the tiles, in the order of the waves."""
    if config.whole_units:
        return jnp.bool_(True)
    heads, ctas, tiles = config.num_kv_heads, config.workers, nblk.shape[0]
    wave = jnp.arange(cdiv(tiles * heads, ctas), dtype=jnp.int32)[:, None]
    unit = wave * ctas + snake(wave, jnp.arange(ctas, dtype=jnp.int32)[None, :], ctas)
    costs = _unit_costs(nblk, config)
    load = jnp.where(unit < tiles * heads, costs[jnp.minimum(divmod_i32(unit, heads)[0], tiles - 1)], 0).sum(axis=0)
    most = line.most.astype(jnp.float32) * WAVES_SHARE + jnp.where(line.is_cut, CUT_KEYS // config.block_kv, 0)
    return (jnp.max(load) <= most) & ~line.is_long_and_even


def _fills_waves(costs, total, config):
    """Are units about equal, and do they fill whole waves, so that no unit of the line need be cut? See CUT_KEYS.

    costs: of a unit of each tile; total: of all units.
    """
    units = jnp.sum(costs > 0, dtype=jnp.int32) * config.num_kv_heads
    most = cdiv(units, config.workers) * jnp.max(costs, initial=0) - CUT_KEYS // config.block_kv
    return most <= total.astype(jnp.float32) * (CUTS_SHARE / config.workers)


def _whole_blocks(nblk, total, config):
    """Up to how many blocks a unit of the flat list is whole: those of config.whole_keys, or of twice as many keys in a
    batch as long as C / 2 such units."""
    keys = jnp.where(total >= cdiv(config.workers * nblk, 2), 2 * config.whole_keys, config.whole_keys)
    return keys // config.block_kv


def _unit_costs(nblk, config):
    """Of one of each tile's units, in blocks: those that it has, and config.unit_blocks more."""
    return jnp.where(nblk > 0, nblk + config.unit_blocks, 0)


def _running_sums(x):
    """Of each element and those before it, by a masked sum, which XLA fuses."""
    number = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(number[None, :] <= number[:, None], x[None, :], 0), axis=1)


def _only_waves(tiles: int, config):
    """The array cta where no CTA has a part of the line; `build` fills in WAVES."""
    me = jnp.arange(config.workers, dtype=jnp.int32)
    every = lambda x: jnp.full_like(me, x)
    nowhere, heads = every(ANY_POSITION), config.num_kv_heads
    line = [every(0), nowhere, every(0), nowhere, every(0)]
    return cta_columns([*line, every(0), every(tiles * heads), every(heads)], [every(-1), *[every(0)] * 4, me])


class _Parts(NamedTuple):
    """The parts of the line, CTA after CTA."""

    unit: jax.Array  # i32[C+1]: that of each cut; past the end of the line, the number of units
    block: jax.Array  # at which the cut is
    begins: jax.Array  # bool[C]: does the unit that the end of the part cuts begin in it?
    last: jax.Array  # the last CTA with a part of that unit
    own_first: jax.Array  # the first and the last CTA with a part of the unit at which the part begins
    own_last: jax.Array
    place: jax.Array  # see PLACE


def _cut_line(nblk, tiles_so_far, config) -> _Line:
    """The units of all tiles with blocks. nblk: blocks of the tiles, in the order of requests; tiles_so_far: see
    _with_rows_first."""
    heads, ctas, tiles = config.num_kv_heads, config.workers, nblk.shape[0]
    parts, most, is_long_and_even = _equal_parts(nblk, tiles_so_far, config)
    if config.piece_blocks and not config.whole_units:
        fits, pieces = _equal_pieces(nblk, tiles_so_far, config)
        parts = jax.tree.map(lambda piece, part: jnp.where(fits, piece, part), pieces, parts)
    me, is_cut = jnp.arange(ctas, dtype=jnp.int32), parts.block[1:] > 0
    nothing, every = jnp.zeros_like(me), lambda x: jnp.full_like(me, x)
    line = [nothing, parts.unit[:-1], parts.block[:-1], parts.unit[1:], parts.block[1:], nothing]
    joins = [jnp.where(is_cut & parts.begins, parts.unit[1:], -1), me, parts.last, parts.own_first, parts.own_last]
    cta = cta_columns([*line, every(tiles * heads), every(heads)], [*joins, parts.place])
    return _Line(cta, most, is_cut.any(), is_long_and_even)


def _equal_parts(nblk, tiles_so_far, config) -> tuple[_Parts, jax.Array, jax.Array]:
    """(the parts, the cost of the one that costs most, see _Line.is_long_and_even). CTA c begins at point
    c * total // C.

    A cut behind a unit's blocks, within its config.unit_blocks, is the end of the unit.
    """
    heads, ctas = config.num_kv_heads, config.workers
    costs = _unit_costs(nblk, config)
    ends = _running_sums(costs) * heads
    total = ends[-1]
    cut, cta_of = _equal_cuts(total, ctas)
    # the tile of each cut, the point at which it begins, the cost of one of its units: masked sums, which XLA fuses
    point = cut(jnp.arange(ctas + 1, dtype=jnp.int32))
    starts, stops, point = point[:-1], point[1:], point[:, None]
    begins = (ends - costs * heads)[None, :]
    before = ends[None, :] <= point
    here = ~before & (begins <= point)
    found = jnp.max(jnp.where(before, tiles_so_far[None, :], 0), axis=1)
    first = jnp.sum(jnp.where(before, costs[None, :], 0), axis=1) * heads
    each = jnp.maximum(jnp.sum(jnp.where(here, costs[None, :], 0), axis=1), 1)
    blocks = jnp.maximum(each - config.unit_blocks, 1)

    # each cut's unit and the block within it; past the end, the unit after the last
    inside = point[:, 0] - first
    quotient, remainder = divmod_i32(inside, each)
    whole = blocks <= _whole_blocks(blocks, total, config)
    unit = found * heads + quotient
    alike = _fills_waves(costs, total, config) & (config.piece_blocks == 0)  # with equal pieces not measured
    whole = jnp.bool_(True) if config.whole_units else whole | alike
    moves_on = (whole & (2 * remainder >= each)) | (remainder >= blocks)
    unit, moves = jnp.where(moves_on, unit + 1, unit), whole | moves_on
    moved = jnp.where(moves, point[:, 0] - remainder + jnp.where(moves_on, each, 0), point[:, 0])
    block = jnp.where(moves, 0, remainder)

    me = jnp.arange(ctas, dtype=jnp.int32)
    begin = stops - block[1:]  # of the unit that this CTA's end cuts
    own = starts - block[:-1]  # where the unit begins in which this CTA begins
    # CTAs without a part of the line come first in a wave, and so have the padding before others. On a line of cost up
    # to C a CTA has a part of cost 1 or none, and `starts` counts the CTAs before it that have one.
    place = jnp.where(starts < stops, ctas - total + starts, me - starts)
    parts = _Parts(
        unit, block, begin >= starts, cta_of(begin + blocks[1:] - 1), cta_of(own), cta_of(own + blocks[:-1] - 1),
        jnp.where(total <= ctas, place, me),
    )  # fmt: skip
    longest = jnp.max(nblk)
    is_long_and_even = alike & (longest > _whole_blocks(longest, total, config))
    return parts, jnp.max(jnp.diff(moved)), is_long_and_even


def _equal_cuts(total, ctas: int):
    """(function: CTA -> the point at which its part of the line begins; function: point -> the CTA whose part has it).

    CTA c begins at point c * total // C, a product that may need more than 32 bits.
    """
    each, more = divmod_i32(total, ctas)
    cut = lambda c: c * each + divmod_i32(c * more, ctas)[0]

    def cta_of(point):
        share = ctas / jnp.maximum(total, 1).astype(jnp.float32)
        near = jnp.ceil((point + 1).astype(jnp.float32) * share).astype(jnp.int32) - 1  # off by at most one
        near = near - (cut(near) > point)
        return near + (cut(near + 1) <= point)

    return cut, cta_of


def _equal_pieces(nblk, tiles_so_far, config):
    """(bool: does it fit, _Parts): every unit in pieces of about equal length, one a CTA, in the first CTAs.

    It fits if the longest piece needs at most piece_blocks more than an equal share of all blocks.
    """
    heads, ctas, total = config.num_kv_heads, config.workers, jnp.sum(nblk, dtype=jnp.int32) * config.num_kv_heads
    most = cdiv(total, ctas) + jnp.arange(config.piece_blocks + 1, dtype=jnp.int32)  # candidates for the longest piece
    fits = jnp.sum(cdiv(nblk[None, :], jnp.maximum(most, 1)[:, None]), axis=1) * heads <= ctas
    pieces = cdiv(nblk, jnp.maximum(jnp.min(jnp.where(fits, most, total + 1)), 1))  # of one unit of each tile
    me, ends = jnp.arange(ctas + 1, dtype=jnp.int32), _running_sums(pieces) * heads
    begins = ends - pieces * heads
    here = (ends[None, :] > me[:, None]) & (begins[None, :] <= me[:, None])
    of_tile = lambda x: jnp.sum(jnp.where(here, x[None, :], 0), axis=1)
    count = jnp.maximum(of_tile(pieces), 1)
    head, piece = divmod_i32(me - of_tile(begins), count)
    each, more = divmod_i32(of_tile(nblk), count)
    has_piece = here.any(axis=1)
    unit = jnp.where(has_piece, (of_tile(tiles_so_far) - 1) * heads + head, jnp.max(tiles_so_far) * heads)
    block = jnp.where(has_piece, piece * each + divmod_i32(piece * more, count)[0], 0)
    me, first = me[:-1], (me - piece)[:-1]
    last = first + count[:-1] - 1
    return fits.any(), _Parts(unit, block, piece[:-1] == 0, last, first, last, ctas - 1 - me)
