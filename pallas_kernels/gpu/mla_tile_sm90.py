"""The warpgroups' work on one piece of latent attention.

Block b of a CTA, counted over all its pieces, lies in stage b % 2. Compute warpgroup b % 2 is its owner: it multiplies
queries and rows, and computes the weights. Both warpgroups then add weights times rows, each to its own half of the
output's columns, in the order of the blocks. Warpgroup w, at its block b:

    scores of b  ->  add block b - 1 (when its owner has published it)  ->  weights of b, published  ->  add block b

The tensor cores thus work for one warpgroup while the other computes its softmax.

Published weights and maxima have one buffer, and no barrier frees it. Block b - 1 in it is read by the owner of block b
alone, which has added it before it writes block b; the owner of block b - 1 adds from its registers.

Part h of a stage, a half, is free when warpgroup h has added the block. The owner reads both for its scores, but before
it publishes the weights, so before any warpgroup adds the block.
"""

import dataclasses
import functools
import inspect

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.branch import as_number, when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.mla_config import BLOCK_KV, STAGES, MlaKernelConfig
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, count_pieces, piece_from_list, send_piece


@dataclasses.dataclass(frozen=True)
class MlaRefs:
    """Every Ref of the kernel, with its shape."""

    q: object  # GMEM [T, H, L+R]
    latents: object  # GMEM [N, S, L], or [N, S, L+R] with whole_rows
    ropes: object  # GMEM [N, S, R], or the same pool
    block_table: object  # GMEM i32[R, B]
    info: object  # GMEM i32[tiles, 16]
    cta: object  # GMEM i32[C, 12]
    out: object  # GMEM [T, H, L]
    lse: object  # GMEM f32[T, H]
    part: object  # GMEM f32[2 C, 128, L]: normalised partial outputs
    part_lse: object  # GMEM f32[2 C, 128], base 2
    q_tile: object  # SMEM [1, 1, 64, L+R]
    latent: object  # SMEM [2, parts, 64, L/parts]: stage, part of the latent columns, row, column
    rope: object  # SMEM [2, 64, R]
    weights: object  # SMEM [64, 64]: of the block last published
    stats: object  # SMEM f32[192]: the maxima after that block; the sums of warpgroups 0 and 1
    piece_box: object  # SMEM i32[1, 16]: the numbers of the piece, see Piece
    rope_full: object  # barriers [2]; one arrival a page
    full: object  # barriers [2 parts], number stage * parts + part; one arrival a page
    free: object  # barriers [2 parts]; the warpgroup that has these columns has added the block
    published: object  # barriers [2]: of each owner
    q_full: object  # barrier [1]
    q_free: object  # barrier [1]; one arrival a compute warpgroup
    compute_barrier: object  # of the two compute warpgroups: exchange of sums
    used: object  # barrier; warpgroups 0 and 1 have used the last publication: see mla_roles_sm90.py


def load_latents(cfg: MlaKernelConfig, refs: MlaRefs):
    """The memory warpgroup: fetches the queries of each piece and the rows of each block."""
    page, attention = cfg.page_size, cfg.attention
    copies, width = max(BLOCK_KV // page, 1), min(page, BLOCK_KV)

    def load_piece(j, block_number):
        if cfg.own_queries:
            piece = piece_from_list(attention, refs, j)
            count = piece.count
        else:
            count = send_piece(attention, refs, j).count
            piece = Piece(lambda column: refs.piece_box[0, column], 0)  # read at each use: registers are few here

        def page_ids(i):
            first = lax.div(piece[wl.KSTART], jnp.int32(page))
            last = jnp.maximum(lax.div(piece[wl.KSTOP] - 1, jnp.int32(page)), first)
            column = lax.div((piece[wl.BLK0] + piece.lo + i) * BLOCK_KV, jnp.int32(page))
            return tuple(refs.block_table[piece[wl.REQ], jnp.clip(column + p, first, last)] for p in range(copies))

        def load_block(i, carry):
            number, pages = carry
            next_pages = page_ids(i + 1)  # loaded while this block waits for its stage
            stage = lax.rem(number, jnp.int32(STAGES))
            key = (piece[wl.BLK0] + piece.lo + i) * BLOCK_KV
            offset = pl.multiple_of(lax.rem(key, jnp.int32(page)), 8) if width < page else 0

            def fill(pool, column, columns, tile, full):
                for p in range(copies):
                    source = pool.at[pages[p], pl.ds(offset, width), pl.ds(column, columns)]
                    plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(p * width, width)], full)

            for part in order_of_parts(cfg):
                free = free_barrier(cfg, refs, stage, part)
                when(number >= STAGES)(functools.partial(plgpu.barrier_wait, free))
                full = refs.full.at[_barrier(cfg, stage, part)]
                fill(refs.latents, part * cfg.part, cfg.part, refs.latent.at[stage, part], full)
                if part == 0:
                    rope_column = cfg.latent_dim if cfg.whole_rows else 0
                    fill(refs.ropes, rope_column, cfg.rope_dim, refs.rope.at[stage], refs.rope_full.at[stage])
            return number + 1, next_pages

        return lax.fori_loop(0, count, load_block, (block_number, page_ids(0)))[0]

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), load_piece, jnp.int32(0))


def order_of_parts(cfg: MlaKernelConfig) -> list[int]:
    """The parts of a stage in the order in which they become free: the first of each warpgroup, then the second."""
    count = cfg.latent_dim // cfg.part
    return sorted(range(count), key=lambda part: part % (count // 2))


def _barrier(cfg: MlaKernelConfig, stage, part):
    return stage * (cfg.latent_dim // cfg.part) + part


def free_barrier(cfg: MlaKernelConfig, refs: MlaRefs, stage, part):
    """Part `part` of stage `stage` has been added."""
    return refs.free.at[_barrier(cfg, stage, part)]


def latent_tile(cfg: MlaKernelConfig, refs: MlaRefs, piece: Piece, wg, blocks_before):
    """At most 64 rows over the blocks of the piece; warpgroup `wg` computes its half of the output's columns."""
    n = piece.count
    own0 = lax.rem(blocks_before + wg, jnp.int32(STAGES))  # the piece's first block that wg owns: 0 or 1
    owned = lax.div(n - own0 + 1, jnp.int32(2))
    add = functools.partial(_add_block, cfg, refs, wg)
    add_other = functools.partial(_add_published, refs, wg, add)

    def step(t, state):
        j = 2 * t + own0
        if cfg.add_first:
            state = lax.fori_loop(0, as_number(j > 0), add_other, state)
        dots = scores(cfg, refs, wg)
        if not cfg.add_first:
            state = lax.fori_loop(0, as_number(j > 0), add_other, state)
        kv0 = (piece[wl.BLK0] + piece.lo + j) * BLOCK_KV
        dots = rows.keep_columns(dots, row_stops(cfg, piece) - kv0)
        zero_past_end(cfg, refs, wg, piece[wl.SEQ] - kv0)
        acc, m, total = state
        factor = cfg.logits.scale * tiles.LOG2E
        new_m = jnp.maximum(m, dots.max(axis=1) * factor)
        p = jnp.exp2(dots * factor - tiles.across_columns(new_m, dots.shape))
        weights, row_sum = p.astype(cfg.dtype), p.sum(axis=1)
        refs.weights[...] = weights
        refs.stats[pl.ds(0, WARPGROUP_ROWS)] = new_m
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.published.at[wg])
        acc, m, total = add(wg, weights, new_m, (acc, m, total))
        return acc, m, total + row_sum

    state = lax.fori_loop(0, owned, step, tiles.start_state(cfg.half))
    last_is_other = lax.rem(n - own0, jnp.int32(2)) == 0
    state = lax.fori_loop(0, as_number(last_is_other & (n > 0)), add_other, state)
    _finish(cfg, refs, piece, wg, state)


def row_stops(cfg: MlaKernelConfig, piece: Piece):
    """i32 (64,): row r sees keys 0 .. stop - 1."""
    packed = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=tiles.ROW_LAYOUT) + piece[wl.ROW0]
    q_pos = lax.div(packed, jnp.int32(cfg.group)) + piece[wl.QPOS0]
    causal = piece[wl.CAUSAL] != 0 if cfg.per_request_causal else None
    _, stop = key_range(cfg.mask, q_pos, q_pos, piece[wl.SEQ], causal)
    return plgpu.layout_cast(jnp.broadcast_to(stop, (WARPGROUP_ROWS,)), tiles.ROW_LAYOUT)


def scores(cfg: MlaKernelConfig, refs: MlaRefs, number):
    """Dots f32 (64, 64) of the queries and the rows of stage `number`."""
    stage, zero = ptx.opaque(number), ptx.opaque(jnp.int32(0))
    q, width = refs.q_tile.at[zero, 0], cfg.part

    def body(acc):
        for part in order_of_parts(cfg):
            plgpu.barrier_wait(refs.full.at[_barrier(cfg, number, part)])
            plgpu.wgmma(acc, q.at[:, pl.ds(part * width, width)], refs.latent.at[stage, part].transpose((1, 0)))
            if part == 0:
                plgpu.barrier_wait(refs.rope_full.at[number])
                plgpu.wgmma(acc, q.at[:, pl.ds(cfg.latent_dim, cfg.rope_dim)], refs.rope.at[stage].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((WARPGROUP_ROWS, BLOCK_KV), jnp.float32))


def zero_past_end(cfg: MlaKernelConfig, refs: MlaRefs, stage, count):
    """Zeroes the latents of this stage from row `count`: they may be NaN, and 0 * NaN is NaN."""

    @when(count < BLOCK_KV)
    def _():
        for part in order_of_parts(cfg):
            tile = refs.latent.at[stage, part]
            rows.zero_rows(tile, jnp.int32(0), count, rows=BLOCK_KV, dim=cfg.part, dtype=cfg.dtype)


def _add_block(cfg: MlaKernelConfig, refs: MlaRefs, wg, stage, weights, new_m, state):
    """The state after adding the block in `stage`, without its row sums. weights: registers or SMEM [64, 64]."""
    acc, m, total = state
    alpha = jnp.exp2(m - new_m)

    def body(ref):
        plgpu.wgmma(ref, weights, refs.latent.at[ptx.opaque(stage), wg])

    acc = pl.run_state(body)(plgpu.ACC.init(acc * tiles.across_columns(alpha, acc.shape)))
    plgpu.barrier_arrive(free_barrier(cfg, refs, stage, wg))
    return acc, new_m, total * alpha


def _add_published(refs: MlaRefs, wg, add, _, state):
    """The state after adding the other warpgroup's block. The body of a loop that runs at most once (an `if`)."""
    other = 1 - wg
    plgpu.barrier_wait(refs.published.at[other])
    new_m = load_stats(refs, 0)
    return add(other, refs.weights, new_m, state)


def _finish(cfg: MlaKernelConfig, refs: MlaRefs, piece: Piece, wg, state):
    """Adds both warpgroups' sums and stores this one's columns."""
    acc, m, own = state
    refs.stats[pl.ds(WARPGROUP_ROWS * (1 + wg), WARPGROUP_ROWS)] = own
    _meet(refs)
    total = own + load_stats(refs, 2 - wg)
    _meet(refs)  # the sums have been read; the next piece may replace them
    store_piece(cfg, refs, piece, wg * cfg.half, acc, m, total)


def store_piece(cfg: MlaKernelConfig, refs: MlaRefs, piece: Piece, column, acc, m, total):
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


def load_stats(refs: MlaRefs, number):
    """f32 (64,): the maxima (0), or the sums of warpgroup 0 (1) or 1 (2)."""
    place = refs.stats.at[pl.ds(WARPGROUP_ROWS * number, WARPGROUP_ROWS)]
    idx = inspect.signature(plgpu.load).parameters.get("idx")
    index = ((),) if idx is not None and idx.default is inspect.Parameter.empty else ()  # JAX before 0.11 needs one
    return plgpu.load(place, *index, layout=tiles.ROW_LAYOUT)


def _meet(refs: MlaRefs):
    """Waits until both compute warpgroups are here."""
    plgpu.barrier_arrive(refs.compute_barrier)
    plgpu.barrier_wait(refs.compute_barrier)
