"""Wide tiles: 64 query rows, or 128, over all keys of a piece; 16 of each 64 rows to a warp. FlashAttention-2's way."""

import jax.numpy as jnp

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import wide_mma_sm80 as wide_mma
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.copies_sm80 import WARPS, sync_warps
from pallas_kernels.gpu.pieces_sm80 import BlockReader
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs


def wide_tile(cfg: WarpKernelConfig, refs: Refs, piece: Piece):
    """Up to 128 rows: both halves at the same time, or one after the other."""
    if cfg.tile_halves == 2 or not cfg.long_tiles:
        return _rows(cfg, refs, piece, 0)
    _rows(cfg, refs, piece, 0)

    @when(piece[wl.NROWS] > WARPGROUP_ROWS)
    def _():
        sync_warps()  # no warp reads the first half's keys any longer
        _rows(cfg, refs, piece, WARPGROUP_ROWS)


def _rows(cfg: WarpKernelConfig, refs: Refs, piece: Piece, first: int):
    """Rows first .. first + 64 * tile_halves - 1 of the tile."""
    offsets = [first + WARPGROUP_ROWS * half for half in range(cfg.tile_halves)]
    kind = dict(group=cfg.group, heads=cfg.num_heads, dim=cfg.head_dim, dtype=cfg.dtype, hidden=True)
    for half, offset in enumerate(offsets):
        where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0] + offset, piece[wl.NROWS] - offset)
        rows.load_rows(refs.q, refs.q_tile.at[half], *where, **kind)
    reader = BlockReader(cfg, refs, piece, WARPS)
    ids = reader.start()  # its first group of copies has the queries too
    by_row = cfg.logits.has_alibi or cfg.logits.score_fn is not None
    bounds = lambda: [tiles.row_bounds(cfg, refs, piece, jnp.int32(offset)) for offset in offsets]
    rows_of_all = bounds() if by_row else None  # else not in registers while blocks without a mask are computed
    scale = refs.scales[piece[HEAD], 0]

    def step(j, carry, masked):
        states, ids = carry
        slot, kv0 = reader.slot(j), reader.first_key + j * cfg.block_kv
        reader.keys(j, ids)
        kind = dict(halves=cfg.tile_halves, block=cfg.block_kv, dim=cfg.head_dim, dtype=cfg.dtype)
        dots = wide_mma.queries_times_keys(refs.q_tile, refs.k_tile.at[slot], **kind)
        new, weights = [], []
        own = rows_of_all or (bounds() if masked else [None] * cfg.tile_halves)
        for row, x, (acc, m, total) in zip(own, dots, states, strict=True):
            x, c = tiles.logits(cfg, row, x, kv0, scale, masked)
            p, m, total, acc = tiles.softmax_step(cfg, x, c, m, total, acc)
            new.append((acc, m, total + p.sum(axis=1)))
            weights.append(p.astype(cfg.value_dtype))
        ids = reader.values(j, ids)
        kind = dict(block=cfg.block_kv, dim=cfg.v_head_dim, dtype=cfg.value_dtype)
        accs = wide_mma.add_weighted_values([acc for acc, _, _ in new], weights, refs.v_tile.at[slot], **kind)
        return tuple((acc, m, total) for acc, (_, m, total) in zip(accs, new, strict=True)), ids

    start = tuple(tiles.start_state(cfg.v_head_dim) for _ in offsets)
    states, _ = tiles.loop_over_blocks(cfg, step, tiles.full_block_bounds(piece), (start, ids))
    for offset, state in zip(offsets, states, strict=True):
        tiles.finish(cfg, refs, piece, state, jnp.int32(offset))
