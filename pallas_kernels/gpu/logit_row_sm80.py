"""A row of logits as a draw sees it: less its maximum, over its temperature, without what min_p excludes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import words_sm80 as words

_LOAD_FOUR = (
    "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.f32 $0, 0fFF800000; mov.f32 $1, 0fFF800000; mov.f32 $2, 0fFF800000;"
    " mov.f32 $3, 0fFF800000; @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }"
)
LOAD_ONE = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f32 $0, 0fFF800000; @p ld.f32 $0, [$1]; }"
"""PTX: the f32 at an address of either memory, or -inf if the condition is 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a draw scales the logits of each row: (logit - largest) / temperature, or -inf if that is below `least`."""

    largest: jax.Array  # f32[R] the row's maximum
    temperature: jax.Array  # f32[R] above 0
    least: jax.Array  # f32[R] the logarithm of min_p

    @classmethod
    def none(cls, rows: int) -> "Scaling":
        """That of logits that are scaled already: it changes none."""
        zeros = jnp.zeros(rows, jnp.float32)
        return cls(zeros, zeros + 1, jnp.full_like(zeros, -math.inf))

    def scaled(self, logits: jax.Array) -> jax.Array:
        """f32[R vocab], by XLA. It divides; the kernels multiply by the reciprocal, so that some last bits differ."""
        # The maximum is subtracted first, so a small temperature can overflow to -inf only, which is never drawn.
        scaled = (logits - self.largest[:, None]) / self.temperature[:, None]
        return jnp.where(scaled < self.least[:, None], -jnp.inf, scaled)


@dataclasses.dataclass(frozen=True)
class LogitRow:
    """A row in the kernel: the i64 address of its first logit, and the row's Scaling as f32."""

    vocab: int
    logits: object
    largest: object
    factor: object  # 1 / temperature. Dividing each logit would take longer than all else that finding the floor does
    least: object

    @classmethod
    def of(cls, vocab: int, row, logits, *scaling) -> "LogitRow":
        """Row i32 of logits and Scaling at these i64 addresses."""
        of_row = lambda place: ptx.asm_value("ld.global.nc.f32 $0, [$1];", "=f,l", words.place(place, row))
        first = arith.addi(logits, arith.muli(ptx.to_i64(row), ptx.i64(4 * vocab)))
        largest, temperature, least = map(of_row, scaling)
        factor = ptx.asm_value("rcp.rn.f32 $0, $1;", "=f,f", temperature, pure=True)
        return cls(vocab, first, largest, factor, least)

    def scaled(self, logit):
        x = arith.mulf(arith.subf(logit, self.largest), self.factor)
        return arith.select(greater(self.least, x), ptx.f32(-math.inf), x)

    def each(self, step, carry, *, thread, threads: int, values: int, first=None, count: int | None = None):
        """carry = step(scaled logits, their numbers, carry) for `values` at a time; -inf past the end of the row.

        thread: of `threads` that share the logits from number `first` on (i32, a multiple of 4; None: 0), `count` of
        them, rounded up to whole turns; None: all.
        """
        width = 4 if self.vocab % 4 == 0 else 1  # logits of a load
        loads = values // width
        first = ptx.i32(0) if first is None else first

        def several(i, carry):
            logits, numbers = [], []
            for j in range(loads):
                number = ptx.add(ptx.mul(i, threads * loads), ptx.i32(threads * j), thread)
                number = ptx.add(first, ptx.mul(number, width))
                there = ptx.bool_to_i32(ptx.less(number, ptx.i32(self.vocab)))
                place = words.place(self.logits, number)
                logits += (
                    ptx.asm_values(_LOAD_FOUR, "=&f,=&f,=&f,=&f,l,r", 4, place, there)
                    if width == 4
                    else [ptx.asm_value(LOAD_ONE, "=&f,l,r", place, there)]
                )
                numbers += [ptx.add(number, ptx.i32(k)) for k in range(width)]
            return step([self.scaled(x) for x in logits], numbers, carry)

        turns = cdiv(self.vocab if count is None else count, threads * values)
        return control.loop(ptx.i32(turns), carry, several)


def ordered_bits(x):
    """As in jattn/engine/sampling_floor.py: -0 becomes 0; then the sign, or all bits of a negative one, are flipped."""
    return words.ordered(arith.addf(x, ptx.f32(0.0)))


def is_finite(x):
    """Of a number that is not positive."""
    return greater(x, ptx.f32(-math.inf))


def greater(a, b):
    return arith.cmpf(arith.CmpFPredicate.OGT, a, b)
