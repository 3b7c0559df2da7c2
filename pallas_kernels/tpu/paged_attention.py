"""Ragged paged attention for TPU: one launch that walks a list of query tiles, decode and prefill alike.

    ragged_paged_attention
      _check                                   arrays against the config; NotImplementedError where not supported
      _launch
        _kernel                                  copies.py moves, query_tile.py computes
          for tile in the work list:               queries of its tokens, fetched one tile ahead
            queries as rows of each kv head          row_order.py
            for block in its key range:              whole pages, fetched one block ahead, across tiles too
              for chunk of rows, kv head:              dots -> logits -> (mask) -> online softmax -> values
            rows as outputs of tokens                row_order.py
            out, lse -> HBM                          written back while the next tile runs
          outputs of tokens of no tile := 0
      lse_of_tokens                            work_list.py: lse in the order [T, H]

Terms, from large to small (their sizes are fields of TpuKernelConfig):

    tile    consecutive new tokens of one request: tile_tokens tokens times the G query heads of each kv head. A row is
            one token and one query head. Row r of a kv head is token r // G, head r % G of its group
    chunk   chunk_rows rows of a tile: one matrix product. A tile of at most few_rows rows has no chunks
    pack    16 rows, or 8 in a half pack: what one copy of ranges, biases or lse moves
    block   block_kv keys of a request, fetched together, page by page, of all kv heads
    step    keys of a block that a chunk takes at once where all its rows see them all: step_kv
    part    keys of a block that it takes at once where some row does not: part_kv

Parts of a block that every row of a chunk sees are computed without a mask, parts that none sees are skipped. Keys that
are not the request's are kept out of every product: the tail of a page may hold NaN. A tile of few rows, such as one
token, has a body of its own instead of chunks. Queries and outputs are copied from and to [T, H, ...] as they are;
where their rows are no whole packs there (config.in_place), they are put into order once a tile.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.algebra.checks import check_arrays, check_seen
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, PACK, TpuKernelConfig
from pallas_kernels.tpu.copies import SEMAPHORES, Buffers, Copies, HbmRefs, ScalarRefs
from pallas_kernels.tpu.pools import BLOCK as POOL
from pallas_kernels.tpu.pools import launch as launch_with_pools
from pallas_kernels.tpu.query_tile import QueryTile
from pallas_kernels.tpu.row_order import output_order, query_order
from pallas_kernels.tpu.supports import SPILL, supports, supports_batch
from pallas_kernels.tpu.work_list import TpuWorkList, lse_of_tokens, lse_shape


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    work: TpuWorkList,
    config: TpuKernelConfig,
    *,
    alibi_slopes=None,
    sinks=None,
    qq_bias=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    k_token_scale=None,
    v_token_scale=None,
    chip: str = "",
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """softmax(q k^T) v over pages: (out [T, H, V] in config.out_dtype, lse f32[T, H], natural log).

    q [T, H, D]; pools [N, K, S, D] and [N, K, S, V], or as config.layout says, in their own dtype; block_table
    i32[R, B], whose unused columns may hold anything. alibi_slopes, sinks f32[H]; qq_bias f32[Q, Q] of new tokens;
    q_scale f32 or f32[H]; k_scale, v_scale f32 or f32[K]; k_token_scale, v_token_scale f32[N, K, S]. All scales are
    traced: real = stored * scale. A row that sees no key, padding tokens included, gives (0, -inf). chip: the
    generation whose limits are checked. interpret: False, or pltpu.InterpretParams.
    """
    by_name = dict(q_scale=q_scale, slope=alibi_slopes, sink=sinks, qq_bias=qq_bias)
    tokens = (k_token_scale, v_token_scale)
    _check(q, k_pages, v_pages, block_table, work, config, by_name, tokens, chip)
    scales, columns = logit_and_output_scales(config, q_scale, k_scale, v_scale), row_columns(config, by_name)
    pools = (k_pages, v_pages, *(x for x in tokens if x is not None))
    bias = None if qq_bias is None else bias_rows(qq_bias, work, config)
    return launch(config, q, pools, block_table, work, scales, columns, bias, interpret=interpret)


def launch(config: TpuKernelConfig, q, pools, block_table, work: TpuWorkList, scales, columns, bias=None, *, interpret):
    """(out [T, H, V], lse f32[T, H]) of queries [T, H, D] over the arrays of config.paged_arrays."""
    if config.in_place:  # elsewhere row_order.py puts copies of a query side by side
        q = jnp.tile(q, (1, 1, config.beside))
    given = dict(ranges=work.ranges, bias=bias)
    rows = tuple(given[name] for name in config.row_arrays)
    out, lse = _launch(config, q, pools, rows, block_table, work, scales, columns, interpret=interpret)
    return out, lse_of_tokens(lse, work, config)


def logit_and_output_scales(c: TpuKernelConfig, q_scale, k_scale, v_scale) -> jax.Array:
    """f32[2 K]: the factors of the kv heads' logits, then of their outputs."""
    spread = lambda x: jnp.broadcast_to(jnp.asarray(1.0 if x is None else x, jnp.float32), (c.num_kv_heads,))
    logit = spread(k_scale) * c.logits.scale
    if q_scale is not None and not c.per_head_q_scale:
        logit = logit * jnp.asarray(q_scale, jnp.float32)
    return jnp.concatenate([logit, spread(v_scale)])


def row_columns(c: TpuKernelConfig, by_name) -> jax.Array | None:
    """f32[K rows C]: the numbers of each row's query head, in the order of config.columns."""
    if not c.columns:
        return None
    table = jnp.stack([jnp.asarray(by_name[name], jnp.float32) for name in c.columns], axis=-1)
    by_group = table.reshape(c.num_kv_heads, c.group, len(c.columns))
    return jnp.tile(by_group, (1, cdiv(c.rows, c.group), 1))[:, : c.rows]


def bias_rows(qq_bias, work: TpuWorkList, c: TpuKernelConfig) -> jax.Array:
    """f32[packs 16 bias_lanes]: the biases of each row and its request's new tokens; 0 where there is none."""
    wide = jnp.pad(jnp.asarray(qq_bias, jnp.float32), ((0, 0), (0, c.bias_lanes - qq_bias.shape[1])))
    return wide.at[work.new].get(mode="fill", fill_value=0)


def _check(q, k_pages, v_pages, block_table, work: TpuWorkList, config: TpuKernelConfig, by_name, tokens, chip: str):
    c, qq_bias = config, by_name["qq_bias"]
    reqs, columns = block_table.shape
    size = 0 if qq_bias is None else qq_bias.shape[0]
    if reasons := supports(c, chip=chip) + supports_batch(q.shape[0], reqs, columns, c, size):
        raise NotImplementedError("; ".join(reasons))
    extra = (
        ("tokens of the work list", work.row.shape[0], q.shape[0]),
        ("qq_bias given", qq_bias is not None, c.qq_bias),
        ("token scales given", tuple(x is not None for x in tokens), (c.token_scales,) * 2),
        ("alibi_slopes given", by_name["slope"] is not None, c.logits.has_alibi),
        ("sinks given", by_name["sink"] is not None, c.has_sinks),
        ("q_scale a head", jnp.ndim(by_name["q_scale"]) == 1 if by_name["q_scale"] is not None else False,
         c.per_head_q_scale),
    )  # fmt: skip
    page = (c.page_size, c.num_kv_heads) if c.layout == "NHD" else (c.num_kv_heads, c.page_size)
    if c.beside > 1:
        wanted = (c.num_kv_heads, *c.page_dims(c.head_dim))
        check_seen(("k_pages", k_pages.shape[1:], wanted), ("v_pages", v_pages.shape, (k_pages.shape[0], *wanted)))
        k_pages, v_pages = (jax.ShapeDtypeStruct((x.shape[0], *page, c.head_dim), x.dtype) for x in (k_pages, v_pages))
    check_arrays(c, q, k_pages, v_pages, block_table, page, extra)


def _launch(config: TpuKernelConfig, q, pools, rows, block_table, work, scales, columns, *, interpret):
    """(out [T H V], lse f32[packs 16 lse_lanes]). The lse of no tile is not written."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tables = () if columns is None else (columns,)
    in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    kernel = pl.pallas_call(
        functools.partial(_kernel, config=config, num_columns=block_table.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(ScalarRefs._fields),
            grid=(1,),
            in_specs=[whole, *[POOL] * len(pools), *[whole] * len(rows), *[in_vmem] * len(tables)],
            out_specs=[whole] * 2,
            scratch_shapes=list(_scratch(config).values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:-1], config.v_head_dim), config.out_dtype),
            jax.ShapeDtypeStruct(lse_shape(work, config), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_bytes() + SPILL, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="ragged_latent_attention" if config.latent else "ragged_paged_attention",
    )
    before = work.count, work.items, block_table.reshape(-1), scales, q
    return launch_with_pools(kernel, before, pools, (*rows, *tables))


def _scratch(c: TpuKernelConfig) -> dict[str, Any]:
    """The fields of Buffers that this config has."""
    packs, f32, heads, pages = c.rows // PACK, jnp.float32, c.num_kv_heads, (c.block_pages, c.num_kv_heads)
    stored = jnp.dtype(c.kv_dtype)
    tile, q_dim = (c.buffered_tokens, c.num_heads), c.head_dim * (c.beside if c.in_place else 1)
    found = dict(
        q=pltpu.VMEM((2, *tile, q_dim), jnp.dtype(c.dtype)),
        out=pltpu.VMEM((2, *tile, c.v_head_dim), jnp.dtype(c.out_dtype)),
        lse=pltpu.VMEM((2, packs, PACK, c.lse_lanes), f32),
        m=pltpu.VMEM((heads, c.rows, LANES), f32),
        l=pltpu.VMEM((heads, c.rows, LANES), f32),
        acc=pltpu.VMEM((heads, c.rows, c.acc_dim), f32),
        sems=pltpu.SemaphoreType.DMA((len(SEMAPHORES), 2)),
    )
    for name, dim in zip(("k", "v"), c.pool_dims, strict=False):
        found[name] = pltpu.VMEM((1 if c.layout == "NHD" else 2, *pages, *c.page_dims(dim)), stored)
        if c.layout == "NHD":
            found[f"{name}_fetched"] = pltpu.VMEM((2, c.block_pages, c.page_size, heads, dim), stored)
        if c.token_scales:
            found[f"{name}_token"] = pltpu.VMEM((2, *pages, c.page_size), f32)
    if not c.in_place:
        found["q_words"], found["q_rows"] = query_order(c).scratch(c.ordered_rows)
        found["out_words"], found["out_rows"] = output_order(c).scratch(c.ordered_rows)
    if c.has_half_packs:
        found["q_half_packs"] = pltpu.VMEM((heads, PACK, c.head_dim * c.beside), jnp.dtype(c.dtype))
    if c.long_tiles:
        step, lanes = ((c.staged_heads, c.chunk_rows, n) for n in (c.step_keys, LANES))
        found |= dict(s=pltpu.VMEM(step, f32), p=pltpu.VMEM(step, jnp.dtype(c.compute_dtype)))
        found |= dict(top=pltpu.VMEM(lanes, f32), alpha=pltpu.VMEM(lanes, f32))
    if c.has_ranges:
        found["ranges"] = pltpu.VMEM((2, packs, PACK, LANES), jnp.int32)
    if c.qq_bias:
        found["bias"] = pltpu.VMEM((2, packs, PACK, c.bias_lanes), f32)
    return found


def _kernel(*refs, config: TpuKernelConfig, num_columns: int):
    """Walks over the tiles. copies.py says what the Refs hold."""
    # in this order: prefetched scalars; inputs q, what is paged, what each row has and, if there are any, columns
    # f32[K rows C]; outputs; scratch
    left = iter(refs)
    s = ScalarRefs(*itertools.islice(left, len(ScalarRefs._fields)))
    inputs = {name: next(left) for name in ("q", *config.paged_arrays, *config.row_arrays)}
    columns = next(left) if config.columns else None
    hbm = HbmRefs(**inputs, out=next(left), lse=next(left))
    buf = Buffers(**dict(zip(_scratch(config), left, strict=True)))
    copies = Copies(config, num_columns, s, hbm, buf)
    count = s.count[0]

    @pl.when(count > 0)
    def _():
        copies.start_q(0)
        copies.start_keys(0, 0, 0)

    def walk(i, step):
        item, half = copies.item(i), lax.rem(i, 2)
        pl.when(i + 1 < count)(lambda: copies.start_q(i + 1))
        copies.wait_q(i)
        pl.when(i >= 2)(lambda: copies.wait_out(i - 2))
        tile = QueryTile(config, buf, columns, s.scales, item, half)
        # at least one block: a tile that sees no key still writes (0, -inf)
        blocks = jnp.maximum(lax.div(item.pages + config.block_pages - 1, config.block_pages), 1)
        first_key = item.page * config.page_size

        def block(b, _):
            side = lax.rem(step + b, 2)
            last = b + 1 == blocks
            next_i, next_b = jnp.where(last, i + 1, i), jnp.where(last, 0, b + 1)
            pl.when(next_i < count)(lambda: copies.start_keys(next_i, next_b, 1 - side))
            copies.wait_keys(item, b, side)
            if config.layout == "NHD":
                copies.order_heads_first(item, b, side)
            tile.add_block(0 if config.layout == "NHD" else side, first_key + b * config.block_keys)
            return ()

        tile.start()
        lax.fori_loop(0, blocks, block, ())
        tile.finish()
        copies.start_out(i)
        return step + blocks

    lax.fori_loop(0, count, walk, jnp.int32(0))
    for back in (2, 1):
        pl.when(count >= back)(lambda back=back: copies.wait_out(count - back))
    copies.clear_padding(count)
