"""A soft cap: some scores on the special-function unit (MUFU), the others by FMA, so that both units work.

MUFU computes 16 values a cycle on an SM. The softmax needs one for the exponential of each score, and tanh.approx needs
another. For y = score / cap with |y| <= MAX_INPUT a polynomial is more exact than tanh.approx, whose relative error is
2 ** -11:

    tanh(y) = y (C0 + C1 y^2 + C2 y^4)        relative error at most 2 ** -13

Scores of the FMA part that are beyond MAX_INPUT are computed by tanh.approx after all. That is decided score by score,
so that the result does not depend on the other scores of the warp.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

COEFFICIENTS, MAX_INPUT = (0.99992075, -0.32962109, 0.10660985), 0.625
EVERY = 4
"""One register pair of every four is computed by FMA. On an H200 (2026-11-30) pre_1x8k takes 868 us, with two of four
872, with three 895, and without a cap 781; pre_1x4k with heads of 256 takes 204, with two of four 207, and 210 with
none."""


def capped(x, scale, cap: float):
    """cap * tanh(x * scale) of f32 (64, n). scale: positive f32 scalar, that of the logits divided by the cap."""
    shape = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, ptx.SCALAR), return_type=shape)
    def compute(ctx, x, scale):
        scale = ptx.scalar_value(scale)
        flat = [rows.pair_element(pair, k) for pair in x.registers.flat for k in range(2)]
        by_fma = [i for i in range(len(flat)) if i // 2 % EVERY == 0]
        inputs = [flat[i] for i in by_fma]
        values = _capped_where_out_of_range(inputs, _by_polynomial(inputs, scale, cap), scale, cap)
        of_index = dict(zip(by_fma, values, strict=True))
        for i in range(len(flat)):
            if i in of_index:
                flat[i] = of_index[i]
            else:
                tanh = ptx.asm_value("tanh.approx.f32 $0, $1;", "=f,f", arith.mulf(flat[i], scale), pure=True)
                flat[i] = arith.mulf(tanh, ptx.f32(cap))
        out = rows.empty_fragment(x.shape, plgpu.Layout.WGMMA)
        rows.fill(out, lambda i: flat[2 * i : 2 * i + 2])
        return out

    return compute(x, scale)


def _by_polynomial(inputs, scale, cap: float):
    """cap * tanh(x * scale) of each x, as x (f0 + f1 x^2 + f2 x^4); cap and powers of the scale are in the factors."""
    square, power, factors = arith.mulf(scale, scale), arith.mulf(scale, ptx.f32(cap)), []
    for coefficient in COEFFICIENTS:
        factors.append(arith.mulf(ptx.f32(coefficient), power))
        power = arith.mulf(power, square)
    values = []
    for x in inputs:
        squared, total = arith.mulf(x, x), factors[-1]
        for factor in reversed(factors[:-1]):
            total = ptx.fma(total, squared, factor)
        values.append(arith.mulf(x, total))
    return values


def _capped_where_out_of_range(inputs, values, scale, cap: float):
    """`values`, with those replaced by tanh.approx whose input is beyond the polynomial's range."""
    tops = [ptx.f32(0.0)] * 4  # the largest inputs, in four chains that do not wait for one another
    larger = "{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }"
    for n, x in enumerate(inputs):
        tops[n % 4] = ptx.asm_value(larger, "=f,f,f", tops[n % 4], x, pure=True)
    top = ptx.fmax(ptx.fmax(*tops[:2]), ptx.fmax(*tops[2:]))
    count, most = len(values), ptx.hex_f32(MAX_INPUT)
    out, given, factor, largest = range(count), range(count, 2 * count), 2 * count, 2 * count + 1
    text = f"setp.gt.f32 p, ${largest}, {most}; vote.sync.any.pred p, p, -1; @!p bra WITHIN; "
    for k in range(count):
        text += f"mul.f32 y, ${given[k]}, ${factor}; abs.f32 z, y; setp.gtu.f32 q, z, {most}; tanh.approx.f32 y, y; "
        text += f"mul.f32 y, y, {ptx.hex_f32(cap)}; selp.f32 ${out[k]}, y, ${out[k]}, q; "
    constraints = ",".join(["=&f"] * count + ["f"] * (count + 2) + [str(k) for k in range(count)])
    arguments = (*inputs, scale, arith.mulf(top, scale), *values)
    text = f"{{ .reg .pred p, q; .reg .f32 y, z; {text} WITHIN: }}"
    return ptx.asm_values(text, constraints, count, *arguments)
