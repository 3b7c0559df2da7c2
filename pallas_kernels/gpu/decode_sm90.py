"""8-bit values of a cache as 16-bit ones, in PTX: four of a word in registers, or a whole tile of shared memory."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.rows_sm90 import swizzle_bytes, tile_transforms

THREADS = 128
DECODED_TOGETHER = 4  # chunks that a thread holds in registers while it decodes a tile


def decode_tile(src_ref, dst_ref, *, rows, dim, source, target, dst_dim=None, converts_fp8=True, hidden=False):
    """8-bit SMEM tile [rows, dim] -> 16-bit SMEM tile of the same shape, exactly. The caller must call commit_smem.

    dst_dim: columns of dst_ref, whose memory is used, if there are more than `dim`. converts_fp8: see decode_word.
    """
    chunks = dim // 16  # chunks of 16 values in a row
    kinds = (plgpu.RefType(tile_transforms(dim, source)), plgpu.RefType(tile_transforms(dst_dim or dim, target)))
    text, swizzles = decode_word(source, target, converts_fp8), [swizzle_bytes(dim, kind) for kind in (source, target)]
    period, further = steps_of_equal_columns(chunks)

    @plgpu.inline_mgpu(arg_types=kinds)
    def decode(ctx, src, dst):
        src, dst, me = ptx.pointer(src, 3), ptx.pointer(dst, 3), ptx.thread_index(hidden=hidden)
        places, steps = {}, range(rows * chunks // THREADS)

        def place_of(step):
            """(addresses of the chunk's values, and of its first and second half decoded; rows to add to them)."""
            first = step % period
            if first not in places:
                chunk = ptx.add(me, ptx.i32(first * THREADS))
                row = arith.divui(chunk, ptx.i32(chunks))
                byte = ptx.mul(arith.subi(chunk, ptx.mul(row, chunks)), 16)
                found = [ptx.add(src, ptx.swizzled(row, byte, dim, swizzles[0]))]
                for half in range(2):
                    column = ptx.add(ptx.mul(byte, 2), ptx.i32(16 * half))
                    found.append(ptx.add(dst, ptx.swizzled(row, column, 2 * dim, swizzles[1])))
                places[first] = found
            return places[first], step // period * further

        def load_chunk(step):
            (place, *_), row = place_of(step)
            text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{row * dim}];"
            return ptx.asm_values(text, "=r,=r,=r,=r,r", 4, place)

        def decode_chunk(step, words):
            (_, *halves), row = place_of(step)
            pairs = [x for word in words for x in ptx.asm_values(text, "=r,=r,r", 2, word, pure=True)]
            for half, place in enumerate(halves):
                store = f"st.shared.v4.b32 [$0+{2 * row * dim}], {{$1, $2, $3, $4}};"
                ptx.asm(store, "r,r,r,r,r", place, *pairs[4 * half : 4 * half + 4])

        for first in steps[::DECODED_TOGETHER]:  # loads before the first decode: their latencies overlap
            together = steps[first : first + DECODED_TOGETHER]
            loaded = [load_chunk(step) for step in together]
            for step, words in zip(together, loaded, strict=True):
                decode_chunk(step, words)

    decode(src_ref, dst_ref)


def steps_of_equal_columns(chunks: int) -> tuple[int, int]:
    """(steps, rows): so many steps later a thread has the same chunk of a row, so many rows further.

    The rows are a multiple of 8, so that both swizzles are the same: an address is the earlier one plus a constant,
    which is part of the instruction, and not in a register from the decoding of keys to that of values.
    """
    steps = chunks // math.gcd(THREADS, chunks)
    while steps * THREADS // chunks % 8:
        steps *= 2
    return steps, steps * THREADS // chunks


def decode_word(source: str, target: str, converts_fp8: bool = True) -> str:
    """PTX that decodes the four 8-bit values of $2 to two words of two 16-bit values, $0 and $1.

    converts_fp8: the chip converts float8 to float16 in one instruction (since sm_89).
    """
    if source == "float8_e4m3fn" and not converts_fp8:
        return _decode_e4m3(target)
    if source == "int8":  # 0x6400 | (x + 128) is the float16 1024 + 128 + x
        halves = (
            "xor.b32 t, $2, 0x80808080; prmt.b32 a, t, 0x64646464, 0x4140; prmt.b32 b, t, 0x64646464, 0x4342;"
            " mov.b32 c, 0x64806480; sub.rn.f16x2 a, a, c; sub.rn.f16x2 b, b, c;"
        )
    elif not converts_fp8:  # float8_e5m2 is the upper half of a float16
        halves = "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
    else:
        kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[source]
        halves = f"mov.b32 {{lo, hi}}, $2; cvt.rn.f16x2.{kind} a, lo; cvt.rn.f16x2.{kind} b, hi;"
    if target == "float16":
        finish = "mov.b32 $0, a; mov.b32 $1, b;"
    else:
        to_bf16 = "mov.b32 {{lo, hi}}, {0}; cvt.f32.f16 f, lo; cvt.f32.f16 g, hi; cvt.rn.bf16x2.f32 {1}, g, f;"
        finish = to_bf16.format("a", "$0") + to_bf16.format("b", "$1")
    return f"{{ .reg .b16 lo, hi; .reg .b32 a, b, c, t; .reg .f32 f, g; {halves} {finish} }}"


def _decode_e4m3(target: str) -> str:
    """decode_word of float8_e4m3fn without an instruction for it: sign, exponent and mantissa are moved to their places
    and the number is multiplied by the ratio of the two biases. The bits of a NaN, 0x7f, are all set before."""
    shift, magnitude, scale, kind = {  # the scale is 2^8 as float16, 2^120 as bfloat16
        "float16": (1, "0x3f803f80", "0x5c005c00", "f16x2"),
        "bfloat16": (4, "0x07f007f0", "0x7b807b80", "bf16x2"),
    }[target]
    pair = (
        "prmt.b32 n, m, 0, {nans}; prmt.b32 p, $2, 0, {bytes}; shr.u32 t, p, {shift};"
        " lop3.b32 t, t, {magnitude}, n, 0xea; lop3.b32 t, p, 0x80008000, t, 0xea; fma.rn.{kind} {out}, t, s, z;"
    )
    fixed = dict(shift=shift, magnitude=magnitude, kind=kind)
    low = pair.format(out="a", nans="0x9988", bytes="0x1404", **fixed)
    high = pair.format(out="b", nans="0xbbaa", bytes="0x3424", **fixed)
    return (
        "{ .reg .b32 a, b, m, n, p, s, t, z; and.b32 m, $2, 0x7f7f7f7f; add.u32 m, m, 0x01010101;"  # m: signs of NaNs
        f" mov.b32 s, {scale}; mov.b32 z, 0x80008000; {low} {high} mov.b32 $0, a; mov.b32 $1, b; }}"
    )
