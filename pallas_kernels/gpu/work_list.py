"""The work list of the persistent attention kernel: who computes what, from traced lengths, in jit.

A *tile* is up to 128 packed rows of one request (row p = token p // G, head p % G of a kv head's group).
A *unit* is (tile, kv head). Its cost is its number of key blocks times a weight, and a little for the unit itself.
Kv heads are taken in sets, one set after the other: where the keys of all heads exceed L2, a set is one head, whose
keys stay in L2 while all its queries pass. Within a set units are ranked by cost, in the last set longest first, in
the one before it shortest first, and so on, so that costs never jump. The first W * C of all units (C CTAs, W full
waves, as many as leave no CTA with more than its share) are taken whole, in snake order; the rest are laid end to end
on a line which is cut so that every CTA ends with the same total. A cut inside a unit makes two partial results, so at
most C - 1 units are ever merged, whatever the batch: no tuning of split counts, no data-dependent shapes.

    info  i32[tiles, 16]   one row a tile, ranked: see the columns below
    cta   i32[C, 12]       W, first unit of the line's piece, its first block, end unit, end block, BACKWARD,
                           SET_UNITS, SET_HEADS; from JOIN on, a unit to merge: unit (or -1), first and last CTA that
                           hold a part of it

A flat list (decode: every request has one tile) is the line alone, cut at equal numbers of blocks: tile g is ghost
tile g, tile `ghosts` + r is request r, and nothing is ranked or moved. It is what XLA makes few kernels of.

Rows past query_start_loc[R] (padding tokens) belong to a ghost request that sees nothing, so that they come out 0.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.mask import MaskRule, key_range
from pallas_kernels.algebra.paging import cdiv

TOK0, ROW0, NROWS, BLK0, NBLK, FULL0, FULL1, KSTART, KSTOP, REQ, QPOS0, SEQ, CAUSAL = range(13)
INFO_COLUMNS = 16
WAVES, LINE_UNIT0, LINE_BLK0, LINE_UNIT1, LINE_BLK1, BACKWARD, SET_UNITS, SET_HEADS = range(8)
JOIN, CTA_COLUMNS = 8, 12
TILE_ROWS = 128
L2_BYTES = 40 << 20  # keys and values beyond this do not stay in a Hopper's 50 MB of L2 while a wave of tiles passes
FEW = 0.05  # of the cost of a batch: below it, decodes change nothing about how prefills are best arranged
SHORT_ROWS = 64  # a tile of at most this many rows is computed by both warpgroups, each on half of the keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkList:
    """See the module's docstring."""

    info: jax.Array
    cta: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListConfig:
    """What the list depends on, besides lengths: hashable."""

    rule: MaskRule
    group: int
    num_kv_heads: int
    heads_together: int = 0  # kv heads of a set, a divisor of num_kv_heads; 0: all, or one where keys exceed L2
    key_bytes: int = 512  # of one token's key and value of one head
    block_kv: int
    num_ctas: int = 132
    short_weight: int = 4  # cost of one key block of a short tile ...
    long_weight: int = 9  # ... and of a tile of more than SHORT_ROWS rows
    unit_cost: int = 11  # what a unit costs beside its blocks: about 2 us
    min_split: int = 1  # key blocks: a cut never leaves less than this on either side
    flat: bool = False  # every request has one tile: no ranking and no waves, the line alone, in few XLA kernels


def capacity(num_tokens: int, num_reqs: int, group: int) -> int:
    """Static bound on the number of tiles: sum of ceil(q_len * G / 128), the ghost request included."""
    return num_tokens * group // TILE_ROWS + num_reqs + 1


def build(query_start_loc, seq_lens, num_tokens: int, config: ListConfig, causal=None) -> WorkList:
    """Lengths i32[R+1], i32[R] -> WorkList; `causal` bool[R] overrules the rule's, request by request."""
    if config.flat:
        return _flat(query_start_loc, seq_lens, num_tokens, config, causal)
    info, cost = _tiles(query_start_loc, seq_lens, num_tokens, config, causal)
    order = jnp.argsort(-cost, stable=True)
    info, cost = info[order], cost[order]
    return _assign(info, cost, config)


def _tiles(query_start_loc, seq_lens, num_tokens, config, causal):
    """All tiles in request order: (info i32[tiles, 16], cost i32[tiles], 0 where there is no tile)."""
    num_reqs = seq_lens.shape[0]
    starts = query_start_loc.astype(jnp.int32)
    q_lens = jnp.append(jnp.diff(starts), num_tokens - starts[-1])
    seqs = jnp.append(seq_lens.astype(jnp.int32), 0)
    seqs = jnp.where(q_lens > 0, seqs, 0)
    ends = jnp.cumsum(cdiv(q_lens * config.group, TILE_ROWS))
    tile = jnp.arange(capacity(num_tokens, num_reqs, config.group), dtype=jnp.int32)
    req = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    valid = req <= num_reqs
    req = jnp.minimum(req, num_reqs)
    q_len, seq = q_lens[req], seqs[req]
    row0 = (tile - (ends[req] - cdiv(q_len * config.group, TILE_ROWS))) * TILE_ROWS
    nrows = jnp.where(valid, jnp.clip(q_len * config.group - row0, 0, TILE_ROWS), 0)
    see = None if causal is None else jnp.append(causal, True)[req]
    info = _info(config, starts[req], row0, nrows, jnp.minimum(req, num_reqs - 1), q_len, seq, see)
    weight = jnp.where(nrows <= SHORT_ROWS, config.short_weight, config.long_weight)
    return jnp.stack(info, axis=1), jnp.where(nrows > 0, info[NBLK] * weight + config.unit_cost, 0)


def _info(config, tok0, row0, nrows, req, q_len, seq, see):
    """The 16 columns of info, i32[tiles] each; see: bool[tiles], causal or not, or None for the rule's own."""
    rule, block = config.rule, config.block_kv
    qpos0 = seq - q_len
    q_first = qpos0 + row0 // config.group
    q_last = qpos0 + (row0 + jnp.maximum(nrows, 1) - 1) // config.group
    start, stop = key_range(rule, q_first, q_last, seq, see)
    start, stop = jnp.maximum(start, 0), jnp.maximum(stop, 0)
    blk0 = start // block
    nblk = jnp.maximum(cdiv(stop, block) - blk0, 1)
    last_start, _ = key_range(rule, q_last, q_last, seq, see)
    _, first_stop = key_range(rule, q_first, q_first, seq, see)
    full0 = jnp.clip(cdiv(jnp.maximum(last_start, 0), block) - blk0, 0, nblk)
    full1 = jnp.clip(jnp.maximum(first_stop, 0) // block - blk0, full0, nblk)
    if rule.mask_fn is not None:
        full1 = full0
    flag = jnp.full_like(seq, int(rule.causal)) if see is None else see
    columns = [tok0, row0, nrows, blk0, nblk, full0, full1, start, stop, req, qpos0, seq, flag]
    columns += [jnp.zeros_like(seq)] * (INFO_COLUMNS - len(columns))
    return [column.astype(jnp.int32) for column in columns]


def _flat(query_start_loc, seq_lens, num_tokens, config, causal) -> WorkList:
    """The list of a batch in which no request has more than TILE_ROWS rows; a tile without rows has no blocks."""
    starts, num_reqs = query_start_loc.astype(jnp.int32), seq_lens.shape[0]
    ghosts = cdiv(num_tokens * config.group, TILE_ROWS)
    tile = jnp.arange(ghosts + num_reqs, dtype=jnp.int32)
    is_ghost, req = tile < ghosts, jnp.maximum(tile - ghosts, 0)
    pads = num_tokens - starts[-1]
    used = cdiv(pads * config.group, TILE_ROWS)  # ghost tiles that have rows: the last of them, next to the requests
    row0 = jnp.where(is_ghost, (tile - ghosts + used) * TILE_ROWS, 0)
    q_len = jnp.where(is_ghost, pads, starts[req + 1] - starts[req])
    nrows = jnp.clip(q_len * config.group - row0, 0, TILE_ROWS) * (row0 >= 0)
    seq = jnp.where(is_ghost | (q_len == 0), 0, seq_lens.astype(jnp.int32)[req])
    tok0 = jnp.where(is_ghost, starts[-1], starts[req])
    see = None if causal is None else is_ghost | causal[req]
    info = _info(config, tok0, jnp.maximum(row0, 0), nrows, req, q_len, seq, see)
    info[NBLK] = jnp.where(nrows > 0, info[NBLK], 0)
    return WorkList(info=jnp.stack(info, axis=1), cta=_cut_line(info[NBLK], config))


def _cut_line(nblk, config):
    """All units, end to end in tile order, cut into equal numbers of blocks: CTA c begins at block c * total // C."""
    heads, ctas, tiles = config.num_kv_heads, config.num_ctas, nblk.shape[0]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(tile[None, :] <= tile[:, None], nblk[None, :], 0), axis=1) * heads
    total = ends[-1]
    cut = lambda c: c * total // ctas
    # the tile of each cut, its first block on the line and the blocks of one of its units: sums, for XLA to fuse
    point = cut(jnp.arange(ctas + 1, dtype=jnp.int32))[:, None]
    begins = (ends - nblk * heads)[None, :]
    before = (ends[None, :] <= point) & (begins < total)  # requests without rows at the end are behind every cut
    here = ~before & (begins <= point)
    found = jnp.sum(before, axis=1, dtype=jnp.int32)
    first = jnp.sum(jnp.where(before, nblk[None, :], 0), axis=1) * heads
    each = jnp.maximum(jnp.sum(jnp.where(here, nblk[None, :], 0), axis=1), 1)

    def place(c):
        """(unit, block within it) of a cut; past the end, the unit after the last."""
        inside = cut(c) - first[c]
        return found[c] * heads + inside // each[c], inside % each[c]

    me = jnp.arange(ctas, dtype=jnp.int32)
    (u0, b0), (u1, b1) = place(me), place(me + 1)
    begin = cut(me + 1) - b1  # of the unit that this CTA's end cuts
    last = cdiv((begin + each[me + 1]) * ctas, jnp.maximum(total, 1)) - 1  # whose stretch holds its last block
    joins = [jnp.where((b1 > 0) & (begin >= cut(me)), u1, -1), me, last]
    nothing, every = jnp.zeros_like(me), lambda x: jnp.full_like(me, x)
    return _columns([nothing, u0, b0, u1, b1, nothing, every(tiles * heads), every(heads)], joins)


def place_of(unit, set_units, heads: int, set_heads: int):
    """Unit -> (tile, kv head); set_units is the number of units of one set of heads. For arrays and kernel scalars."""
    of_set = unit // set_units
    within = unit - of_set * set_units
    down = (heads // set_heads - 1 - of_set) % 2 == 0  # the last set goes from the first tile to the last
    within = jnp.where(down, within, set_units - 1 - within)
    return within // set_heads, of_set * set_heads + within % set_heads


def _assign(info, cost, config) -> WorkList:
    """Ranked tiles -> whole waves and cuts of the line."""
    heads, ctas = config.num_kv_heads, config.num_ctas
    few, keys = _kinds(info, cost)
    set_heads = _set_heads(few, keys, config)
    tiles = jnp.sum(cost > 0, dtype=jnp.int32)
    num_units, set_units = tiles * heads, jnp.maximum(tiles, 1) * set_heads
    unit = jnp.arange(cdiv(cost.shape[0] * heads, ctas) * ctas, dtype=jnp.int32)
    tile, _ = place_of(unit, set_units, heads, set_heads)
    tile = jnp.where(unit < num_units, tile, cost.shape[0] - 1)
    each = jnp.where(unit < num_units, cost[tile], 0)
    ends = jnp.cumsum(each)
    total = ends[-1]
    waves, load = _whole_waves(each.reshape(-1, ctas), num_units // ctas, total)
    share = jnp.maximum(total / ctas - load, 0.0)
    base = jnp.where(waves > 0, ends[jnp.maximum(waves * ctas - 1, 0)], 0)
    rest = (total - base).astype(jnp.float32)
    cuts = jnp.floor(jnp.cumsum(share) * (rest / jnp.maximum(jnp.sum(share), 1e-6))).astype(jnp.int32) + base
    cuts = jnp.clip(jnp.concatenate([base[None], cuts[:-1], total[None]]), base, total)
    at = jnp.sum(ends[None, :] <= cuts[:, None], axis=1, dtype=jnp.int32)
    at_end, at = at >= num_units, jnp.minimum(at, num_units - 1)
    units, blocks = _snap(at, cuts - (ends[at] - each[at]), info[tile[at]], config)
    units, blocks = jnp.where(at_end, num_units, units), jnp.where(at_end, 0, blocks)
    mixed = (few > FEW) & (few < 1 - FEW)  # then half the CTAs start from their other end
    backward = jnp.where(mixed, jnp.arange(ctas) % 2, 0)
    spread = lambda x: jnp.broadcast_to(x, (ctas,))
    columns = [spread(waves), units[:-1], blocks[:-1], units[1:], blocks[1:], backward, spread(set_units)]
    return WorkList(info=info, cta=_columns([*columns, spread(set_heads)], _joins(units, blocks)))


def _kinds(info, cost):
    """(share of the cost that requests of few rows have, tokens of keys that the other requests see)."""
    first, rows = info[:, ROW0] == 0, info[:, NROWS]
    few = first & (rows > 0) & (rows <= SHORT_ROWS)
    share = jnp.sum(jnp.where(few, cost, 0)) / jnp.maximum(jnp.sum(cost), 1)
    return share, jnp.sum(jnp.where(first & (rows > SHORT_ROWS), info[:, SEQ], 0))


def _set_heads(few, keys, config: ListConfig):
    """Kv heads of a set, i32: one where the keys of a prefill exceed L2, else all."""
    heads, rule = config.num_kv_heads, config.rule
    if config.heads_together or rule.left >= 0 or rule.chunk > 0:  # a window's keys are few at any time
        return jnp.int32(config.heads_together or heads)
    large = keys.astype(jnp.float32) * (config.key_bytes * heads) > L2_BYTES
    return jnp.where(large & (few < FEW), 1, heads).astype(jnp.int32)


def _whole_waves(cost, most, total):
    """Costs [waves, C] of units in order -> (the most waves whose largest load is still a share, f32[C] their loads).

    Wave w goes left to right when w is even, else back. A hundredth over the share is less than more cuts would cost.
    """
    wave = jnp.arange(cost.shape[0])[:, None]
    loads = jnp.cumsum(jnp.where(wave % 2 == 1, cost[:, ::-1], cost), axis=0)
    fits = (loads.max(axis=1) * (cost.shape[1] / 1.01) <= total) & (wave[:, 0] < most)
    waves = jnp.sum(fits, dtype=jnp.int32)
    return waves, jnp.where(waves > 0, loads[jnp.maximum(waves - 1, 0)], 0).astype(jnp.float32)


def _snap(unit, inside, info, config):
    """Cost `inside` a unit -> (unit, block within it), at the unit's ends where that is close."""
    weight = jnp.where(info[:, NROWS] <= SHORT_ROWS, config.short_weight, config.long_weight)
    block = (jnp.maximum(inside - config.unit_cost // 2, 0) + weight // 2) // weight
    up = info[:, NBLK] - block < config.min_split
    return jnp.where(up, unit + 1, unit), jnp.where(up | (block < config.min_split), 0, block)


def _columns(pieces, joins):
    """The array `cta` from columns i32[C]."""
    spare = [jnp.zeros_like(pieces[-1])] * (JOIN - len(pieces))
    return jnp.stack([*pieces, *spare, *joins, jnp.zeros_like(pieces[-1])], axis=1).astype(jnp.int32)


def _joins(unit, block):
    """i32[C] each: for the CTA in which a split unit begins, the unit, the first and last CTA that hold its parts."""
    ctas = unit.shape[0] - 1
    me = jnp.arange(ctas, dtype=jnp.int32)
    u0, b0, u1, b1 = unit[:-1], block[:-1], unit[1:], block[1:]
    begins = (b1 > 0) & ((u1 > u0) | (b0 == 0))
    # the unit's last part is in the CTA before the first one whose piece starts past the unit
    past = (unit[None, :] > u1[:, None]) & (jnp.arange(ctas + 1)[None, :] > me[:, None])
    last = jnp.where(past.any(axis=1), jnp.argmax(past, axis=1), ctas) - 1
    return [jnp.where(begins, u1, -1), me, last]
