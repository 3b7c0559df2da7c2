"""A CTA's share of a token's columns, by fours of columns for each thread of a warpgroup."""

import dataclasses

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import THREADS

_LOAD4 = ptx.predicated_load("f32", 4, "cg")
_LOAD2 = ptx.predicated_load("b32", 2, "cg")


@dataclasses.dataclass(frozen=True)
class TokenShare:
    """This thread's fours of columns of a token: thread i has the fours i, i + 128, .. of the CTA's share."""

    row: object  # i32
    number: object  # i32, of the share
    width: int
    shares: int

    @property
    def quads(self):
        """(number, is it there) of each."""
        each = -(-(self.width // 4) // self.shares)
        first = ptx.add(ptx.mul(self.number, each), ptx.thread_index())
        end = ptx.add(ptx.mul(self.number, each), ptx.i32(each))
        for i in range(-(-each // THREADS)):
            quad = ptx.add(first, ptx.i32(i * THREADS))
            inside = arith.andi(ptx.less(quad, end), ptx.less(quad, ptx.i32(self.width // 4)))
            yield quad, ptx.bool_to_i32(inside)

    def at(self, ref, quad, size: int, row=None):
        return self.place(ptx.pointer(ref, 0), quad, size, self.row if row is None else row)

    def place(self, base, quad, size: int, row):
        """The address of a four in an array [.., width] of `size` bytes a column."""
        place = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(self.width)), arith.muli(ptx.to_i64(quad), ptx.i64(4)))
        return arith.addi(base, arith.muli(place, ptx.i64(size)))

    def words(self, ref, row=None):
        """Two words of bf16 of each four."""
        return self.words_at(lambda quad: self.at(ref, quad, 2, row))

    def words_at(self, place):
        """The same of the fours at the addresses place(quad)."""
        return [ptx.asm_values(_LOAD2, "=&r,=&r,l,r", 2, place(quad), ok) for quad, ok in self.quads]

    def sums(self, parts, splits: int, rows8: int):
        """Four f32 of each four: the sums of the CTAs, in their order."""
        loaded, totals = [], []
        for quad, ok in self.quads:
            rows_of = [ptx.add(self.row, ptx.i32(split * rows8)) for split in range(splits)]
            loaded.append(
                [ptx.asm_values(_LOAD4, "=&f,=&f,=&f,=&f,l,r", 4, self.at(parts, quad, 4, r), ok) for r in rows_of]
            )
        for first, *more in loaded:
            for other in more:
                first = [arith.addf(a, b) for a, b in zip(first, other, strict=True)]
            totals.append(first)
        return totals

    def store(self, ref, fours):
        """Rounds each four to bf16; the rounded values as f32."""
        return self.store_at(ptx.pointer(ref, 0), fours, self.row)

    def store_at(self, base, fours, row):
        """The same into an array [.., width] at the address `base`."""
        rounded = []
        for (quad, ok), four in zip(self.quads, fours, strict=True):
            words = packed(four)
            ptx.store_if(self.place(base, quad, 2, row), ok, *words)
            rounded.append(floats(words))
        return rounded


def packed(numbers):
    """Words of two bf16 each."""
    return [ptx.pack_16bit(*numbers[i : i + 2], "bfloat16") for i in range(0, len(numbers), 2)]


def floats(words):
    """The f32 of the two bf16 of each word."""
    return [ptx.float_of_bf16(word, half) for word in words for half in range(2)]


def plus(x, factor: float, y):
    """x + factor * y of each number."""
    if factor == 1.0:
        return [arith.addf(a, b) for a, b in zip(x, y, strict=True)]
    return [ptx.fma(b, ptx.f32(factor), a) for a, b in zip(x, y, strict=True)]


def norm_factor(place, hidden: int, shares: int, eps: float):
    """1 / sqrt(mean + eps) of the shares' sums of squares at this address."""
    names = ", ".join(f"${i}" for i in range(shares))
    kind = {1: "f32 $0", 2: f"v2.f32 {{{names}}}", 4: f"v4.f32 {{{names}}}"}[shares]
    text = f"ld.global.cg.{kind}, [${shares}];"
    outs = ",".join(["=f"] * shares)
    if shares == 1:
        total = ptx.asm_value(text, f"{outs},l", place)
    else:
        total, *more = ptx.asm_values(text, f"{outs},l", shares, place)
        for value in more:
            total = arith.addf(total, value)
    return inverse_root(total, hidden, eps)


def inverse_root(squares, count: int, eps: float):
    """1 / sqrt(mean + eps) of a sum of so many squares."""
    mean = arith.addf(arith.mulf(squares, ptx.f32(1.0 / count)), ptx.f32(eps))
    return ptx.asm_value("rsqrt.approx.f32 $0, $1;", "=f,f", mean)


def scale_floats(words, one_plus: bool):
    """The f32 scales of a norm; one_plus: 1 + the stored numbers."""
    return [arith.addf(s, ptx.f32(1.0)) if one_plus else s for s in floats(words)]
