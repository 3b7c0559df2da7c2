"""Wide tiles, of up to 128 query rows: each warp computes 16 of each 64 rows over all keys, as in FlashAttention-2.

The products are wide_mma_sm80.py's.
"""

import jax.numpy as jnp

from pallas_kernels.gpu import lanes_sm80 as lanes
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import wide_mma_sm80 as wide_mma
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.copies_sm80 import WARPS, sync_lanes, sync_warps
from pallas_kernels.gpu.decode_sm90 import decode_tile
from pallas_kernels.gpu.pieces_sm80 import BlockReader
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs
from pallas_kernels.gpu.row_states_sm90 import across_columns
from pallas_kernels.gpu.softmax_sm90 import MOST_RISE
from pallas_kernels.gpu.token_scales_sm90 import multiply_per_key

COLUMNS_TOGETHER = 8  # keys whose positions are in registers at a time


def wide_tile(cfg: WarpKernelConfig, refs: Refs, piece: Piece):
    """64 rows, or 128 in two halves: both at the same time, or one after the other."""
    _halves(cfg, refs, piece, 0)
    if cfg.tile_halves == 2 or not cfg.long_tiles:
        return

    @when(piece[wl.NROWS] > WARPGROUP_ROWS)
    def _():
        sync_warps()  # no warp reads the first half's keys any longer
        _halves(cfg, refs, piece, WARPGROUP_ROWS)


def _softmax_step(cfg: WarpKernelConfig, x, c, m, total, acc):
    """(p f32, new m, rescaled total with p's sum, rescaled acc). total: partial sums, as of lanes.partial_row_sums.

    Base-2 logits are x * c. With lazy_rescale m may be below the maximum by up to MOST_RISE: it changes in few
    blocks after the first, and lanes whose rows keep it do not rescale acc.
    """
    top = lanes.row_maxima(x) * c
    new_m = jnp.where(top > m + MOST_RISE, top, m) if cfg.lazy_rescale else jnp.maximum(m, top)
    alpha = jnp.exp2(m - new_m)
    p = wide_mma.exponentials(x, c, new_m)
    acc = wide_mma.rescaled(acc, alpha) if cfg.lazy_rescale else acc * across_columns(alpha, acc.shape)
    return p, new_m, total * alpha + lanes.partial_row_sums(p), acc


def _logits(cfg: WarpKernelConfig, row, dots, kv0, scale, masked):
    """tiles.logits. A mask_fn, score_fn or bias is computed for COLUMNS_TOGETHER keys at a time, to save registers."""
    if cfg.mask.mask_fn is None and cfg.logits.score_fn is None and not (cfg.qq_bias and masked):
        return tiles.logits(cfg, row, dots, kv0, scale, masked)
    parts = []
    for n, part in enumerate(wide_mma.split_columns(dots, COLUMNS_TOGETHER)):
        sync_lanes()  # no load of a bias is moved before it
        x, c = tiles.logits(cfg, row, part, kv0 + n * COLUMNS_TOGETHER, scale, masked)
        parts.append(x)
    return wide_mma.join_columns(parts), c


def _weight_operands(cfg: WarpKernelConfig, p, of_values) -> tuple:
    """f32 weights -> the operands whose products with the stored values are added."""
    p = multiply_per_key(p, of_values, 1)
    return wide_mma.bfloat16_parts(p) if cfg.weight_parts == 2 else (p.astype(cfg.value_dtype),)


def _decoded(cfg: WarpKernelConfig, refs: Refs, tile, dim: int, target: str):
    """A tile of keys or values as it is multiplied. One of 8 bits is decoded to refs.decoded, which both use in turn.

    No warp reads the former tile there any longer: all have waited for this one (BlockReader, warps=4).
    """
    if not cfg.quantised:
        return tile
    kind = dict(rows=cfg.block_kv, dim=dim, source=cfg.kv_dtype, target=target, dst_dim=cfg.head_dim)
    decode_tile(tile, refs.decoded, **kind, converts_fp8=cfg.converts_fp8, hidden=True)
    sync_warps()
    return refs.decoded


def _halves(cfg: WarpKernelConfig, refs: Refs, piece: Piece, first: int):
    """Rows first .. first + 64 * tile_halves - 1 of the tile, over all keys of the piece."""
    offsets = [first + WARPGROUP_ROWS * half for half in range(cfg.tile_halves)]
    kind = dict(group=cfg.group, heads=cfg.num_heads, dim=cfg.head_dim, dtype=cfg.dtype, hidden=True)
    for half, offset in enumerate(offsets):
        where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0] + offset, piece[wl.NROWS] - offset)
        rows.load_rows(refs.q, refs.q_tile.at[half], *where, **kind)
    reader = BlockReader(cfg, refs, piece, warps=WARPS)
    next_rows = reader.start()  # the copies of the queries belong to its first group, and are waited for with it
    of_keys = dict(halves=cfg.tile_halves, block=cfg.block_kv, dim=cfg.head_dim, dtype=cfg.dtype)
    of_values = dict(block=cfg.block_kv, dim=cfg.v_head_dim, dtype=cfg.value_dtype)
    of_values |= dict(ref_dim=cfg.head_dim if cfg.quantised else cfg.v_head_dim)
    by_row = cfg.logits.has_alibi or cfg.logits.score_fn is not None
    scale = refs.scales[piece[HEAD], 0]
    by_position = cfg.mask.mask_fn is not None or cfg.qq_bias  # else columns are compared with constants

    def step(j, carry, masked):
        numbers, next_rows = carry
        states = [(wide_mma.paired(acc, cfg.v_head_dim), m, total) for acc, m, total in numbers]
        slot, kv0 = reader.slot(j), reader.first_key + j * cfg.block_kv
        reader.wait_for_keys(j)
        keys = _decoded(cfg, refs, refs.k_tile.at[slot], cfg.head_dim, cfg.dtype)
        dots = wide_mma.queries_times_keys(refs.q_tile, keys, **of_keys)
        if by_row:
            sync_lanes()  # what belongs to rows is loaded after the products: there are no registers for it before
        key_scales, _ = reader.token_scales(slot, 1)
        dots = [multiply_per_key(x, key_scales, 1) for x in dots]
        new, weights = [], []
        for offset, x, (acc, m, total) in zip(offsets, dots, states, strict=True):
            row = None  # computed anew for each block: it would be in registers during the products
            if masked or by_row:
                row = tiles.row_bounds(cfg, refs, piece, jnp.int32(offset), ranges=masked)
            x, c = _logits(cfg, row, x, kv0, scale, masked and by_position)
            if masked and not by_position:
                starts = row.start - kv0 if cfg.mask.left >= 0 or cfg.mask.chunk > 0 else None
                x = rows.keep_columns(x, row.stop - kv0, starts, hidden=True)
            p, m, total, acc = _softmax_step(cfg, x, c, m, total, acc)
            new.append((acc, m, total))
            _, value_scales = reader.token_scales(slot, 1)  # read again: not in registers during the softmax
            weights.append(_weight_operands(cfg, p, value_scales))
        next_rows = reader.wait_for_values(j, next_rows)
        values = _decoded(cfg, refs, refs.v_tile.at[slot], cfg.v_head_dim, cfg.value_dtype)
        accs = [acc for acc, _, _ in new]
        for n, part in enumerate(zip(*weights, strict=True)):
            if n and cfg.has_options:
                sync_lanes()  # no value of the second product is loaded during the first: there are no registers for it
            accs = wide_mma.add_weighted_values(accs, part, values, **of_values)
        numbers = tuple((wide_mma.unpaired(acc), m, total) for acc, (_, m, total) in zip(accs, new, strict=True))
        return numbers, next_rows

    acc, *others = tiles.start_state(cfg.v_head_dim)
    start = ((wide_mma.unpaired(acc), *others),) * len(offsets)
    states, _ = tiles.loop_over_blocks(cfg, step, tiles.full_block_bounds(cfg, piece), (start, next_rows))
    for offset, (acc, m, total) in zip(offsets, states, strict=True):
        acc = wide_mma.paired(acc, cfg.v_head_dim)
        tiles.finish(cfg, refs, piece, (acc, m, lanes.complete_row_sums(total)), jnp.int32(offset))
