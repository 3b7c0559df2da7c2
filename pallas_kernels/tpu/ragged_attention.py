"""The kernel: one launch that walks a list of query tiles, decode and prefill alike.

    for tile in plan:                                q tile: rows of all kv heads, fetched one tile ahead
      for block in its key range // block_keys:      whole pages, fetched one block ahead, across tiles too
        for each chunk of rows, each kv head:        dots -> logits -> (mask) -> online softmax -> values
      out, lse -> HBM                                written back while the next tile runs

A block whose every key is seen by every row is not masked; at the others, keys that are not the request's are kept
out of every product (a page's tail may hold NaN). A tile of one token has a body of 8 rows, not of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.config import LANES, PACK, Config
from pallas_kernels.tpu.moves import Buffers, Hbm, Moves, Scalars
from pallas_kernels.tpu.supports import SPILL
from pallas_kernels.tpu.tile import Tile
from pallas_kernels.tpu.work_list import Plan


def attend(config: Config, q, k_pages, v_pages, table, plan: Plan, scales, columns, *, interpret=False):
    """(out [K packs 16 V], lse f32[packs 16 128]) of packed q; rows that no tile writes hold anything."""
    kv_heads, num_packs, _, dim = q.shape
    value_dim = v_pages.shape[-1]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tables = () if columns is None else (columns,)
    return pl.pallas_call(
        functools.partial(_kernel, config=config, num_columns=table.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Scalars._fields),
            grid=(1,),
            in_specs=[whole] * 3 + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(tables),
            out_specs=[whole] * 2,
            scratch_shapes=_scratch(config, q.dtype, k_pages.dtype),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((kv_heads, num_packs, PACK, value_dim), q.dtype),
            jax.ShapeDtypeStruct((num_packs, PACK, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_bytes() + SPILL, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )(plan.count, plan.items, table.reshape(-1), scales, q, k_pages, v_pages, *tables)


def _scratch(c: Config, dtype, kv_dtype):
    packs, f32 = c.rows // PACK, jnp.float32
    return [
        pltpu.VMEM((2, c.num_kv_heads, packs, PACK, c.head_dim), dtype),
        pltpu.VMEM((2, c.block_pages, c.num_kv_heads, c.page_size, c.head_dim), kv_dtype),
        pltpu.VMEM((2, c.block_pages, c.num_kv_heads, c.page_size, c.v_head_dim), kv_dtype),
        pltpu.VMEM((2, c.num_kv_heads, packs, PACK, c.v_head_dim), dtype),
        pltpu.VMEM((2, packs, PACK, LANES), f32),
        pltpu.VMEM((c.num_kv_heads, c.rows, 1), f32),
        pltpu.VMEM((c.num_kv_heads, c.rows, 1), f32),
        pltpu.VMEM((c.num_kv_heads, c.rows, c.v_head_dim), f32),
        pltpu.SemaphoreType.DMA((5, 2)),
    ]


def _kernel(*refs, config: Config, num_columns: int):
    """The walk over the tiles; what the Refs hold is said in moves."""
    # Prefetch
    s, refs = Scalars(*refs[:4]), refs[4:]
    # Input: q, k, v; columns f32[K rows C] in VMEM, if there are any.   Output: out, lse.   Scratch: the rest
    (q, k, v), refs = refs[:3], refs[3:]
    columns, refs = (refs[0], refs[1:]) if config.columns else (None, refs)
    buf = Buffers(*refs[2:])
    move = Moves(config, num_columns, s, Hbm(q, k, v, *refs[:2]), buf)
    count = s.count[0]

    @pl.when(count > 0)
    def _():
        move.start_q(0)
        move.start_keys(0, 0, 0)

    def walk(i, step):
        item, half = move.item(i), lax.rem(i, 2)
        pl.when(i + 1 < count)(lambda: move.start_q(i + 1))
        move.wait_q(i)
        pl.when(i >= 2)(lambda: move.wait_out(i - 2))
        tile = Tile(config, buf, columns, s.scales, item, half)
        # at least one block: a tile that sees nothing must still say so
        blocks = jnp.maximum(lax.div(item.pages + config.block_pages - 1, config.block_pages), 1)
        first_key = item.page * config.page_size

        def block(b, _):
            side = lax.rem(step + b, 2)
            last = b + 1 == blocks
            next_i, next_b = jnp.where(last, i + 1, i), jnp.where(last, 0, b + 1)
            pl.when(next_i < count)(lambda: move.start_keys(next_i, next_b, 1 - side))
            move.wait_keys(item, b, side)
            tile.block(side, first_key + b * config.block_keys)
            return ()

        tile.start()
        lax.fori_loop(0, blocks, block, ())
        tile.finish()
        move.start_out(i)
        return step + blocks

    lax.fori_loop(0, count, walk, jnp.int32(0))
    for back in (2, 1):
        pl.when(count >= back)(lambda back=back: move.wait_out(count - back))
