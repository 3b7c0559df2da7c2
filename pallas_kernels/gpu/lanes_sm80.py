"""Maxima and sums over the lanes of a warp by products with constant matrices, and without shuffles.

`shfl.sync`, `vote.sync` and `bar.warp.sync` in a loop are calls where a program is compiled relocatably for sm_80, 86
or 89, as nvJitLink compiles: a call destroys a thread's first registers and all uniform ones, and mixed batches spilled
up to 3776 bytes. `mma` and `movmatrix` are never calls. A number is passed as the sum of two or three bfloat16, since a
product of bfloat16 with 1 is exact: three give every bit, and two all but 2^-16 of it, enough for a maximum, which
need only be the same in every lane. For a sum the constant matrix is all ones; for a maximum each product's matrix
selects some lanes' numbers, which the product hands to the other lanes. Where shuffles are no calls, they are hardly
faster (on an H200, up to 5 %).
"""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)  # one number for each row, the same in the four lanes that share it
ONE, TWO_ONES = 0x3F80, 0x3F803F80  # one and two bfloat16 of a word
LOWEST = -3e38  # instead of -inf, which times 0 is NaN


def row_maxima(x):
    """f32 (64,): the largest number of each row of a fragment f32 [64, n], to 2^-16 of it, and at least LOWEST."""

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, _ROWS))
    def largest(ctx, x):
        tops = [functools.reduce(ptx.fmax, values, ptx.f32(LOWEST)) for values in _by_row(x)]
        return _of_rows(x.shape[:1], _quad_maxima(*tops))

    return largest(x)


def partial_row_sums(x):
    """f32 (64,): in each of the four lanes of a row, the sum of the lane's own columns only; n is 8, 16, 32, ..

    complete_row_sums adds the four: once for a whole piece, since these sums can be added up first.
    """

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, _ROWS))
    def add(ctx, x):
        return _of_rows(x.shape[:1], [_tree_sum(values) for values in _by_row(x)])

    return add(x)


def complete_row_sums(x):
    """f32 (64,): what partial_row_sums left in the four lanes of each row, added up, the same in all four."""

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, _ROWS))
    def add(ctx, x):
        parts = [_parts(rows.register_value(r), 3) for r in x.registers.flat]
        words = [ptx.pack_16bit(high, middle, "bfloat16") for high, middle, _ in parts]
        words += [ptx.pack_16bit(low, ptx.f32(0.0), "bfloat16") for _, _, low in parts]
        sums = ptx.mma(words, [ptx.i32(TWO_ONES)] * 2, [ptx.f32(0.0)] * 4, "bfloat16")
        return _of_rows(x.shape, sums[::2])

    return add(x)


def column_maxima(values):
    """The largest of `values`, two numbers of each lane, over the eight lanes of the warp with the same lane % 4; to
    2^-16. The numbers must be finite: -inf times 0 is NaN."""
    transposed = [ptx.transpose_8x8(word) for word in _words(values, 2)]
    _, t, _, _ = ptx.lane_position(hidden=True)  # else eight constants would stay in registers
    tops = [None, None]
    for i in range(4):  # rows g of the product are of lanes 8 i .. 8 i + 3, rows g + 8 of the next four
        even = arith.select(ptx.equal(t, ptx.i32(i)), ptx.i32(ONE), ptx.i32(0))
        odd = arith.shli(even, ptx.i32(16))
        found = ptx.mma([even, odd] * 2, transposed, [ptx.f32(0.0)] * 4, "bfloat16")
        for e in range(2):
            top = ptx.fmax(found[e], found[2 + e])
            tops[e] = top if i == 0 else ptx.fmax(tops[e], top)
    return tops


def column_sums(values):
    """The sums of `values`, two numbers of each lane, over the eight lanes of the warp with the same lane % 4; exact to
    float32's rounding."""
    high, middle, low = [ptx.transpose_8x8(word) for word in _words(values, 3)]
    ones = [ptx.i32(TWO_ONES)] * 4
    sums = ptx.mma(ones, [high, middle], [ptx.f32(0.0)] * 4, "bfloat16")
    return ptx.mma(ones, [low, ptx.i32(0)], sums, "bfloat16")[:2]


def _quad_maxima(first, second):
    """The largest of the four lanes of a row, for a lane's two rows."""
    words = [ptx.pack_16bit(*_parts(x, 2), "bfloat16") for x in (first, second)]
    g, t, _, _ = ptx.lane_position(hidden=True)
    parity, found = arith.remui(g, ptx.i32(2)), []
    for i in range(2):  # even columns of the product are of lane 2 i, odd ones of lane 2 i + 1
        chosen = ptx.equal(t, ptx.add(parity, ptx.i32(2 * i)))
        found.append(ptx.mma_8(words, arith.select(chosen, ptx.i32(TWO_ONES), ptx.i32(0)), "bfloat16"))
    pairs = [[x[2 * row + e] for x in found for e in range(2)] for row in range(2)]
    return [functools.reduce(ptx.fmax, four) for four in pairs]


def _parts(x, count: int):
    """Numbers whose sum is x; all but the last have no more bits than a bfloat16."""
    parts = []
    for _ in range(count - 1):
        parts.append(ptx.upper_half(x))
        x = arith.subf(x, parts[-1])
    return [*parts, x]


def _words(values, count: int):
    """The same parts of two numbers in a word, for each of `count` parts."""
    return [ptx.pack_16bit(*pair, "bfloat16") for pair in zip(*(_parts(x, count) for x in values), strict=True)]


def _by_row(fragment):
    """The floats of a lane's first row, and those of its second."""
    found = [], []
    for (second, _), pair in zip(rows.pair_places(fragment), fragment.registers.flat, strict=True):
        found[second].extend(rows.pair_element(pair, k) for k in range(2))
    return found


def _of_rows(shape, values):
    """A fragment f32 (64,) of one number for each of a lane's two rows."""
    fragment = rows.empty_fragment(shape, _ROWS)
    rows.fill(fragment, lambda i: [values[i]])
    return fragment


def _tree_sum(values):
    """The sum, by a tree: fewer additions wait for one another than in a chain. Their number is a power of two."""
    while len(values) > 1:
        values = [arith.addf(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
