"""Few rows times packed matrices: y = x w, where w is kept in 4 or 8 bits with a scale for each group of inputs.

    y[token, column] = sum over groups of  scale[group, column] * sum over its inputs of  x[token, input] * code

The time is that of reading w. Each warp copies codes to shared memory some steps before it uses them
(packed_ring_sm90.py); the rows of x are there, too (packed_rows_sm90.py). A step, or chunk, is `unroll` blocks of 32
inputs. A thread turns its codes into the dtype of x in registers, those of fp8 into float16 (packed_codes_sm90.py), in
which they are exact, and multiplies them with mma.m16n8k16: its rows are columns of w, its columns tokens. A product
does not depend on the order of its inner dimension, so that a thread (g = lane / 4, t = lane % 4) uses 8 consecutive
inputs of a block:

    inputs 8 t + 4 s + (0, 1) as the columns (2 t, 2 t + 1) of step s, and + (2, 3) as (2 t + 8, 2 t + 9)

Sums are scaled in float32 at the end of each group. Codes of NVFP4, and of MXFP4 with rows of bfloat16, are multiplied
by their scales before mma instead, because these products are exact. Groups of 16 are smaller than a block, and the 8
inputs of a thread are of one group.

Warps of a CTA and the CTAs of a cluster share the inner dimension. They write their sums to shared memory, and each
adds up some of them, always in the same order.

A CTA computes one item at a time. The terms, as in the config:

    tile    up to tile_rows rows of x, all of one expert
    strip   columns of one matrix, those of a CTA; `across` of its warps have warp_columns each, and a thread `columns`
    item    one strip of one tile
    part    the share of the inner dimension of a warp: there are `along` in each of the `splits` CTAs of a cluster
    step    `unroll` blocks of 32 inputs: what a warp copies and multiplies at a time
    run     blocks of a step whose sums have the same scales, or none

Matrices may have experts. A tile of rows has one expert then, from `tiles`: (expert, first row, number of rows). The
rows are those of y, and of x too. With `tokens`, x is a few tokens instead, and every tile multiplies all of them.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import packed_codes_sm90 as codes
from pallas_kernels.gpu import packed_ring_sm90 as packed_ring
from pallas_kernels.gpu import packed_rows_sm90 as packed_rows
from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.packed_product_config import BITS, BLOCK, ITEM_BYTES, PackedProductConfig, supports
from pallas_kernels.gpu.packed_sums_sm90 import Packed


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def packed_product(x: jax.Array, matrices: tuple[Packed, ...], config: PackedProductConfig, tiles=None) -> tuple:
    """y [config.rows, width] for each matrix. x [config.x_rows, inner] of 16 bits.

    tiles: i32[config.tiles, 3] with experts, else None.
    """
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    packed_sums.check_operands(c, x, matrices, c.experts)
    out_type = jax.ShapeDtypeStruct((c.rows, c.joined_width), jnp.dtype(c.dtype))
    given = [x] if tiles is None else [x, tiles]

    def packed_product(*refs):  # the kernel's name in a profile
        def scoped(sums):
            _each_item(c, None if tiles is None else refs[1], functools.partial(_multiply, c, refs, sums))

        pl.run_scoped(scoped, plgpu.SMEM((c.shared_floats,), jnp.float32), collective_axes="wg")

    mesh = plgpu.Mesh(
        grid=(c.items_at_once,), grid_names=("item",), cluster=(c.splits,), cluster_names=("split",),
        num_threads=c.warpgroups, thread_name="wg",
    )  # fmt: skip
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(packed_product, out_type=out_type, mesh=mesh, compiler_params=params, name="packed_product")
    return packed_sums.apart(c, call(*given, *packed_sums.joined(matrices)))


def _each_item(cfg: PackedProductConfig, tiles, body) -> None:
    """body(strip, tile) for each item of the CTA: every `items_at_once`-th, up to the first tile without rows, as all
    after it have none. Without experts a CTA has one item."""
    apart = lambda item: (lax.rem(item, jnp.int32(cfg.strips)), lax.div(item, jnp.int32(cfg.strips)))
    first = lax.axis_index("item")
    if tiles is None:
        body(*apart(first))
        return

    def count(item):
        tile = apart(item)[1]
        return tiles[jnp.minimum(tile, cfg.tiles - 1), 2] * (tile < cfg.tiles)

    def turn(state):
        item, _ = state
        body(*apart(item))
        after = item + cfg.items_at_once
        return after, count(after)

    lax.while_loop(lambda state: state[1] > 0, turn, (first, count(first)))


@dataclasses.dataclass(frozen=True)
class _Strip(packed_sums.Results):
    """What a CTA multiplies, and where its results belong. Addresses are those of its matrix, and of its expert."""

    x: object  # i64: of the first row
    values: object  # i64
    zeros: object  # i64, or None
    wg: object  # i32: the warpgroup of the thread


def _multiply(cfg: PackedProductConfig, refs, sums, strip, tile):
    """One item, by one warpgroup of its CTA."""
    kinds = (*(plgpu.RefType(),) * (len(refs) + 1), *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds)
    def multiply(ctx, *args):
        *given, sums, strip, tile, split, wg = args
        strip, tile, split, wg = map(ptx.scalar_value, (strip, tile, split, wg))
        here = _strip(cfg, [ptx.pointer(ref, 0) for ref in given], strip, tile, wg)
        base = ptx.pointer(sums, 3)
        warp = ptx.add(ptx.mul(wg, 4), ptx.lane_position()[3])
        along, across = ptx.divided(warp, cfg.across)
        acc = _sum_of_part(cfg, here, base, split, along, across)
        _store_sums(cfg, base, along, across, acc)
        packed_sums.add_up(cfg, here, base, split, wg)
        packed_sums.wait_to_leave(cfg)

    multiply(*refs, sums, strip, tile, lax.axis_index("split"), lax.axis_index("wg"))


def _strip(cfg: PackedProductConfig, addresses, strip, tile, wg) -> _Strip:
    x, *rest = addresses
    if cfg.experts:
        tiles, *rest = rest
        place = arith.addi(tiles, ptx.to_i64(ptx.mul(tile, 12)))
        expert, row, count = (ptx.asm_value(f"ld.global.nc.b32 $0, [$1+{4 * i}];", "=r,l", place) for i in range(3))
    else:
        expert, row = None, ptx.mul(tile, cfg.tile_rows)
        count = arith.minsi(ptx.i32(cfg.tile_rows), arith.subi(ptx.i32(cfg.rows), row))
    arrays = packed_sums.of_each(cfg, rest)
    select = functools.partial(packed_sums.of_matrix, cfg, strip)

    def address(i: int, bytes_of_column: int):
        start = select([array[i] for array in arrays])
        if expert is None:
            return start
        sizes = [ptx.i64(width * bytes_of_column) for width in cfg.widths]
        return arith.addi(start, arith.muli(ptx.to_i64(expert), select(sizes)))

    groups, size = cfg.inner // cfg.group, ITEM_BYTES[cfg.scale_dtype]
    width = packed_sums.width_of(cfg, strip)
    return _Strip(
        x=x if cfg.tokens else arith.addi(x, arith.muli(ptx.to_i64(row), ptx.i64(2 * cfg.inner))),
        values=address(0, cfg.inner * BITS[cfg.format] // 8),
        scales=address(1, groups * size),
        zeros=address(2, groups) if cfg.has_zeros else None,
        factor=address(cfg.arrays - 1, 4) if cfg.has_factor else None,
        out=packed_sums.first_result(cfg, rest[-1], row, strip),
        width=width,
        column=packed_sums.first_column(cfg, strip),
        count=count,
        wg=wg,
    )


def _sum_of_part(cfg: PackedProductConfig, here: _Strip, base, split, along, across) -> list:
    """Sums of a warp's part of the inner dimension: [tile of 16 columns][tile of 8 rows][4] floats, as mma has them.

    The slot that a step has used is filled for the step that comes `ring` steps later.
    """
    g, t, _, _ = ptx.lane_position()
    edge = lambda p: arith.divui(ptx.mul(p, cfg.chunks), ptx.i32(cfg.parts))
    part = ptx.add(ptx.mul(split, cfg.along), along)
    first, begin = edge(part), edge(ptx.mul(split, cfg.along))
    count = arith.subi(edge(ptx.add(part, ptx.i32(1))), first)
    copied = packed_rows.first_loads(cfg, here, begin)
    _hold()
    warp, column = ptx.add(ptx.mul(along, cfg.across), across), ptx.add(here.column, ptx.mul(across, cfg.warp_columns))
    ring = packed_ring.Ring.of_warp(cfg, here, base, warp, column)
    step_bytes = ring.step_bytes()

    def ask(i, source, slot):
        ring.copy(source, slot, _group(cfg, ptx.add(first, i)), ptx.less(i, count))
        return arith.addi(source, step_bytes)

    source = arith.addi(ring.source, arith.muli(step_bytes, ptx.to_i64(first)))
    for j in range(cfg.ring - 1):
        source = ask(ptx.i32(j), source, ptx.i32(j * cfg.slot_bytes))
    packed_rows.copy(cfg, here, base, begin, copied)
    _wait_for_rows()
    rows = []
    for n in range(cfg.tile_rows // 8):
        row = arith.minsi(ptx.add(g, ptx.i32(8 * n)), arith.subi(here.count, ptx.i32(1)))
        rows.append(ptx.add(base, ptx.i32(cfg.row_start), ptx.mul(row, cfg.row_bytes), ptx.mul(t, 16)))

    def step(i, carry):
        source, to_fill, at, acc = carry
        ring.wait()
        source, chunk = ask(ptx.add(i, ptx.i32(cfg.ring - 1)), source, to_fill), ptx.add(first, i)
        xs, numbers = packed_rows.load(cfg, base, rows, arith.subi(chunk, begin))
        acc = _multiply_chunk(cfg, ring.load(at), xs, numbers, acc)
        return source, at, packed_ring.next_slot(cfg, at), acc

    acc = [[[ptx.f32(0.0)] * 4 for _ in rows] for _ in range(cfg.columns // 2)]
    start = source, ptx.i32((cfg.ring - 1) * cfg.slot_bytes), ptx.i32(0), acc
    return control.loop(count, start, step)[3]


def _wait_for_rows():
    """Waits for all threads of the CTA: the rows of x that they copied are in shared memory then."""
    ptx.asm("bar.sync 0;", "")


def _hold():
    """Keeps the loads before it there. ptxas would move them to where their results are used, and wait there."""
    ptx.asm("bar.warp.sync 0xffffffff;", "")


def _group(cfg: PackedProductConfig, chunk):
    """The first group of a step: the first row of scales and zero points that it reads."""
    if cfg.is_whole:
        return ptx.i32(0)
    step = BLOCK * cfg.unroll
    return arith.divui(chunk, ptx.i32(cfg.group // step)) if cfg.group >= step else ptx.mul(chunk, step // cfg.group)


def _multiply_chunk(cfg: PackedProductConfig, weights: tuple, xs: list, numbers: list, acc) -> list:
    """acc + the products of a step. weights: see Ring.load; xs, numbers: of the rows (packed_rows_sm90.py).

    Where codes stand for numbers less an offset (of the format, and a zero point), mma multiplies the codes, and the
    offset times the sum of the inputs is taken off each sum: one subtraction for a run, not one for each weight.
    """
    values, scales, zeros = weights
    for first in range(0, cfg.unroll, cfg.run):
        run = first // cfg.run
        if cfg.has_offset and not cfg.has_zeros:  # numbers: the sums of inputs, times minus the offset
            sums = _each(acc, lambda i, n, e, m, run=run: numbers[run][n][e % 2])
        else:
            sums = _each(acc, lambda i, n, e, m: ptx.f32(0.0)) if cfg.scales_sums or cfg.has_numbers else acc
        sums = [list(tiles) for tiles in sums]
        for b in range(first, first + cfg.run):
            pairs = _pairs(cfg, values[b], scales[b] if cfg.scales_codes else None)
            for s in range(2):
                for m, tiles in enumerate(sums):
                    low, high = pairs[2 * m], pairs[2 * m + 1]
                    a = low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]
                    for n in range(len(tiles)):
                        tiles[n] = ptx.mma(a, xs[b][n][2 * s : 2 * s + 2], tiles[n], cfg.element)
        if cfg.has_zeros:
            sums = _without_offsets(cfg, sums, numbers[run], zeros[run])
        if cfg.becomes_float16:
            sums = _each(sums, lambda i, n, e, m, run=run, sums=sums: arith.mulf(sums[m][n][e], numbers[run][n][e % 2]))
        acc = _scaled(cfg, acc, sums, scales[run] if cfg.scales_sums else None)
    return acc


def _each(acc, function) -> list:
    """function(i, n, e, m) of each number: column of the thread, tile of rows, element of mma, tile of 16 columns."""
    element = lambda m, n, e: function(2 * m + e // 2, n, e, m)
    return [[[element(m, n, e) for e in range(4)] for n in range(len(acc[0]))] for m in range(len(acc))]


def _without_offsets(cfg: PackedProductConfig, sums, of_inputs, zeros) -> list:
    """sums - (offset of the format + its factor times the zero point of the column) * sum of the row's inputs."""
    offset, factor = ptx.f32(-codes.offset(cfg.format, cfg.element)), ptx.f32(-codes.factor(cfg.format, cfg.element))
    zero = lambda i: ptx.float_of_byte(zeros[i // 4], i % 4)
    offsets = [ptx.fma(zero(i), factor, offset) for i in range(cfg.columns)]
    return _each(sums, lambda i, n, e, m: ptx.fma(offsets[i], of_inputs[n][e % 2], sums[m][n][e]))


def _scaled(cfg: PackedProductConfig, acc, sums, words) -> list:
    """acc + scales * sums / the factor of the format. Without scales and numbers the sums began with acc."""
    shrink = 1.0 / codes.factor(cfg.format, cfg.element)
    if words is None and not cfg.has_numbers:
        return sums
    if words is None:
        return _each(sums, lambda i, n, e, m: ptx.fma(sums[m][n][e], ptx.f32(shrink), acc[m][n][e]))
    factors = [packed_sums.scale_number(cfg.scale_dtype, words, i) for i in range(cfg.columns)]
    factors = factors if shrink == 1.0 else [arith.mulf(x, ptx.f32(shrink)) for x in factors]
    return _each(sums, lambda i, n, e, m: ptx.fma(sums[m][n][e], factors[i], acc[m][n][e]))


def _pairs(cfg: PackedProductConfig, words, scales) -> list:
    """[column of the thread][4] pairs of a block's 8 inputs. scales: words of those by which codes are multiplied."""
    if BITS[cfg.format] == 4:
        scale_pairs = functools.partial(codes.scale_pairs, cfg.scale_dtype, scales, cfg.element)
        of_columns = scale_pairs() if cfg.scales_codes else [None] * cfg.columns
        decode = functools.partial(codes.pairs_of_word, cfg.format, element=cfg.element)
        return [decode(word, scale=scale) for word, scale in zip(words, of_columns, strict=True)]
    rows_of = lambda j, i: (words[2 * j][i // 4], words[2 * j + 1][i // 4], i % 4)
    decode = lambda j, i: codes.pairs_of_bytes(cfg.format, *rows_of(j, i), cfg.element)
    twos = [[decode(j, i) for j in range(4)] for i in range(0, cfg.columns, 2)]
    return [[pairs[k] for pairs in two] for two in twos for k in range(2)]


def _store_sums(cfg: PackedProductConfig, base, along, across, acc):
    """This warp's sums to SMEM, [along, tile_rows, pitch] floats."""
    g, t, _, _ = ptx.lane_position()
    column = ptx.add(ptx.mul(across, cfg.warp_columns), ptx.mul(g, cfg.columns))
    for n in range(cfg.tile_rows // 8):
        for k in range(2):
            row = ptx.add(ptx.mul(along, cfg.tile_rows), ptx.i32(8 * n + k), ptx.mul(t, 2))
            place = ptx.add(base, ptx.mul(ptx.add(ptx.mul(row, cfg.pitch), column), 4))
            own = [acc[i // 2][n][k + 2 * (i % 2)] for i in range(cfg.columns)]
            for i in range(0, cfg.columns, 4):
                text = f"st.shared.v4.f32 [$0+{4 * i}], {{$1, $2, $3, $4}};"
                ptx.asm(text, "r,f,f,f,f", place, *own[i : i + 4])
