"""Ragged paged attention for Hopper: one persistent launch for decode, speculative, prefill and mixed batches.

Three warpgroups a CTA: two compute, one loads pages by TMA. Each CTA walks its pieces of the work list
(work_list.py). A tile of more than 64 packed rows gives 64 rows to each compute warpgroup, which alternate on the
tensor cores (ping-pong); a tile of at most 64 rows (decode, speculation, remainders) is computed by both, each on
every other key block, and their states are merged through shared memory. Pieces that are only part of a unit go to
a small partial buffer that merge_sm90 joins. docs/notebook/nvidia_h200.md has a drawing and what was measured.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.narrow_sm90 import narrow_tile
from pallas_kernels.gpu.pieces_sm90 import Config, Refs, count_pieces, load_pages, receive_piece
from pallas_kernels.gpu.tiles_sm90 import M, blank_tile, long_tile, short_tile


def _compute(cfg: Config, refs: Refs, wg):
    def piece_body(j, turn):
        piece = receive_piece(cfg, refs, j)
        few = piece[wl.NROWS] <= (cfg.narrow_rows or wl.SHORT_ROWS)
        few_rows = narrow_tile if cfg.narrow_rows else short_tile
        many_rows = long_tile if cfg.long_tiles else blank_tile  # else only padding can have many
        pl.when(few)(lambda: few_rows(cfg, refs, piece, wg, turn))
        pl.when(jnp.logical_not(few))(lambda: many_rows(cfg, refs, piece, wg, turn))
        plgpu.barrier_arrive(refs.q_free.at[piece.buffer])
        return turn + piece.count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def _kernel(cfg: Config, *gmem):
    """One CTA: allocate, then each warpgroup to its role."""

    def roles(tiles, small, full, free, queries, turn):
        tiles, small = (*tiles, None, None)[:5], (*small, None)[:3]
        pools = gmem if cfg.token_scales else (*gmem[:8], None, None, *gmem[8:])
        refs = Refs(*pools, *tiles, *small, *full, *free, *queries, turn)
        wg = lax.axis_index("wg")
        compute, memory = (224, 56) if cfg.token_scales else (232, 40)  # a thread; 3 * 168 in all

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(compute, action="increase")
            _compute(cfg, refs, wg)

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(memory, action="decrease")
            load_pages(cfg, refs)

    def tile(dtype, *shape):
        return plgpu.SMEM(shape, dtype, transforms=rows.tile_transforms(shape[-1], dtype))

    block, stages = cfg.block_kv, cfg.stages
    tiles = [tile(cfg.dtype, cfg.q_buffers, 2, M, cfg.head_dim)]
    tiles += [tile(cfg.kv_dtype, stages, block, dim) for dim in (cfg.head_dim, cfg.v_head_dim)]
    if cfg.quantised and not cfg.narrow_rows:
        tiles += [tile(cfg.dtype, 2, block, cfg.head_dim), tile(cfg.value_dtype, 2, block, cfg.v_head_dim)]
    small = [plgpu.SMEM((512,), jnp.float32), plgpu.SMEM((cfg.q_buffers, wl.INFO_COLUMNS), jnp.int32)]
    small += [plgpu.SMEM((stages, 2 * block), jnp.float32)] if cfg.token_scales else []
    pages = max(block // cfg.page_size, 1)
    full = tuple(plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (pages + cfg.token_scales, pages))
    free = (plgpu.Barrier(num_arrivals=2, num_barriers=stages),) * 2
    buffers = dict(num_barriers=cfg.q_buffers)
    queries = (plgpu.Barrier(**buffers), plgpu.Barrier(num_arrivals=2, **buffers))
    turn = plgpu.Barrier(num_arrivals=2)
    pl.run_scoped(roles, tuple(tiles), tuple(small), full, free, queries, turn, collective_axes="wg")


def attend(cfg: Config, q, k_pages, v_pages, block_table, work: wl.WorkList, scales, heads, token_scales=()):
    """The launch: (out [T, H, V], lse f32[T, H], partial outputs, partial lse base 2).

    token_scales: the two pools of scales, or nothing.
    """
    num_tokens, num_heads, _ = q.shape
    v_dim, slots = cfg.v_head_dim, 2 * cfg.num_ctas
    out_type = [
        jax.ShapeDtypeStruct((num_tokens, num_heads, v_dim), q.dtype),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((slots, wl.TILE_ROWS, v_dim), jnp.float32),
        jax.ShapeDtypeStruct((slots, wl.TILE_ROWS), jnp.float32),
    ]

    def ragged_paged_attention(*refs):
        _kernel(cfg, *refs)

    call = plgpu.kernel(
        ragged_paged_attention,
        out_type=out_type,
        grid=(cfg.num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(q, k_pages, v_pages, block_table, work.info, work.cta, scales, heads, *token_scales)
