"""Sets rows to zero in place: costs what those rows take to write, and not a copy of the array."""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx

THREADS = 128
ROWS = 16  # of a CTA


def zero_rows(*arrays: jax.Array, used: jax.Array) -> tuple[jax.Array, ...]:
    """Each array [T ...] with 0 in the rows where used bool[T] is False. A row must be a multiple of 16 bytes."""
    mesh = plgpu.Mesh(grid=(pl.cdiv(used.shape[0], ROWS),), grid_names=("part",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    refs = [jax.new_ref(x) for x in arrays]

    def zero_unused_rows(used, *refs):
        first = lax.axis_index("part") * ROWS
        for ref in refs:
            _zero(used, ref, first)

    zero = pl.kernel(zero_unused_rows, out_type=(), mesh=mesh, compiler_params=params, name="zero_unused_rows")
    zero(used.astype(jnp.int32), *refs)
    return tuple(jax.freeze(ref) for ref in refs)


def _zero(used, array, first):
    """Zeros 16 bytes a thread at a time of those of ROWS rows, from row `first` on, that are not used."""
    rows = array.shape[0]
    chunks = math.prod(array.shape[1:]) * array.dtype.itemsize // 16

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def zero(ctx, used, array, first):
        used, array = ptx.pointer(used, 0), ptx.pointer(array, 0)
        for i in range(ROWS):
            row = arith.addi(ptx.scalar_value(first), ptx.i32(i))
            inside = ptx.bool_to_i32(ptx.less(row, ptx.i32(rows)))
            flag = arith.addi(used, arith.muli(ptx.to_i64(row), ptx.i64(4)))
            text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 1; @p ld.global.nc.b32 $0, [$1]; }"
            is_used = ptx.asm_value(text, "=&r,l,r", flag, inside, pure=True)
            begin = arith.addi(array, arith.muli(ptx.to_i64(row), ptx.i64(16 * chunks)))
            for part in range(0, chunks, THREADS):
                chunk = arith.addi(ptx.thread_index(), ptx.i32(part))
                place = arith.addi(begin, arith.muli(ptx.to_i64(chunk), ptx.i64(16)))
                text = (
                    "{ .reg .pred p; setp.lt.s32 p, $2, $3; setp.eq.and.u32 p, $1, 0, p;"
                    " @p st.global.v4.b32 [$0], {$1, $1, $1, $1}; }"
                )
                ptx.asm(text, "l,r,r,r", place, is_used, chunk, ptx.i32(chunks))

    zero(used, array, first)
