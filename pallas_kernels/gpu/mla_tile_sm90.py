"""Latent attention by warpgroups of different roles: one for scores and weights, two for values.

Warpgroup 2 multiplies queries and rows, keeps the running maxima and sums, and publishes the weights of each block.
Warpgroups 0 and 1 add weights times rows, each to its own half of the output's columns. The tensor cores work on block
b for warpgroups 0 and 1 while warpgroup 2 computes the scores of block b + 1.

The maximum of a row in use is replaced when a logit exceeds it by SLACK in base 2: weights are at most 2 ** SLACK, and
what was added is seldom multiplied by a factor other than 1. Sums and output have the same factor, so it cancels.

A publication is: the weights of a block with the factors for what was added before; or, after a piece's last block, the
maxima and sums. There is one buffer: the next publication waits until both warpgroups have used the last one.

No warpgroup waits for ever: all four read the same work list, so they agree on the pieces and on each piece's blocks.
A piece of n blocks, n >= 0, is n fills and n frees of each part and n + 1 publications, each used twice; a CTA without
a piece waits for nothing. Every wait is for something earlier in this order, so the first that is due can go on: load
of b, scores of b (published when b - 1 is used), addition of b, load of b + 2 where b was.

zero_past_end writes to a stage that nobody else reads yet: additions of b begin when its weights are published.
"""

import inspect

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import as_number, when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.gather_sm90 import gather
from pallas_kernels.gpu.mla_config import BLOCK_KV, SLACK, MlaKernelConfig
from pallas_kernels.gpu.mla_listed_sm90 import keep_listed
from pallas_kernels.gpu.mla_pieces_sm90 import MlaRefs, barrier_of, load_queries, order_of_parts, zero_past_end
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, count_pieces, piece_from_list


def score_pieces(cfg: MlaKernelConfig, refs: MlaRefs):
    """Warpgroup 2: scores and weights of the CTA's pieces in order."""

    def piece_body(j, blocks_before):
        piece = load_queries(cfg, refs, j)
        stops = _row_stops(cfg, piece)
        factor = cfg.logits.scale * tiles.LOG2E
        if cfg.is_decoded:
            factor = factor * _row_factors(cfg, refs, piece)

        def step(i, state, masked):
            m, total = state
            stage = _stage_of(cfg, blocks_before + i)
            dots = _scores(cfg, refs, stage)
            if cfg.listed:
                dots = keep_listed(dots, refs.listed, stage)
            if masked:
                kv0 = (piece[wl.BLK0] + piece.lo + i) * BLOCK_KV
                dots = rows.keep_columns(dots, stops - kv0)
                zero_past_end(cfg, refs, stage, piece[wl.SEQ] - kv0, commits=False)
            top = dots.max(axis=1) * factor
            new_m = jnp.where(top > m + (SLACK + cfg.bias), top - cfg.bias, m)
            logits = dots * (tiles.across_columns(factor, dots.shape) if cfg.is_decoded else factor)
            p = jnp.exp2(logits - tiles.across_columns(new_m, dots.shape))
            _publish(refs, blocks_before + j + i, jnp.exp2(m - new_m), weights=p.astype(cfg.dtype))
            return new_m, total * jnp.exp2(m - new_m) + p.sum(axis=1)

        state = tiles.start_state(BLOCK_KV)[1:]
        m, total = tiles.loop_over_blocks(cfg.attention, step, tiles.full_block_bounds(cfg.attention, piece), state)
        _publish(refs, blocks_before + j + piece.count, m, total=total)
        return blocks_before + piece.count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def _stage_of(cfg: MlaKernelConfig, number):
    """The stage in which block `number` of the CTA is multiplied."""
    return lax.rem(number, jnp.int32(cfg.stages)) if cfg.stages > 1 else jnp.int32(0)


def _row_stops(cfg: MlaKernelConfig, piece: Piece):
    """i32 (64,): row r sees keys 0 .. stop - 1."""
    packed = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=tiles.ROW_LAYOUT) + piece[wl.ROW0]
    q_pos = lax.div(packed, jnp.int32(cfg.group)) + piece[wl.QPOS0]
    causal = piece[wl.CAUSAL] != 0 if cfg.per_request_causal else None
    _, stop = key_range(cfg.mask, q_pos, q_pos, piece[wl.SEQ], causal)
    return plgpu.layout_cast(jnp.broadcast_to(stop, (WARPGROUP_ROWS,)), tiles.ROW_LAYOUT)


def _row_factors(cfg: MlaKernelConfig, refs: MlaRefs, piece: Piece):
    """f32 (64,): refs.factors of each row; of rows past the tile's end, that of its last one."""
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=tiles.ROW_LAYOUT)
    row = jnp.minimum(row, jnp.maximum(piece[wl.NROWS] - 1, 0)) + piece[wl.ROW0]
    token = lax.div(row, jnp.int32(cfg.group))
    head = piece[HEAD] * cfg.group + row - token * cfg.group
    return gather(refs.factors, (token + piece[wl.TOK0]) * cfg.num_heads + head, tiles.ROW_LAYOUT)


def _scores(cfg: MlaKernelConfig, refs: MlaRefs, number):
    """Dots f32 (64, 64) of the queries and the rows of stage `number`."""
    stage, zero = ptx.opaque(number), ptx.opaque(jnp.int32(0))
    q, width = refs.q_tile.at[zero], cfg.part

    def body(acc):
        for part in order_of_parts(cfg):
            plgpu.barrier_wait(refs.full.at[barrier_of(cfg, number, part)])
            plgpu.wgmma(acc, q.at[:, pl.ds(part * width, width)], refs.latent.at[stage, part].transpose((1, 0)))
            if part == 0:
                plgpu.barrier_wait(refs.rope_full.at[number])
                plgpu.wgmma(acc, q.at[:, pl.ds(cfg.latent_dim, cfg.rope_dim)], refs.rope.at[stage].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((WARPGROUP_ROWS, BLOCK_KV), jnp.float32))


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
    plgpu.barrier_arrive(refs.published)


def add_pieces(cfg: MlaKernelConfig, refs: MlaRefs, wg):
    """Warpgroup 0 or 1: adds the blocks of the CTA's pieces to its half of the columns, and stores them."""
    parts = range(cfg.parts_of_half)

    def piece_body(j, blocks_before):
        def step(i, accs):
            stage = _stage_of(cfg, blocks_before + i)
            plgpu.barrier_wait(refs.published)
            factor = _load_stats(refs, 0)
            accs = [rows.scale_rows(acc, factor) for acc in accs]

            def body(refs_of_acc):
                where = ptx.opaque(stage)
                for part, ref in zip(parts, refs_of_acc, strict=True):
                    plgpu.wgmma(ref, refs.weights, refs.latent.at[where, wg * cfg.parts_of_half + part])
                for part in parts:  # it is free while the products of the later ones go on
                    plgpu.wgmma_wait(cfg.parts_of_half - 1 - part)
                    plgpu.barrier_arrive(refs.free.at[barrier_of(cfg, stage, wg * cfg.parts_of_half + part)])

            accs = pl.run_state(body)([plgpu.ACC.init(acc) for acc in accs])
            plgpu.barrier_arrive(refs.used)
            return accs

        count = piece_from_list(cfg.attention, refs, j).count
        accs = lax.fori_loop(0, count, step, [tiles.start_state(cfg.part)[0] for _ in parts])
        plgpu.barrier_wait(refs.published)
        m, total = _load_stats(refs, 0), _load_stats(refs, 1)
        plgpu.barrier_arrive(refs.used)
        piece = piece_from_list(cfg.attention, refs, j)  # read again: its numbers would cost registers in the loop
        for part, acc in zip(parts, accs, strict=True):
            _store_piece(cfg, refs, piece, wg * cfg.half + part * cfg.part, acc, m, total)
        return blocks_before + count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def _load_stats(refs: MlaRefs, number):
    """f32 (64,): factors or maxima (0), or sums (1)."""
    place = refs.stats.at[pl.ds(WARPGROUP_ROWS * number, WARPGROUP_ROWS)]
    idx = inspect.signature(plgpu.load).parameters.get("idx")
    index = ((),) if idx is not None and idx.default is inspect.Parameter.empty else ()  # JAX before 0.11 needs one
    return plgpu.load(place, *index, layout=tiles.ROW_LAYOUT)


def _store_piece(cfg: MlaKernelConfig, refs: MlaRefs, piece: Piece, column, acc, m, total):
    """Stores the output's columns from `column` on, to out or to the CTA's slot of partial results."""
    nrows = piece[wl.NROWS]

    @when(piece.is_part)
    def _():
        safe = jnp.where(total > 0.0, total, 1.0)
        lse = jnp.where(total > 0.0, m + lax.log(safe) * tiles.LOG2E, -jnp.inf)
        slot = 2 * lax.axis_index("cta") + as_number(piece.lo == 0)
        out = acc * tiles.across_columns(1.0 / safe, acc.shape)
        zero = jnp.int32(0)
        rows.store_partial(refs.part, refs.part_lse, out, lse, slot, zero, nrows, column, stride=cfg.latent_dim)

    @when(jnp.logical_not(piece.is_part))
    def _():
        factor, lse = tiles.finish_rows(m, total, None)
        out = acc * tiles.across_columns(factor, acc.shape)
        kind = dict(group=cfg.group, heads=cfg.num_heads, stride=cfg.latent_dim)
        where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0])
        rows.store_rows(refs.out, refs.lse, out, lse, *where, nrows, column, **kind)

        @when(nrows > WARPGROUP_ROWS)  # padding tokens: all rows are (0, -inf)
        def _():
            where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0] + WARPGROUP_ROWS)
            rows.store_rows(refs.out, refs.lse, out, lse, *where, nrows - WARPGROUP_ROWS, column, **kind)
