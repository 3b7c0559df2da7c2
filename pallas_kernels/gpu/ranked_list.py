"""The work list of any batch: units sorted by cost, in waves, then on a line. The terms are in work_list.py.

1. Kv heads are taken in sets, one set after the other. Where the keys of a prefill's heads exceed L2 together, a set is
   as few heads as keep all CTAs busy: its keys stay in L2 while all its queries pass over them. Elsewhere one set holds
   all heads.
2. Within a set, units are sorted by cost: longest first in the last set, shortest first in the one before it, and so
   on, so that the cost does not jump from one set to the next.
3. With C CTAs, the first W * C units are assigned whole, in snake order. W is the largest number of such waves that
   gives no CTA more than an equal share of the total.
4. The remaining units are laid end to end on a line, which is cut so that every CTA ends with the same total. At most
   C - 1 units are merged, whatever the batch. Shapes are static and there is no number of splits to tune. Where giving
   out these units whole, in snake order too, makes the longest CTA hardly longer (see CUTS_COST), or with
   config.whole_units, nothing is cut. Where the keys of few long units exceed L2, and equally many parts of each are
   hardly longer than an equal share (see EVEN_SHARE), each CTA gets one part.
"""

import jax.numpy as jnp

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.work_columns import (
    NBLK,
    NROWS,
    ROW0,
    SEQ,
    SHORT_ROWS,
    GpuWorkList,
    cta_columns,
    divmod_i32,
    info_columns,
    place_of,
    snake,
)

L2_BYTES = 40 << 20  # keys and values beyond this do not stay in a Hopper's 50 MB of L2 while a wave of tiles passes
CUTS_SHARE, CUTS_COST, CUTS_COST_8BIT = 1.04, 66, 28
"""Units stay whole while the longest CTA has at most CUTS_SHARE times, or CUTS_COST more than, an equal share, where
11 is about 2 us, as in config.unit_cost. To cut takes a second piece on each CTA, and parts to write and to merge.
Whole units of one head also pass over its keys at the same time, so that they are read into L2 once. An H200,
2026-11-30, whole and cut: 32 decodes and two prompts of 8 heads on one kv head, of which the longest CTA has 45 more
than a share, 94 and 106 us, 34 requests of 4 kv heads, 39 more, 150 and 160; over 8-bit caches a batch with 23 more 65
and 71, one with 31 more 155 and 151, one with 54 more 111 and 109."""
WIDE, WIDE_CUTS_SHARE, WIDE_CUTS_COST = 192, 1.12, 110
"""Both for heads wider than that in 16 bits, whose partial results are as wide. Five short prompts of heads of 256, of
which the longest CTA has 49 more than a share when whole, take 54 us, and 75 in pieces; one prompt of 1324, 60 more, 37
and 59."""
EVEN_SHARE = 1.06
"""Long units are cut into equal parts, one for each CTA, while the longest part has at most so many times an equal
share. The tiles of one head then pass over its keys at the same time, so that they are read into L2 once; cut at equal
shares of the line, each CTA begins at another key."""
FEW_DECODES = 0.05
"""Share of a batch's cost in decodes below which they do not change how its prefills are arranged. In a batch with more
of both, every other CTA goes through its pieces backward, so that decodes run beside prefills."""
NO_DECODES = 0.01
"""The same, below which sets of several heads are made: 200 decodes of 500 keys, 0.03 of the cost, beside a chunk of
2048 after 28000 with 8 kv heads of 64 take 1610 us in one set, and 1683 in four."""


def max_tiles(num_tokens: int, num_reqs: int, config: GpuKernelConfig) -> int:
    """Static upper bound of the tiles: the sum of ceil(q_len * G / tile_rows), the ghost request included."""
    return num_tokens * config.group // config.tile_rows + num_reqs + 1


def build(query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges) -> GpuWorkList:
    """The ranked list; the arguments are those of build_work_list."""
    info, cost = _tiles(query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges)
    order = jnp.argsort(-cost, stable=True)
    return _assign(info[order], cost[order], config)


def _tiles(query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges):
    """All tiles in the order of requests: (info i32[tiles, 16], cost i32[tiles]); cost 0: the row of info is unused."""
    num_reqs = seq_lens.shape[0]
    starts = query_start_loc.astype(jnp.int32)
    q_lens = jnp.append(query_lens, num_tokens - starts[-1])
    seqs = jnp.append(seq_lens.astype(jnp.int32), 0)
    seqs = jnp.where(q_lens > 0, seqs, 0)
    ends = jnp.cumsum(cdiv(q_lens * config.group, config.tile_rows))
    tile = jnp.arange(max_tiles(num_tokens, num_reqs, config), dtype=jnp.int32)
    req = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    valid = req <= num_reqs
    req = jnp.minimum(req, num_reqs)
    q_len, seq = q_lens[req], seqs[req]
    row0 = (tile - (ends[req] - cdiv(q_len * config.group, config.tile_rows))) * config.tile_rows
    nrows = jnp.where(valid, jnp.clip(q_len * config.group - row0, 0, config.tile_rows), 0)
    tile_causal = None if causal is None else jnp.append(causal, True)[req]
    held = None if rank is None else (rank, jnp.where(q_len > 0, jnp.append(local_lens, 0)[req], 0))
    tile_req = jnp.minimum(req, num_reqs - 1)
    info = info_columns(config, starts[req], row0, nrows, tile_req, q_len, seq, tile_causal, held, ranges)
    cost = info[NBLK] * _weights(nrows, config) + config.unit_cost
    return jnp.stack(info, axis=1), jnp.where(nrows > 0, cost, 0)


def _weights(nrows, config):
    """i32[n] what one key block costs of tiles with `nrows` i32[n] rows."""
    weights = jnp.where(nrows <= SHORT_ROWS, config.short_weight, config.long_weight)
    return jnp.where(nrows <= config.narrow_rows, config.narrow_weight, weights) if config.narrow_rows else weights


def _assign(info, cost, config) -> GpuWorkList:
    """Ranked tiles -> whole waves and cuts of the line."""
    heads, ctas = config.num_kv_heads, config.workers
    cost, shift = _in_32_bits(cost, heads)
    decode_share, keys = _decode_share(info, cost)
    tiles = jnp.sum(cost > 0, dtype=jnp.int32)
    exceeds_l2 = _prefill_exceeds_l2(decode_share, keys, config)
    set_heads = jnp.where(exceeds_l2, _heads_of_a_set(info, decode_share, heads, ctas), config.heads_together or heads)
    num_units, set_units = tiles * heads, jnp.maximum(tiles, 1) * set_heads
    unit = jnp.arange(cdiv(cost.shape[0] * heads, ctas) * ctas, dtype=jnp.int32)
    tile, _ = place_of(unit, set_units, heads, set_heads)
    tile = jnp.where(unit < num_units, tile, cost.shape[0] - 1)
    each = jnp.where(unit < num_units, cost[tile], 0)
    ends = jnp.cumsum(each)
    total = ends[-1]
    waves, load, longest = _whole_waves(each.reshape(-1, ctas), num_units // ctas, total)
    ratio, more = _limits_of_whole(config)
    cuts_gain_little = longest <= jnp.maximum(total / ctas * ratio, total / ctas + more)
    whole = jnp.bool_(True) if config.whole_units else cuts_gain_little
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
    own = waves * ctas + snake(waves, me, ctas)  # of the last wave, which may not reach every CTA
    u0 = jnp.where(whole, jnp.minimum(own, num_units), u0)
    u1 = jnp.where(whole, jnp.minimum(own + 1, num_units), u1)
    b0, b1 = (jnp.where(whole, 0, b) for b in (b0, b1))
    mixed = (decode_share > FEW_DECODES) & (decode_share < 1 - FEW_DECODES)
    backward = jnp.where(mixed, jnp.arange(ctas) % 2, 0)
    spread = lambda x: jnp.broadcast_to(x, (ctas,))
    columns = [spread(waves), u0, b0, u1, b1, backward, spread(set_units), spread(set_heads)]
    return GpuWorkList(info=info, cta=cta_columns(columns, joins))


def _heads_of_a_set(info, decode_share, heads: int, ctas: int):
    """The fewest heads of which the long tiles give every CTA a unit, in sets of equal size; all heads if none do.

    Short tiles are not counted: in a set with few long ones some CTAs would have nothing but short units, which take
    longer so than their cost says. Beside decodes a set has one head or all. An H200, 2026-12-01, us before and now:
    200 decodes of 500 keys and a chunk of 2048 after 28000 2098 and 1400; with 40 kv heads four prompts of 2000 376 and
    308, a chunk of 2048 after 18000 1172 and 1111; ragged prompts with 32 kv heads of 80 483 and 417.
    """
    long = jnp.sum(info[:, NROWS] > SHORT_ROWS, dtype=jnp.int32)
    sizes = jnp.asarray([size for size in range(1, heads + 1) if heads % size == 0], jnp.int32)
    may_be = (sizes == 1) | (decode_share < NO_DECODES)
    return jnp.min(jnp.where(may_be & (long * sizes >= ctas), sizes, heads))


def _limits_of_whole(config) -> tuple[float, int]:
    """(times an equal share, cost more than it): what the longest CTA may have while units stay whole."""
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
    parts, _ = divmod_i32(ctas, jnp.maximum(long, 1))
    divisor, me = jnp.maximum(parts, 1), jnp.arange(ctas + 1, dtype=jnp.int32)
    unit, part = divmod_i32(me, divisor)
    unit = jnp.minimum(unit, each.shape[0] - 1)
    cuts = ends[unit] - each[unit] + divmod_i32(part * each[unit], divisor)[0]
    left, rest = ctas - long * parts, total - ends[jnp.maximum(long - 1, 0)]
    of_rest = total - rest + divmod_i32(jnp.maximum(me - long * parts, 0) * rest, jnp.maximum(left, 1))[0]
    cuts = jnp.where(me < long * parts, cuts, jnp.where(me < ctas, of_rest, total))
    fits = (parts >= 2) & (each[0] <= parts * share * EVEN_SHARE) & (rest <= left * share * EVEN_SHARE)
    return fits, cuts


def _decode_share(info, cost):
    """(share of the cost in requests of few rows, number of key tokens of the other requests)."""
    first, rows = info[:, ROW0] == 0, info[:, NROWS]
    few = first & (rows > 0) & (rows <= SHORT_ROWS)  # with two pipelines, the first tile of each prompt too
    share = jnp.sum(jnp.where(few, cost, 0)) / jnp.maximum(jnp.sum(cost), 1)
    return share, jnp.sum(jnp.where(first & (rows > SHORT_ROWS), info[:, SEQ], 0))


def _prefill_exceeds_l2(decode_share, keys, config: GpuKernelConfig):
    """Do the keys of a prefill exceed L2? A window reads few of them at any time. Not where decodes, which share no
    keys, cost more than FEW_DECODES, and not where config.heads_together already says how heads are taken."""
    if config.heads_together or config.mask.left >= 0 or config.mask.chunk > 0:
        return jnp.bool_(False)
    large = keys.astype(jnp.float32) * (config.key_bytes * config.num_kv_heads) > L2_BYTES
    return large & (decode_share < FEW_DECODES)


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
    weight = _weights(info[:, NROWS], config)
    block = (jnp.maximum(inside - config.unit_cost // 2, 0) + weight // 2) // weight
    up = (block > 0) & (info[:, NBLK] - block < config.min_split)
    return jnp.where(up, unit + 1, unit), jnp.where(up | (block < config.min_split), 0, block)


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
