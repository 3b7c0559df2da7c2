"""Latent attention by warpgroups of different roles: one for scores and weights, two for values.

Warpgroup 2 multiplies queries and rows, keeps the running maxima and sums, and publishes the weights of each block.
Warpgroups 0 and 1 add weights times rows, each to its own half of the output's columns. The tensor cores work on block
b for warpgroups 0 and 1 while warpgroup 2 computes the scores of block b + 1.

A publication is: the weights of a block with the factors for what was added before; or, after a piece's last block, the
maxima and sums. There is one buffer: the next publication waits until both warpgroups have used the last one.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.mla_config import BLOCK_KV, STAGES, MlaKernelConfig
from pallas_kernels.gpu.mla_tile_sm90 import (
    MlaRefs,
    free_barrier,
    load_stats,
    row_stops,
    scores,
    store_piece,
    zero_past_end,
)
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, count_pieces, piece_from_list, receive_piece

COLUMNS = 128  # of one product: ptxas wants the operands of each instruction to fit in 128 registers


def score_pieces(cfg: MlaKernelConfig, refs: MlaRefs):
    """Warpgroup 2: scores and weights of the CTA's pieces in order."""

    def piece_body(j, blocks_before):
        piece = _load_queries(cfg, refs, j) if cfg.own_queries else receive_piece(cfg.attention, refs, j)
        stops, count = row_stops(cfg, piece), piece.count

        def step(i, state, masked):
            m, total = state
            dots = scores(cfg, refs, lax.rem(blocks_before + i, jnp.int32(STAGES)))
            if masked:
                kv0 = (piece[wl.BLK0] + piece.lo + i) * BLOCK_KV
                dots = rows.keep_columns(dots, stops - kv0)
                zero_past_end(cfg, refs, lax.rem(blocks_before + i, jnp.int32(STAGES)), piece[wl.SEQ] - kv0)
            factor = cfg.logits.scale * tiles.LOG2E
            new_m = jnp.maximum(m, dots.max(axis=1) * factor)
            p = jnp.exp2(dots * factor - tiles.across_columns(new_m, dots.shape))
            _publish(refs, blocks_before + j + i, jnp.exp2(m - new_m), weights=p.astype(cfg.dtype))
            return new_m, total * jnp.exp2(m - new_m) + p.sum(axis=1)

        state = tiles.start_state(BLOCK_KV)[1:]
        m, total = tiles.loop_over_blocks(cfg.attention, step, tiles.full_block_bounds(piece), state)
        if not cfg.own_queries:
            plgpu.barrier_arrive(refs.q_free.at[piece.buffer])  # from here on the piece's numbers may be replaced
        _publish(refs, blocks_before + j + count, m, total=total)
        return blocks_before + count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def _load_queries(cfg: MlaKernelConfig, refs: MlaRefs, j) -> Piece:
    """Piece j, whose queries this warpgroup loads itself: rows of the next piece are loaded before they are there."""
    piece = piece_from_list(cfg.attention, refs, j)
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS])
    kind = dict(group=cfg.group, heads=cfg.num_heads, dim=cfg.head_dim, dtype=cfg.dtype)
    rows.load_rows(refs.q, refs.q_tile.at[0, 0], *where, **kind)
    rows.await_rows()
    plgpu.commit_smem()
    return piece


def _publish(refs: MlaRefs, number, vector, *, weights=None, total=None):
    """Writes publication `number` of the CTA when the one before it has been used."""

    @when(number > 0)
    def _():
        plgpu.barrier_wait(refs.used)

    refs.stats[pl.ds(0, WARPGROUP_ROWS)] = vector
    if weights is not None:
        refs.weights[...] = weights
    if total is not None:
        refs.stats[pl.ds(WARPGROUP_ROWS, WARPGROUP_ROWS)] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.published.at[0])


def add_pieces(cfg: MlaKernelConfig, refs: MlaRefs, wg):
    """Warpgroup 0 or 1: adds the blocks of the CTA's pieces to its half of the columns, and stores them."""
    width = cfg.part if cfg.fine else COLUMNS
    columns = range(0, cfg.half, width)

    def piece_body(j, blocks_before):
        def step(i, accs):
            stage = lax.rem(blocks_before + i, jnp.int32(STAGES))
            plgpu.barrier_wait(refs.published.at[0])
            factor = load_stats(refs, 0)
            free = lambda part: plgpu.barrier_arrive(free_barrier(cfg, refs, stage, wg * (cfg.half // cfg.part) + part))
            accs = [acc * tiles.across_columns(factor, acc.shape) for acc in accs]

            def body(refs_of_acc):
                where = ptx.opaque(stage)
                for column, ref in zip(columns, refs_of_acc, strict=True):
                    part, inside = wg * (cfg.half // cfg.part) + column // cfg.part, column % cfg.part
                    values = refs.latent.at[where, part]
                    plgpu.wgmma(ref, refs.weights, values.at[:, pl.ds(inside, ref.shape[1])])
                if cfg.fine:  # the first product's part is free while the second one goes on
                    for left in reversed(range(len(columns))):
                        plgpu.wgmma_wait(left)
                        free(len(columns) - 1 - left)

            accs = pl.run_state(body)([plgpu.ACC.init(acc) for acc in accs])
            if not cfg.fine:
                free(0)
            plgpu.barrier_arrive(refs.used)
            return accs

        count = piece_from_list(cfg.attention, refs, j).count
        start = [tiles.start_state(min(width, cfg.half - column))[0] for column in columns]
        accs = lax.fori_loop(0, count, step, start)
        plgpu.barrier_wait(refs.published.at[0])
        m, total = load_stats(refs, 0), load_stats(refs, 1)
        plgpu.barrier_arrive(refs.used)
        piece = piece_from_list(cfg.attention, refs, j)
        for column, acc in zip(columns, accs, strict=True):
            store_piece(cfg, refs, piece, wg * cfg.half + column, acc, m, total)
        return blocks_before + count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))
