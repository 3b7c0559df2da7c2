"""Few rows times packed matrices: y = x w, where w is kept in 4 or 8 bits with a scale for each group of inputs.

    y[token, column] = sum over groups of  scale[group, column] * sum over its inputs of  x[token, input] * code

The time is that of reading w. Each thread copies what it will need to shared memory (cp.async), some steps ahead. No
other thread reads that, so there is nothing to wait for but its own copies. It turns the codes into bfloat16 in
registers (packed_codes_sm90.py), in which they are exact, and multiplies them with mma.m16n8k16: its rows are columns
of w, its columns tokens. A product does not depend on the order of its inner dimension, so that a thread
(g = lane / 4, t = lane % 4) uses 8 consecutive inputs of a block of 32:

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

        pl.run_scoped(scoped, plgpu.SMEM((c.warpgroups * c.shared_bytes // 4,), jnp.float32), collective_axes="wg")

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
        own = ptx.add(base, ptx.mul(wg, cfg.shared_bytes))
        acc = _sum_of_part(cfg, here, ptx.add(ptx.mul(split, cfg.warpgroups), wg), own)
        _wait_for_warpgroup(wg)  # the sums take the place of the copies
        _store_sums(cfg, own, acc)
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


@dataclasses.dataclass(frozen=True)
class _Copies:
    """What a thread copies for a step of the loop, a piece of `size` bytes after the other.

    In a stage, all threads' first pieces come first, side by side, then all second ones.
    """

    stages: object  # i32: address of the warpgroup's first stage

    def place(self, cfg: PackedProductConfig, number, offset: int, size: int):
        """Address of this thread's piece `offset` bytes (of a thread) into step `number`."""
        stage = ptx.mul(arith.remui(number, ptx.i32(cfg.stages)), 128 * cfg.thread_bytes)
        return ptx.add(self.stages, stage, ptx.mul(ptx.thread_index(), size), ptx.i32(128 * offset))


def _pieces(cfg: PackedProductConfig) -> list[tuple[str, int, int]]:
    """(kind, index, size) of a step's pieces: "codes" of (block, row), "x" of (block, tile of rows), scales, zeros."""
    size, found = _bytes(cfg.scale_dtype) * cfg.columns, []
    codes_of_block = [16] if BITS[cfg.format] == 4 else [cfg.columns] * 8
    for b in range(cfg.unroll):
        found += [("codes", 8 * b + i, n) for i, n in enumerate(codes_of_block)]
        found += [("x", 2 * b + n, 16) for n in range(cfg.tile_rows // 8)]
        if b % cfg.run == 0:
            scales = [] if cfg.is_whole else [min(size, 16)] * -(-size // 16)
            found += [("scales", 2 * b + i, n) for i, n in enumerate(scales)]
            found += [("zeros", b, cfg.columns)] if cfg.has_zeros else []
    return sorted(found, key=lambda piece: -piece[2])  # large ones first: each begins at a multiple of its size


def _sum_of_part(cfg: PackedProductConfig, here: _Strip, part, stages) -> list:
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
    copies = _Copies(stages)

    def ask(number):
        chunk, is_used = ptx.add(first, number), ptx.bool_to_i32(ptx.less(number, count))
        for kind, index, size, offset in _offsets(cfg):
            source = _source(cfg, here, rows, column, t, chunk, kind, index)
            _copy(copies.place(cfg, number, offset, size), source, size, is_used)
        _close_group()

    for number in range(cfg.stages - 1):
        ask(ptx.i32(number))

    def step(i, acc):
        _wait_for_groups(cfg.stages - 2)
        words = {
            (kind, index): _read(copies.place(cfg, i, offset, size), size)
            for kind, index, size, offset in _offsets(cfg)
        }
        ask(ptx.add(i, ptx.i32(cfg.stages - 1)))
        return _multiply_chunk(cfg, words, acc)

    acc = [[[ptx.f32(0.0)] * 4 for _ in rows] for _ in range(cfg.columns // 2)]
    acc = _loop(count, acc, step)
    _wait_for_groups(0)
    return acc


def _offsets(cfg: PackedProductConfig):
    """The pieces, each with the bytes of a thread before it."""
    offset = 0
    for kind, index, size in _pieces(cfg):
        yield kind, index, size, offset
        offset += size


def _loop(count, carry, step):
    """carry = step(i, carry) for i < count."""
    return utils.fori(count, carry)(step).results


def _copy(place, source, size: int, is_used):
    """Copies from GMEM to SMEM; zeros if is_used is 0."""
    cache = "cg" if size == 16 else "ca"
    text = f"{{ .reg .pred p; setp.eq.u32 p, $2, 0; cp.async.{cache}.shared.global [$0], [$1], {size}, p; }}"
    ptx.asm(text, "r,l,r", place, source, is_used)


def _close_group():
    ptx.asm("cp.async.commit_group;", "")


def _wait_for_groups(pending: int):
    """This thread's copies have arrived, but those of the last `pending` groups."""
    ptx.asm(f"cp.async.wait_group {pending};", "")


def _read(place, size: int) -> list:
    """The 32-bit words of a piece in SMEM."""
    if size == 4:
        return [ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", place)]
    names = ", ".join(f"${i}" for i in range(size // 4))
    text = f"ld.shared.v{size // 4}.b32 {{{names}}}, [${size // 4}];"
    return ptx.asm_values(text, ",".join(["=r"] * (size // 4)) + ",r", size // 4, place)


def _source(cfg: PackedProductConfig, here: _Strip, rows, column, t, chunk, kind: str, index: int):
    """Address in GMEM of a piece of a step."""
    block = ptx.add(ptx.mul(chunk, cfg.unroll), ptx.i32(index // {"codes": 8, "x": 2, "scales": 2, "zeros": 1}[kind]))
    if kind == "x":
        return arith.addi(rows[index % 2], ptx.to_i64(ptx.mul(block, 2 * BLOCK)))
    if kind == "codes" and BITS[cfg.format] == 4:
        return _place(here.values, ptx.add(ptx.mul(block, 4), t), here.width, column, 4)
    if kind == "codes":
        row = ptx.add(ptx.mul(block, BLOCK), ptx.mul(t, 8), ptx.i32(index % 8))
        return _place(here.values, row, here.width, column, 1)
    group = arith.divui(ptx.mul(block, BLOCK), ptx.i32(cfg.group))
    if kind == "zeros":
        return _place(here.zeros, group, here.width, column, 1)
    start = _place(here.scales, group, here.width, column, _bytes(cfg.scale_dtype))
    return arith.addi(start, ptx.i64(16 * (index % 2)))


def _float(cfg: PackedProductConfig, words, i: int):
    """Scale i of the words that hold some."""
    if cfg.scale_dtype == "float32":
        return ptx.asm_value("mov.b32 $0, $1;", "=f,r", words[i], pure=True)
    if cfg.scale_dtype == "bfloat16":
        return ptx.float_of_bf16(words[i // 2], i % 2)
    return ptx.float_of_f16(words[i // 2], i % 2)


def _multiply_chunk(cfg: PackedProductConfig, words, acc) -> list:
    """acc + the products of a step, whose pieces are `words`."""
    sums = acc if cfg.is_whole else None
    for b in range(cfg.unroll):
        run = b // cfg.run * cfg.run
        if sums is None:
            sums = [[[ptx.f32(0.0)] * 4 for _ in tiles] for tiles in acc]
        codes_of_block = [words[key] for key in (("codes", 8 * b + i) for i in range(8)) if key in words]
        pairs = _pairs(cfg, codes_of_block, words.get(("zeros", run)))
        for s in range(2):
            for m, tiles in enumerate(sums):
                low, high = pairs[2 * m], pairs[2 * m + 1]
                a = low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]
                for n in range(len(tiles)):
                    x = words["x", 2 * b + n][2 * s : 2 * s + 2]
                    tiles[n] = ptx.mma(a, x, tiles[n], "bfloat16")
        if not cfg.is_whole and (b + 1) % cfg.run == 0:
            scales = words["scales", 2 * run] + words.get(("scales", 2 * run + 1), [])
            acc, sums = _scaled(cfg, acc, sums, scales), None
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
            own = codes.pairs_of_word(cfg.format, words[0][i])
        else:
            at = lambda j, i=i: words[j][i // 4]
            own = [codes.pair_of_bytes(cfg.format, at(2 * j), at(2 * j + 1), i % 4) for j in range(4)]
        less = codes.offset(cfg.format)
        if zeros is not None:
            less = codes.with_zero(cfg.format, ptx.byte_permute(zeros[i // 4], i % 4))
        pairs.append(own if less is None else [codes.subtract(pair, less) for pair in own])
    return pairs


def _store_sums(cfg: PackedProductConfig, base, acc):
    """This warpgroup's sums to SMEM, [tile_rows, pitch] floats."""
    g, t, _, warp = ptx.lane_position()
    column = ptx.add(ptx.mul(warp, 8 * cfg.columns), ptx.mul(g, cfg.columns))
    for n in range(cfg.tile_rows // 8):
        for k in range(2):
            row = ptx.add(ptx.mul(t, 2), ptx.i32(8 * n + k))
            place = ptx.add(base, ptx.mul(ptx.add(ptx.mul(row, cfg.pitch), column), 4))
            own = [acc[i // 2][n][k + 2 * (i % 2)] for i in range(cfg.columns)]
            for i in range(0, cfg.columns, 4):
                text = f"st.shared.v4.f32 [$0+{4 * i}], {{$1, $2, $3, $4}};"
                ptx.asm(text, "r,f,f,f,f", place, *own[i : i + 4])


def _wait_for_warpgroup(wg):
    ptx.asm("bar.sync $0, 128;", "r", ptx.add(wg, ptx.i32(1)))


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
                offset = part * cfg.shared_bytes
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
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    return _float(cfg, [arith.shrui(ptx.asm_value(text, "=&r,l,r", place, is_used), ptx.mul(odd, 16))], 0)


def _store(dtype: str, place, value, is_used):
    text = "{ .reg .pred p; .reg .b16 h; setp.ne.u32 p, $2, 0; "
    if dtype == "float32":
        text += "@p st.global.f32 [$0], $1; }"
    else:
        text += f"cvt.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}.f32 h, $1; @p st.global.b16 [$0], h; }}"
    ptx.asm(text, "l,f,r", place, value, is_used)
