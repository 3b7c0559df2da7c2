"""A scale for each token and kv head: loaded beside the tiles, applied by the compute warpgroups.

    real key = stored * k_token_scale[slot, head] * k_scale     applied to the dots of the key
    real value = stored * v_token_scale[slot, head] * v_scale   applied to the weights

Warp-level products multiply a weight by its value's scale after it is summed: bfloat16 then, which holds any scale. In
wgmma's tiles the scale is a part of the logit, so that weights times scales come out of the exponential and are at most
about 1, as float16 needs, and the sum takes them divided by their scales again:

    y = logit + log2(scale)     weight * scale = 2 ** (y - m)     sum of weights = sum of 2 ** (y - m) / scale

A block's scales lie in SMEM as f32 [2 block_kv]: first its keys', then its values'; of a converted tile as f32
[3 block_kv]: its keys', then log2 and reciprocals of its values'. They are loaded through registers, one block ahead,
and not by TMA: in NHD the scales of one page and head are strided. A slot without a token may have any scale, NaN
included; it is read as 0, so that a masked logit is not NaN. Scales of values must not be negative, which nothing
checks: in a converted tile, 0 and below count as LEAST.

In a converted tile, weights times scales below 2**-25 of a row's largest become 0. So a token of zeros should have a
small scale, as quant.token_head_scale gives it: a scale of 1 would hide tokens with scales below 2**-25.
"""

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

THREADS = 128
OF_KEYS, OF_VALUES = 0, 1  # parts of a row of scales of a narrow tile, or of the warp-level kernel
LOGS, RECIPROCALS = 1, 2  # of a converted tile, after OF_KEYS
LEAST = 2.0**-80
"""Instead of a smaller scale of a value, 0 included, whose logarithm or reciprocal would be infinite. Beside a scale of
1e4 its key still has a weight: exponentials below 2**-126 are 0."""


def _per_thread(size: int):
    """Layout: element i is held by thread i % THREADS."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def load_ids(block_table, req, kv0, start, stop, *, block: int, page: int, columns: int):
    """i32 (128,): the page of this thread's key, kv0 + thread % block; 0 unless start <= key < stop.

    block_table GMEM i32[R, columns].
    """
    out = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, _per_thread(THREADS))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 4), return_type=out)
    def load(ctx, block_table, req, *where):
        key, seen = _key(block, *where)
        row = arith.muli(ptx.to_i64(ptx.scalar_value(req)), ptx.i64(columns))
        place = arith.addi(row, ptx.to_i64(arith.divui(key, ptx.i32(page))))
        place = arith.addi(ptx.pointer(block_table, 0), arith.muli(place, ptx.i64(4)))
        return _fragment([ptx.asm_value(ptx.predicated_load("b32"), "=&r,l,r", place, seen)], ptx.int_type())

    return load(block_table, req, kv0, start, stop)


def load_scales(k, v, ids, head, kv0, start, stop, *, block: int, page: int, heads: int, heads_first: bool):
    """f32 (2 block,): the scales of keys kv0 .. kv0 + block - 1, then of their values; 0 outside start .. stop - 1.

    k, v GMEM f32 [N, K, S] (heads_first) or [N, S, K]; ids: what load_ids gave for the same keys.
    """
    out = plgpu.ShapeDtypeStruct((2 * block,), jnp.float32, _per_thread(2 * block))
    kinds = (plgpu.RefType(), plgpu.RefType(), _per_thread(THREADS), *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=out)
    def load(ctx, k, v, ids, head, *where):
        key, seen = _key(block, *where)
        head, offset = ptx.scalar_value(head), arith.remui(key, ptx.i32(page))
        block_id = rows.register_value(ids.registers.flat[0])
        place = ptx.pool_row(block_id, offset, head, heads=heads, page=page, heads_first=heads_first)
        place, values = arith.muli(place, ptx.i64(4)), []
        for i in range(2 * block // THREADS):
            of_keys = ptx.less(arith.addi(ptx.thread_index(), ptx.i32(i * THREADS)), ptx.i32(block))
            pool = arith.select(of_keys, ptx.pointer(k, 0), ptx.pointer(v, 0))
            values.append(ptx.asm_value(ptx.predicated_load("f32"), "=&f,l,r", arith.addi(pool, place), seen))
        return _fragment(values)

    return load(k, v, ids, head, kv0, start, stop)


def load_block(pool, ids, head, kv0, start, stop, *, block: int, page: int, heads: int, heads_first: bool):
    """f32 (128,): the scale in one pool of key kv0 + thread % block; 0 unless start <= key < stop. ids: of load_ids."""
    out = plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, _per_thread(THREADS))
    kinds = (plgpu.RefType(), _per_thread(THREADS), *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=out)
    def load(ctx, pool, ids, head, *where):
        key, seen = _key(block, *where)
        head, offset = ptx.scalar_value(head), arith.remui(key, ptx.i32(page))
        block_id = rows.register_value(ids.registers.flat[0])
        place = ptx.pool_row(block_id, offset, head, heads=heads, page=page, heads_first=heads_first)
        place = arith.addi(ptx.pointer(pool, 0), arith.muli(place, ptx.i64(4)))
        return _fragment([ptx.asm_value(ptx.predicated_load("f32"), "=&f,l,r", place, seen)])

    return load(pool, ids, head, kv0, start, stop)


def in_logits(scales):
    """(log2, reciprocal) of what load_block gave of a block's values."""
    safe = jnp.maximum(scales, jnp.float32(LEAST))
    return lax.log(safe) * jnp.float32(1 / math.log(2)), 1.0 / safe


def put_block(tile, values, first: int, *, block: int):
    """Stores f32 (128,), of which keys 0 .. block - 1 count, from element `first` on of a row of scales in SMEM."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _per_thread(THREADS)))
    def put(ctx, tile, values):
        me = ptx.thread_index()
        place = ptx.add(ptx.pointer(tile, 3), ptx.mul(ptx.add(me, ptx.i32(first)), 4))
        inside = ptx.bool_to_i32(ptx.less(me, ptx.i32(block)))
        value = rows.register_value(values.registers.flat[0])
        ptx.store_if(place, inside, value, kind="f32", space="shared")

    put(tile, values)


def _key(block: int, kv0, start, stop):
    """(position of this thread's key, 1 if start <= key < stop else 0)."""
    kv0, start, stop = map(ptx.scalar_value, (kv0, start, stop))
    key = arith.addi(kv0, arith.remui(ptx.thread_index(), ptx.i32(block)))
    known = arith.cmpi(arith.CmpIPredicate.sge, key, start)
    return key, ptx.bool_to_i32(arith.andi(known, ptx.less(key, stop)))


def _fragment(values, element=None):
    size = THREADS * len(values)
    fragment = rows.empty_fragment((size,), _per_thread(size), element)
    rows.fill(fragment, lambda i: values[i : i + 1])
    return fragment


def load_per_key(tile, row, axis: int, block: int, first=0, count: int | None = None, of=(OF_KEYS, OF_VALUES)):
    """f32 (count,) of keys first .. for each of these parts of a row of scales.

    They broadcast along the other axis of WGMMA scores, whose `axis` runs over keys.
    tile SMEM f32 [rows, 2 or 3 block].
    """
    layout, count = plgpu.Layout.WGMMA.reduce(1 - axis), count or block

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout))
    def read(ctx, ref):
        return FragmentedArray.load_untiled(ref, layout=layout.to_mgpu(), optimized=False)

    return tuple(read(tile.at[row, pl.ds(kind * block + first, count)]) for kind in of)


def multiply_per_key(x, scale, axis: int):
    """x * scale, with one scale for each key along `axis`; a scale of None is 1."""
    return x if scale is None else x * lax.broadcast_in_dim(scale, x.shape, [axis])


def weighted_row_sums(x, factors):
    """lanes.partial_row_sums of x * factors, f32 (64, n) each."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    out = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA), return_type=out)
    def add(ctx, x, factors):
        sums = [[None, None], [None, None]]  # of each row, two chains
        for (second, _), pair, by in zip(rows.pair_places(x), x.registers.flat, factors.registers.flat, strict=True):
            for k, total in enumerate(sums[second]):
                value, factor = rows.pair_element(pair, k), rows.pair_element(by, k)
                sums[second][k] = arith.mulf(value, factor) if total is None else ptx.fma(value, factor, total)
        fragment = rows.empty_fragment(x.shape[:1], layout)
        rows.fill(fragment, lambda i: [arith.addf(*sums[i])])
        return fragment

    return add(x, factors)
