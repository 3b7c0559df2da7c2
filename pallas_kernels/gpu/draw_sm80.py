"""A token drawn for each row: that with the largest sum of scaled logit and noise, among those that are kept.

The noise of a token is jax.random.gumbel's for the row's key: threefry of the token's number, of which two logarithms
are taken. That is 100 instructions for each token, so a warp leaves them out where none of its 32 tokens is kept. A row
is divided among CTAs. What a row draws depends on that row alone: a sum is the same in whatever CTA it is computed.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import words_sm80 as words
from pallas_kernels.gpu.logit_row_sm80 import LogitRow, Scaling, greater, is_finite, ordered_bits

THREADS, WARPS = 128, 4
VALUES = 8  # logits that a thread loads before it uses the first
CTAS = 2048  # of all rows, about: 16 on each of 128 multiprocessors
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA  # the third word of threefry's key is this, xor the other two
_LOG_2 = 0.6931471805599453
_LOG_1P = (
    -0.12948908, 0.1400476, -0.12167168, 0.1400116, -0.16682304, 0.20010747, -0.24999717, 0.3333321, -0.5
)  # fmt: skip
"""P in log(1 + f) = f + f f P(f), |f| up to 1 / 3, the highest power first; fitted for the least relative error."""
_TWO_THIRDS = 0x3F2AAAAB  # the bits of 2 / 3: log takes x as m 2 ** e with m from here up to 4 / 3


def parts_of(rows: int, vocab: int) -> tuple[int, int]:
    """(CTAs that share a row, logits of each)."""
    parts = max(min(cdiv(CTAS, rows), cdiv(vocab, THREADS * VALUES)), 1)
    size = cdiv(cdiv(vocab, parts), THREADS * VALUES) * THREADS * VALUES
    return cdiv(vocab, size), size


def draw(logits: jax.Array, scaling: Scaling, floor: jax.Array, keys: jax.Array) -> jax.Array:
    """i32[R]: of each row of logits f32[R, vocab] the first token with the largest sum.

    floor u32[R]: ordered bits of the least scaled logit that is kept. keys u32[R, 2]. The token of a row without a
    finite logit, or with a NaN, has no meaning.
    """
    rows, vocab = logits.shape
    parts, size = parts_of(rows, vocab)

    def draw(*refs):  # the kernel's name in a profile
        shared = plgpu.SMEM((2 * WARPS,), jnp.int32)
        pl.run_scoped(functools.partial(_part, vocab, parts, size, refs), shared, collective_axes="wg")

    mesh = plgpu.Mesh(grid=(rows, parts), grid_names=("row", "part"), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = [jax.ShapeDtypeStruct((rows, parts), dtype) for dtype in (jnp.float32, jnp.int32)]
    given = logits, scaling.largest, scaling.temperature, scaling.least, floor, keys
    sums, tokens = pl.kernel(draw, out_type=out, mesh=mesh, compiler_params=params)(*given)
    best = jnp.argmax(sums, axis=1, keepdims=True)  # the first of equal ones: parts are in the order of tokens
    return jnp.take_along_axis(tokens, best, axis=1)[:, 0]


def _part(vocab: int, parts: int, size: int, refs, shared):
    """One CTA."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * (len(refs) + 1), ptx.SCALAR, ptx.SCALAR))
    def find(ctx, logits, largest, temperature, least, floor, keys, sums, tokens, shared, row, part):
        row, part = map(ptx.scalar_value, (row, part))
        logits, largest, temperature, least, floor, keys, sums, tokens = (
            ptx.pointer(ref, 0) for ref in (logits, largest, temperature, least, floor, keys, sums, tokens)
        )
        of_row = LogitRow.of(vocab, row, logits, largest, temperature, least)
        word = lambda base, number: ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", words.place(base, number))
        key = [word(keys, ptx.add(ptx.mul(row, 2), ptx.i32(k))) for k in range(2)]
        best = _best_of_thread(of_row, word(floor, row), key, ptx.mul(part, size), size)
        best = _best_of_cta(best, ptx.pointer(shared, 3))
        place, is_first = ptx.add(ptx.mul(row, parts), part), ptx.equal(ptx.thread_index(), ptx.i32(0))
        for base, value, kind in zip((sums, tokens), best, ("f32", "b32"), strict=True):
            words.store(base, place, ptx.bool_to_i32(is_first), value, kind=kind)

    find(*refs, shared, *map(lax.axis_index, ("row", "part")))


def _best_of_thread(row: LogitRow, floor, key, first, size: int):
    """(the largest sum, its token) of the thread's logits from number `first` on."""

    def step(values, numbers, best):
        for x, number in zip(values, numbers, strict=True):
            is_kept = arith.andi(ptx.negated(ptx.less_unsigned(ordered_bits(x), floor)), is_finite(x))
            some = ptx.less_unsigned(ptx.i32(0), words.votes(is_kept))
            best = control.where(some, lambda: _with_noise(x, number, is_kept, key, best), best)  # noqa: B023
        return best

    start = ptx.f32(-np.inf), ptx.i32(0)
    return row.each(step, start, thread=ptx.thread_index(), threads=THREADS, values=VALUES, first=first, count=size)


def _with_noise(x, number, is_kept, key, best):
    """The better of `best` and this logit with its noise, if it is kept. Of equal sums the earlier."""
    total = arith.addf(x, gumbel(key, number))
    is_better = arith.andi(is_kept, greater(total, best[0]))
    return arith.select(is_better, total, best[0]), arith.select(is_better, number, best[1])


def _best_of_cta(best, shared):
    """(the largest sum, its token) of all threads, for the first one. shared: SMEM address of 2 WARPS words."""
    for distance in (16, 8, 4, 2, 1):
        best = _better(best, (ptx.shuffle_xor(best[0], distance), ptx.shuffle_xor_word(best[1], distance)))
    thread = ptx.thread_index()
    warp, is_first = arith.divui(thread, ptx.i32(32)), ptx.equal(arith.remui(thread, ptx.i32(32)), ptx.i32(0))
    words.store_shared(shared, warp, ptx.bool_to_i32(is_first), words.of_float(best[0]))
    words.store_shared(shared, ptx.add(warp, ptx.i32(WARPS)), ptx.bool_to_i32(is_first), best[1])
    words.barrier()
    load = lambda kind, at: ptx.asm_values(
        f"ld.shared.v4.{kind}32 {{$0, $1, $2, $3}}, [$4+{at}];", ",".join(["=f" if kind == "f" else "=r"] * 4) + ",r",
        4, shared,
    )  # fmt: skip
    return functools.reduce(_better, zip(load("f", 0), load("b", 4 * WARPS), strict=True))


def _better(one, other):
    """The larger of two (sum, token); of equal sums the smaller token."""
    is_tie = arith.andi(arith.cmpf(arith.CmpFPredicate.OEQ, other[0], one[0]), ptx.less(other[1], one[1]))
    is_other = arith.ori(greater(other[0], one[0]), is_tie)
    return arith.select(is_other, other[0], one[0]), arith.select(is_other, other[1], one[1])


def gumbel(key, number):
    """f32: jax.random.gumbel(key, vocab)[number] up to the rounding of logarithms, for a key of two i32."""
    bits = arith.shrui(threefry(key, number), ptx.i32(9))
    uniform = ptx.asm_value("mov.b32 $0, $1;", "=f,r", arith.ori(bits, ptx.i32(0x3F800000)), pure=True)
    uniform = ptx.fmax(arith.subf(uniform, ptx.f32(1.0)), ptx.f32(float(np.finfo(np.float32).tiny)))
    # Only the first logarithm must be exact near 1, where it is small; an error of 2e-7 of the second does no harm.
    return arith.mulf(ptx.log2(arith.negf(log(uniform))), ptx.f32(-_LOG_2))


def threefry(key, number):
    """i32: both words of threefry2x32 of (0, number), xor."""
    first, second = key
    schedule = first, second, arith.xori(arith.xori(first, second), ptx.i32(PARITY))
    x, y = first, ptx.add(second, number)
    for block in range(5):
        for by in ROTATIONS[block % 2]:
            x = ptx.add(x, y)
            rotated = arith.ori(arith.shli(y, ptx.i32(by)), arith.shrui(y, ptx.i32(32 - by)))
            y = arith.xori(rotated, x)
        x = ptx.add(x, schedule[(block + 1) % 3])
        y = ptx.add(y, schedule[(block + 2) % 3], ptx.i32(block + 1))
    return arith.xori(x, y)


def log(x):
    """The natural logarithm of an f32 that is normal, finite and positive; a relative error of about an ulp."""
    word = words.of_float(x)
    exponent = arith.andi(arith.subi(word, ptx.i32(_TWO_THIRDS)), ptx.i32(-(2**23)))
    mantissa = ptx.asm_value("mov.b32 $0, $1;", "=f,r", arith.subi(word, exponent), pure=True)
    power = ptx.asm_value("cvt.rn.f32.s32 $0, $1;", "=f,r", arith.shrsi(exponent, ptx.i32(23)), pure=True)
    f = arith.subf(mantissa, ptx.f32(1.0))
    polynomial = ptx.f32(_LOG_1P[0])
    for coefficient in _LOG_1P[1:]:
        polynomial = ptx.fma(polynomial, f, ptx.f32(coefficient))
    return ptx.fma(power, ptx.f32(_LOG_2), ptx.fma(polynomial, arith.mulf(f, f), f))
