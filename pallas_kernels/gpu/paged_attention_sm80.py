"""Ragged paged attention by mma.sync, ldmatrix and cp.async, for NVIDIA GPUs since Ampere.

config_sm80.CHIPS lists the chips. The kernel has run on sm_90 only (an H200, an H100); for the others it was compiled.

    ragged_paged_attention                paged_attention_sm90.py: checks, given a WarpKernelConfig
      launch                              persistent CTAs of four warps
        _kernel                             allocates shared memory
          _piece                              for each piece of the CTA's part of the work list (work_list.py):
            narrow_tile                         narrow_sm80.py: at most 8 or 16 rows; each warp has keys of its own
            wide_tile                           wide_sm80.py: more rows; each warp has rows of its own
            blank_tile                          more rows than any request's tile has: padding tokens
      merge_parts                         merge_sm90.py: a second, small launch, for units split among CTAs
      merge_few_parts                     merge_few_sm90.py: the same, where no tile is long

The arguments, the work list, the algebra and the merge are those of paged_attention_sm90.py. A file named sm80 is this
kernel's, but for warp_mma_sm80.py, whose products narrow tiles on Hopper use, too.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.config_sm80 import SMALL_ROWS, WarpKernelConfig
from pallas_kernels.gpu.copies_sm80 import sync_warps
from pallas_kernels.gpu.narrow_sm80 import narrow_tile
from pallas_kernels.gpu.pieces_sm90 import (
    HI,
    Piece,
    Refs,
    count_pieces,
    output_types,
    piece_from_list,
    with_scale_pools,
)
from pallas_kernels.gpu.ptx_sm90 import put_numbers
from pallas_kernels.gpu.wide_sm80 import wide_tile


def launch(config: WarpKernelConfig, q, k_pages, v_pages, block_table, work, scales, per_head, token_scales):
    """(out [T, H, V], lse f32[T, H], partial outputs, partial lse in base 2); as _launch of paged_attention_sm90.py."""

    def ragged_paged_attention(*gmem):  # the kernel's name in a profile
        _kernel(config, *gmem)

    call = plgpu.kernel(
        ragged_paged_attention,
        out_type=output_types(config, q.shape[0], slots=1 if config.whole_units else 2 * config.num_ctas),
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=1,  # of Pallas, each a warpgroup: four warps
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(q, k_pages, v_pages, block_table, work.info, work.cta, scales, per_head, *token_scales)


def _kernel(cfg: WarpKernelConfig, *gmem):
    """One CTA: allocates, then computes its pieces."""

    def pieces(smem, small):
        # Rows 0 and 1: rows of two blocks in the pool. 2: f32 [4 warps, 8 rows, 2] of a merge. 3: numbers of a piece.
        refs = Refs(*with_scale_pools(cfg, gmem), **smem, pool_rows=small, stats=small.at[2], piece_box=small.at[3])
        lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), lambda j, _: _piece(cfg, refs, j), None)

    block, stages = cfg.block_kv, cfg.stages
    smem = dict(k_tile=rows.smem_tiles(cfg.kv_dtype, stages, block, cfg.head_dim))
    smem["v_tile"] = rows.smem_tiles(cfg.kv_dtype, stages, block, cfg.v_head_dim)
    if cfg.query_shape:
        smem["q_tile"] = rows.smem_tiles(cfg.dtype, *cfg.query_shape)
    if cfg.wide_tiles and cfg.quantised:
        smem["decoded"] = rows.smem_tiles(cfg.dtype, block, cfg.head_dim)
    if cfg.token_scales:
        smem["token_scale"] = plgpu.SMEM((stages, 2 * block), jnp.float32)
    small = plgpu.SMEM((SMALL_ROWS, block), jnp.int32)  # one buffer for all, since each takes at least a KiB
    pl.run_scoped(pieces, smem, small, collective_axes="wg")


def _piece(cfg: WarpKernelConfig, refs: Refs, j):
    """Computes the CTA's j-th piece, whose numbers are in shared memory meanwhile: they take no registers."""
    numbers, listed = refs.piece_box, piece_from_list(cfg, refs, j)
    sync_warps()  # no warp reads the last piece's numbers and tiles any longer
    put_numbers(numbers, [jnp.asarray(listed[column], jnp.int32) for column in range(HI + 1)])
    sync_warps()
    piece = Piece(lambda column: numbers[column], box=0)
    nrows, most_rows = piece[wl.NROWS], _most_rows(cfg)
    when(nrows <= cfg.narrow_rows)(lambda: narrow_tile(cfg, refs, piece))
    if cfg.wide_tiles:
        when((nrows > cfg.narrow_rows) & (nrows <= most_rows))(lambda: wide_tile(cfg, refs, piece))
    if most_rows < wl.TILE_ROWS:
        when(nrows > most_rows)(lambda: blank_tile(cfg, refs, piece))


def _most_rows(cfg: WarpKernelConfig) -> int:
    """The most rows of a request's tile. A tile with more holds padding tokens."""
    if not cfg.wide_tiles:
        return cfg.narrow_rows
    return wl.TILE_ROWS if cfg.long_tiles else WARPGROUP_ROWS * cfg.tile_halves


def blank_tile(cfg: WarpKernelConfig, refs: Refs, piece: Piece):
    """Padding tokens, which see no key: stores (0, -inf)."""
    for half in range(wl.TILE_ROWS // WARPGROUP_ROWS):
        tiles.finish(cfg, refs, piece, tiles.start_state(cfg.v_head_dim), jnp.int32(WARPGROUP_ROWS * half))
