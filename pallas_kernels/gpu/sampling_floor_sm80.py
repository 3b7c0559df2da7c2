"""The least likely token that top_k and top_p keep, of each row of logits: one CTA for a row, which it reads twice.

    1  a histogram of the logits, in bins of 1 / 256 from the largest on, tells the bins first .. last that may have it
    2  the logits of these bins are listed, a list for each warp; the exponentials of those before `first` are added up
    3  the floor is found among the listed by bisection of their bits

For top_k, `first` is 0: all that it keeps are listed, and top_p chooses among them. For top_p alone, the range first ..
last is halved before step 2 as long as it has too many logits; each time reads the row once more. If a warp's list is
too short all the same, as for a top_k of many thousands, step 3 reads the row instead, once for each bit.

The order of every sum of floats depends on the row and its cuts only, so that a row's floor depends neither on other
rows nor on the run. Counts in bins are integers: the order of their atomic additions does not matter.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import words_sm80 as words
from pallas_kernels.gpu.logit_row_sm80 import LOAD_ONE, LogitRow, Scaling, greater, is_finite, ordered_bits

WARPGROUPS = 4
WARPS, THREADS = 4 * WARPGROUPS, 128 * WARPGROUPS
VALUES, VALUES_SEARCHED = 16, 8  # loads that a thread issues before it uses the first: of the row, of the candidates
BINS, BINS_PER_NAT = 8192, 256  # a range of 32: what lies below it has 1e-14 of the largest exponential
HALF_BIN = 1.0025  # at least exp(0.5 / BINS_PER_NAT) = 1.00196 and the rounding of sums over bins
LISTED = 512  # logits of a warp's list at most
MOST_CANDIDATES = WARPS * LISTED // 2  # of all lists: warps do not have equally many
_BINS_OF_THREAD = BINS // THREADS
_MAGIC, _MAGIC_BITS = 2.0**23, 0x4B000000  # a float32 plus 2**23 has been rounded to an integer, in its low bits
_SIGN = -(2**31)  # the bit, as i32; as ordered bits the number 0
_COUNT = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p red.shared.add.u32 [$0], 1; }"


def sampling_floor(logits: jax.Array, scaling: Scaling, top_k, top_p) -> jax.Array:
    """u32[R] the scaled logit of the least likely token that is kept, as ordered bits; 0 if neither cut applies.

    Ordered bits are those of a float32 that is not negative with the first one set, or all bits of another inverted.
    Kept are the top_k most likely tokens, and of these the fewest that reach top_p of their sum. Ties are kept.
    logits f32[R, vocab]. top_k [R]: 0 or less, or vocab or more: off. top_p [R]: 1 or more: off.
    """
    rows, vocab = logits.shape
    logits, top_k, top_p = logits.astype(jnp.float32), jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32)

    def sampling_floor(*refs):  # the kernel's name in a profile
        shapes = [plgpu.SMEM((size,), jnp.int32) for size in shared_words()]
        pl.run_scoped(functools.partial(_warpgroup, vocab, refs), *shapes, collective_axes="wg")

    mesh = plgpu.Mesh(grid=(rows,), grid_names=("row",), num_threads=WARPGROUPS, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct((rows,), jnp.uint32)
    given = logits, scaling.largest, scaling.temperature, scaling.least, top_k, top_p
    return pl.kernel(sampling_floor, out_type=out, mesh=mesh, compiler_params=params)(*given)


def shared_words() -> tuple[int, ...]:
    """The words of a CTA's bins, its lists, and what its warps tell each other."""
    return BINS, WARPS * LISTED, 2 * WARPS


def _warpgroup(vocab: int, refs, *shared):
    """One warpgroup of a row's CTA."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * (len(refs) + len(shared)), ptx.SCALAR, ptx.SCALAR))
    def find(ctx, logits, largest, temperature, least, top_k, top_p, floor, *rest):
        *shared, row, wg = rest
        row, wg = map(ptx.scalar_value, (row, wg))
        of_logits = (ptx.pointer(ref, 0) for ref in (logits, largest, temperature, least))
        places = (words.place(ptx.pointer(ref, 0), row) for ref in (top_k, top_p, floor))
        thread = ptx.add(ptx.mul(wg, 128), ptx.thread_index())
        _store_floor(
            _Row(LogitRow.of(vocab, row, *of_logits), *places, *(ptx.pointer(ref, 3) for ref in shared), thread)
        )

    find(*refs, *shared, *map(lax.axis_index, ("row", "wg")))


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row, as its CTA sees it: i64 addresses in GMEM, i32 addresses in SMEM, and the thread's number in the CTA."""

    logits: LogitRow
    top_k_at: object
    top_p_at: object
    floor_at: object
    bins: object  # i32[BINS]
    lists: object  # f32[WARPS, LISTED]
    sums: object  # [2, WARPS]
    thread: object

    @property
    def lane(self):
        return arith.remui(self.thread, ptx.i32(32))

    @property
    def warp(self):
        return arith.divui(self.thread, ptx.i32(32))


def _store_floor(row: _Row):
    top_k = ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", row.top_k_at)
    top_p = ptx.asm_value("ld.global.nc.f32 $0, [$1];", "=f,l", row.top_p_at)
    has_top_k = arith.andi(ptx.less(ptx.i32(0), top_k), ptx.less(top_k, ptx.i32(row.logits.vocab)))
    has_top_p = greater(ptx.f32(1.0), top_p)
    compute = lambda: _floor(row, top_k, has_top_k, top_p, has_top_p)
    floor = control.where(arith.ori(has_top_k, has_top_p), compute, ptx.i32(0))
    ptx.store_if(row.floor_at, ptx.bool_to_i32(ptx.equal(row.thread, ptx.i32(0))), floor)


def _floor(row: _Row, top_k, has_top_k, top_p, has_top_p):
    """i32: the floor of a row that has a top_k or a top_p."""
    finite, total = _fill_bins(row)
    has_top_k = _all(has_top_k, ptx.negated(ptx.less(finite, top_k)))  # otherwise it keeps all that can be drawn
    needed = arith.mulf(top_p, total)
    first, last = _bins_of_floor(row, top_k, has_top_k, needed)
    first, last = control.where(ptx.negated(has_top_k), lambda: _narrowed(row, first, last, needed), (first, last))
    before, candidates = _fill_lists(row, first, last)

    def by_top_k():
        kth = _largest(row, candidates, last, lambda count, _: ptx.negated(ptx.less(count, top_k)))
        count, mass = _from_key(row, candidates, ptx.add(kth, ptx.i32(1)))
        ties = _to_float(arith.subi(top_k, count))
        return kth, arith.mulf(top_p, ptx.fma(ties, ptx.exp(words.float_of_ordered(kth)), mass))

    kth, needed = control.where(has_top_k, by_top_k, (ptx.i32(0), needed))
    is_reached = lambda _, mass: ptx.negated(greater(needed, arith.addf(before, mass)))
    by_top_p = lambda: arith.maxui(kth, _largest(row, candidates, ptx.i32(0), is_reached))
    return arith.minui(control.where(has_top_p, by_top_p, kth), ptx.i32(_SIGN))  # that of the largest logit, 0


def _fill_bins(row: _Row):
    """Counts the logits of each bin. Returns how many logits are finite, and the sum of the exponentials in bins.

    What lies below all bins is not in the sum: rounded, it might be more than the bins reach, and none would be kept.
    """
    mine = ptx.add(row.bins, ptx.mul(row.thread, 4 * _BINS_OF_THREAD))
    for at in range(0, 4 * _BINS_OF_THREAD, 16):
        ptx.asm(f"st.shared.v4.b32 [$0+{at}], {{$1, $1, $1, $1}};", "r,r", mine, ptx.i32(0))
    words.barrier()

    def count(values, sums):
        finite, total = sums
        for x in values:
            finite = ptx.add(finite, ptx.bool_to_i32(is_finite(x)))
            number = _bin(x)
            place, inside = ptx.add(row.bins, ptx.mul(number, 4)), ptx.less(number, ptx.i32(BINS))
            total = arith.addf(total, arith.select(inside, ptx.exp(x), ptx.f32(0.0)))
            ptx.asm(_COUNT, "r,r", place, ptx.bool_to_i32(inside))
        return finite, total

    return _over_cta(row, _each_logit(row, count, (ptx.i32(0), ptx.f32(0.0))), [arith.addi, arith.addf])


def _bins_of_floor(row: _Row, top_k, has_top_k, needed):
    """The first and the last bin that may have the floor; BINS: what lies below all bins.

    needed: of the sum of exponentials. That of a bin is known but for a factor of HALF_BIN. What lies below all bins
    does not matter to a top_p below 1.
    """
    low, high = (arith.mulf(needed, ptx.f32(x)) for x in (1 / HALF_BIN, HALF_BIN))
    misses = (
        lambda count, mass: ptx.less(count, top_k),
        lambda count, mass: greater(low, mass),
        lambda count, mass: greater(high, mass),
    )
    short = [ptx.i32(0)] * 3  # of the thread's bins: those at whose end a sum is still too small
    for count, mass in _sums_of_bins(row):
        now = [ptx.bool_to_i32(is_missed(count, mass)) for is_missed in misses]
        short = [ptx.add(x, y) for x, y in zip(short, now, strict=True)]
    # A thread whose last bin is still short answers BINS: the least answer is the bin.
    is_mine = [ptx.less(x, ptx.i32(_BINS_OF_THREAD)) for x in short]
    number = ptx.mul(row.thread, _BINS_OF_THREAD)
    found = [arith.select(mine, ptx.add(number, x), ptx.i32(BINS)) for mine, x in zip(is_mine, short, strict=True)]
    of_top_k, first = _over_cta(row, found[:2], [arith.minsi] * 2)
    (last,) = _over_cta(row, found[2:], [arith.minsi])
    last = arith.minsi(last, ptx.i32(BINS - 1))
    return arith.select(has_top_k, ptx.i32(0), first), arith.select(has_top_k, of_top_k, last)


def _sums_of_bins(row: _Row) -> list:
    """For each of the thread's bins: how many logits it and the bins before have, and about their exponentials' sum."""
    counts = _counts_of_bins(row)
    of_thread = functools.reduce(arith.addi, counts), functools.reduce(arith.addf, _masses_of_bins(row, counts))
    count, mass = _sums_before(row, *of_thread)
    counts, sums = _counts_of_bins(row), []  # again: on sm_80 shuffles may be calls, before which registers are saved
    for n, m in zip(counts, _masses_of_bins(row, counts), strict=True):
        count, mass = ptx.add(count, n), arith.addf(mass, m)
        sums.append((count, mass))
    return sums


def _masses_of_bins(row: _Row, counts) -> list:
    """About the sum of the exponentials in each of the thread's bins."""
    number = ptx.mul(row.thread, _BINS_OF_THREAD)
    weight = ptx.exp(arith.mulf(_to_float(number), ptx.f32(-1 / BINS_PER_NAT)))
    factors = [ptx.f32(math.exp(-i / BINS_PER_NAT)) for i in range(_BINS_OF_THREAD)]
    return [arith.mulf(arith.mulf(_to_float(n), weight), f) for n, f in zip(counts, factors, strict=True)]


def _counts_of_bins(row: _Row) -> list:
    """How many logits each of the thread's bins has."""
    mine = ptx.add(row.bins, ptx.mul(row.thread, 4 * _BINS_OF_THREAD))
    counts = []
    for at in range(0, 4 * _BINS_OF_THREAD, 16):
        counts += ptx.asm_values(f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];", "=r,=r,=r,=r,r", 4, mine)
    return counts


def _narrowed(row: _Row, first, last, needed):
    """Of the bins first .. last some that have the floor, and at most MOST_CANDIDATES logits, or one bin."""

    def is_wide(first, last):
        number, count = ptx.mul(row.thread, _BINS_OF_THREAD), ptx.i32(0)
        for i, n in enumerate(_counts_of_bins(row)):
            inside = _is_between(ptx.add(number, ptx.i32(i)), first, last)
            count = ptx.add(count, arith.select(inside, n, ptx.i32(0)))
        (count,) = _over_cta(row, [count], [arith.addi])
        return _all(ptx.less(first, last), ptx.less(ptx.i32(MOST_CANDIDATES), count))

    def halve(first, last):
        middle = arith.shrui(ptx.add(first, last), ptx.i32(1))

        def add(values, mass):
            for x in values:
                inside = ptx.negated(ptx.less(middle, _bin(x)))
                mass = arith.addf(mass, arith.select(inside, ptx.exp(x), ptx.f32(0.0)))
            return mass

        (mass,) = _over_cta(row, [_each_logit(row, add, ptx.f32(0.0))], [arith.addf])
        is_missing = greater(needed, mass)
        after = ptx.add(middle, ptx.i32(1))
        return arith.select(is_missing, after, first), arith.select(is_missing, last, middle)

    return control.repeat(is_wide, halve, first, last)


def _sums_before(row: _Row, count, mass):
    """The sums of i32 `count` and f32 `mass` over the threads before this one."""
    values = [count, mass]
    for distance in (1, 2, 4, 8, 16):
        exists = ptx.negated(ptx.less(row.lane, ptx.i32(distance)))
        values = [_sum(x, _of_lane_before(x, distance, exists)) for x in values]
    is_last = ptx.bool_to_i32(ptx.equal(row.lane, ptx.i32(31)))
    of_warps = _exchange(row, values, is_last)
    # Not this sum less the thread's own: a small sum before a large one would be lost.
    sums = [_of_lane_before(x, 1, ptx.less(ptx.i32(0), row.lane)) for x in values]
    for warp in range(WARPS):
        is_before = ptx.less(ptx.i32(warp), row.warp)
        sums[0] = ptx.add(sums[0], arith.select(is_before, of_warps[0][warp], ptx.i32(0)))
        sums[1] = arith.addf(sums[1], arith.select(is_before, of_warps[1][warp], ptx.f32(0.0)))
    return sums


def _fill_lists(row: _Row, first, last):
    """Lists the finite logits of bins first .. last. Returns the sum of the exponentials of what is in the bins before,
    and the candidates; 0 if they are the row."""

    def step(values, carry):
        before, count = carry
        chosen = []
        for x in values:
            number, weight = _bin(x), ptx.exp(x)
            is_before = ptx.less(number, first)
            before = arith.addf(before, arith.select(is_before, weight, ptx.f32(0.0)))
            chosen.append(_all(is_finite(x), _is_between(number, first, last)))
        some = ptx.negated(ptx.equal(words.votes(functools.reduce(arith.ori, chosen)), ptx.i32(0)))
        append = lambda n, one: _append(row, n, *one)
        append_all = lambda: functools.reduce(append, zip(values, chosen, strict=True), count)
        return before, control.where(some, append_all, count)

    before, count = _each_logit(row, step, (ptx.f32(0.0), ptx.i32(0)))
    before, longest = _over_cta(row, [before, count], [arith.addf, arith.maxsi])
    is_row = ptx.less(ptx.i32(LISTED), longest)
    return arith.select(is_row, ptx.f32(0.0), before), _candidates(row, is_row, count)


def _candidates(row: _Row, is_row, count):
    """The row's logits if is_row, else the `count` of the warp's list."""
    of_list = _address_of_shared(ptx.add(_own_list(row), ptx.mul(row.lane, 4)))
    of_row = words.place(row.logits.logits, row.thread)
    stride = arith.select(is_row, ptx.i32(THREADS), ptx.i32(32))
    size = arith.select(is_row, ptx.i32(row.logits.vocab), count)
    number = arith.select(is_row, row.thread, row.lane)
    own_count = arith.divui(ptx.add(arith.subi(size, number), stride, ptx.i32(-1)), stride)
    return _Candidates(arith.select(is_row, of_row, of_list), ptx.mul(stride, 4), own_count, is_row)


def _append(row: _Row, count, x, is_chosen):
    """Adds the logits of the lanes with `is_chosen` to the warp's list of `count`. Returns its new count."""
    votes = words.votes(is_chosen)
    place = ptx.add(count, words.ones(arith.andi(votes, words.lower_lanes(row.lane))))
    fits = ptx.bool_to_i32(_all(is_chosen, ptx.less(place, ptx.i32(LISTED))))
    ptx.store_if(ptx.add(_own_list(row), ptx.mul(place, 4)), fits, x, kind="f32", space="shared")
    return ptx.add(count, words.ones(votes))


def _own_list(row: _Row):
    return ptx.add(row.lists, ptx.mul(row.warp, 4 * LISTED))


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The logits that a thread searches: their warp's list, or the row where a list was too short."""

    first: object  # i64 address
    stride: object  # i32 bytes
    count: object  # i32
    is_row: object  # i1: then they are not scaled yet


def _each_candidate(row: _Row, candidates: _Candidates, step, carry):
    """carry = step(logit, is there one, carry) for each."""

    def several(i, carry):
        numbers = [ptx.add(ptx.mul(i, VALUES_SEARCHED), ptx.i32(j)) for j in range(VALUES_SEARCHED)]
        exists = [ptx.less(n, candidates.count) for n in numbers]
        places = [arith.addi(candidates.first, ptx.to_i64(arith.muli(n, candidates.stride))) for n in numbers]
        values = [
            ptx.asm_value(LOAD_ONE, "=&f,l,r", *args) for args in zip(places, map(ptx.bool_to_i32, exists), strict=True)
        ]
        values = [arith.select(candidates.is_row, row.logits.scaled(x), x) for x in values]
        for x, there in zip(values, exists, strict=True):
            carry = step(x, there, carry)
        return carry

    turns = arith.divui(ptx.add(candidates.count, ptx.i32(VALUES_SEARCHED - 1)), ptx.i32(VALUES_SEARCHED))
    return control.loop(turns, carry, several)


def _largest(row: _Row, candidates: _Candidates, last_bin, holds):
    """The largest ordered bits t with holds(count, sum of exponentials) of the candidates from t on: true up to some t,
    which is a candidate of `last_bin` or below. The least one's if it never holds."""

    def widen(x, there, ends):
        key = ordered_bits(x)
        is_one = _all(there, ptx.negated(ptx.less(_bin(x), last_bin)))
        low, high = arith.select(is_one, key, ptx.i32(-1)), arith.select(is_one, key, ptx.i32(0))
        return arith.minui(ends[0], low), arith.maxui(ends[1], high)

    ends = _each_candidate(row, candidates, widen, (ptx.i32(-1), ptx.i32(0)))
    low, high = _over_cta(row, ends, [arith.minui, arith.maxui])
    zeros = ptx.asm_value("clz.b32 $0, $1;", "=r,r", arith.subi(high, low), pure=True)

    def halve(_, ends):
        low, end = ends
        middle = ptx.add(low, arith.shrui(arith.subi(end, low), ptx.i32(1)))
        is_lower = holds(*_from_key(row, candidates, middle))
        return arith.select(is_lower, middle, low), arith.select(is_lower, end, middle)

    return control.loop(arith.subi(ptx.i32(32), zeros), (low, ptx.add(high, ptx.i32(1))), halve)[0]


def _from_key(row: _Row, candidates: _Candidates, least):
    """(count, sum of exponentials) of the candidates whose ordered bits are `least` or more."""

    def step(x, there, sums):
        is_counted = _all(there, ptx.negated(ptx.less_unsigned(ordered_bits(x), least)))
        weight = arith.select(is_counted, ptx.exp(x), ptx.f32(0.0))
        return ptx.add(sums[0], ptx.bool_to_i32(is_counted)), arith.addf(sums[1], weight)

    sums = _each_candidate(row, candidates, step, (ptx.i32(0), ptx.f32(0.0)))
    return _over_cta(row, sums, [arith.addi, arith.addf])


def _each_logit(row: _Row, step, carry):
    """carry = step(VALUES scaled logits, carry) over the row; -inf past its end."""
    without_numbers = lambda values, _, carry: step(values, carry)
    return row.logits.each(without_numbers, carry, thread=row.thread, threads=THREADS, values=VALUES)


def _over_cta(row: _Row, values, combine) -> list:
    """Each of one or two numbers of every thread, combined over the CTA, always in the same order."""
    values = list(values)
    for distance in (16, 8, 4, 2, 1):
        values = [f(x, _of_lane(x, distance)) for f, x in zip(combine, values, strict=True)]
    of_warps = _exchange(row, values, ptx.bool_to_i32(ptx.equal(row.lane, ptx.i32(0))))
    return [functools.reduce(f, parts) for f, parts in zip(combine, of_warps, strict=True)]


def _exchange(row: _Row, values, is_sender) -> list:
    """Of each number: those of all warps, each sent by the lane with `is_sender`."""
    place = ptx.add(row.sums, ptx.mul(row.warp, 4))
    for i, x in enumerate(values):
        kind = "f" if _is_float(x) else "r"
        text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.shared.b32 [$0+{4 * WARPS * i}], $2; }}"
        ptx.asm(text, f"r,r,{kind}", place, is_sender, x)
    words.barrier()
    received = []
    for i, x in enumerate(values):
        kind, parts = "f" if _is_float(x) else "r", []
        for at in range(4 * WARPS * i, 4 * WARPS * (i + 1), 16):
            text = f"ld.shared.v4.{'f32' if kind == 'f' else 'b32'} {{$0, $1, $2, $3}}, [$4+{at}];"
            parts += ptx.asm_values(text, f"={kind},={kind},={kind},={kind},r", 4, row.sums)
        received.append(parts)
    words.barrier()
    return received


def _bin(x):
    """The bin of a logit; BINS: below all of them, and what is not a number."""
    number = words.of_float(ptx.fma(x, ptx.f32(-BINS_PER_NAT), ptx.f32(_MAGIC)))
    return arith.minui(arith.subi(number, ptx.i32(_MAGIC_BITS)), ptx.i32(BINS))


def _to_float(integer):
    return ptx.asm_value("cvt.rn.f32.s32 $0, $1;", "=f,r", integer, pure=True)


def _is_between(number, first, last):
    return _all(ptx.negated(ptx.less(number, first)), ptx.negated(ptx.less(last, number)))


def _all(*conditions):
    return functools.reduce(arith.andi, conditions)


def _of_lane(x, distance: int):
    """The number of the lane (own ^ distance)."""
    return ptx.shuffle_xor(x, distance) if _is_float(x) else ptx.shuffle_xor_word(x, distance)


def _of_lane_before(x, distance: int, exists):
    """The number of the lane `distance` before, where there is one; else 0."""
    kind, zero = ("f", ptx.f32(0.0)) if _is_float(x) else ("r", ptx.i32(0))
    before = ptx.asm_value(f"shfl.sync.up.b32 $0, $1, {distance}, 0, -1;", f"={kind},{kind}", x)
    return arith.select(exists, before, zero)


def _sum(a, b):
    return arith.addf(a, b) if _is_float(a) else arith.addi(a, b)


def _is_float(x) -> bool:
    return x.type == ir.F32Type.get()


def _address_of_shared(address):
    """The i64 address of a place in SMEM for instructions that take both memories."""
    text = "{ .reg .b64 t; cvt.u64.u32 t, $1; cvta.shared.u64 $0, t; }"
    return ptx.asm(text, "=l,r", address, result=ptx.int_type(64), pure=True)
