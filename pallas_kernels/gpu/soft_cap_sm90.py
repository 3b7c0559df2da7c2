"""tanh for a soft cap: some scores on the special-function unit (MUFU), the others by FMA, so that both units work.

MUFU computes 16 values a cycle on an SM, and the softmax needs one exponential a score already; tanh.approx is a second
one. For |y| <= 1, logits within the cap, a polynomial is more exact than tanh.approx:

    tanh(y) = y (C0 + C1 y^2 + .. + C4 y^8)        relative error at most 2 ** -17

If one of the scores that a warp computes so has |y| > 1, the warp takes tanh.approx for all of them.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

COEFFICIENTS = (0.99999309, -0.33298064, 0.13036808, -0.04481753, 0.00903642)


def tanh_of_scaled(x, scale, fourths: int):
    """tanh(x * scale) of f32 (64, n), `fourths` of every four register pairs by FMA. scale: positive f32 scalar."""
    shape = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, ptx.SCALAR), return_type=shape)
    def tanh(ctx, x, scale):
        scale = ptx.scalar_value(scale)
        square, factors = arith.mulf(scale, scale), [scale]
        for _ in COEFFICIENTS[1:]:
            factors.append(arith.mulf(factors[-1], square))
        factors = [arith.mulf(ptx.f32(c), f) for c, f in zip(COEFFICIENTS, factors, strict=True)]
        flat = [rows.pair_element(pair, k) for pair in x.registers.flat for k in range(2)]
        by_fma = [i for i in range(len(flat)) if i // 2 % 4 < fourths]
        for i in range(len(flat)):
            if i not in by_fma:
                flat[i] = ptx.asm_value("tanh.approx.f32 $0, $1;", "=f,f", arith.mulf(flat[i], scale), pure=True)
        inputs = [flat[i] for i in by_fma]
        values = _tanh_where_out_of_range(inputs, [_polynomial(x, factors) for x in inputs], scale)
        for i, value in zip(by_fma, values, strict=True):
            flat[i] = value
        out = rows.empty_fragment(x.shape, plgpu.Layout.WGMMA)
        rows.fill(out, lambda i: flat[2 * i : 2 * i + 2])
        return out

    return tanh(x, scale)


def _polynomial(x, factors):
    square, total = arith.mulf(x, x), factors[-1]
    for factor in reversed(factors[:-1]):
        total = ptx.fma(total, square, factor)
    return arith.mulf(x, total)


def _tanh_where_out_of_range(inputs, values, scale):
    """`values`, or tanh.approx(inputs * scale) if an input of the warp is out of the polynomial's range."""
    top = ptx.f32(0.0)
    for x in inputs:
        top = ptx.asm_value("{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }", "=f,f,f", top, x, pure=True)
    count = len(values)
    out, given, factor, largest = range(count), range(count, 2 * count), 2 * count, 2 * count + 1
    text = f"setp.gt.f32 p, ${largest}, 0f3F800000; vote.sync.any.pred p, p, -1; @!p bra WITHIN; "
    for k in range(count):
        text += f"mul.f32 y, ${given[k]}, ${factor}; tanh.approx.f32 ${out[k]}, y; "
    constraints = ",".join(["=&f"] * count + ["f"] * (count + 2) + [str(k) for k in range(count)])
    arguments = (*inputs, scale, arith.mulf(top, scale), *values)
    text = f"{{ .reg .pred p; .reg .f32 y; {text} WITHIN: }}"
    return ptx.asm_values(text, constraints, count, *arguments)
