"""Narrow tiles, of at most 16 query rows: every warp computes 16 of each 64 keys for all rows, and waits for no other.

The products are warp_mma_sm80.py's. Each warp keeps its own maximum, sum and output; the four states are merged at the
end of the piece.
"""

import jax.numpy as jnp

from pallas_kernels.gpu import warp_mma_sm80 as warp_mma
from pallas_kernels.gpu import wide_mma_sm80 as wide_mma
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.copies_sm80 import WARPS, sync_lanes, sync_warps
from pallas_kernels.gpu.narrow_sm90 import logits, merge_warps, query_bounds
from pallas_kernels.gpu.pieces_sm80 import BlockReader
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs
from pallas_kernels.gpu.tiles_sm90 import full_block_bounds, loop_over_blocks
from pallas_kernels.gpu.token_scales_sm90 import multiply_per_key


def narrow_tile(cfg: WarpKernelConfig, refs: Refs, piece: Piece):
    """At most cfg.narrow_rows rows over the piece's blocks of 64 keys."""
    rows8, reader = cfg.narrow_rows // 8, BlockReader(cfg, refs, piece, warps=1)
    both = dict(rows8=rows8, source=cfg.kv_dtype, converts_fp8=cfg.converts_fp8, hidden=True)
    of_keys = dict(dim=cfg.head_dim, target=cfg.dtype, stored=cfg.stored_queries, **both)
    of_values = dict(dim=cfg.v_head_dim, target=cfg.value_dtype, parts=cfg.weight_parts, shuffles=False, **both)
    of_values |= dict(apart=cfg.stored_queries and cfg.quantised and cfg.has_options)
    next_rows = reader.start()
    queries = _load_queries(cfg, refs, piece)
    scale = refs.scales[piece[HEAD], 0]
    by_row = cfg.logits.has_alibi or cfg.logits.score_fn is not None
    again = cfg.narrow_rows > 8  # what belongs to rows is computed in each block: there are no registers for it
    kept_bounds = None if again else query_bounds(cfg, refs, piece)
    first = jnp.int32(0)  # of the block's keys
    start = warp_mma.start_state(rows8=rows8, dim=cfg.v_head_dim)
    widths = [x.shape[1] for x in start]
    paired = lambda singles: tuple(wide_mma.paired(x, width) for x, width in zip(singles, widths, strict=True))

    def step(j, carry, masked):
        *singles, next_rows = carry
        acc, stats = paired(singles)
        slot = reader.slot(j)
        reader.wait_for_keys(j)
        key_scales, _ = reader.token_scales(slot, 0)
        dots = warp_mma.keys_times_queries(refs.k_tile.at[slot], queries, first, **of_keys)
        dots = multiply_per_key(dots, key_scales, 0)
        bounds = kept_bounds
        if again and (masked or by_row):
            sync_lanes()  # no load of what belongs to rows is moved among the products
            bounds = query_bounds(cfg, refs, piece, masked)
        x, factor = logits(cfg, bounds, dots, reader.first_key + j * cfg.block_kv, scale, masked)
        _, value_scales = reader.token_scales(slot, 0)  # not before: they would be in registers during the products
        next_rows = reader.wait_for_values(j, next_rows)
        value_tile = refs.v_tile.at[slot]
        state = warp_mma.softmax_times_values(value_tile, x, factor, acc, stats, first, value_scales, **of_values)
        return *map(wide_mma.unpaired, state), next_rows

    blocks = full_block_bounds(cfg, piece)
    *singles, _ = loop_over_blocks(cfg, step, blocks, (*map(wide_mma.unpaired, start), next_rows))
    _merge_in_keys(cfg, refs, piece, paired(singles))


def _load_queries(cfg: WarpKernelConfig, refs: Refs, piece: Piece):
    """The queries as warp_mma.keys_times_queries takes them: in registers, or with stored_queries in shared memory."""
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS])
    kind = dict(rows8=cfg.narrow_rows // 8, dim=cfg.head_dim, dtype=cfg.dtype, group=cfg.group, heads=cfg.num_heads)
    queries = warp_mma.load_queries(refs.q, *where, **kind, decoded=cfg.quantised)
    if not cfg.stored_queries:
        return queries
    warp_mma.put_queries(refs.q_tile.at[0], queries, dim=cfg.head_dim, dtype=cfg.dtype)
    sync_lanes()
    return refs.q_tile.at[0]


def _merge_in_keys(cfg: WarpKernelConfig, refs: Refs, piece: Piece, state):
    """Merges the states of the four warps in memory that is no longer used; cfg.least_stages says when it is enough.

    That is the tile of decoded keys, where wide tiles have one, or else all stages of keys.
    """
    tile, dtype = (refs.k_tile, cfg.kv_dtype) if refs.decoded is None else (refs.decoded, cfg.dtype)
    scratch, first = (tile, refs.stats), jnp.int32(0)
    merge_warps(cfg, refs, piece, state, first, scratch, dtype, sync_warps, count=WARPS, shuffles=False)
