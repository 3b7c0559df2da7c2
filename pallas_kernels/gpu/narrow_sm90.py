"""Narrow tiles: at most 16 query rows, by warp-level products instead of wgmma's 64 rows.

Of every block of 128 keys, warp w of the CTA computes keys 16 w .. 16 w + 15 for all rows; with two pipelines a block
has 64 keys and a pipeline's four warps compute them. Each warp keeps its own maximum, sum and output; the states are
merged at the end of the piece, and no warp waits for another before.
"""

import dataclasses
import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import new_tokens_sm90 as new_tokens
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import token_scales_sm90 as token_scales
from pallas_kernels.gpu import warp_mma_sm80 as warps
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import as_number, when
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.gather_sm90 import gather
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs, place_in_ring, queries_of, worker, zero_unseen_values
from pallas_kernels.gpu.tiles_sm90 import LOG2E, full_block_bounds, loop_over_blocks, merge_if_last, sync_warpgroups

_WGMMA = plgpu.Layout.WGMMA
_COLUMN = _WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class QueryBounds:
    """The keys that each query row sees, and its head, as columns of S^T: [64 keys, rows] in registers."""

    q_pos: object
    start: object  # the row sees keys start <= kv_pos < stop, unless there is a mask_fn
    stop: object
    slope: object  # f32 ALiBi slope times log2(e), or None
    head: object  # query head
    bias: object = None  # function: positions of keys -> f32 [64 keys, rows], with a qq_bias


def _keys(cfg: GpuKernelConfig):
    """The key of each element of S^T, within the block."""
    shape = (warps.KEYS, cfg.narrow_rows)
    return rows.numbers(shape, 0) if cfg.lean else plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)


def _columns(cfg: GpuKernelConfig):
    count = cfg.narrow_rows
    return rows.column_numbers(count) if cfg.lean else plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_COLUMN)


def query_bounds(cfg: GpuKernelConfig, refs: Refs, piece: Piece, ranges: bool = True) -> QueryBounds:
    """ranges: compute the keys that each row sees, which only blocks with a mask need."""
    packed = _columns(cfg) + piece[wl.ROW0]
    token = lax.div(packed, jnp.int32(cfg.group))
    member, q_pos = packed - token * cfg.group, token + piece[wl.QPOS0]
    head0, start, stop, slope, bias = piece[HEAD] * cfg.group, None, None, None, None
    if ranges:
        start, stop = _key_ranges(cfg, refs, piece, token, q_pos)
        bias = functools.partial(_bias, cfg, refs, piece, _every(cfg, token)) if cfg.qq_bias else None
    if cfg.logits.has_alibi:
        slope = _every(cfg, gather(refs.per_head, 2 * (head0 + member), _COLUMN) * LOG2E)
    return QueryBounds(_every(cfg, q_pos), start, stop, slope, _every(cfg, head0 + member), bias)


def _every(cfg: GpuKernelConfig, vector):
    """A number for each row -> the same for every key."""
    return lax.broadcast_in_dim(vector, (warps.KEYS, cfg.narrow_rows), [1])


def _key_ranges(cfg: GpuKernelConfig, refs: Refs, piece: Piece, token, q_pos):
    """(start, stop) of each row."""
    causal = piece[wl.CAUSAL] & 1 != 0 if cfg.per_request_causal else None
    rank = piece[wl.CAUSAL] >> 1 if cfg.shards.world > 1 else 0
    if cfg.mask.spans:
        found = wl.token_range(refs.info, refs.q.shape[0], token + piece[wl.TOK0], _COLUMN)
    else:
        found = wl.visible_keys(cfg, q_pos, q_pos, piece[wl.SEQ], causal, rank)
    whole = lambda x: plgpu.layout_cast(jnp.broadcast_to(x, (cfg.narrow_rows,)), _COLUMN)
    return (_every(cfg, whole(x)) for x in found)


def _bias(cfg: GpuKernelConfig, refs: Refs, piece: Piece, token, key):
    return new_tokens.bias_of(cfg, refs.per_head, token, key - piece[wl.QPOS0], _WGMMA)


def logits(cfg: GpuKernelConfig, column: QueryBounds, dots, kv0, scale, masked):
    """S^T -> (x, c): base-2 logits are x * c, -inf where masked; as in algebra/logits.py, with rows as columns."""
    rule, factor = cfg.logits, scale * LOG2E
    key = lambda: _keys(cfg) + kv0
    if rule.soft_cap:
        dots, factor = jnp.tanh(dots * (scale / rule.soft_cap)), jnp.float32(rule.soft_cap * LOG2E)
    if rule.has_alibi:
        distance = (key() - column.q_pos).astype(jnp.float32)
        dots, factor = dots * factor + column.slope * distance, jnp.float32(1.0)
    if cfg.qq_bias and masked:
        dots, factor = dots * factor + column.bias(key()) * LOG2E, jnp.float32(1.0)
    if rule.score_fn is not None:
        score = rule.score_fn(dots * (factor * (1 / LOG2E)), column.head, column.q_pos, key())
        dots, factor = score, jnp.float32(LOG2E)
    if masked:
        seen = key() < column.stop
        if cfg.mask.left >= 0 or cfg.mask.chunk > 0:
            seen = seen & (key() >= column.start)
        if cfg.mask.mask_fn is not None:
            seen = seen & cfg.mask.mask_fn(column.head, column.q_pos, key())
        dots = jnp.where(seen, dots, -jnp.inf)
    return dots, factor


def narrow_tile(cfg: GpuKernelConfig, refs: Refs, piece: Piece, wg, blocks_before):
    """At most cfg.narrow_rows rows, in blocks of 64 keys for each of the warpgroups that share a block."""
    rows8, half = cfg.narrow_rows // 8, wg if cfg.pipelines == 1 else None
    keys = dict(rows8=rows8, dim=cfg.head_dim, source=cfg.kv_dtype, target=cfg.dtype)
    values = dict(rows8=rows8, dim=cfg.v_head_dim, source=cfg.kv_dtype, target=cfg.value_dtype)
    values["parts"] = cfg.weight_parts
    kind = dict(rows8=rows8, dim=cfg.head_dim, dtype=cfg.dtype, decoded=cfg.quantised)
    if cfg.loads_queries:
        where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS])
        queries = warps.load_queries(refs.q, *where, group=cfg.group, heads=cfg.num_heads, **kind)
    else:
        queries = warps.read_queries(queries_of(cfg, refs, piece).at[0], **kind)
    column, scale = query_bounds(cfg, refs, piece), refs.scales[piece[HEAD], 0]
    block_of = piece.blocks(cfg)
    mine = jnp.int32(0) if half is None else half * warps.KEYS

    def step(j, carry, masked):
        slot = place_in_ring(cfg, refs, blocks_before + j, cfg.narrow_stages)
        kv0 = block_of(j) * cfg.block_kv
        plgpu.barrier_wait(refs.k_narrow_full.at[slot])
        of_keys = of_values = None
        if cfg.token_scales:
            row = slot + cfg.converted_scales
            of_keys, of_values = token_scales.load_per_key(refs.token_scale, row, 0, cfg.block_kv, mine, warps.KEYS)
        dots = warps.keys_times_queries(refs.k_narrow.at[slot], queries, mine, **keys)
        rows.end_reads()
        plgpu.barrier_arrive(refs.k_narrow_free.at[slot])
        dots = token_scales.multiply_per_key(dots, of_keys, 0)
        x, factor = logits(cfg, column, dots, kv0 + mine, scale, masked)
        plgpu.barrier_wait(refs.v_narrow_full.at[slot])
        if masked:
            zero_unseen_values(cfg, refs.v_narrow.at[slot], piece, kv0, half=half)
        carry = warps.softmax_times_values(refs.v_narrow.at[slot], x, factor, *carry, mine, of_values, **values)
        rows.end_reads()
        plgpu.barrier_arrive(refs.v_narrow_free.at[slot])
        return carry

    start = warps.start_state(rows8=rows8, dim=cfg.v_head_dim)
    state = loop_over_blocks(cfg, step, full_block_bounds(cfg, piece), start)
    _merge_and_store(cfg, refs, piece, state, wg)


def merge_warps(cfg, refs: Refs, piece: Piece, state, wg, scratch, dtype: str, sync, *, count: int, shuffles=True):
    """Merges the states of the `count` warps of a piece, eight rows at a time, and stores its rows, or a part of them.

    scratch: an SMEM tile [.., D] of `dtype` for the outputs, and one for maxima and sums, both as raw memory. sync: a
    barrier of the warps. wg: which of their warpgroups this is. shuffles: see warp_mma_sm80.softmax_times_values.
    """
    kind = dict(dim=cfg.v_head_dim, q_dim=cfg.head_dim, q_dtype=dtype, warps=count)
    slot = 2 * worker(cfg, refs) + as_number(piece.lo == 0)
    part = (as_number(piece.is_part), slot)
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS], wg)
    own, rows8 = dict(decoded=cfg.quantised, shuffles=shuffles), cfg.narrow_rows // 8
    for n in range(rows8):
        sync()
        warps.put_state(*scratch, *state, wg, n, rows8=rows8, **own, **kind)
        sync()
        for line in range(8 // count):
            warps.merge_and_store(
                *scratch, refs, part, refs.scales[piece[HEAD], 1], 1, where, n=n, line=line, group=cfg.group,
                heads=cfg.num_heads, has_sinks=cfg.has_sinks, out_dtype=cfg.result_dtype, **kind,
            )  # fmt: skip


def _merge_and_store(cfg: GpuKernelConfig, refs: Refs, piece: Piece, state, wg):
    """Merges the states of the warps, by way of the memory of the queries, and stores the rows."""
    alone = cfg.pipelines == 2
    scratch = (queries_of(cfg, refs, piece), refs.stats.at[refs.pipeline] if alone else refs.stats)

    sync = rows.sync_warpgroup if alone else functools.partial(sync_warpgroups, refs)
    wg = jnp.int32(0) if alone else wg
    merge_warps(cfg, refs, piece, state, wg, scratch, cfg.dtype, sync, count=8 // cfg.pipelines)
    if cfg.two_rings:
        sync()  # the states are read: each warpgroup may load other queries there
    if cfg.merges_inside:

        @when(piece.is_part)
        def _():
            sync()  # the rows of all warps are stored
            merge_if_last(cfg, refs, piece) if alone else when(wg == 0)(lambda: merge_if_last(cfg, refs, piece))
