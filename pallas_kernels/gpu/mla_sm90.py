"""Absorbed latent attention for Hopper: decoding and multi-token prediction, one persistent launch.

    latent_attention
      _check                              arrays against the config; NotImplementedError where it is not supported
      _launch                             one CTA on each SM, four warpgroups each
        _kernel                             allocates shared memory and barriers
          warpgroup 3: load_latents           mla_pieces_sm90.py: pages into shared memory; 8 bits are decoded there
          warpgroup 2: score_pieces           mla_tile_sm90.py: scores and weights
          warpgroups 0, 1: add_pieces         mla_tile_sm90.py: weights times rows
                                              both by mla_narrow_sm90.py for at most 16 rows over 8 bits
      merge_parts                         merge_sm90.py: a second, small launch, for units split among CTAs
      merge_few_parts                     merge_few_sm90.py: the same for few units, or units of few rows

A tile has at most 64 rows, (token, head) pairs of one request, and each warpgroup that adds holds all rows of one half
of the output's columns: 64 x 256 f32 are 128 registers a thread. The cached rows are read once, and are keys (all
columns) and values (the latent columns) from the same place in shared memory. With more than 64 rows, heads are divided
among units (config.group), which read the same pages at nearly the same time, through L2.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.merge_few_sm90 import MOST_CTAS, merge_few_parts
from pallas_kernels.gpu.merge_sm90 import merge_parts
from pallas_kernels.gpu.mla_config import BLOCK_KV, NARROW_ROWS, STATS, MlaKernelConfig, supports_mla
from pallas_kernels.gpu.mla_listed_sm90 import load_listed
from pallas_kernels.gpu.mla_narrow_sm90 import add_narrow, score_narrow
from pallas_kernels.gpu.mla_pieces_sm90 import MlaRefs, load_latents
from pallas_kernels.gpu.mla_tile_sm90 import add_pieces, score_pieces

REGISTERS = (176, 112, 48)  # of a thread that adds values, of one that computes scores, and of one that loads
DECODING = (168, 104, 72)  # the same, where the threads that load also decode 8 bits
NARROW = (104, 232, 56)  # of the narrow kernel, whose queries are in registers
SMALL = (136, 144, 96)  # the same for latents of 128 values, of which a thread that adds holds 32 and not 128
MERGE = dict(in_flight=4, chunks=4)
"""Of merge_parts: 528 CTAs take 2 us on an H200 where there is nothing to merge; the 2112 of chunks=1 take 7."""
FEW_UNITS, FEW_ROWS, CTAS_OF_FEW = 32, 16, 32
"""merge_few_sm90.py merges up to so many units, or units of up to so many rows, with so many CTAs of each. One request
of 16 heads takes 2.2 us instead of 7.8 with 600 keys, and 7.7 instead of 71 with 8192; of 128 heads 3.5 instead of
10.6, and 10.7 instead of 44. 32 requests of 128 heads take 9.0 by merge_parts and 10.4 by it (an H200, 2026-11-29)."""


def latent_attention(
    q: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array | None,
    block_table: jax.Array,
    work: wl.GpuWorkList,
    config: MlaKernelConfig,
    factors: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q [latent | rope]^T) latent over pages: (out [T, H, L] in q's dtype, lse f32[T, H], natural log).

    q [T, H, L+R]: absorbed queries, then the rotated part. latent_pages [N, S, L] and rope_pages [N, S, R], or with
    config.whole_rows latent_pages [N, S, L+R] and None. block_table i32[R, B], whose unused columns may hold
    anything; with config.listed i32[T, n], rows of the pools in any order, -1 for none, n a multiple of 64, and each
    token is a request of at most n keys.
    work: build_work_list for config.list_of(R), or for config.attention with config.listed. factors f32[T, H]: with a
    cache of 8 bits, positive factors of the logits beside the scale; None: 1. A row that sees no key, padding tokens
    included, gives (0, -inf).
    """
    _check(q, latent_pages, rope_pages, block_table, config)
    if config.is_decoded:
        factors = jnp.ones(q.shape[:2], jnp.float32) if factors is None else factors
    elif factors is not None:
        raise ValueError("factors are given, and the cache is not of 8 bits: multiply them into q")
    out, lse, part, part_lse = _launch(config, q, latent_pages, rope_pages, block_table, work, factors)
    no_sinks = part_lse  # any array: it is not read
    return _merge(config, q.shape[0])(config.attention, out, lse, part, part_lse, work, no_sinks)


def _merge(config: MlaKernelConfig, tokens: int) -> Callable:
    """The second launch. Few units are divided into many parts, which many CTAs merge."""
    is_few = tokens * (config.num_heads // config.group) <= FEW_UNITS
    if is_few or config.max_rows <= FEW_ROWS:
        ctas = CTAS_OF_FEW if is_few else MOST_CTAS
        return functools.partial(merge_few_parts, rows=config.max_rows, ctas=ctas)
    return functools.partial(merge_parts, **MERGE)


def _check(q, latent_pages, rope_pages, block_table, config: MlaKernelConfig):
    if reasons := supports_mla(config):
        raise NotImplementedError("; ".join(reasons))
    c = config
    rope_shape = None if c.whole_rows else (*latent_pages.shape[:2], c.rope_dim)
    table = (
        ("q", q.shape[1:], (c.num_heads, c.head_dim)),
        ("latent_pages", latent_pages.shape[1:], (c.page_size, c.head_dim if c.whole_rows else c.latent_dim)),
        ("rope_pages", None if rope_pages is None else rope_pages.shape, rope_shape),
        ("q dtype", q.dtype.name, c.dtype),
        ("latent_pages dtype", latent_pages.dtype.name, c.cache_dtype),
        ("rope_pages dtype", c.cache_dtype if rope_pages is None else rope_pages.dtype.name, c.cache_dtype),
        ("block_table dtype", block_table.dtype.name, "int32"),
    )
    for name, seen, wanted in table:
        if seen != wanted:
            raise ValueError(f"{name} is {seen}; the config wants {wanted}")


def _launch(config: MlaKernelConfig, q, latent_pages, rope_pages, block_table, work, factors):
    """(out [T, H, L], lse f32[T, H], partial outputs, partial lse in base 2)."""
    num_tokens, num_heads, _ = q.shape
    slots = 2 * config.num_ctas
    out_type = [
        jax.ShapeDtypeStruct((num_tokens, num_heads, config.latent_dim), q.dtype),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((slots, wl.TILE_ROWS, config.latent_dim), jnp.float32),
        jax.ShapeDtypeStruct((slots, wl.TILE_ROWS), jnp.float32),
    ]

    def latent_attention(*gmem):  # the kernel's name in a profile
        _kernel(config, *gmem)

    call = plgpu.kernel(
        latent_attention,
        out_type=out_type,
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # only rows are reduced, within a warp
        ),
    )
    pools = (latent_pages,) if config.whole_rows else (latent_pages, rope_pages)
    own = (factors,) if config.is_decoded else ()
    return call(q, *pools, block_table, work.info, work.cta, *own)


def _kernel(cfg: MlaKernelConfig, *gmem):
    """One CTA: allocates, then gives each warpgroup its role."""
    gmem = (gmem[0], gmem[1], *gmem[1:]) if cfg.whole_rows else gmem  # the pool of latents is that of ropes, too
    gmem = gmem if cfg.is_decoded else (*gmem[:6], None, *gmem[6:])

    def roles(*smem):
        smem = (None, *smem) if cfg.is_narrow else smem
        if cfg.decodes_tiles:
            smem = (*smem[:-4], None, *smem[-4:])
        refs = MlaRefs(*gmem, *smem)
        wg, registers = lax.axis_index("wg"), DECODING if cfg.decodes_tiles else REGISTERS
        registers = SMALL if cfg.latent_dim == 128 else NARROW if cfg.is_narrow else registers

        @when(wg < 2)
        def _():
            plgpu.set_max_registers(registers[0], action="decrease" if registers[0] < 128 else "increase")
            (add_narrow if cfg.is_narrow else add_pieces)(cfg, refs, wg)

        @when(wg == 2)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease" if registers[1] < 128 else "increase")
            (score_narrow if cfg.is_narrow else score_pieces)(cfg, refs)

        @when(wg == 3)
        def _():
            plgpu.set_max_registers(registers[2], action="decrease")
            (load_listed if cfg.listed else load_latents)(cfg, refs)

    def tile(*shape, dtype=cfg.dtype):
        return rows.smem_tiles(dtype, *shape)

    def stages_of(count, dtype):
        return [tile(count, parts, BLOCK_KV, cfg.part, dtype=dtype), tile(count, BLOCK_KV, cfg.rope_dim, dtype=dtype)]

    def loaded(count, arrivals):
        return [plgpu.Barrier(num_arrivals=arrivals, num_barriers=n) for n in (count, count * parts)]

    copies, parts = max(BLOCK_KV // cfg.page_size, 1), 2 * cfg.parts_of_half  # pages and parts of a block
    # In the order of the fields of MlaRefs.
    tiles = stages_of(cfg.stages, cfg.cache_dtype if cfg.is_narrow else cfg.dtype)
    if cfg.is_narrow:
        tiles.append(plgpu.SMEM((NARROW_ROWS * BLOCK_KV,), cfg.dtype))
    else:
        tiles = [tile(1, WARPGROUP_ROWS, cfg.head_dim), *tiles, tile(WARPGROUP_ROWS, BLOCK_KV)]
    tiles.append(plgpu.SMEM((STATS,), jnp.float32))
    barriers = loaded(cfg.stages, 1 if cfg.decodes_tiles or cfg.listed else copies)
    barriers += [plgpu.Barrier(num_barriers=cfg.stages * parts), plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)]
    cached = cfg.loaded_stages
    if cfg.listed:
        barriers.append(plgpu.SMEM((cfg.stages, BLOCK_KV), jnp.int32))
    raw = [*stages_of(cached, cfg.cache_dtype), *loaded(cached, copies)] if cfg.decodes_tiles else []
    pl.run_scoped(roles, *tiles, *barriers, *raw, collective_axes="wg")
