"""Merges the attention states of all ranks (devices), each of other keys, in one launch on each: few rows, low latency.

    out = sum_r exp(lse_r - lse) out_r        lse = log sum_r exp(lse_r)        r over the ranks

One warp for each row. It stores this rank's part into the memory of the others and adds one to the row's counter there,
waits until the others have done so, and merges in the order of the ranks, so that all have equal bits. XLA gives the
addresses of the other ranks' memory, and runs a barrier of all ranks before the launch.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx

WARPS = 4  # rows of a CTA
MAX_ROWS = 132 * 16 * WARPS  # so that every CTA runs at once: a row waits for the same row elsewhere
MAX_RANKS = 8
_COUNTER = 8  # int32: a counter has 32 bytes


def supports(rows: int, width: int, ranks: int) -> bool:
    """Rows of `width` float32, of so many ranks."""
    return 1 <= rows <= MAX_ROWS and width % 64 == 0 and width // 32 in (2, 4, 8) and 2 <= ranks <= MAX_RANKS


def merge_ranks(out: jax.Array, lse: jax.Array, ranks: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """f32[R, V], f32[R] of this rank -> those of the union of all ranks' keys; call it on every rank in shard_map.

    dtype: of the merged out, float32 or bfloat16. A row whose lse is -inf or +inf is empty: its out, even NaN, does not
    count.
    """
    rows, width = out.shape
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    out_type = (
        jax.ShapeDtypeStruct(out.shape, jnp.dtype(dtype)),
        shape(rows),
        shape(ranks * rows, width),
        shape(ranks * rows),
    )
    counters = jax.new_ref(jnp.zeros(rows * _COUNTER, jnp.int32))

    def merge_ranks(*refs):  # the kernel's name in a profile
        _kernel(ranks, rows, width, dtype == "bfloat16", refs, lax.axis_index("cta"))

    mesh = plgpu.Mesh(grid=(-(-rows // WARPS),), grid_names=("cta",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(merge_ranks, out_type=out_type, mesh=mesh, compiler_params=params, name="merge_ranks")
    merged, merged_lse, *_ = call(out, lse, counters)
    return merged, merged_lse


def _kernel(ranks: int, rows: int, width: int, rounds: bool, refs, cta):
    """In GMEM: out f32[R, V], lse f32[R], counters i32[8 R], merged and lse, received f32[ranks R, V] and lse."""
    of_lane = width // 32

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * len(refs), ptx.SCALAR))
    def merge(ctx, out, lse, counters, merged, merged_lse, received, received_lse, cta):
        _, _, lane, warp = ptx.lane_position()
        row = ptx.add(ptx.mul(ptx.scalar_value(cta), WARPS), warp)
        exists, rank = ptx.bool_to_i32(ptx.less(row, ptx.i32(rows))), ctx.device_id()
        row = arith.select(ptx.less(row, ptx.i32(rows)), row, ptx.i32(0))
        first = ptx.equal(lane, ptx.i32(0))
        element = lambda number: _at(ptx.add(ptx.mul(number, width), ptx.mul(lane, of_lane)), 4)
        base = lambda ref: ptx.pointer(ref, 0)
        own = _loads(arith.addi(base(out), element(row)), of_lane)
        own_lse = _without_inf(ptx.asm_value("ld.global.f32 $0, [$1];", "=f,l", arith.addi(base(lse), _at(row, 4))))
        sent = ptx.add(ptx.mul(rank, rows), row)
        for peer in range(ranks):
            other = ptx.bool_to_i32(arith.andi(_is(exists), _not_equal(rank, peer)))
            of_peer = lambda ref, peer=peer: ptx.pointer(ctx.to_remote(ref, ptx.i32(peer)), 0)
            _stores(arith.addi(of_peer(received), element(sent)), own, other)
            writes = ptx.bool_to_i32(arith.andi(_is(other), first))
            _stores(arith.addi(of_peer(received_lse), _at(sent, 4)), [own_lse], writes)
        ptx.asm("bar.warp.sync 0xffffffff;", "")
        for peer in range(ranks):  # lane `peer` tells that rank
            place = ptx.pointer(ctx.to_remote(counters, ptx.i32(peer)), 0)
            tells = arith.andi(arith.andi(_is(exists), _not_equal(rank, peer)), ptx.equal(lane, ptx.i32(peer)))
            text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p red.release.sys.global.add.u32 [$0], 1; }"
            ptx.asm(text, "l,r", arith.addi(place, _at(row, 4 * _COUNTER)), ptx.bool_to_i32(tells))
        waits = ptx.bool_to_i32(arith.andi(_is(exists), first))
        text = (
            "{ .reg .pred p; .reg .b32 seen; setp.eq.u32 p, $1, 0; @p bra DONE;"
            " AGAIN: ld.acquire.sys.global.u32 seen, [$0]; setp.lt.u32 p, seen, $2; @p bra AGAIN; DONE: }"
        )
        ptx.asm(text, "l,r,r", arith.addi(base(counters), _at(row, 4 * _COUNTER)), waits, ptx.i32(ranks - 1))
        ptx.asm("bar.warp.sync 0xffffffff;", "")
        numbers = [ptx.add(row, ptx.i32(each * rows)) for each in range(ranks)]
        is_own = [ptx.bool_to_i32(ptx.equal(rank, ptx.i32(each))) for each in range(ranks)]
        lses = [
            _received(arith.addi(base(received_lse), _at(number, 4)), [own_lse], mine)[0]
            for number, mine in zip(numbers, is_own, strict=True)
        ]
        values = [
            _received(arith.addi(base(received), element(number)), own, mine)
            for number, mine in zip(numbers, is_own, strict=True)
        ]
        total_lse, factors = _factors(lses)
        sums = [ptx.f32(0.0)] * of_lane
        for factor, vector in zip(factors, values, strict=True):
            is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, factor, ptx.f32(0.0))
            parts = [arith.select(is_zero, ptx.f32(0.0), arith.mulf(x, factor)) for x in vector]
            sums = [arith.addf(a, b) for a, b in zip(sums, parts, strict=True)]
        if rounds:
            place = arith.addi(base(merged), _at(ptx.add(ptx.mul(row, width), ptx.mul(lane, of_lane)), 2))
            words = [ptx.pack_16bit(*sums[i : i + 2], "bfloat16") for i in range(0, of_lane, 2)]
            _stores(place, words, exists, "b32", "r")
        else:
            _stores(arith.addi(base(merged), element(row)), sums, exists)
        _stores(arith.addi(base(merged_lse), _at(row, 4)), [total_lse], waits)

    merge(*refs, cta)


def _factors(lses: list) -> tuple:
    """(lse of the union, exp(lse_r - lse) of each rank); -inf and 0 if all are empty."""
    minus_inf, top = ptx.f32(-math.inf), lses[0]
    for each in lses[1:]:
        top = ptx.fmax(top, each)
    nothing = arith.cmpf(arith.CmpFPredicate.OEQ, top, minus_inf)
    shift = arith.select(nothing, ptx.f32(0.0), top)
    weights = [ptx.exp2(arith.mulf(arith.subf(each, shift), ptx.f32(1 / math.log(2)))) for each in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = arith.addf(total, weight)
    safe = arith.select(nothing, ptx.f32(1.0), total)
    lse = arith.addf(shift, arith.mulf(ptx.log2(safe), ptx.f32(math.log(2))))
    return arith.select(nothing, minus_inf, lse), [ptx.divide(weight, safe) for weight in weights]


def _at(number, size: int):
    """Bytes before element `number`, i64."""
    return arith.muli(ptx.to_i64(number), ptx.i64(size))


def _is(flag):
    return _not_equal(flag, 0)


def _not_equal(x, number: int):
    return arith.cmpi(arith.CmpIPredicate.ne, x, ptx.i32(number))


def _without_inf(lse):
    """-inf for +inf, which some kernels write for rows without keys."""
    is_inf = arith.cmpf(arith.CmpFPredicate.OEQ, lse, ptx.f32(math.inf))
    return arith.select(is_inf, ptx.f32(-math.inf), lse)


def _chunks(count: int) -> list[tuple[int, int]]:
    """(first, size) of vectors of at most four."""
    return [(i, min(4, count - i)) for i in range(0, count, 4)]


def _vector(size: int, first: int, kind: str = "f32") -> tuple[str, str]:
    """The type and the operands $first .. of a vector."""
    names = ", ".join(f"${first + i}" for i in range(size))
    return (kind, names) if size == 1 else (f"v{size}.{kind}", f"{{{names}}}")


def _loads(place, count: int) -> list:
    found = []
    for first, size in _chunks(count):
        kind, names = _vector(size, 0)
        text = f"ld.global.{kind} {names}, [${size}+{4 * first}];"
        found += ptx.asm_values(text, ",".join(["=f"] * size) + ",l", size, place)
    return found


def _stores(place, values: list, writes, kind: str = "f32", constraint: str = "f") -> None:
    """Stores words where `writes` is not 0."""
    for first, size in _chunks(len(values)):
        vector, names = _vector(size, 2, kind)
        text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.{vector} [$0+{4 * first}], {names}; }}"
        ptx.asm(text, "l,r" + f",{constraint}" * size, place, writes, *values[first : first + size])


def _received(place, own: list, is_own) -> list:
    """What a rank sent, or `own` where is_own is not 0."""
    found = []
    for first, size in _chunks(len(own)):
        kind, names = _vector(size, 0)
        moves = " ".join(f"mov.f32 ${i}, ${size + 2 + i};" for i in range(size))
        text = (
            f"{{ .reg .pred p; setp.eq.u32 p, ${size + 1}, 0; {moves}"
            f" @p ld.global.cg.{kind} {names}, [${size}+{4 * first}]; }}"
        )
        constraints = ",".join(["=&f"] * size) + ",l,r" + ",f" * size
        if size == 1:
            found.append(ptx.asm_value(text, constraints, place, is_own, *own[first : first + 1]))
        else:
            found += ptx.asm_values(text, constraints, size, place, is_own, *own[first : first + size])
    return found
