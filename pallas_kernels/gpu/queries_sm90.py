"""A warpgroup's queries and weights in the dtype of the products over an 8-bit cache.

queries   bfloat16 -> float16 or float8_e4m3fn, each row times a power of two, so that its largest element is just
          below 2 ** 15 or 2 ** 8. float16 then holds every element above 2 ** -32 of the largest exactly.
weights   float32 -> float8_e4m3fn, at most 2 ** 8
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.config import FP8, WARPGROUP_ROWS

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
TOP = {"float16": 15, FP8: 8}  # a row's largest element is below this power of two


def convert_rows(source_ref, target_ref, *, dim: int, target: str):
    """bfloat16 rows -> rows of `target`; gives f32 (64,): the power of two by which a row's products are multiplied.

    source_ref SMEM 16 bits [64, dim], target_ref SMEM [64, dim], which may be the same memory for float16. The caller
    must call commit_smem.
    """
    swizzles = rows.swizzle_bytes(dim, jnp.bfloat16), rows.swizzle_bytes(dim, target)
    kinds = tuple(plgpu.RefType(rows.tile_transforms(dim, dtype)) for dtype in (jnp.bfloat16, target))
    factors = plgpu.ShapeDtypeStruct((WARPGROUP_ROWS,), jnp.float32, ROW_LAYOUT)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=factors)
    def convert(ctx, source, target_tile):
        source, target_tile = ptx.pointer(source, 3), ptx.pointer(target_tile, 3)
        g, t, _, warp = ptx.lane_position()
        inverses = []
        for half in range(2):
            row = ptx.add(ptx.mul(warp, 16), g, ptx.i32(8 * half))

            def place(i, size, swizzle, row=row):
                column = ptx.add(ptx.mul(t, 2), ptx.i32(8 * i))
                return ptx.swizzled(row, ptx.mul(column, size), dim * size, swizzle)

            words, top = [], ptx.i32(0)
            for i in range(dim // 8):
                word = ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", ptx.add(source, place(i, 2, swizzles[0])))
                words.append(word)
                text = (  # bits of magnitudes are in their order
                    "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 a, a, 0x7fff0000; and.b32 b, $1, 0x7fff0000;"
                    " max.u32 a, a, b; max.u32 $0, $2, a; }"
                )
                top = ptx.asm_value(text, "=r,r,r", word, top, pure=True)
            for distance in (1, 2):  # of the four threads of a row
                text = f"{{ .reg .b32 t; shfl.sync.bfly.b32 t, $1, {distance}, 31, -1; max.u32 $0, $1, t; }}"
                top = ptx.asm_value(text, "=r,r", top)
            scale, inverse = powers(top, TOP[target])
            inverses.append(inverse)
            for i, word in enumerate(words):
                low, high = (arith.mulf(ptx.float_of_bf16(word, k), scale) for k in range(2))
                if target == FP8:
                    text = (
                        "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; st.shared.b16 [$0], t; }",
                        "r,f,f",
                    )
                    ptx.asm(*text, ptx.add(target_tile, place(i, 1, swizzles[1])), low, high)
                else:
                    packed = ptx.pack_16bit(low, high, target)
                    ptx.asm("st.shared.b32 [$0], $1;", "r,r", ptx.add(target_tile, place(i, 2, swizzles[1])), packed)
        out = rows.empty_fragment((WARPGROUP_ROWS,), ROW_LAYOUT)
        rows.fill(out, lambda i: inverses[i : i + 1])
        return out

    return convert(source_ref, target_ref)


def powers(top, exponent: int):
    """(2 ** n, 2 ** -n): the largest n with 2 ** n * top < 2 ** exponent, top being a magnitude's bits as f32."""
    # field of the exponent: a zero counts as 2 ** (exponent - 125), and an infinity stays one
    field = arith.maxui(arith.shrui(top, ptx.i32(23)), ptx.i32(exponent + 1))
    power = lambda bits: ptx.asm_value("mov.b32 $0, $1;", "=f,r", arith.shli(bits, ptx.i32(23)), pure=True)
    return power(arith.subi(ptx.i32(253 + exponent), field)), power(ptx.add(field, ptx.i32(1 - exponent)))


def eight_bit_weights(p):
    """f32 (64, n) weights -> float8_e4m3fn, the left operand of a product whose keys are ordered as in stored_tiles."""
    kind = plgpu.ShapeDtypeStruct(p.shape, jnp.float8_e4m3fn, plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)
    def pack(ctx, p):
        pairs = dict(zip(rows.pair_places(p), p.registers.flat, strict=True))
        kind_of = ir.Float8E4M3FNType.get()
        out = rows.empty_fragment(p.shape, plgpu.Layout.WGMMA_8BIT, kind_of)
        flat = out.registers.reshape(-1)
        for i, (second, column) in enumerate(list(rows.pair_places(out))):
            four = [rows.pair_element(pairs[second, column + 8 * j], e) for j in range(2) for e in range(2)]
            text = (
                "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
                " mov.b32 $0, {l, h}; }"
            )
            word = ptx.asm_value(text, "=r,f,f,f,f", *four, pure=True)
            flat[i] = utils.bitcast(word, ir.VectorType.get((4,), kind_of))
        out.registers[...] = flat.reshape(out.registers.shape)
        return out

    return pack(p)


def stage_rows(tile_ref, out, *, dim: int, dtype: str):
    """f32 (64, dim) -> rows of `dtype` in an SMEM tile of any 16-bit type. The caller must call commit_smem."""
    swizzle = rows.swizzle_bytes(dim, dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(rows.tile_transforms(dim, dtype)), plgpu.Layout.WGMMA))
    def stage(ctx, tile, out):
        base, (g, t, _, warp) = ptx.pointer(tile, 3), ptx.lane_position()
        for (second, column), pair in zip(rows.pair_places(out), out.registers.flat, strict=True):
            row = ptx.add(ptx.mul(warp, 16), g, ptx.i32(8 * second))
            place = ptx.swizzled(row, ptx.mul(ptx.add(ptx.mul(t, 2), ptx.i32(column)), 2), 2 * dim, swizzle)
            word = ptx.pack_16bit(*(rows.pair_element(pair, k) for k in range(2)), dtype)
            ptx.asm("st.shared.b32 [$0], $1;", "r,r", ptx.add(base, place), word)

    stage(tile_ref, out)
