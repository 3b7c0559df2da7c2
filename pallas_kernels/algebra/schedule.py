"""The schedule of a ragged batch: which queries are multiplied with which keys in one piece of work.

    q tiles     a request's queries in tiles of `q_tile` tokens: q_tile * G rows of one kv head
    key range   the keys that some query of the tile sees (mask.key_range); no others are read
    KV split    the long key range of a short tile is cut at multiples of kv_tile into pieces of about equal
                length, so that every worker has work; the reductions merge their partial results

        budget = max(ceil(sum of kv tiles / workers), min_split)     pieces = ceil(kv tiles / budget)

There are then at most `workers` more pieces than tiles, and all capacities are static. Everything is int32. `xp` is
numpy or jax.numpy; both give the same schedule.
"""

import dataclasses
from types import ModuleType

import jax

from pallas_kernels.algebra.mask import MaskRule, key_range
from pallas_kernels.algebra.paging import cdiv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkItems:
    """One piece of work an entry. Entries past the count have q_num 0 and an empty range. All i32[capacity]."""

    req_id: jax.Array
    q_start: jax.Array  # first query, an index into the packed tokens
    q_num: jax.Array
    kv_start: jax.Array  # positions in the request, half open; kv_start == kv_end where no query sees a key
    kv_end: jax.Array
    seq_len: jax.Array  # of the request
    split_id: jax.Array  # index of the partial result; -1 = the tile is not split
    local_split_id: jax.Array  # number of the piece within its tile, from 0; -1 = the tile is not split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reductions:
    """One split tile an entry: merge partial results split_start .. split_start + split_num - 1. All i32[capacity]."""

    req_id: jax.Array
    q_start: jax.Array
    q_num: jax.Array
    split_start: jax.Array
    split_num: jax.Array


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """The static parameters of a schedule; hashable."""

    q_tile: int  # tokens of a query tile
    kv_tile: int  # pieces are cut at multiples of this
    num_workers: int = 1  # workers that share the work of one kv head
    max_split_queries: int = 1  # only tiles of at most this many tokens are split; 0 = none
    min_split: int = 1  # kv tiles of the smallest piece: a smaller one costs more to merge than it saves
    fixed_split: int | None = None  # kv tiles of every piece, independent of the batch: batch-invariant results

    def tiles(self, num_tokens: int, num_reqs: int) -> int:
        """Static upper bound of the query tiles: each request has at most one that is not full."""
        return max(min(num_tokens, num_reqs + num_tokens // self.q_tile), 1)

    def extra(self, num_tokens: int, num_reqs: int, max_seq_len: int) -> int:
        """Static upper bound of pieces minus tiles, and so of the reductions."""
        if not self.max_split_queries:
            return 0
        if self.fixed_split is None:
            return self.num_workers if self.num_workers > 1 else 0
        return self.tiles(num_tokens, num_reqs) * (cdiv(self.max_units(max_seq_len), self.fixed_split) - 1)

    def max_units(self, max_seq_len: int) -> int:
        """Upper bound of the kv tiles in one key range."""
        return cdiv(max(max_seq_len, 1), self.kv_tile)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The schedule of one batch, shared by all layers with the same mask."""

    items: WorkItems
    reductions: Reductions
    num_items: jax.Array  # i32[]
    num_reductions: jax.Array  # i32[]
    num_splits: jax.Array  # i32[] all partial results: at most two for each entry of the reductions
    plan: SchedulePlan = dataclasses.field(metadata=dict(static=True))


def make_schedule(
    query_start_loc,
    seq_lens,
    rule: MaskRule,
    plan: SchedulePlan,
    *,
    num_tokens: int,
    max_seq_len: int,
    causal=None,
    xp: ModuleType,
) -> Schedule:
    """The schedule of i32[R+1] starts and i32[R] lengths; causal bool[R] replaces rule.causal.

    Every live query is in exactly one tile. The pieces of a tile cover its key range exactly once.
    """
    num_reqs = seq_lens.shape[0]
    start = query_start_loc[:-1]
    query = query_start_loc[1:] - start
    # 1. query tiles
    tiles = cdiv(query, plan.q_tile)
    tile_ends = _sum(tiles, xp)
    tile = xp.arange(plan.tiles(num_tokens, num_reqs), dtype=xp.int32)
    live = tile < tile_ends[-1]
    req = _owner(tile_ends, tile, xp)
    local = (tile - (tile_ends - tiles)[req]) * plan.q_tile
    q_len, q_start = query[req], start[req] + local
    q_num = xp.where(live, xp.minimum(plan.q_tile, q_len - local), 0)
    # 2. the keys that each tile sees
    seq_len = xp.where(live, seq_lens[req], 0)
    first = seq_len - q_len + local
    tile_causal = None if causal is None else causal[req]
    kv_start, kv_end = key_range(rule, first, first + q_num - 1, seq_len, tile_causal, xp=xp)
    seen = live & (kv_end > kv_start)
    kv_start, kv_end = xp.where(seen, kv_start, 0), xp.where(seen, kv_end, 0)
    # 3. pieces of each tile, in units of kv_tile
    unit = kv_start // plan.kv_tile
    units = cdiv(kv_end, plan.kv_tile) - unit
    extra = plan.extra(num_tokens, num_reqs, max_seq_len)
    pieces = xp.where(live, _pieces(units, q_num, plan, max_seq_len, xp) if extra else 1, 0).astype(xp.int32)
    piece_ends = _sum(pieces, xp)
    split = pieces > 1
    split_starts = _sum(xp.where(split, pieces, 0), xp)
    num_splits = split_starts[-1]
    split_starts = split_starts - xp.where(split, pieces, 0)
    # 4. one item a piece
    item = xp.arange(tile.shape[0] + extra, dtype=xp.int32)
    alive = item < piece_ends[-1]
    of = _owner(piece_ends, item, xp)
    piece = item - (piece_ends - pieces)[of]
    size, more = (x[of] for x in xp.divmod(units, xp.maximum(pieces, 1)))
    cut = unit[of] + piece * size + xp.minimum(piece, more)  # the first `more` pieces are one unit longer
    cut_end = cut + size + (piece < more)
    partial = alive & split[of]
    items = WorkItems(
        req_id=_keep(alive, req[of], 0, xp),
        q_start=_keep(alive, q_start[of], 0, xp),
        q_num=_keep(alive, q_num[of], 0, xp),
        kv_start=_keep(alive, xp.maximum(kv_start[of], cut * plan.kv_tile), 0, xp),
        kv_end=_keep(alive, xp.minimum(kv_end[of], cut_end * plan.kv_tile), 0, xp),
        seq_len=_keep(alive, seq_len[of], 0, xp),
        split_id=_keep(partial, split_starts[of] + piece, -1, xp),
        local_split_id=_keep(partial, piece, -1, xp),
    )
    # 5. one reduction a split tile
    split_ends = _sum(split, xp)
    reduction = xp.arange(extra, dtype=xp.int32)
    merged = reduction < split_ends[-1]
    of = _owner(split_ends, reduction, xp)
    reductions = Reductions(
        req_id=_keep(merged, req[of], 0, xp),
        q_start=_keep(merged, q_start[of], 0, xp),
        q_num=_keep(merged, q_num[of], 0, xp),
        split_start=_keep(merged, split_starts[of], 0, xp),
        split_num=_keep(merged, pieces[of], 0, xp),
    )
    return Schedule(
        items=items,
        reductions=reductions,
        num_items=piece_ends[-1],
        num_reductions=split_ends[-1],
        num_splits=num_splits,
        plan=plan,
    )


def _pieces(units, q_num, plan: SchedulePlan, max_seq_len: int, xp: ModuleType):
    """Pieces of each tile, at least one.

    Where int32 could overflow, kv tiles are summed in units of 2**shift tiles, which only rounds the budget up.
    """
    if plan.fixed_split is not None:
        budget = plan.fixed_split
    else:
        shift = 0
        while units.shape[0] * cdiv(plan.max_units(max_seq_len), 1 << shift) >= 2**31:
            shift += 1
        total = xp.sum(cdiv(units, 1 << shift), dtype=xp.int32)
        share = xp.minimum(cdiv(total, plan.num_workers), (2**31 - 1) >> shift) << shift
        budget = xp.maximum(share, plan.min_split)
    return xp.where(q_num <= plan.max_split_queries, xp.maximum((units - 1) // budget + 1, 1), 1)


def _sum(x, xp: ModuleType):
    return xp.cumsum(x, dtype=xp.int32)


def _owner(ends, index, xp: ModuleType):
    """Index of the run that holds each index, given the cumulative `ends` of runs; past the last end, the last run."""
    return xp.minimum(xp.searchsorted(ends, index, side="right"), ends.shape[0] - 1).astype(xp.int32)


def _keep(flag, x, fill: int, xp: ModuleType):
    return xp.where(flag, x, fill).astype(xp.int32)
