"""Single numbers of an array in GMEM, at indices that differ from element to element of a fragment."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu.ptx_sm90 import add, asm_value, i64, pointer, to_i64
from pallas_kernels.gpu.rows_sm90 import empty_fragment, fill, pair_element


def gather(ref, index, layout):
    """The elements, f32 or i32, of the row-major array `ref` at flat indices, i32 in this layout; 0 at -1."""
    dtype = jnp.dtype(ref.dtype)
    kind = plgpu.ShapeDtypeStruct(index.shape, dtype, layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=kind)
    def gather_numbers(ctx, source, index):
        floats = dtype == jnp.float32
        base, places = pointer(source, 0), index.registers.reshape(-1)
        register, zero = ("=&f", "mov.f32 $0, 0f00000000;") if floats else ("=&r", "mov.b32 $0, 0;")
        load = f"ld.global.{'f32' if floats else 'b32'} $0, [$1];"
        text = f"{{ .reg .pred p; setp.ge.s32 p, $2, 0; {zero} @p {load} }}"

        def read(i):
            held = places[i]
            count = held.type.shape[0] if isinstance(held.type, ir.VectorType) else 0
            numbers = [pair_element(held, k) for k in range(count)] if count else [held]
            address = lambda number: add(base, arith.muli(to_i64(number), i64(4)))
            return [asm_value(text, f"{register},l,r", address(number), number) for number in numbers]

        element = ir.F32Type.get() if floats else ir.IntegerType.get_signless(32)
        found = empty_fragment(kind.shape, layout, element)
        fill(found, read)
        return found

    return gather_numbers(ref, index)
