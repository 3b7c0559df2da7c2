"""Scales per token and head: fetched beside their keys by the memory warpgroup, multiplied in by the compute ones.

    real key = stored * k_token[slot, head] * k_scale        logits: dots * scale of the key
    real value likewise                                      weights, after their sum: p * scale of the value

A block's scales lie in SMEM as f32 [2 block_kv]: its keys', then its values'. They come through the memory
warpgroup's registers, a block ahead, and not by TMA: in NHD a page's scales of one head are strided. Slots that hold
no token may have any scale, NaN included; theirs are taken for 0, so that what is masked stays masked.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

THREADS = 128
_LOAD = "{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.{} $0, [$1]; }}"


def _per_thread(size: int):
    """One value a thread, or one every THREADS."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def load_ids(table, req, kv0, start, stop, *, block: int, page: int, columns: int):
    """i32 (128,): the page of this thread's key, kv0 + thread % block; 0 unless start <= key < stop.

    table GMEM i32[R, columns].
    """
    out = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, _per_thread(THREADS))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 4), return_type=out)
    def load(ctx, table, req, *where):
        key, seen = _key(block, *where)
        row = arith.muli(ptx.wide(ptx.scalar(req)), ptx.i64(columns))
        place = arith.addi(row, ptx.wide(arith.divui(key, ptx.i32(page))))
        place = arith.addi(ptx.pointer(table, 0), arith.muli(place, ptx.i64(4)))
        return _fragment([ptx.one(_LOAD.format("b32"), "=&r,l,r", place, seen)], ptx.int_type())

    return load(table, req, kv0, start, stop)


def load_scales(k, v, ids, head, kv0, start, stop, *, block: int, page: int, heads: int, heads_first: bool):
    """f32 (2 block,): the scales of keys kv0 .. kv0 + block - 1, then of their values; 0 outside start .. stop - 1.

    k, v GMEM f32 [N, K, S] (heads_first) or [N, S, K]; ids: what load_ids gave for the same keys.
    """
    out = plgpu.ShapeDtypeStruct((2 * block,), jnp.float32, _per_thread(2 * block))
    kinds = (plgpu.RefType(), plgpu.RefType(), _per_thread(THREADS), *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=out)
    def load(ctx, k, v, ids, head, *where):
        key, seen = _key(block, *where)
        head, offset = ptx.scalar(head), arith.remui(key, ptx.i32(page))
        block_id, kind = rows.single(ids.registers.flat[0]), dict(heads=heads, page=page, heads_first=heads_first)
        place = ptx.pool_row(block_id, offset, head, **kind)
        place, values = arith.muli(place, ptx.i64(4)), []
        for i in range(2 * block // THREADS):
            of_keys = ptx.less(arith.addi(ptx.thread(), ptx.i32(i * THREADS)), ptx.i32(block))
            pool = arith.select(of_keys, ptx.pointer(k, 0), ptx.pointer(v, 0))
            values.append(ptx.one(_LOAD.format("f32"), "=&f,l,r", arith.addi(pool, place), seen))
        return _fragment(values)

    return load(k, v, ids, head, kv0, start, stop)


def _key(block: int, kv0, start, stop):
    """(this thread's key, 1 if start <= key < stop)."""
    kv0, start, stop = map(ptx.scalar, (kv0, start, stop))
    key = arith.addi(kv0, arith.remui(ptx.thread(), ptx.i32(block)))
    known = arith.cmpi(arith.CmpIPredicate.sge, key, start)
    return key, ptx.flag(arith.andi(known, ptx.less(key, stop)))


def _fragment(values, element=None):
    size = THREADS * len(values)
    fragment = rows.empty_fragment((size,), _per_thread(size), element)
    rows.fill(fragment, lambda i: values[i : i + 1])
    return fragment


def across_keys(tile, slot, axis: int, block: int, first=0, count: int | None = None):
    """(keys', values') f32 (count,) of keys first .. of the block in a slot: keys run along `axis` of WGMMA scores.

    tile SMEM f32 [stages, 2 block].
    """
    layout, count = plgpu.Layout.WGMMA.reduce(1 - axis), count or block

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout))
    def read(ctx, ref):
        return FragmentedArray.load_untiled(ref, layout=layout.to_mgpu(), optimized=False)

    return tuple(read(tile.at[slot, pl.ds(at, count)]) for at in (first, block + first))


def times(x, scale, axis: int):
    """x with each key's scale; None is 1."""
    return x if scale is None else x * lax.broadcast_in_dim(scale, x.shape, [axis])
