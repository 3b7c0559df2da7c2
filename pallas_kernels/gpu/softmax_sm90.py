"""The online softmax of a block of keys, in one warpgroup, mostly without the block's maxima.

A row's weights are 2 ** (x * factor - m). Its shift m need not be the row's maximum: every m gives the same output and
log-sum-exp, as long as no weight overflows and the largest does not underflow. So m is raised, to the maximum so far,
only in a block whose weights would be large: in the first one that a row sees, and in few after it. In the others the
output is not rescaled and lanes exchange nothing. m never exceeds the maximum so far, so the largest weight so far is
at least 1. Whether m is raised depends on nothing but the row's own logits. Factors must not be negative.

    raise_shift     before the weights are computed: each lane compares its own columns' maximum with m
    weights_first   weights are computed with m as it is, and no maximum; where a lane's sum of them is large, once more

A warp in which no row's m is raised skips the instructions that raise it. The branch is inside one piece of PTX: if
LLVM saw it, it might copy the code after it, and all warps must reach the same wgmma.

State: (output f32 (64, V), shift f32 (64,), sums f32 (64,)); the sums are of each lane's own columns, see
lanes.complete_row_sums.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)
_STATE = (_WGMMA, _ROWS, _ROWS)
MOST_RISE = 8.0  # in base 2, of a logit over m: weights are at most 256, and float16 holds up to 65504
MOST_SUM = 4096  # a lane's sum of weights beyond which weights_first raises m; so no weight of float16 overflows
SHFL = "shfl.sync.bfly.b32 u, {0}, {1}, 31, -1; max.NaN.f32 {0}, {0}, u; "  # the larger of two lanes


def raise_shift(x, factor, state, *, eight_bits: bool = False):
    """The state with m raised where x * factor exceeds it by more than MOST_RISE.

    x f32 [64, n], factor f32 or f32 (64,).
    eight_bits: weights are rounded to 8 bits. m is a whole number then, so that they are rounded alike whatever keys
    came before, and so low that the largest are near 256: 8 bits hold less of the small ones.
    """
    by_row, kind = _factors(factor)

    @plgpu.inline_mgpu(arg_types=(_WGMMA, kind, *_STATE), return_type=_state_types(state))
    def rise(ctx, x, factor, acc, m, total):
        tops = [arith.mulf(top, by) for top, by in zip(_lane_maxima(x), by_row(factor), strict=True)]
        values = [*_of_rows(m), *_of_rows(total), *_flat(acc)]
        count = len(values)
        text = ".reg .pred p, q<2>; .reg .f32 u, t<2>, a<2>, b<2>; "
        for i in range(2):
            text += f"mov.f32 t{i}, ${count + i}; add.f32 b{i}, ${i}, {ptx.hex_f32(MOST_RISE)}; "
            text += f"setp.gt.f32 q{i}, t{i}, b{i}; "
        text += "or.pred p, q0, q1; " + _unless_any("p")
        for i in range(2):
            text += SHFL.format(f"t{i}", 1) + SHFL.format(f"t{i}", 2)
            text += f"setp.gt.f32 q{i}, t{i}, b{i}; "
            if eight_bits:
                text += f"cvt.rpi.f32.f32 t{i}, t{i}; sub.f32 t{i}, t{i}, {ptx.hex_f32(MOST_RISE - 1)}; "
            text += f"selp.f32 t{i}, t{i}, ${i}, q{i}; "
            text += _rescale(acc, i, first=4)
        text += "SAME: "
        return _run(text, values, tops, acc)[0]

    acc, m, total = state
    m, total, acc = rise(x, factor, acc, m, total)
    return acc, m, total


def weights_first(x, factor, state, *, dtype: str):
    """(weights [64, n] of `dtype`, the state with their sums). x f32 [64, n], factor f32 or f32 (64,)."""
    weights = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), _WGMMA)
    by_row, kind = _factors(factor)

    @plgpu.inline_mgpu(arg_types=(_WGMMA, kind, *_STATE), return_type=(*_state_types(state), weights))
    def compute(ctx, x, factor, acc, m, total):
        factors, shifts, which = by_row(factor), _of_rows(m), [second for second, _ in rows.pair_places(x)]
        lower, sums, words = [arith.negf(shift) for shift in shifts], [None, None], []
        for second, pair in zip(which, x.registers.flat, strict=True):
            both = [rows.pair_element(pair, k) for k in range(2)]
            both = [ptx.exp2(ptx.fma(value, factors[second], lower[second])) for value in both]
            words.append(ptx.pack_16bit(*both, dtype))
            both = arith.addf(*both)
            sums[second] = both if sums[second] is None else arith.addf(sums[second], both)
        values = [*shifts, *_of_rows(total), *_flat(acc)]
        given, first = [*factors, *sums, *_flat(x)], len(values) + len(words)  # operands that are not results
        text = ".reg .pred p, q<2>; .reg .f32 u, v, w, t<2>, a<2>, s<2>; "
        for i in range(2):
            text += f"mov.f32 s{i}, ${first + 2 + i}; setp.gtu.f32 q{i}, s{i}, {ptx.hex_f32(MOST_SUM)}; "
        text += "or.pred p, q0, q1; " + _unless_any("p")
        half = "bf16x2" if dtype == "bfloat16" else "f16x2"
        for i in range(2):
            own = [n for n, second in enumerate(which) if second == i]
            text += f"selp.f32 t{i}, {ptx.hex_f32(1)}, {ptx.hex_f32(0)}, q{i}; "
            text += SHFL.format(f"t{i}", 1) + SHFL.format(f"t{i}", 2)
            text += f"setp.gt.f32 q{i}, t{i}, {ptx.hex_f32(0)}; "  # in one of the row's four lanes
            text += f"mov.f32 t{i}, ${first + 4 + 2 * own[0]}; "
            for n in own:
                text += "".join(f"max.NaN.f32 t{i}, t{i}, ${first + 4 + 2 * n + k}; " for k in range(2))
            text += SHFL.format(f"t{i}", 1) + SHFL.format(f"t{i}", 2)
            text += f"mul.f32 t{i}, t{i}, ${first + i}; max.NaN.f32 t{i}, t{i}, ${i}; selp.f32 t{i}, t{i}, ${i}, q{i}; "
            text += _rescale(acc, i, first=4)
            text += f"neg.f32 t{i}, t{i}; mov.f32 s{i}, {ptx.hex_f32(0)}; "
            for n in own:
                for k, name in enumerate("vw"):
                    text += f"fma.rn.f32 {name}, ${first + 4 + 2 * n + k}, ${first + i}, t{i}; "
                    text += f"ex2.approx.ftz.f32 {name}, {name}; "
                text += f"cvt.rn.{half}.f32 ${len(values) + n}, w, v; add.f32 v, v, w; add.f32 s{i}, s{i}, v; "
        text += "SAME: " + " ".join(f"add.f32 ${2 + i}, ${2 + i}, s{i};" for i in range(2))
        state, words = _run(text, values, given, acc, words)
        return *state, rows.fragment_of_words(x.shape, utils.dtype_to_ir_type(jnp.dtype(dtype)), words)

    acc, m, total = state
    m, total, acc, weights = compute(x, factor, acc, m, total)
    return weights, (acc, m, total)


def _factors(factor):
    """(function: factor inside inline PTX -> the factors of a lane's two rows, its type)."""
    if len(factor.shape):
        return _of_rows, _ROWS
    return lambda value: [ptx.scalar_value(value)] * 2, ptx.SCALAR


def _state_types(state):
    row = plgpu.ShapeDtypeStruct((64,), jnp.float32, _ROWS)
    return row, row, plgpu.ShapeDtypeStruct(state[0].shape, jnp.float32, _WGMMA)


def _of_rows(values):
    """A lane's numbers of its two rows."""
    return [rows.register_value(register) for register in values.registers.flat]


def _flat(fragment):
    return [rows.pair_element(pair, k) for pair in fragment.registers.flat for k in range(2)]


def _lane_maxima(x):
    """The largest of the lane's own columns, of each of its two rows; two chains of comparisons a row."""
    largest = lambda a, b: ptx.asm_value("max.NaN.f32 $0, $1, $2;", "=f,f,f", a, b, pure=True)
    tops = [[None, None], [None, None]]
    for (second, _), pair in zip(rows.pair_places(x), x.registers.flat, strict=True):
        for k in range(2):
            value, top = rows.pair_element(pair, k), tops[second][k]
            tops[second][k] = value if top is None else largest(top, value)
    return [largest(*own) for own in tops]


def _unless_any(predicate: str) -> str:
    """To SAME, unless the predicate holds in one of the warp's lanes."""
    return f"vote.sync.any.pred {predicate}, {predicate}, -1; @!{predicate} bra SAME; "


def _rescale(acc, i: int, first: int) -> str:
    """Of row i: t, which is its new shift, replaces m; the sum and the output from operand `first` on are rescaled."""
    text = f"sub.f32 a{i}, ${i}, t{i}; ex2.approx.ftz.f32 a{i}, a{i}; mov.f32 ${i}, t{i}; "
    text += f"mul.f32 ${2 + i}, ${2 + i}, a{i}; "
    own = [n for n, (second, _) in enumerate(rows.pair_places(acc)) if second == i]
    return text + "".join(f"mul.f32 ${first + 2 * n + k}, ${first + 2 * n + k}, a{i}; " for n in own for k in range(2))


def _run(text: str, values, given, acc, words=()):
    """((m, total, acc), words) after the PTX, which changes them in place. given: its other operands."""
    count = len(values) + len(words)
    results = ["=&f"] * len(values) + ["=&r"] * len(words)
    constraints = ",".join([*results, *("f" for _ in given), *map(str, range(count))])
    found = ptx.asm_values(f"{{ {text} }}", constraints, count, *given, *values, *words)
    of_rows = [rows.empty_fragment((64,), _ROWS) for _ in range(2)]
    for k, fragment in enumerate(of_rows):
        rows.fill(fragment, lambda i, k=k: [found[2 * k + i]])
    out = rows.empty_fragment(acc.shape, _WGMMA)
    rows.fill(out, lambda i: found[4 + 2 * i : 6 + 2 * i])
    return (*of_rows, out), found[len(values) :]
