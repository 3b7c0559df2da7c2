"""The work list of the TPU kernel: its query tiles in order, and the order of what the kernel has for each row.

The kernel walks TpuWorkList.items one after the other. algebra/schedule.py divides a request's queries into tiles of
consecutive tokens, whose queries and outputs are copied from and to [T H D] as they are. What else is given or written
for each row (ranges, biases, lse), token after token and within a token the G heads of a kv head, lies in packs of 16:

    tile i holds packs first_pack[i] .. first_pack[i] + ceil(tokens * G / 16) - 1

There a tile begins on a whole VMEM tile for any lengths of a batch, and the kernel never copies a part of one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.schedule import SchedulePlan, make_schedule
from pallas_kernels.algebra.token_ranges import bounds_of_tokens
from pallas_kernels.tpu.config import LANES, PACK, TpuKernelConfig

FIELDS = ("req", "token", "tokens", "pack", "packs", "q_first", "page", "pages", "kv_start", "kv_end", "full_start",
          "full_end", "causal")  # fmt: skip
"""One i32 a tile for each: the request; first token and number of tokens; first pack and live packs; position of the
first query; first column of the block table and number of columns; keys that some row sees and keys that every row sees
(half open; positions, or with keys on several ranks indices among those of this rank); is it causal. fields_of may add:
context, the position of the request's first new token; rank, this rank."""


def fields_of(config: TpuKernelConfig) -> tuple[str, ...]:
    """FIELDS, and those that this config needs besides."""
    return FIELDS + ("context",) * config.qq_bias + ("rank",) * (config.shards.world > 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TpuWorkList:
    """The work list of one batch, shared by all layers of the same config."""

    count: jax.Array  # i32[1] live tiles
    items: jax.Array  # i32[fields * tiles], field after field; flat, since SMEM pads the rows of a matrix
    row: jax.Array  # i32[T] index of a token's first row, flat in packs 16; past the end for padding
    ranges: jax.Array | None = None  # i32[packs 16 128], with config.has_ranges: see copies.HbmRefs
    new: jax.Array | None = None  # i32[packs 16], with config.qq_bias: index of a row among its request's new tokens


def num_packs(num_tokens: int, num_tiles: int, config: TpuKernelConfig) -> int:
    """Static upper bound: each tile wastes less than one pack."""
    return num_tokens * config.group // PACK + num_tiles


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
    first_pack = jnp.cumsum(packs, dtype=jnp.int32) - packs
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
        req=items.req_id, token=items.q_start, tokens=items.q_num, pack=first_pack, packs=packs, q_first=q_first,
        page=page, pages=cdiv(kv_end, config.page_size) - page, kv_start=kv_start, kv_end=kv_end,
        full_start=full_start, full_end=full_end,
        causal=jnp.ones_like(packs) if flags is None else flags[items.req_id],
        context=context, rank=jnp.broadcast_to(jnp.asarray(0 if rank is None else rank, jnp.int32), packs.shape),
    )  # fmt: skip
    placed = items, first_pack, num_tokens, config
    token = _token_of_rows(*placed)  # of ranges and biases only
    first = jnp.append(starts, 0)[jnp.searchsorted(starts[1:], token, side="right")] if config.qq_bias else None
    return TpuWorkList(
        count=schedule.num_items[None].astype(jnp.int32),
        items=jnp.concatenate([fields[name].astype(jnp.int32) for name in fields_of(config)]),
        row=_row_of_tokens(*placed),
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


def _row_of_tokens(items, first_pack, num_tokens: int, config: TpuKernelConfig):
    """The field row of TpuWorkList."""
    past = num_packs(num_tokens, first_pack.shape[0], config) * PACK
    ends, token = jnp.cumsum(items.q_num, dtype=jnp.int32), jnp.arange(num_tokens, dtype=jnp.int32)
    tile = jnp.minimum(jnp.searchsorted(ends, token, side="right"), first_pack.shape[0] - 1)
    row = first_pack[tile] * PACK + (token - items.q_start[tile]) * config.group
    return jnp.where(token < ends[-1], row, past)


def _token_of_rows(items, first_pack, num_tokens: int, config: TpuKernelConfig):
    """i32[packs 16] token of each row, T where there is none."""
    tiles = first_pack.shape[0]
    ends = first_pack + cdiv(items.q_num * config.group, PACK)
    pack = jnp.arange(num_packs(num_tokens, tiles, config), dtype=jnp.int32)
    tile = jnp.minimum(jnp.searchsorted(ends, pack, side="right"), tiles - 1)
    token = ((pack - first_pack[tile])[:, None] * PACK + jnp.arange(PACK, dtype=jnp.int32)[None]) // config.group
    live = (token < items.q_num[tile][:, None]) & (pack < ends[-1])[:, None]
    return jnp.where(live, items.q_start[tile][:, None] + token, num_tokens)


def lse_shape(work: TpuWorkList, config: TpuKernelConfig) -> tuple[int, int, int]:
    """(packs, 16, lanes) of the lse as the kernel writes it."""
    tiles = work.items.shape[0] // len(fields_of(config))
    return num_packs(work.row.shape[0], tiles, config), PACK, config.lse_lanes


def lse_of_tokens(lse: jax.Array, work: TpuWorkList, config: TpuKernelConfig) -> jax.Array:
    """f32[packs 16 lanes] as the kernel wrote it -> f32[T H]; tokens of no tile get -inf.

    Of long tiles a gather by XLA, which is gone where nobody takes the lse.
    """
    c, tokens = config, work.row.shape[0]
    if c.tile_tokens == 1:  # tile i has token i: its rows are a slice
        group = c.few_rows if c.has_half_packs else c.group
        rows = lse[: tokens * c.packs_of_token].reshape(tokens, c.packs_of_token * PACK, -1)[:, :group]
        live = (jnp.arange(tokens, dtype=jnp.int32) < work.count)[:, None, None]
        rows = jnp.where(live, rows[..., : c.num_heads // group], float("-inf"))
    else:
        at = work.row[:, None] + jnp.arange(c.group, dtype=jnp.int32)[None]  # [T G]
        flat = lse.reshape(-1, c.lse_lanes)[:, : c.num_kv_heads]
        rows = flat.at[at].get(mode="fill", fill_value=float("-inf"))  # [T G K]
    return jnp.swapaxes(rows, 1, 2).reshape(tokens, c.num_heads)
