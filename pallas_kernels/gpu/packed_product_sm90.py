"""Few rows times packed matrices: y = x w, where w is kept in 4 or 8 bits with a scale for each group of inputs.

    y[token, column] = sum over groups of  scale[group, column] * sum over its inputs of  x[token, input] * code

The time is that of reading w. Each thread asks for 16 or 8 bytes of codes at a time, `depth` steps before it uses them;
the rows of x are in shared memory (packed_rows_sm90.py). It turns the codes into the dtype of x in registers, those of
fp8 into float16 (packed_codes_sm90.py), in which they are exact, and multiplies them with mma.m16n8k16: its rows are
columns of w, its columns tokens. A product does not depend on the order of its inner dimension, so that a thread
(g = lane / 4, t = lane % 4) uses 8 consecutive inputs of a block of 32:

    inputs 8 t + 4 s + (0, 1) as the columns (2 t, 2 t + 1) of step s, and + (2, 3) as (2 t + 8, 2 t + 9)

Sums are scaled in float32 at the end of each group. Codes of NVFP4, and of MXFP4 with rows of bfloat16, are multiplied
by their scales before mma instead, because these products are exact. Groups of 16 are smaller than a block, and the 8
inputs of a thread are of one group.

Warps of a CTA and the CTAs of a cluster share the inner dimension. They write their sums to shared memory, and each
adds up some of them, always in the same order.

Matrices may have experts. A tile of rows has one expert then, from `tiles`: (expert, first row, number of rows). They
are rows of y, and of x too, unless x is a few tokens, which every tile has.
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
from pallas_kernels.gpu import packed_rows_sm90 as packed_rows
from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.packed_product_config import BITS, BLOCK, ITEM_BYTES, PackedProductConfig, supports
from pallas_kernels.gpu.packed_sums_sm90 import Packed, load_words, place_of


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
            if tiles is None:
                _multiply(c, refs, sums)
            else:  # tiles at the end may have no rows
                when(refs[1][lax.axis_index("tile"), 2] > 0)(lambda: _multiply(c, refs, sums))

        pl.run_scoped(scoped, plgpu.SMEM((c.shared_floats,), jnp.float32), collective_axes="wg")

    mesh = plgpu.Mesh(
        grid=(c.strips, c.tiles), grid_names=("strip", "tile"), cluster=(c.splits,), cluster_names=("split",),
        num_threads=c.warpgroups, thread_name="wg",
    )  # fmt: skip
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(packed_product, out_type=out_type, mesh=mesh, compiler_params=params, name="packed_product")
    return packed_sums.apart(c, call(*given, *packed_sums.joined(matrices)))


@dataclasses.dataclass(frozen=True)
class _Strip(packed_sums.Results):
    """What a CTA multiplies, and where its results belong."""

    x: object  # i64: of the first row
    values: object
    zeros: object  # or None
    wg: object  # i32, of the thread


def _multiply(cfg: PackedProductConfig, refs, sums):
    """One warpgroup."""
    kinds = (*(plgpu.RefType(),) * (len(refs) + 1), *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds)
    def multiply(ctx, *args):
        *given, sums, strip, tile, split, wg = args
        strip, tile, split, wg = map(ptx.scalar_value, (strip, tile, split, wg))
        here = _strip(cfg, [ptx.pointer(ref, 0) for ref in given], strip, tile, wg)
        base = ptx.pointer(sums, 3)
        warp = ptx.add(ptx.mul(wg, 4), ptx.lane_position()[3])
        across, along = arith.remui(warp, ptx.i32(cfg.across)), arith.divui(warp, ptx.i32(cfg.across))
        acc = _sum_of_part(cfg, here, base, split, along, across)
        _store_sums(cfg, base, along, across, acc)
        packed_sums.add_up(cfg, here, base, split, wg)
        packed_sums.wait_to_leave(cfg)

    multiply(*refs, sums, *map(lax.axis_index, ("strip", "tile", "split", "wg")))


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

    `depth` steps are in flight: what a step has used is replaced by what the step `depth` later needs.
    """
    g, t, _, _ = ptx.lane_position()
    column = ptx.add(here.column, ptx.mul(across, 8 * cfg.columns), ptx.mul(g, cfg.columns))
    column = arith.select(ptx.less(column, here.width), column, ptx.i32(0))  # a column past the end is not stored
    edge = lambda p: arith.divui(ptx.mul(p, cfg.chunks), ptx.i32(cfg.parts))
    part = ptx.add(ptx.mul(split, cfg.along), along)
    first = edge(part)
    count = arith.subi(edge(ptx.add(part, ptx.i32(1))), first)
    places = _places(cfg, here, column, t)
    at = lambda i: ptx.add(first, i)
    is_step = lambda i: ptx.less(i, count)
    weights = lambda i: _load_weights(cfg, places, at(i), ptx.bool_to_i32(is_step(i)))
    start = [weights(ptx.i32(j)) for j in range(cfg.depth)]
    begin = edge(ptx.mul(split, cfg.along))
    packed_rows.copy(cfg, here, base, begin)
    _wait_for_rows()
    rows = []
    for n in range(cfg.tile_rows // 8):
        row = arith.minsi(ptx.add(g, ptx.i32(8 * n)), arith.subi(here.count, ptx.i32(1)))
        rows.append(ptx.add(base, ptx.i32(cfg.row_start), ptx.mul(row, cfg.row_bytes), ptx.mul(t, 16)))

    def turn(k, carry):
        slots, acc = carry
        for j in range(cfg.depth):
            i = ptx.add(ptx.mul(k, cfg.depth), ptx.i32(j))
            _hold()
            rows_of_step = functools.partial(packed_rows.load, cfg, base, rows, arith.subi(at(i), begin))
            # A branch also keeps ptxas from mixing the instructions of several steps, for which registers are too few.
            acc = control.where(is_step(i), functools.partial(_multiply_chunk, cfg, slots[j], rows_of_step, acc), acc)
            slots = [*slots[:j], weights(ptx.add(i, ptx.i32(cfg.depth))), *slots[j + 1 :]]
        return slots, acc

    acc = [[[ptx.f32(0.0)] * 4 for _ in rows] for _ in range(cfg.columns // 2)]
    turns = arith.divui(ptx.add(count, ptx.i32(cfg.depth - 1)), ptx.i32(cfg.depth))
    return control.loop(turns, (start, acc), turn)[1]


def _wait_for_rows():
    """What the threads of the CTA copied is there."""
    ptx.asm("bar.sync 0;", "")


def _hold():
    """Loads before it stay before it. ptxas would move them to where what they load is used, and wait there."""
    ptx.asm("bar.warp.sync 0xffffffff;", "")


def _divided(words: list, each: int) -> list:
    return [words[i : i + each] for i in range(0, len(words), each)]


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where a thread's weights of the first input are: i64 addresses, and i32 bytes from row to row of an array."""

    values: object
    value_row: object
    scales: object
    scale_row: object
    zeros: object  # or None
    width: object


def _places(cfg: PackedProductConfig, here: _Strip, column, t) -> _Places:
    size, scale = (4 if BITS[cfg.format] == 4 else 1), ITEM_BYTES[cfg.scale_dtype]
    row = t if BITS[cfg.format] == 4 else ptx.mul(t, 8)
    group = arith.shrui(t, ptx.i32(1)) if cfg.scales_codes and cfg.group == 16 else ptx.i32(0)
    return _Places(
        values=place_of(here.values, row, here.width, column, size), value_row=ptx.mul(here.width, size),
        scales=place_of(here.scales, group, here.width, column, scale), scale_row=ptx.mul(here.width, scale),
        zeros=None if here.zeros is None else arith.addi(here.zeros, ptx.to_i64(column)), width=here.width,
    )  # fmt: skip


def _rows_on(start, row, row_bytes):
    """An address, so many rows on."""
    return arith.addi(start, arith.muli(ptx.to_i64(row), ptx.to_i64(row_bytes)))


def _load_weights(cfg: PackedProductConfig, places: _Places, chunk, is_used) -> tuple[list, list, list]:
    """(codes of each block, words of scales of each run, or of each block; words of zero points of each run)"""
    is_four = BITS[cfg.format] == 4
    rows, own, words = (4, 1, 4) if is_four else (BLOCK, 8, cfg.columns // 4)  # of a block; of the thread; of a row
    first = ptx.mul(chunk, cfg.unroll * rows)
    steps = [b * rows + k for b in range(cfg.unroll) for k in range(own)]
    starts = [_rows_on(places.values, ptx.add(first, ptx.i32(step)), places.value_row) for step in steps]
    loaded = _divided(load_words(starts, words, is_used, cached=False), words)
    values, scales, zeros = loaded if is_four else _divided(loaded, 8), [], []
    if cfg.scales_codes:
        each, size = BLOCK // cfg.group, cfg.columns * ITEM_BYTES[cfg.scale_dtype] // 4  # groups and words of a block
        groups = [ptx.add(ptx.mul(chunk, each * cfg.unroll), ptx.i32(each * b)) for b in range(cfg.unroll)]
        starts = [_rows_on(places.scales, group, places.scale_row) for group in groups]
        scales = _divided(load_words(starts, size, is_used), size)
    for b in range(0, cfg.unroll, cfg.run):
        group = _group(cfg, chunk, b)
        if cfg.scales_sums:
            scales.append(_load_scales(cfg, _rows_on(places.scales, group, places.scale_row), is_used))
        if places.zeros is not None:
            zeros.append(load_words([_rows_on(places.zeros, group, places.width)], cfg.columns // 4, is_used))
    return values, scales, zeros


def _group(cfg: PackedProductConfig, chunk, b: int):
    """The number of the group of block b of a step."""
    if cfg.is_whole:
        return ptx.i32(0)
    step = BLOCK * cfg.unroll
    if cfg.group >= step:
        return arith.divui(chunk, ptx.i32(cfg.group // step))
    return ptx.add(ptx.mul(chunk, step // cfg.group), ptx.i32(BLOCK * b // cfg.group))


def _load_scales(cfg: PackedProductConfig, place, is_used) -> list:
    size = cfg.columns * ITEM_BYTES[cfg.scale_dtype]
    places = [arith.addi(place, ptx.i64(at)) for at in range(0, size, 16)]
    return load_words(places, min(4, size // 4), is_used)


def _multiply_chunk(cfg: PackedProductConfig, weights, load_rows, acc) -> list:
    """acc + the products of a step.

    Where codes stand for numbers less an offset (of the format, and a zero point), mma multiplies the codes, and the
    offset times the sum of the inputs is taken off each sum: one subtraction for a run, not one for each weight.
    """
    values, scales, zeros = weights
    xs, numbers = load_rows()
    for first in range(0, cfg.unroll, cfg.run):
        run = first // cfg.run
        if cfg.has_offset and not cfg.has_zeros:  # the numbers are times the offset
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
    """function(column of the thread, tile of rows, element of mma) of each number."""
    element = lambda m, n, e: function(2 * m + e // 2, n, e, m)
    return [[[element(m, n, e) for e in range(4)] for n in range(len(acc[0]))] for m in range(len(acc))]


def _without_offsets(cfg: PackedProductConfig, sums, of_inputs, zeros) -> list:
    """sums - (offset of the format + its factor times the zero point of the column) * sum of the row's inputs."""
    offset, factor = ptx.f32(-codes.offset(cfg.format, cfg.element)), ptx.f32(-codes.factor(cfg.format, cfg.element))
    zero = lambda i: ptx.float_of_byte(zeros[i // 4], i % 4)
    offsets = [ptx.fma(zero(i), factor, offset) for i in range(cfg.columns)]
    return _each(sums, lambda i, n, e, m: ptx.fma(offsets[i], of_inputs[n][e % 2], sums[m][n][e]))


def _scaled(cfg: PackedProductConfig, acc, sums, words) -> list:
    """acc + scales * sums / the factor of the format."""
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
    column = ptx.add(ptx.mul(across, 8 * cfg.columns), ptx.mul(g, cfg.columns))
    for n in range(cfg.tile_rows // 8):
        for k in range(2):
            row = ptx.add(ptx.mul(along, cfg.tile_rows), ptx.i32(8 * n + k), ptx.mul(t, 2))
            place = ptx.add(base, ptx.mul(ptx.add(ptx.mul(row, cfg.pitch), column), 4))
            own = [acc[i // 2][n][k + 2 * (i % 2)] for i in range(cfg.columns)]
            for i in range(0, cfg.columns, 4):
                text = f"st.shared.v4.f32 [$0+{4 * i}], {{$1, $2, $3, $4}};"
                ptx.asm(text, "r,f,f,f,f", place, *own[i : i + 4])
