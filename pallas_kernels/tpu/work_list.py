"""The work list of the TPU kernel: its query tiles in order, and how queries are packed for them.

The kernel walks TpuWorkList.items one after the other. algebra/schedule.py divides a request's queries into tiles. The
rows of a tile, token after token and within a token the G heads of a kv head, lie in packs of 16:

    tile i holds packs first_pack[i] .. first_pack[i] + ceil(tokens * G / 16) - 1

A tile thus begins on a whole VMEM tile for any lengths of a batch, and the kernel never copies a part of one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.schedule import SchedulePlan, make_schedule
from pallas_kernels.algebra.token_ranges import bounds_of_tokens
from pallas_kernels.tpu.config import LANES, PACK, TpuKernelConfig

FIELDS = ("req", "pack", "packs", "rows", "q_first", "page", "pages", "kv_start", "kv_end", "full_start", "full_end",
          "causal")  # fmt: skip
"""One i32 a tile for each: the request; first pack, live packs and live rows; position of the first query; first column
of the block table and number of columns; keys that some row sees and keys that every row sees (half open; positions, or
with keys on several ranks indices among those of this rank); is it causal. fields_of may add: context, the position of
the request's first new token; rank, this rank."""


def fields_of(config: TpuKernelConfig) -> tuple[str, ...]:
    """FIELDS, and those that this config needs besides."""
    return FIELDS + ("context",) * config.qq_bias + ("rank",) * (config.shards.world > 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TpuWorkList:
    """The work list of one batch, shared by all layers of the same config."""

    count: jax.Array  # i32[1] live tiles
    items: jax.Array  # i32[fields * tiles], field after field; flat, since SMEM pads the rows of a matrix
    token: jax.Array  # i32[packs 16] token of each row, T where there is none
    member: jax.Array  # i32[packs 16] head of the group
    row: jax.Array  # i32[T] index of a token's first row, flat in packs 16; past the end for padding
    ranges: jax.Array | None = None  # i32[packs 16 128], with config.has_ranges: see copies.HbmRefs
    new: jax.Array | None = None  # i32[packs 16], with config.qq_bias: index of a row among its request's new tokens


def num_packs(num_tokens: int, num_tiles: int, config: TpuKernelConfig) -> int:
    """Static upper bound: each tile wastes less than one pack, and the last one may read rows past its end."""
    return num_tokens * config.group // PACK + num_tiles + config.rows // PACK


def build_work_list(
    query_start_loc, seq_lens, num_tokens: int, config: TpuKernelConfig, causal=None, ranges=None, rank=None
) -> TpuWorkList:
    """i32[R+1] starts, i32[R] lengths, causal bool[R] or None -> TpuWorkList. Pure jnp, no host sync.

    ranges i32[T, 2], with config.has_ranges: the keys that each token sees, half open: see algebra/token_ranges.py.
    rank: of the keys, where several ranks hold them; the ranges are then those of its own keys, see ranges_of_rank.
    """
    if (ranges is not None) != config.has_ranges or (rank is not None) != (config.shards.world > 1):
        raise ValueError(f"{config.mask.spans=}, {config.shards=}: ranges and rank must be given exactly if needed")
    sizes = SchedulePlan(q_tile=config.tile_tokens, kv_tile=config.page_size)
    starts, lengths = jnp.asarray(query_start_loc, jnp.int32), jnp.asarray(seq_lens, jnp.int32)
    flags = None if causal is None else jnp.asarray(causal, bool)
    rule = dataclasses.replace(config.mask, spans=False, clamp_spans=False)  # spans are in the ranges
    schedule = make_schedule(starts, lengths, rule, sizes, num_tokens=num_tokens, max_seq_len=1, causal=flags, xp=jnp)
    items = schedule.items
    packs = cdiv(items.q_num * config.group, PACK)
    ends = jnp.cumsum(packs, dtype=jnp.int32)
    query = (starts[1:] - starts[:-1])[items.req_id]
    q_first = items.seq_len - query + items.q_start - starts[items.req_id]
    if ranges is not None:  # a token that sees no key must not stretch its tile's range
        ranges = jnp.where((ranges[:, 0] < ranges[:, 1])[:, None], ranges, 0)
    kv_start, kv_end, context = items.kv_start, items.kv_end, items.seq_len - query
    if ranges is None:
        full_start, full_end = _seen_by_all(items, q_first, config, None if flags is None else flags[items.req_id])
    else:
        kv_start, kv_end, full_start, full_end = _bounds(ranges, items, config)
    if config.qq_bias:  # it is added in parts with a mask only
        full_end = jnp.minimum(full_end, context)
    page = kv_start // config.page_size
    fields = dict(
        req=items.req_id, pack=ends - packs, packs=packs, rows=items.q_num * config.group, q_first=q_first,
        page=page, pages=cdiv(kv_end, config.page_size) - page, kv_start=kv_start, kv_end=kv_end,
        full_start=full_start, full_end=full_end,
        causal=jnp.ones_like(packs) if flags is None else flags[items.req_id],
        context=context, rank=jnp.broadcast_to(jnp.asarray(0 if rank is None else rank, jnp.int32), packs.shape),
    )  # fmt: skip
    token, member, row = _rows(items, packs, ends, num_tokens, config)
    first = jnp.append(starts, 0)[jnp.searchsorted(starts[1:], token, side="right")] if config.qq_bias else None
    return TpuWorkList(
        count=schedule.num_items[None].astype(jnp.int32),
        items=jnp.concatenate([fields[name].astype(jnp.int32) for name in fields_of(config)]),
        token=token,
        member=member,
        row=row,
        ranges=None if ranges is None else _in_lanes(ranges.at[token].get(mode="fill", fill_value=0)),
        new=None if first is None else token - first,
    )


def _in_lanes(x):
    """[packs 16 2] -> [packs 16 128]."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, LANES - x.shape[-1])))


def ranges_of_rank(ranges, query_start_loc, local_lens, config: TpuKernelConfig, rank):
    """i32[T, 2] of positions -> of this rank's keys, of which each request has i32[R] local_lens.

    Positions ascend with the index of a key, so a range of positions is a range of indices on every rank.
    """
    starts, reqs = jnp.asarray(query_start_loc, jnp.int32), local_lens.shape[0]
    token = jnp.arange(ranges.shape[0], dtype=jnp.int32)
    req = jnp.minimum(jnp.sum(starts[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32), reqs - 1)
    return jnp.minimum(config.shards.count_below(ranges, rank), jnp.asarray(local_lens, jnp.int32)[req][:, None])


def _bounds(ranges, items, config: TpuKernelConfig):
    """i32[tiles] each: the keys that some row of a tile sees, and those that every row sees; half open."""
    start, stop, last_start, first_stop = bounds_of_tokens(ranges, items.q_start, items.q_start + items.q_num - 1)
    if config.mask.mask_fn is not None:
        last_start = first_stop = jnp.zeros_like(start)
    return start, jnp.maximum(stop, start), last_start, first_stop


def _seen_by_all(items, q_first, config: TpuKernelConfig, causal):
    """Keys that every query of a tile sees: from the start of the last query's range to the end of the first's.

    None where there is a mask_fn, which may hide any key.
    """
    if config.mask.mask_fn is not None:
        return jnp.zeros_like(q_first), jnp.zeros_like(q_first)
    end, last = items.seq_len, q_first + items.q_num - 1
    start = key_range(config.mask, last, last, end, causal)[0]
    return start, key_range(config.mask, q_first, q_first, end, causal)[1]


def _rows(items, packs, ends, num_tokens: int, config: TpuKernelConfig):
    """The fields token, member and row of TpuWorkList."""
    group, tiles = config.group, packs.shape[0]
    count = num_packs(num_tokens, tiles, config)
    pack = jnp.arange(count, dtype=jnp.int32)
    tile = jnp.minimum(jnp.searchsorted(ends, pack, side="right"), tiles - 1)
    local = (pack - (ends - packs)[tile])[:, None] * PACK + jnp.arange(PACK, dtype=jnp.int32)[None]
    live = (local < (items.q_num * group)[tile][:, None]) & (pack < ends[-1])[:, None]
    token = jnp.where(live, items.q_start[tile][:, None] + local // group, num_tokens)
    flat = jnp.arange(count * PACK, dtype=jnp.int32).reshape(count, PACK)
    first = live & (local % group == 0)
    row = jnp.full(num_tokens, count * PACK, jnp.int32)
    row = row.at[jnp.where(first, token, num_tokens)].set(flat, mode="drop")
    return token, local % group, row


def pack_queries(q: jax.Array, work: TpuWorkList, config: TpuKernelConfig) -> jax.Array:
    """[T H D] -> [K packs 16 D]; rows of no token are 0. Where keys lie side by side, so do copies of a query.

    Where they are taken in place: only these copies.
    """
    q = jnp.tile(q, (1, 1, config.beside))
    if config.in_place:
        return q
    num_tokens, heads, dim = q.shape
    by_group = q.reshape(num_tokens, config.num_kv_heads, config.group, dim)
    taken = by_group.at[work.token, :, work.member].get(mode="fill", fill_value=0)  # [packs 16 K D]
    return jnp.moveaxis(taken, 2, 0)


def unpack_rows(packed: jax.Array, work: TpuWorkList, config: TpuKernelConfig, fill: float) -> jax.Array:
    """[K packs 16 V] -> [T H V]; tokens of no tile get `fill`."""
    kv_heads, dim = packed.shape[0], packed.shape[-1]
    rows = work.row[:, None] + jnp.arange(config.group, dtype=jnp.int32)[None]  # [T G]
    taken = packed.reshape(kv_heads, -1, dim).at[:, rows].get(mode="fill", fill_value=fill)  # [K T G V]
    return jnp.moveaxis(taken, 0, 1).reshape(rows.shape[0], -1, dim)


def unpack(out: jax.Array, lse: jax.Array, work: TpuWorkList, config: TpuKernelConfig) -> tuple[jax.Array, jax.Array]:
    """What the kernel wrote -> (out [T H V], lse f32[T H]); tokens of no tile get 0 and -inf."""
    c = config
    if not c.in_place:
        by_head = jnp.moveaxis(lse[..., : c.num_kv_heads], -1, 0)[..., None]  # [K packs 16 1]
        return unpack_rows(out, work, c, 0.0), unpack_rows(by_head, work, c, float("-inf"))[..., 0]
    tokens = out.shape[0]
    live = (jnp.arange(tokens, dtype=jnp.int32) < work.count)[:, None]
    rows = lse[: tokens * c.packs_of_token].reshape(tokens, c.packs_of_token * PACK, -1)
    by_head = jnp.swapaxes(rows[:, : c.few_rows, : c.num_heads // c.few_rows], 1, 2).reshape(tokens, -1)
    return jnp.where(live[..., None], out, jnp.zeros_like(out)), jnp.where(live, by_head, float("-inf"))
