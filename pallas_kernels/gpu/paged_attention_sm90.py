"""Ragged paged attention for Hopper: one persistent launch for decode, speculative, prefill and mixed batches.

    ragged_paged_attention
      _check                              arrays against the config; NotImplementedError where it is not supported
      _launch                             one CTA on each SM, three to five warpgroups (paged_attention_sm80.py: warps)
        _kernel                             allocates shared memory and barriers
          warpgroup N: load_pages             pieces_sm90.py: pages into shared memory, and with two
                                                buffers queries
          warpgroup N + 1: convert_tiles      pieces_sm90.py: tiles of an 8-bit cache for wgmma, and scales of tokens
                       or load_scales         narrow tiles with scales of tokens
          warpgroups 0 .. N - 1: _compute     for each piece of the CTA's part of the work list (work_list.py):
            long_tile                           tiles_sm90.py: more than 64 packed rows, 64 to each warpgroup, which
                                                take turns on the tensor cores (ping-pong)
            short_tile                          tiles_sm90.py: at most 64 rows; each warpgroup computes them over
                                                every N-th key block, and the states are merged
            narrow_tile                         narrow_sm90.py: at most 16 rows. Beside long tiles only over an 8-bit
                                                cache, of which it needs no converted tiles
            blank_tile                          tiles_sm90.py: padding tokens, in a kernel without long tiles
        N is config.computing, 2 or 3
        with two pipelines, for many units of few rows or keys, there are no long tiles: warpgroups 0 and 1 each have a
        part of the work list, stages and a memory warpgroup (2, 3) of their own, and do not wait for each other
      merge_parts                         merge_sm90.py: a second, small launch, for units split among CTAs
      merge_few_parts                     merge_few_sm90.py: the same, where no tile is long

docs/notebook/nvidia_h200.md has a drawing and what was measured.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.checks import check_arrays
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import PIECE_BOXES, WARPGROUP_ROWS, GpuKernelConfig
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.merge_few_sm90 import merge_few_parts
from pallas_kernels.gpu.merge_sm90 import merge_parts
from pallas_kernels.gpu.narrow_sm90 import narrow_tile
from pallas_kernels.gpu.new_tokens_sm90 import bias_rows
from pallas_kernels.gpu.paged_attention_sm80 import launch as launch_warps
from pallas_kernels.gpu.pieces_sm90 import (
    NARROW_FIELDS,
    Refs,
    convert_tiles,
    count_blocks,
    count_pieces,
    in_narrow_ring,
    load_pages,
    load_scales,
    no_blocks,
    output_types,
    receive_piece,
    stored_tiles,
    with_scale_pools,
    worker,
)
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.supports_sm80 import supports as warps_support
from pallas_kernels.gpu.tiles_sm90 import blank_tile, long_tile, short_tile

REGISTERS = (232, 40)  # of a thread that computes and of one that loads: at most 168 * 3 for three warpgroups
REGISTERS_CONVERTING = (200, 32, 80)  # the same and of one that converts tiles: at most 128 * 4
REGISTERS_TOKEN_SCALES = (184, 72, 72)  # of narrow tiles; the third number is of one that loads scales
REGISTERS_THREE = (160, 32)  # as REGISTERS, where three warpgroups compute: 3 * 160 + 32 are at most 128 * 4
REGISTERS_THREE_CONVERTING = (136, 24, 48)  # as REGISTERS_CONVERTING, likewise: at most 96 * 5
REGISTERS_PIPELINES = (208, 48, 48)  # two warpgroups compute, two load: the second number is theirs


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    work: wl.GpuWorkList,
    config: GpuKernelConfig,
    *,
    alibi_slopes=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    k_token_scale=None,
    v_token_scale=None,
    qq_bias=None,
    counters=None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(q k^T) v over pages: (out [T, H, V] in config.result_dtype, lse f32[T, H], natural log).

    q [T, H, D]; pools in their own dtype, HND [N, K, S, D] or NHD [N, S, K, D]; block_table i32[R, B], whose unused
    columns may hold anything. alibi_slopes, sinks f32[H]; q_scale f32 or f32[H]; k_scale, v_scale f32 or f32[K];
    k_token_scale, v_token_scale f32 [N, K, S] or [N, S, K], in the order of the pools. All scales are traced:
    real = stored * scale * token scale. qq_bias f32[Q, Q]: see new_tokens_sm90.py. A row that sees no key,
    padding tokens included, gives (0, -inf).
    """
    _check(q, k_pages, v_pages, block_table, config, alibi_slopes, sinks, (k_token_scale, v_token_scale), qq_bias)
    if work.cta.shape[0] != config.workers:
        raise ValueError(
            f"the work list of another config: it is for {work.cta.shape[0]} workers, not {config.workers}"
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    per_head = None
    if alibi_slopes is not None or sinks is not None or qq_bias is not None:
        per_head = jnp.stack([_one_each(alibi_slopes, heads, 0.0), _one_each(sinks, heads, 0.0)], axis=1)
    if qq_bias is not None:
        per_head = jnp.concatenate([per_head, bias_rows(qq_bias)])
    scales = [_one_each(k_scale, kv_heads, 1.0) * config.logits.scale, _one_each(v_scale, kv_heads, 1.0)]
    if q_scale is not None and jnp.ndim(q_scale) == 0:
        scales[0] = scales[0] * q_scale
    elif q_scale is not None:
        q = (q.astype(jnp.float32) * q_scale[None, :, None]).astype(q.dtype)
    scales = jnp.stack(scales, axis=1)
    per_head = scales if per_head is None else per_head  # not read: XLA would launch a kernel that fills it with zeros
    token_scales = (k_token_scale, v_token_scale) if config.token_scales else ()
    arrays = q, k_pages, v_pages, block_table, work, scales, per_head, token_scales
    if isinstance(config, WarpKernelConfig):
        out, lse, part, part_lse = launch_warps(config, *arrays)
    else:
        out, lse, part, part_lse = _launch(config, *arrays, counters if config.merges_inside else None)
    if config.merges_inside or config.whole_units:
        return out, lse
    merge = merge_parts if config.has_long_tiles else merge_few_parts
    return merge(config, out, lse, part, part_lse, work, per_head)


def _one_each(value, size: int, default: float) -> jax.Array:
    """f32[size] of a scalar, of an array of that size, or of the default for None."""
    value = jnp.asarray(default if value is None else value, jnp.float32)
    return jnp.broadcast_to(value, (size,))


def _check(q, k_pages, v_pages, block_table, config: GpuKernelConfig, alibi_slopes, sinks, token_scales, qq_bias):
    if reasons := (warps_support if isinstance(config, WarpKernelConfig) else supports)(config):
        raise NotImplementedError("; ".join(reasons))
    c = config
    page_shape = (c.num_kv_heads, c.page_size) if c.layout == "HND" else (c.page_size, c.num_kv_heads)
    extra = (
        ("alibi_slopes given", alibi_slopes is not None, c.logits.has_alibi),
        ("sinks given", sinks is not None, c.has_sinks),
        ("qq_bias given", qq_bias is not None, c.qq_bias),
        *(
            (f"{name}_token_scale", None if x is None else x.shape, k_pages.shape[:-1] if c.token_scales else None)
            for name, x in zip("kv", token_scales, strict=True)
        ),
    )
    check_arrays(c, q, k_pages, v_pages, block_table, page_shape, extra)


def _launch(config: GpuKernelConfig, q, k_pages, v_pages, block_table, work, scales, per_head, token_scales, counters):
    """(out [T, H, V], lse f32[T, H], partial outputs, partial lse in base 2).

    scales f32[K, 2], per_head f32[H, 2]: see Refs. token_scales: the two pools of scales, or (). counters: i32[workers]
    or more zeros, or None; with them the launch merges the partial outputs itself.
    """
    out_type = output_types(config, q.shape[0], slots=1 if config.whole_units else 2 * config.workers)

    def ragged_paged_attention(*gmem):  # the kernel's name in a profile
        _kernel(config, *gmem)

    warpgroups = config.computing + len(registers(config)) - 1
    mesh = plgpu.Mesh(grid=(config.num_ctas,), grid_names=("cta",), num_threads=warpgroups, thread_name="wg")
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(
        ragged_paged_attention, out_type=out_type, mesh=mesh, compiler_params=params, name="ragged_paged_attention"
    )
    counted = [] if counters is None else [jax.new_ref(counters)]
    return call(q, k_pages, v_pages, block_table, work.info, work.cta, scales, per_head, *token_scales, *counted)


def _kernel(cfg: GpuKernelConfig, *gmem):
    """One CTA: allocates, then gives each warpgroup its role."""
    counters = gmem[-5] if cfg.merges_inside else None
    gmem = (*gmem[:-5], *gmem[-4:]) if cfg.merges_inside else gmem

    def roles(tiles, small, full, free, stored, narrow, queries, turn, compute_barrier):
        (q_tile, *multiplied), rounded, from_pool, (*small, arrived) = *tiles, small
        narrow_tiles, narrow = multiplied, narrow or (*full, *free)
        if cfg.two_rings:
            multiplied, narrow_tiles = zip(*multiplied, strict=True)
        if len(from_pool) < 2:  # what is not converted is multiplied as it is
            from_pool = (*multiplied, *from_pool)[:: 1 + len(from_pool)]
            stored = (*full, *free) if not stored else (full[0], stored[0], free[0], stored[1])
        tiles = (q_tile, *multiplied, *(rounded or (None,)), *from_pool)
        small = (*small, None)[:3]
        pools = with_scale_pools(cfg, gmem)
        (turn,) = turn or (None,)
        of_narrow = dict(zip(NARROW_FIELDS, (*narrow_tiles, *narrow), strict=True))
        barriers = (*full, *free, *stored, *queries, turn, compute_barrier)
        refs = Refs(*pools, counters, arrived, *tiles, *small, *barriers, **of_narrow)
        wg = lax.axis_index("wg")
        compute, load, *extra = registers(cfg)

        own = lambda pipeline: refs if cfg.pipelines == 1 else dataclasses.replace(refs, pipeline=pipeline)

        @when(wg < cfg.computing)
        def _():
            plgpu.set_max_registers(compute, action="increase")
            _compute(cfg, own(wg), wg)

        @when(wg >= 2 if cfg.pipelines == 2 else wg == cfg.computing)
        def _():
            plgpu.set_max_registers(load, action="decrease")
            load_pages(cfg, own(wg - cfg.computing))

        if extra and cfg.pipelines == 1:

            @when(wg == cfg.computing + 1)
            def _():
                plgpu.set_max_registers(extra[0], action="decrease")
                (convert_tiles if cfg.converts_tiles else load_scales)(cfg, refs)

    tile = rows.smem_tiles
    block, stages = cfg.block_kv, cfg.stages
    buffers, boxes = (count * cfg.pipelines for count in (cfg.q_buffers, PIECE_BOXES))
    queries_dtype = cfg.dtype if cfg.compute_dtype else cfg.query_dtype
    dims, dtypes, shapes = (cfg.head_dim, cfg.v_head_dim), (cfg.kv_dtype,) * 2, None
    if cfg.converts_tiles:
        dtypes, shapes = zip(*((of.target, of.shape) for of in stored_tiles(cfg)), strict=True)
    shapes = shapes or tuple((block, dim) for dim in dims)
    multiplied = [tile(dtype, stages, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    if cfg.two_rings:
        as_stored = [tile(cfg.kv_dtype, cfg.narrow_stages, block, dim) for dim in dims]
        multiplied = [plgpu.RefUnion(*pair) for pair in zip(multiplied, as_stored, strict=True)]
    tiles = tile(queries_dtype, buffers, cfg.computing // cfg.pipelines, WARPGROUP_ROWS, cfg.head_dim), *multiplied
    rounded = (tile(cfg.compute_dtype, cfg.computing, WARPGROUP_ROWS, cfg.head_dim),) if cfg.compute_dtype else ()
    kept = [(count, dim) for count, dim in zip(cfg.stored_stages, dims, strict=True) if count]
    from_pool = tuple(tile(cfg.kv_dtype, count, block, dim) for count, dim in kept)
    stats = (512,) if cfg.pipelines == 1 else (cfg.pipelines, 256)
    small = [plgpu.SMEM(stats, jnp.float32), plgpu.SMEM((boxes, wl.INFO_COLUMNS), jnp.int32)]
    small += [plgpu.SMEM((cfg.scale_rows, cfg.scale_columns), jnp.float32)] if cfg.token_scales else []
    small += [plgpu.SMEM((cfg.pipelines, 4), jnp.int32)]
    copies, scaled = block // cfg.copied_keys, cfg.token_scales and not cfg.converts_tiles
    converted = [cfg.converts_tiles and count > 0 for count in cfg.stored_stages]
    arrivals = [1 if own else copies + more for own, more in zip(converted, (scaled, 0), strict=True)]
    full = tuple(plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in arrivals)
    readers = cfg.computing // cfg.pipelines  # of a stage or a box
    free = (plgpu.Barrier(num_arrivals=readers, num_barriers=stages),) * 2
    stored = tuple(plgpu.Barrier(num_arrivals=n, num_barriers=count) for n in (copies, 1) for count, _ in kept)
    narrow = ()
    if cfg.two_rings:  # full: the copies, and the converting warpgroup, which follows the narrow tiles
        arrivals = (copies + 1,) * 2 + (readers,) * 2
        narrow = tuple(plgpu.Barrier(num_arrivals=n, num_barriers=cfg.narrow_stages) for n in arrivals)
    queries = tuple(plgpu.Barrier(num_arrivals=n, num_barriers=boxes) for n in (1, readers))
    turn = (plgpu.Barrier(num_arrivals=1, num_barriers=3),) if cfg.computing == 3 else ()
    compute_barrier = plgpu.Barrier(num_arrivals=cfg.computing)
    scratch = (tiles, rounded, from_pool), tuple(small), full, free, stored, narrow, queries, turn, compute_barrier
    pl.run_scoped(roles, *scratch, collective_axes="wg")


def registers(cfg: GpuKernelConfig) -> tuple[int, ...]:
    """Registers of a thread that computes, of one that loads, and of one that converts tiles or loads scales,
    if there is one."""
    if cfg.computing == 3:
        return REGISTERS_THREE_CONVERTING if cfg.converts_tiles else REGISTERS_THREE
    if cfg.pipelines == 2:
        return REGISTERS_PIPELINES
    if cfg.converts_tiles:
        return REGISTERS_CONVERTING
    return REGISTERS_TOKEN_SCALES if cfg.token_scales else REGISTERS


def _compute(cfg: GpuKernelConfig, refs: Refs, wg):
    """A compute warpgroup: the CTA's pieces in order.

    before: the number of key blocks of all earlier pieces; with two rings, of those in wgmma's and in the narrow ring.
    """
    if cfg.computing == 3:
        when(wg == 2)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))  # warpgroup 0 has the first turn

    def piece_body(j, before):
        piece = receive_piece(cfg, refs, j)
        few = piece[wl.NROWS] <= (wl.SHORT_ROWS if cfg.has_short_tiles else cfg.narrow_rows)
        is_short = few
        many_rows = long_tile if cfg.has_long_tiles else blank_tile  # without long tiles only padding has many rows
        if cfg.narrow_rows:
            is_narrow = in_narrow_ring(cfg, piece) if cfg.two_rings else few
            is_short = few & jnp.logical_not(is_narrow)
            when(is_narrow)(lambda: narrow_tile(cfg, refs, piece, wg, before[-1]))
        if cfg.has_short_tiles:
            when(is_short)(lambda: short_tile(cfg, refs, piece, wg, before[0]))
        when(jnp.logical_not(few))(lambda: many_rows(cfg, refs, piece, wg, before[0]))
        after = count_blocks(cfg, piece, before)  # read before the arrival: the memory warpgroup then overwrites it
        plgpu.barrier_arrive(refs.q_free.at[piece.box])
        return after

    lax.fori_loop(0, count_pieces(refs.cta, worker(cfg, refs)), piece_body, no_blocks(cfg))
