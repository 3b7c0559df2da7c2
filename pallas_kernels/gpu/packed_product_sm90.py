"""Few rows times packed matrices: y = x w, where w is kept in 4 or 8 bits with a scale for each group of inputs.

    y[token, column] = sum over groups of  scale[group, column] * sum over its inputs of  x[token, input] * code

The time is that of reading w. Each thread asks for 16 or 8 bytes of codes at a time, the next step's before it
multiplies this step's. It turns the codes into bfloat16 in registers (packed_codes_sm90.py), in which they are exact,
and multiplies them with mma.m16n8k16: its rows are columns of w, its columns tokens. A product does not depend on the
order of its inner dimension, so that a thread (g = lane / 4, t = lane % 4) uses 8 consecutive inputs of a block of 32:

    inputs 8 t + 4 s + (0, 1) as the columns (2 t, 2 t + 1) of step s, and + (2, 3) as (2 t + 8, 2 t + 9)

Sums are scaled in float32 at the end of each group. The warpgroups of a CTA and the CTAs of a cluster share the inner
dimension. They write their sums to shared memory, and each adds up some of them, always in the same order.

Matrices may have experts. A tile of rows has one expert then, from `tiles`: (expert, first row, number of rows).
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import packed_codes_sm90 as codes
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.packed_product_config import BITS, BLOCK, TILE_ROWS, PackedProductConfig, supports

Packed = tuple[jax.Array, jax.Array, "jax.Array | None"]
"""values, scales, zero points: those of a QuantisedArray (jattn/ops/quantised.py)."""


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def packed_product(x: jax.Array, matrices: tuple[Packed, ...], config: PackedProductConfig, tiles=None) -> tuple:
    """y [T, width] for each matrix. x bf16[T, inner]; tiles: i32[config.tiles, 3] with experts, else None."""
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    out_type = tuple(jax.ShapeDtypeStruct((x.shape[0], width), jnp.dtype(c.dtype)) for width in c.widths)
    flat = [array for matrix in matrices for array in matrix if array is not None]
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
    return tuple(call(*given, *flat))


@dataclasses.dataclass(frozen=True)
class _Strip:
    """Where this CTA's columns and rows are. Addresses are those of the matrix of the tile's expert."""

    x: object  # i64: of the first row
    values: object
    scales: object
    zeros: object  # or None
    out: object  # i64: of the first row
    width: object  # i32, of the matrix
    column: object  # i32, of the strip's first
    count: object  # i32, rows


def _multiply(cfg: PackedProductConfig, refs, sums):
    """One warpgroup."""
    kinds = (*(plgpu.RefType(),) * (len(refs) + 1), *(ptx.SCALAR,) * 4)

    @plgpu.inline_mgpu(arg_types=kinds)
    def multiply(ctx, *args):
        *given, sums, strip, tile, split, wg = args
        strip, tile, split, wg = map(ptx.scalar_value, (strip, tile, split, wg))
        here = _strip(cfg, [ptx.pointer(ref, 0) for ref in given], strip, tile)
        base = ptx.pointer(sums, 3)
        acc = _sum_of_part(cfg, here, ptx.add(ptx.mul(split, cfg.warpgroups), wg))
        _store_sums(cfg, base, wg, acc)
        _wait_for_all(cfg)
        _add_up(cfg, here, base, split, wg)
        if cfg.splits > 1:  # shared memory must stay until the others have read it
            _wait_for_all(cfg)

    multiply(*refs, sums, *map(lax.axis_index, ("strip", "tile", "split", "wg")))


def _strip(cfg: PackedProductConfig, addresses, strip, tile) -> _Strip:
    x, *rest = addresses
    if cfg.experts:
        tiles, *rest = rest
        place = arith.addi(tiles, ptx.to_i64(ptx.mul(tile, 12)))
        expert, row, count = (ptx.asm_value(f"ld.global.nc.b32 $0, [$1+{4 * i}];", "=r,l", place) for i in range(3))
    else:
        expert, row = None, ptx.mul(tile, TILE_ROWS)
        count = arith.minsi(ptx.i32(cfg.tile_rows), arith.subi(ptx.i32(cfg.rows), row))
    each = 3 if cfg.has_zeros else 2
    outs, arrays = rest[each * len(cfg.widths) :], [rest[each * i : each * (i + 1)] for i in range(len(cfg.widths))]
    select = functools.partial(_of_matrix, cfg, strip)

    def address(i: int, bytes_of_column: int):
        start = select([array[i] for array in arrays])
        if expert is None:
            return start
        sizes = [ptx.i64(width * bytes_of_column) for width in cfg.widths]
        return arith.addi(start, arith.muli(ptx.to_i64(expert), select(sizes)))

    groups, size = cfg.inner // cfg.group, _bytes(cfg.scale_dtype)
    width = select([ptx.i32(width) for width in cfg.widths])
    row_bytes = ptx.mul(width, _bytes(cfg.dtype))
    return _Strip(
        x=arith.addi(x, arith.muli(ptx.to_i64(row), ptx.i64(2 * cfg.inner))),
        values=address(0, cfg.inner * BITS[cfg.format] // 8),
        scales=address(1, groups * size),
        zeros=address(2, groups) if cfg.has_zeros else None,
        out=arith.addi(select(outs), arith.muli(ptx.to_i64(row), ptx.to_i64(row_bytes))),
        width=width,
        column=ptx.mul(arith.subi(strip, select([ptx.i32(first) for first in cfg.first_strips])), cfg.strip),
        count=count,
    )


def _of_matrix(cfg: PackedProductConfig, strip, choices):
    """The choice of the matrix to which a strip belongs."""
    chosen = choices[0]
    for first, choice in zip(cfg.first_strips[1:], choices[1:], strict=True):
        chosen = arith.select(ptx.less(strip, ptx.i32(first)), chosen, choice)
    return chosen


def _bytes(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _place(base, row, width, column, size: int):
    """Address of (row, column) of a GMEM array of rows of `width` elements of `size` bytes."""
    at = arith.addi(arith.muli(ptx.to_i64(row), ptx.to_i64(width)), ptx.to_i64(column))
    return arith.addi(base, arith.muli(at, ptx.i64(size)))


def _sum_of_part(cfg: PackedProductConfig, here: _Strip, part) -> list:
    """Sums of a part of the inner dimension: [tile of 16 columns][tile of 8 rows][4] floats, as mma has them."""
    g, t, _, warp = ptx.lane_position()
    column = ptx.add(here.column, ptx.mul(warp, 8 * cfg.columns), ptx.mul(g, cfg.columns))
    column = arith.select(ptx.less(column, here.width), column, ptx.i32(0))  # a column past the end is not stored
    edge = lambda p: arith.divui(ptx.mul(p, cfg.chunks), ptx.i32(cfg.parts))
    first = edge(part)
    count = arith.subi(edge(ptx.add(part, ptx.i32(1))), first)
    rows = []
    for n in range(cfg.tile_rows // 8):
        row = arith.minsi(ptx.add(g, ptx.i32(8 * n)), arith.subi(here.count, ptx.i32(1)))
        start = arith.addi(here.x, arith.muli(ptx.to_i64(row), ptx.i64(2 * cfg.inner)))
        rows.append(arith.addi(start, ptx.to_i64(ptx.mul(t, 16))))
    load = functools.partial(_load_weights, cfg, here, column, t)
    acc = [[[ptx.f32(0.0)] * 4 for _ in rows] for _ in range(cfg.columns // 2)]

    def step(i, carry):
        weights, acc = carry
        chunk = ptx.add(first, i)
        xs = _load_rows(cfg, rows, chunk)
        after = ptx.add(i, ptx.i32(1))
        following = load(ptx.add(chunk, ptx.i32(1)), ptx.bool_to_i32(ptx.less(after, count)))
        return following, _multiply_chunk(cfg, weights, xs, acc)

    return _loop(count, (load(first, ptx.i32(1)), acc), step)[1]


def _loop(count, carry, step):
    """carry = step(i, carry) for i < count."""
    return utils.fori(count, carry)(step).results


def _load(place, words: int, is_used, cached: bool = True) -> list:
    """32-bit words from GMEM; what they hold is undefined where is_used is 0."""
    kind = "" if words == 1 else f".v{words}"
    names = "$0" if words == 1 else "{" + ", ".join(f"${i}" for i in range(words)) + "}"
    hint = "" if cached else ".L1::no_allocate"
    text = f"{{ .reg .pred p; setp.ne.u32 p, ${words + 1}, 0; @p ld.global.nc{hint}{kind}.b32 {names}, [${words}]; }}"
    constraints = ",".join(["=r"] * words) + ",l,r"
    if words == 1:
        return [ptx.asm_value(text, constraints, place, is_used)]
    return ptx.asm_values(text, constraints, words, place, is_used)


def _load_rows(cfg: PackedProductConfig, rows, chunk) -> list:
    """[block][tile of 8 rows][4] words of x: the thread's 8 inputs of each block."""
    at = ptx.to_i64(ptx.mul(chunk, 2 * BLOCK * cfg.unroll))
    places = [arith.addi(row, at) for row in rows]
    one = lambda place, b: _load(arith.addi(place, ptx.i64(2 * BLOCK * b)), 4, ptx.i32(1))
    return [[one(place, b) for place in places] for b in range(cfg.unroll)]


def _load_weights(cfg: PackedProductConfig, here: _Strip, column, t, chunk, is_used) -> tuple[list, list, list]:
    """(codes of each block, words of scales of each run, words of zero points of each run)"""
    values, scales, zeros = [], [], []
    for b in range(cfg.unroll):
        block = ptx.add(ptx.mul(chunk, cfg.unroll), ptx.i32(b))
        values.append(_load_codes(cfg, here, column, t, block, is_used))
        if b % cfg.run == 0:
            group = arith.divui(ptx.mul(block, BLOCK), ptx.i32(cfg.group))
            if not cfg.is_whole:
                scales.append(_load_scales(cfg, here, group, column, is_used))
            if here.zeros is not None:
                place = _place(here.zeros, group, here.width, column, 1)
                zeros.append(_load(place, cfg.columns // 4, is_used))
    return values, scales, zeros


def _load_codes(cfg: PackedProductConfig, here: _Strip, column, t, block, is_used) -> list:
    """The thread's words of a block: of 4 bits one for each column, of 8 bits columns / 4 for each of 8 inputs."""
    if BITS[cfg.format] == 4:
        place = _place(here.values, ptx.add(ptx.mul(block, 4), t), here.width, column, 4)
        return _load(place, 4, is_used, cached=False)
    place = _place(here.values, ptx.add(ptx.mul(block, BLOCK), ptx.mul(t, 8)), here.width, column, 1)
    words = []
    for _ in range(8):
        words.append(_load(place, cfg.columns // 4, is_used, cached=False))
        place = arith.addi(place, ptx.to_i64(here.width))
    return words


def _load_scales(cfg: PackedProductConfig, here: _Strip, group, column, is_used) -> list:
    size = _bytes(cfg.scale_dtype)
    place = _place(here.scales, group, here.width, column, size)
    words = []
    for at in range(0, cfg.columns * size, 16):
        some = min(4, cfg.columns * size // 4)
        words += _load(arith.addi(place, ptx.i64(at)), some, is_used)
    return words


def _float(cfg: PackedProductConfig, words, i: int):
    """Scale i of the words that hold some."""
    if cfg.scale_dtype == "float32":
        return ptx.asm_value("mov.b32 $0, $1;", "=f,r", words[i], pure=True)
    if cfg.scale_dtype == "bfloat16":
        return ptx.float_of_bf16(words[i // 2], i % 2)
    return ptx.float_of_f16(words[i // 2], i % 2)


def _multiply_chunk(cfg: PackedProductConfig, weights, xs, acc) -> list:
    """acc + the products of a step."""
    values, scales, zeros = weights
    sums = acc if cfg.is_whole else None
    for b in range(cfg.unroll):
        run = b // cfg.run
        if sums is None:
            sums = [[[ptx.f32(0.0)] * 4 for _ in tiles] for tiles in acc]
        pairs = _pairs(cfg, values[b], zeros[run] if zeros else None)
        for s in range(2):
            for m, tiles in enumerate(sums):
                low, high = pairs[2 * m], pairs[2 * m + 1]
                a = low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]
                for n in range(len(tiles)):
                    tiles[n] = ptx.mma(a, xs[b][n][2 * s : 2 * s + 2], tiles[n], "bfloat16")
        if not cfg.is_whole and (b + 1) % cfg.run == 0:
            acc, sums = _scaled(cfg, acc, sums, scales[run]), None
    return acc if sums is None else sums


def _scaled(cfg: PackedProductConfig, acc, sums, words) -> list:
    """acc + scales * sums."""
    factors = [_float(cfg, words, i) for i in range(cfg.columns)]
    both = lambda m, old, new: [ptx.fma(new[i], factors[2 * m + i // 2], old[i]) for i in range(4)]
    return [
        [both(m, old, new) for old, new in zip(*tiles, strict=True)]
        for m, tiles in enumerate(zip(acc, sums, strict=True))
    ]


def _pairs(cfg: PackedProductConfig, words, zeros) -> list:
    """For each column, the four pairs of its 8 inputs, less their zero point."""
    pairs = []
    for i in range(cfg.columns):
        if BITS[cfg.format] == 4:
            own = codes.pairs_of_word(cfg.format, words[i])
        else:
            at = lambda j, i=i: words[j][i // 4]
            own = [codes.pair_of_bytes(cfg.format, at(2 * j), at(2 * j + 1), i % 4) for j in range(4)]
        less = codes.offset(cfg.format)
        if zeros is not None:
            less = codes.with_zero(cfg.format, ptx.byte_permute(zeros[i // 4], i % 4))
        pairs.append(own if less is None else [codes.subtract(pair, less) for pair in own])
    return pairs


def _store_sums(cfg: PackedProductConfig, base, wg, acc):
    """This warpgroup's sums to SMEM, [warpgroups, tile_rows, pitch] floats."""
    g, t, _, warp = ptx.lane_position()
    column = ptx.add(ptx.mul(warp, 8 * cfg.columns), ptx.mul(g, cfg.columns))
    for n in range(cfg.tile_rows // 8):
        for k in range(2):
            row = ptx.add(ptx.mul(wg, cfg.tile_rows), ptx.i32(8 * n + k), ptx.mul(t, 2))
            place = ptx.add(base, ptx.mul(ptx.add(ptx.mul(row, cfg.pitch), column), 4))
            own = [acc[i // 2][n][k + 2 * (i % 2)] for i in range(cfg.columns)]
            for i in range(0, cfg.columns, 4):
                text = f"st.shared.v4.f32 [$0+{4 * i}], {{$1, $2, $3, $4}};"
                ptx.asm(text, "r,f,f,f,f", place, *own[i : i + 4])


def _wait_for_all(cfg: PackedProductConfig):
    """All threads of the cluster; what they stored becomes visible."""
    if cfg.splits == 1:
        ptx.asm("bar.sync 0;", "")
    else:
        ptx.asm("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "")


def _add_up(cfg: PackedProductConfig, here: _Strip, base, split, wg):
    """Each thread of the cluster adds up some numbers of y, and stores them."""
    threads = 128 * cfg.parts
    own = ptx.add(ptx.mul(ptx.add(ptx.mul(split, cfg.warpgroups), wg), 128), ptx.thread_index())
    peers = [base] if cfg.splits == 1 else [_of_peer(base, rank) for rank in range(cfg.splits)]
    space = "shared" if cfg.splits == 1 else "shared::cluster"
    for first in range(0, min(cfg.tile_rows, cfg.rows) * cfg.strip, threads):
        number = ptx.add(own, ptx.i32(first))
        row, column = arith.divui(number, ptx.i32(cfg.strip)), arith.remui(number, ptx.i32(cfg.strip))
        at = ptx.add(here.column, column)
        is_used = arith.andi(ptx.less(row, here.count), ptx.less(at, here.width))
        is_used = ptx.bool_to_i32(is_used)
        inside, total = ptx.mul(ptx.add(ptx.mul(row, cfg.pitch), column), 4), None
        for peer in peers:
            for part in range(cfg.warpgroups):
                offset = 4 * part * cfg.tile_rows * cfg.pitch
                text = "{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.{}.f32 $0, [$1+{}]; }}"
                value = ptx.asm_value(text.format(space, offset), "=&f,r,r", ptx.add(peer, inside), is_used)
                total = value if total is None else arith.addf(total, value)
        if cfg.is_whole:
            total = arith.mulf(total, _one_scale(cfg, here, at, is_used))
        _store(cfg.dtype, _place(here.out, row, here.width, at, _bytes(cfg.dtype)), total, is_used)


def _of_peer(place, rank: int):
    """The same SMEM address in another CTA of the cluster."""
    return ptx.asm_value("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", place, ptx.i32(rank))


def _one_scale(cfg: PackedProductConfig, here: _Strip, column, is_used):
    """The only scale of a column."""
    odd = arith.andi(column, ptx.i32(1)) if _bytes(cfg.scale_dtype) == 2 else ptx.i32(0)
    place = _place(here.scales, ptx.i32(0), here.width, arith.subi(column, odd), _bytes(cfg.scale_dtype))
    return _float(cfg, [arith.shrui(_load(place, 1, is_used)[0], ptx.mul(odd, 16))], 0)


def _store(dtype: str, place, value, is_used):
    text = "{ .reg .pred p; .reg .b16 h; setp.ne.u32 p, $2, 0; "
    if dtype == "float32":
        text += "@p st.global.f32 [$0], $1; }"
    else:
        text += f"cvt.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}.f32 h, $1; @p st.global.b16 [$0], h; }}"
    ptx.asm(text, "l,f,r", place, value, is_used)
