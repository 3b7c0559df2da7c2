"""The Refs of the latent attention kernel, and the memory warpgroup, which fetches rows ahead of use.

Block b of a CTA, counted over all its pieces, lies in stage b % 2; the narrow kernel has more stages. A stage is filled
and freed in parts of at most 128 latent columns: the next load of a part begins when its product ends, and scores begin
when the first part is there.

A cache of 8 bits: block b is loaded into raw stage b % 2, and decoded into the one stage that is multiplied when the
products of block b - 1 end, part after part. A raw part is loaded again when it has been decoded.
"""

import dataclasses
import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.decode_sm90 import decode_tile
from pallas_kernels.gpu.mla_config import BLOCK_KV, MlaKernelConfig
from pallas_kernels.gpu.pieces_sm90 import HEAD, WARPS, Piece, count_pieces, piece_from_list


@dataclasses.dataclass(frozen=True)
class MlaRefs:
    """Every Ref of the kernel, with its shape."""

    q: object  # GMEM [T, H, L+R]
    latents: object  # GMEM [N, S, L], or [N, S, L+R] with whole_rows
    ropes: object  # GMEM [N, S, R], or the same pool
    block_table: object  # GMEM i32[R, B]; of listed keys i32[T, n], rows of the pool or -1
    info: object  # GMEM i32[tiles, 16]
    cta: object  # GMEM i32[C, 16]
    factors: object  # GMEM f32[T, H]: of the logits, with a cache of 8 bits; None without one
    out: object  # GMEM [T, H, L]
    lse: object  # GMEM f32[T, H]
    part: object  # GMEM f32[2 C, 128, L]: normalised partial outputs
    part_lse: object  # GMEM f32[2 C, 128], base 2
    q_tile: object  # SMEM [1, 64, L+R]; None in the narrow kernel
    latent: object  # SMEM [stages, parts, 64, L/parts]: stage, part of the latent columns, row, column
    rope: object  # SMEM [stages, 64, R]
    weights: object  # SMEM [64, 64]: of the block last published. Narrow: see mla_narrow_sm90.py; stats too
    stats: object  # SMEM f32[160]: factors of that block; or the maxima and sums of a piece
    rope_full: object  # barriers [stages]; one arrival a page, or one when it is decoded
    full: object  # barriers [stages * parts], number stage * parts + part; arrivals as above
    free: object  # barriers [stages * parts]; the warpgroup that has these columns has added the block
    published: object  # barrier; weights and stats are written
    used: object  # barrier; both warpgroups that add have read them
    listed: object = None  # SMEM i32[stages, 64] entries of the lists; None: whole pages are loaded
    raw_latent: object = None  # SMEM [2, parts, 64, L/parts] of a cache of 8 bits, as cached; None without one
    raw_rope: object = None  # SMEM [2, 64, R]
    raw_rope_full: object = None  # barriers [2]; one arrival a page
    raw_full: object = None  # barriers [2 parts]


def load_latents(cfg: MlaKernelConfig, refs: MlaRefs):
    """The memory warpgroup: fetches the rows of each block of the CTA's pieces in order."""
    page = cfg.page_size
    copies, width = max(BLOCK_KV // page, 1), min(page, BLOCK_KV)

    def load_piece(j, block_number):
        piece = piece_from_list(cfg.attention, refs, j)

        def page_ids(i):
            first = lax.div(piece[wl.KSTART], jnp.int32(page))
            last = jnp.maximum(lax.div(piece[wl.KSTOP] - 1, jnp.int32(page)), first)
            column = lax.div((piece[wl.BLK0] + piece.lo + i) * BLOCK_KV, jnp.int32(page))
            return tuple(refs.block_table[piece[wl.REQ], jnp.clip(column + p, first, last)] for p in range(copies))

        def load_block(i, carry):
            number, pages = carry
            next_pages = page_ids(i + 1)  # loaded while this block waits for its stage
            stage = lax.rem(number, jnp.int32(cfg.loaded_stages))
            latent, full, rope, rope_full = _targets(cfg, refs)
            key = (piece[wl.BLK0] + piece.lo + i) * BLOCK_KV
            offset = pl.multiple_of(lax.rem(key, jnp.int32(page)), 8) if width < page else 0

            def fill(pool, column, columns, tile, full):
                def copy(p, page_id):
                    source = pool.at[page_id, pl.ds(offset, width), pl.ds(column, columns)]
                    plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(p * width, width)], full)

                _each_copy(pages, copy)

            for part in order_of_parts(cfg):
                barrier = barrier_of(cfg, stage, part)
                when(number >= cfg.loaded_stages)(
                    functools.partial(_empty_part, cfg, refs, number - cfg.loaded_stages, part)
                )
                fill(refs.latents, part * cfg.part, cfg.part, latent.at[stage, part], full.at[barrier])
                if part == 0:
                    rope_column = cfg.latent_dim if cfg.whole_rows else 0
                    fill(refs.ropes, rope_column, cfg.rope_dim, rope.at[stage], rope_full.at[stage])
            return number + 1, next_pages

        return lax.fori_loop(0, piece.count, load_block, (block_number, page_ids(0)))[0]

    total = lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), load_piece, jnp.int32(0))
    if cfg.decodes_tiles:

        def decode_block(number, _):
            for part in order_of_parts(cfg):
                _empty_part(cfg, refs, number, part)

        lax.fori_loop(jnp.maximum(total - cfg.loaded_stages, 0), total, decode_block, None)


def _each_copy(pages: tuple, copy):
    """copy(p, pages[p]) for each page of a part, begun by warp p % WARPS of this warpgroup; fewer than WARPS by all."""
    if len(pages) % WARPS:
        for p, page in enumerate(pages):
            copy(p, page)
        return

    @plgpu.warp_map
    def _(warp):
        for first in range(0, len(pages), WARPS):
            page = pages[first]
            for other in range(1, WARPS):
                page = jnp.where(warp == other, pages[first + other], page)
            copy(first + warp, page)


def _targets(cfg: MlaKernelConfig, refs: MlaRefs):
    """Where rows are loaded: the stages of latents, their barriers, the stages of rotated keys, their barriers."""
    if cfg.decodes_tiles:
        return refs.raw_latent, refs.raw_full, refs.raw_rope, refs.raw_rope_full
    return refs.latent, refs.full, refs.rope, refs.rope_full


def _empty_part(cfg: MlaKernelConfig, refs: MlaRefs, number, part: int):
    """Returns when this part of block `number` may be overwritten where it was loaded; 8 bits are decoded first."""
    stage = lax.rem(number, jnp.int32(cfg.loaded_stages))
    if not cfg.decodes_tiles:
        plgpu.barrier_wait(refs.free.at[barrier_of(cfg, stage, part)])
        return
    kind = dict(rows=BLOCK_KV, source=cfg.cache_dtype, target=cfg.dtype)
    plgpu.barrier_wait(refs.raw_full.at[barrier_of(cfg, stage, part)])
    when(number > 0)(lambda: plgpu.barrier_wait(refs.free.at[part]))
    decode_tile(refs.raw_latent.at[stage, part], refs.latent.at[0, part], dim=cfg.part, **kind)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.full.at[part])
    if part == 0:
        plgpu.barrier_wait(refs.raw_rope_full.at[stage])
        decode_tile(refs.raw_rope.at[stage], refs.rope.at[0], dim=cfg.rope_dim, **kind)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.rope_full.at[0])


def zero_past_end(cfg: MlaKernelConfig, refs: MlaRefs, stage, count, commits: bool):
    """Zeroes the latents of this stage from row `count`: they may be NaN, and 0 * NaN is NaN.

    commits: before TMA writes here again; False: the caller commits later.
    """

    @when(count < BLOCK_KV)
    def _():
        for part in order_of_parts(cfg):
            tile = refs.latent.at[stage, part]
            rows.zero_rows(tile, jnp.int32(0), count, rows=BLOCK_KV, dim=cfg.part, dtype=refs.latent.dtype)
        if commits:
            plgpu.commit_smem()


def order_of_parts(cfg: MlaKernelConfig) -> list[int]:
    """The parts of a stage in the order in which they become free: the first of each warpgroup, then the second."""
    return sorted(range(2 * cfg.parts_of_half), key=lambda part: part % cfg.parts_of_half)


def barrier_of(cfg: MlaKernelConfig, stage, part):
    """The number of this part's barrier in `full` and in `free`."""
    return stage * 2 * cfg.parts_of_half + part


def load_queries(cfg: MlaKernelConfig, refs: MlaRefs, j) -> Piece:
    """Piece j, with its queries in shared memory. Called by the warpgroup that multiplies them."""
    piece = piece_from_list(cfg.attention, refs, j)
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], piece[wl.NROWS])
    kind = dict(group=cfg.group, heads=cfg.num_heads, dim=cfg.head_dim, dtype=cfg.dtype)
    rows.load_rows(refs.q, refs.q_tile.at[0], *where, **kind)
    rows.await_rows()
    plgpu.commit_smem()
    return piece
