"""The two arrays of a work list, and what both lists and the kernels do with them; the terms are in work_list.py.

info  i32[tiles, 16]   one row a tile; the columns TOK0 .. CAUSAL below
cta   i32[C, 16]       one row a CTA: W (its waves), the first unit of its part of the line and the first block of
                       that unit, the end unit and end block, BACKWARD, SET_UNITS, SET_HEADS; from JOIN on: a unit
                       to merge (or -1), the first and the last CTA that hold a part of it; of flat lists only FROM,
                       UNTIL: the same two CTAs of the unit in which this CTA's part begins; and PLACE: the CTA's
                       place within the first wave, if config.moves_padding
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.token_ranges import bounds_of_tokens
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.gather_sm90 import gather

TOK0, ROW0, NROWS, BLK0, NBLK, FULL0, FULL1, KSTART, KSTOP, REQ, QPOS0, SEQ, CAUSAL = range(13)
"""Columns of info. TOK0: first token of the request; ROW0, NROWS: packed rows of the tile; BLK0, NBLK: its key blocks;
FULL0, FULL1: blocks, counted from BLK0, that every row sees whole (half open); KSTART, KSTOP: key positions that
some row sees (half open); REQ, QPOS0, SEQ: the request, the position of its first query, its number of keys; CAUSAL: 1
if it is causal, plus twice the rank. If several ranks hold the keys, those of BLK0 .. KSTOP and SEQ are one rank's.
With spans in the mask, the rows of info after the tiles have the first key that each token sees and the one after the
last: see algebra/token_ranges.py."""
INFO_COLUMNS = 16
WAVES, LINE_UNIT0, LINE_BLK0, LINE_UNIT1, LINE_BLK1, BACKWARD, SET_UNITS, SET_HEADS = range(8)
JOIN, FROM, UNTIL, PLACE, CTA_COLUMNS = 8, 11, 12, 13, 16
"""Columns of cta, see the module's docstring; JOIN is the first of three."""
TILE_ROWS = 2 * WARPGROUP_ROWS  # of a tile, at most, and of a slot of partial results, where two warpgroups compute
SHORT_ROWS = WARPGROUP_ROWS
"""A tile of at most this many rows is computed by all warpgroups, each on a share of the keys, or by its pipeline's."""
ANY_POSITION = 2**30  # more than any length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuWorkList:
    """The two arrays of the module's docstring."""

    info: jax.Array
    cta: jax.Array


def info_columns(config, tok0, row0, nrows, req, q_len, seq, causal, held, ranges):
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
    nblk = jnp.maximum(_blocks_up_to(stop, block) - blk0, 1)
    full0 = jnp.clip(_blocks_up_to(jnp.maximum(last_start, 0), block) - blk0, 0, nblk)
    full1 = jnp.clip(jnp.maximum(first_stop, 0) // block - blk0, full0, nblk)
    if rule.mask_fn is not None:
        full1 = full0
    if config.qq_bias:  # computed with the blocks that have a mask: those of a request's new tokens
        full1 = jnp.clip(qpos0 // block - blk0, full0, full1)
    flag = (jnp.full_like(seq, int(rule.causal)) if causal is None else causal) + 2 * rank
    columns = [tok0, row0, nrows, blk0, nblk, full0, full1, start, stop, req, qpos0, seq, flag]
    columns += [jnp.zeros_like(seq)] * (INFO_COLUMNS - len(columns))
    return [column.astype(jnp.int32) for column in columns]


def _blocks_up_to(position, block: int):
    """Blocks that begin before a position, which may be the largest i32."""
    blocks, rest = divmod_i32(position, block)
    return blocks + (rest > 0)


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


def cta_columns(pieces, joins):
    """The array `cta` from columns i32[C]."""
    columns = [*pieces, *[jnp.zeros_like(pieces[-1])] * (JOIN - len(pieces)), *joins]
    columns += [jnp.zeros_like(pieces[-1])] * (CTA_COLUMNS - len(columns))
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def with_token_ranges(work: GpuWorkList, ranges) -> GpuWorkList:
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


def place_of(unit, set_units, heads: int, set_heads: jax.Array | int):
    """Unit -> (tile, kv head). set_units: units of one set of heads. Works on arrays and on scalars of the kernel."""
    of_set, within = divmod_i32(unit, set_units)
    sets, _ = divmod_i32(heads, set_heads)
    down = divmod_i32(sets + of_set, 2)[1] == 1  # the last set goes from the first tile to the last
    within = jnp.where(down, within, set_units - 1 - within)
    tile, head = divmod_i32(within, set_heads)
    return tile, of_set * set_heads + head


def snake(wave, me, ctas: int):
    """The place of a CTA's unit within a wave: from CTA 0 on in even waves, back in odd ones. Also in the kernel."""
    return jnp.where(lax.rem(wave, jnp.full_like(wave, 2)) == 0, me, ctas - 1 - me)


def divmod_i32(x, y):
    """(x // y, x % y) of i32 that are not negative. Mosaic takes 0.2 s to lower the signs of // and %."""
    x, y = jnp.broadcast_arrays(jnp.asarray(x, jnp.int32), jnp.asarray(y, jnp.int32))
    return lax.div(x, y), lax.rem(x, y)
