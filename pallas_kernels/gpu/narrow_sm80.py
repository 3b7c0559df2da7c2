"""Narrow tiles, of at most 16 query rows: every warp computes 16 of each 64 keys for all rows, and waits for no other.

The products are warp_mma_sm80.py's. Each warp keeps its own maximum, sum and output; the four states are merged at the
end of the piece.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import warp_mma_sm80 as warp_mma
from pallas_kernels.gpu import wide_mma_sm80 as wide_mma
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.branch import as_number
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.copies_sm80 import WARPS, sync_lanes, sync_warps
from pallas_kernels.gpu.narrow_sm90 import logits, query_bounds
from pallas_kernels.gpu.pieces_sm80 import BlockReader
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs
from pallas_kernels.gpu.tiles_sm90 import full_block_bounds, loop_over_blocks
from pallas_kernels.gpu.token_scales_sm90 import multiply_per_key


def narrow_tile(cfg: WarpKernelConfig, refs: Refs, piece: Piece):
    """At most cfg.narrow_rows rows over the piece's blocks of 64 keys."""
    rows8, reader = cfg.narrow_rows // 8, BlockReader(cfg, refs, piece, 1)
    kind = dict(rows8=rows8, source=cfg.kv_dtype, converts_fp8=cfg.converts_fp8, hidden=True)
    keys = dict(dim=cfg.head_dim, target=cfg.dtype, stored=cfg.stored_queries, **kind)
    values = dict(dim=cfg.v_head_dim, target=cfg.value_dtype, parts=cfg.weight_parts, shuffles=False, **kind)
    values |= dict(apart=cfg.stored_queries and cfg.quantised and cfg.has_options)
    next_rows = reader.start()
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS])
    kind = dict(rows8=rows8, dim=cfg.head_dim, dtype=cfg.dtype, group=cfg.group, heads=cfg.num_heads)
    queries = warp_mma.load_queries(refs.q, *where, **kind, decoded=cfg.quantised)
    if cfg.stored_queries:
        warp_mma.put_queries(refs.q_tile.at[0], queries, dim=cfg.head_dim, dtype=cfg.dtype)
        sync_lanes()
        queries = refs.q_tile.at[0]
    scale = refs.scales[piece[HEAD], 0]
    by_row = cfg.logits.has_alibi or cfg.logits.score_fn is not None
    again = cfg.narrow_rows > 8  # what belongs to rows is computed in each block: there are no registers for it
    column = None if again else query_bounds(cfg, refs, piece)
    first = jnp.int32(0)

    def step(j, carry, masked):
        acc, stats = (wide_mma.paired(x, width) for x, width in zip(carry[:2], widths, strict=True))
        next_rows = carry[2]
        slot = reader.slot(j)
        reader.keys(j)
        of_keys, _ = reader.token_scales(slot, 0)
        dots = warp_mma.keys_times_queries(refs.k_tile.at[slot], queries, first, **keys)
        dots = multiply_per_key(dots, of_keys, 0)
        own = column
        if again and (masked or by_row):
            sync_lanes()  # no load of what belongs to rows is moved among the products
            own = query_bounds(cfg, refs, piece, masked)
        x, factor = logits(cfg, own, dots, reader.first_key + j * cfg.block_kv, scale, masked)
        _, of_values = reader.token_scales(slot, 0)  # not before: they would be in registers during the products
        next_rows = reader.values(j, next_rows)
        state = warp_mma.softmax_times_values(refs.v_tile.at[slot], x, factor, acc, stats, first, of_values, **values)
        return *map(wide_mma.unpaired, state), next_rows

    start = warp_mma.start_state(rows8=rows8, dim=cfg.v_head_dim)
    widths = [x.shape[1] for x in start]
    state = loop_over_blocks(cfg, step, full_block_bounds(piece), (*map(wide_mma.unpaired, start), next_rows))
    acc, stats = (wide_mma.paired(x, width) for x, width in zip(state[:2], widths, strict=True))
    _merge_warps(cfg, refs, piece, acc, stats)


def _merge_warps(cfg: WarpKernelConfig, refs: Refs, piece: Piece, acc, stats):
    """Merges the states of the four warps, eight rows at a time, in the buffers of the keys, no longer used.

    Two of them, if the keys have 8 bits, or the buffer of decoded keys.
    """
    decodes = refs.decoded is not None
    scratch, wg = (refs.decoded if decodes else refs.k_tile, refs.stats), jnp.int32(0)
    q_dtype = cfg.dtype if decodes else cfg.kv_dtype
    kind = dict(dim=cfg.v_head_dim, q_dim=cfg.head_dim, q_dtype=q_dtype, warps=WARPS)
    slot = 2 * lax.axis_index("cta") + as_number(piece.lo == 0)
    part = (as_number(piece.is_part), slot)
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS], wg)
    for n in range(cfg.narrow_rows // 8):
        sync_warps()
        decoded, rows8 = cfg.quantised, cfg.narrow_rows // 8
        warp_mma.put_state(*scratch, acc, stats, wg, n, rows8=rows8, decoded=decoded, shuffles=False, **kind)
        sync_warps()
        for line in range(8 // WARPS):
            warp_mma.merge_and_store(
                *scratch, refs, part, refs.scales[piece[HEAD], 1], 1, where, n=n, line=line, group=cfg.group,
                heads=cfg.num_heads, has_sinks=cfg.has_sinks, out_dtype=cfg.result_dtype, **kind,
            )  # fmt: skip
