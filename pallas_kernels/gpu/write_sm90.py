"""Scatter of new keys and values into pages, in place: one launch for both pools and their token scales.

A row is one (token, kv head): D * itemsize bytes. A thread writes CHUNKS chunks of 16 bytes at a time. Rows come in the
pool's dtype, quantised by XLA (algebra/quant.py), and the kernel copies bytes; or they come in 16 bits, and the kernel
computes what quant.to_dtype does, by one divisor for each head or by a scale for each row.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra import quant
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.branch import when

THREADS = 128
SOURCES = ("bfloat16", "float16")  # dtypes of rows that the kernel quantises
FLOAT8_SINCE, PAIRED_MAXIMA_SINCE = 89, 90
"""The first compute capability with the instructions that round to float8, and that find the largest of two numbers of
a word, of which a row's scale is computed."""
CHUNKS = 4  # chunks of 16 bytes that a thread loads before it stores the first
QUANTISED_CHUNKS = 1  # the same where the kernel quantises: write_8k_fp8_token takes 19.7 us, 20.0 with 2, 21.1 with 4


def quantises(capability: int, source: str, target: str, *, own_scales: bool) -> bool:
    """Does the kernel quantise rows of dtype `source` to `target` on a GPU of this compute capability (90: sm_90)?

    own_scales: by scales that it computes, one for each row.
    """
    since = max(PAIRED_MAXIMA_SINCE if own_scales else 0, FLOAT8_SINCE if target.startswith("float8") else 0)
    return source in SOURCES and capability >= since


@dataclasses.dataclass(frozen=True)
class _Pool:
    """Sizes and order of one pool: where the row of a slot and head lies."""

    heads: int
    chunks: int  # of 16 bytes in a row
    blocks: int
    page: int  # slots of a block
    heads_first: bool
    source: str | None = None  # dtype of rows that are quantised here; None: rows are copied
    target: str = ""  # dtype of the pool, if source is given

    def row(self, slot, head):
        """i64 row of slot i32 and head i32 in the pool [N, K, S] or [N, S, K]."""
        block, offset = arith.divui(slot, ptx.i32(self.page)), arith.remui(slot, ptx.i32(self.page))
        return ptx.pool_row(block, offset, head, heads=self.heads, page=self.page, heads_first=self.heads_first)


def write_rows(
    rows,
    scales,
    slots,
    pools,
    scale_pools,
    *,
    page_size: int,
    heads_first: bool,
    divisors=(),
    chunks: int | None = None,
):
    """Writes rows (k [T, K, D], v [T, K, V]) to slots i32[T] of the pools. A slot < 0 or past the end is not written.

    A row must be a multiple of 16 bytes (supports.py). scales, scale_pools: two f32 [T, K] and their pools [N, K, S] or
    [N, S, K], or (). Returns (new pools, new scale pools), in place where the caller donates them.
    divisors: two f32[K] by which rows of SOURCES are divided and rounded to pools of 8 bits, or (). With scale_pools
    and no scales, each row of SOURCES gets the scale of quant.token_head_scale, and is divided by it.
    chunks: of a thread; None: CHUNKS or QUANTISED_CHUNKS.
    """
    own_scales = len(scale_pools) > len(scales)
    chunks = chunks or (QUANTISED_CHUNKS if own_scales or divisors else CHUNKS)
    tokens, heads = rows[0].shape[:2]
    shapes = [
        _Pool(
            heads, x.shape[-1] * pool.dtype.itemsize // 16, pool.shape[0], page_size, heads_first,
            *((x.dtype.name, pool.dtype.name) if divisors or own_scales else ()),
        )
        for x, pool in zip(rows, pools, strict=True)
    ]  # fmt: skip
    total = max(tokens * heads * (lanes_of_row(shape.chunks) if own_scales else shape.chunks) for shape in shapes)
    step = THREADS * chunks
    mesh = plgpu.Mesh(grid=(pl.cdiv(total, step), 2), grid_names=("part", "pool"), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    refs, count = [jax.new_ref(x) for x in (*pools, *scale_pools)], len(divisors)

    def write_kv_pages(slots, *refs):
        divisors, refs = refs[:count], refs[count:]
        sources = refs[: 2 + len(scales)]
        targets = refs[len(sources) :]
        for i, shape in enumerate(shapes):

            @when(lax.axis_index("pool") == i)
            def _(i=i, shape=shape):
                first = lax.axis_index("part") * step
                if own_scales:
                    quantise_rows(shape, slots, sources[i], targets[i], targets[2 + i], first, tokens, chunks)
                    return
                _move(shape, slots, sources[i], targets[i], first, tokens, *divisors[i : i + 1], chunks=chunks)
                if scales:
                    _move_scales(shape, slots, sources[2 + i], targets[2 + i], first, tokens, chunks)

    write = pl.kernel(write_kv_pages, out_type=(), mesh=mesh, compiler_params=params, name="write_kv_pages")
    write(slots, *divisors, *rows, *scales, *refs)
    done = [jax.freeze(ref) for ref in refs]
    return tuple(done[:2]), tuple(done[2:])


def place_of(shape: _Pool, slots, chunk, tokens: int, chunks: int = 0):
    """Of a chunk's number: (row of the source, chunk of the row, slot, head, is it to be written, is it there).

    chunks: of a row; 0: those of the pool's rows. Chunks past those are not there. What is there is loaded, whether it
    is written or not: loads would wait for the slot.
    """
    chunks = chunks or shape.chunks
    row, heads = arith.divui(chunk, ptx.i32(chunks)), ptx.i32(shape.heads)
    token = arith.divui(row, heads)
    inside = ptx.less(token, ptx.i32(tokens))
    source = arith.addi(slots, arith.muli(ptx.to_i64(arith.select(inside, token, ptx.i32(0))), ptx.i64(4)))
    slot = ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", source, pure=True)
    ok = arith.andi(inside, ptx.less_unsigned(slot, ptx.i32(shape.blocks * shape.page)))
    chunk = arith.remui(chunk, ptx.i32(chunks))
    if chunks > shape.chunks:
        inside = arith.andi(inside, ptx.less(chunk, ptx.i32(shape.chunks)))
    return row, chunk, slot, arith.remui(row, heads), arith.andi(ok, inside), inside


def _move(shape: _Pool, slots, source, target, first, tokens: int, *divisors, chunks: int = CHUNKS):
    """Writes `chunks` chunks a thread, from chunk `first` on: all loads before the first store."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, ptx.SCALAR, *(plgpu.RefType() for _ in divisors)))
    def move(ctx, slots, source, target, first, *divisors):
        slots, source, target, *divisors = (ptx.pointer(ref, 0) for ref in (slots, source, target, *divisors))
        start = arith.addi(ptx.scalar_value(first), ptx.thread_index())
        loaded, pieces = [], 1 if shape.source is None else 2
        for i in range(chunks):
            number = ptx.add(start, ptx.i32(i * THREADS))
            row, chunk, slot, head, ok, there = place_of(shape, slots, number, tokens)
            words = load_chunk(shape, source, row, chunk, there if divisors else ok, pieces)
            if divisors:
                of_head = arith.addi(divisors[0], arith.muli(ptx.to_i64(head), ptx.i64(4)))
                divisor = ptx.asm_value("ld.global.nc.f32 $0, [$1];", "=f,l", of_head, pure=True)
                words = encode_chunk(shape, words, divisor)
            where = arith.addi(arith.muli(shape.row(slot, head), ptx.i64(shape.chunks)), ptx.to_i64(chunk))
            loaded.append((arith.addi(target, arith.muli(where, ptx.i64(16))), ptx.bool_to_i32(ok), words))
        for place, ok, words in loaded:
            ptx.store_if(place, ok, *words)

    move(slots, source, target, first, *divisors)


def load_chunk(shape: _Pool, source, row, chunk, there, pieces: int):
    """The words of a chunk of the pool, which is `pieces` times 16 bytes of the source; 0 where it is not `there`."""
    inside = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(shape.chunks)), ptx.to_i64(chunk))
    place, words = arith.addi(source, arith.muli(inside, ptx.i64(16 * pieces))), []
    for piece in range(pieces):
        text = ptx.predicated_load("b32", 4, "nc.L1::no_allocate", f"+{16 * piece}")
        words += ptx.asm_values(text, "=&r,=&r,=&r,=&r,l,r", 4, place, ptx.bool_to_i32(there), pure=True)
    return words


def encode_chunk(shape, words, divisor, bounded: bool = False):
    """Four words of 8-bit values of eight words of 16-bit values, divided by the f32 `divisor`. See encode_words."""
    reciprocal = ptx.asm_value("rcp.rn.f32 $0, $1;", "=f,f", divisor, pure=True)
    text = encode_words(shape.source, shape.target, bounded)
    return ptx.asm_values(text, "=&r,=&r,=&r,=&r" + ",r" * 8 + ",f,f", 4, *words, divisor, reciprocal, pure=True)


def encode_words(source: str, target: str, bounded: bool = False) -> str:
    """PTX that divides the 16-bit values of $4 .. $11 by the f32 $12 and rounds them to the 8-bit values of $0 .. $3.

    $13 is 1 / $12. A quotient is the product with it and one correction, which rounds it as a division (Markstein); a
    divisor near the ends of float32's range divides. NaN becomes NaN, or 0 in int8; halves of integers are rounded
    away from 0; values beyond the largest become it. bounded: finite divisors have finite quotients, and no value is
    infinite beside them.
    """
    out = "{ .reg .pred p; .reg .f32 a, b, c, d, e, q, half; .reg .b32 t, u, v, w; .reg .b16 l, h;"
    out += " setp.ge.f32 p, $12, 0f0D800000; setp.le.and.f32 p, $12, 0f71800000, p; @!p bra DIVIDE;"  # 2 ** -100, 100
    for by, end in (("product", " bra DIVIDED; DIVIDE:"), ("division", " DIVIDED: }")):
        for number in range(4):
            out += _unpack(source, f"${4 + 2 * number}", f"${5 + 2 * number}")
            for x in "abcd":
                if by == "division":
                    out += f" div.rn.f32 {x}, {x}, $12;"
                    continue
                clamp = "" if bounded else " min.f32 q, q, 0f7F7FFFFF; max.f32 q, q, 0fFF7FFFFF;"  # keeps inf and NaN
                out += f" mul.rn.f32 q, {x}, $13;{clamp} neg.f32 e, q; fma.rn.f32 e, e, $12, {x};"
                out += f" fma.rn.f32 {x}, e, $13, q;"
            out += _round(target, f"${number}")
        out += end
    return out


def _unpack(source: str, *words: str) -> str:
    """PTX: the four 16-bit values of two words as the f32 a, b, c, d."""
    text = ""
    for word, (low, high) in zip(words, ("ab", "cd"), strict=True):
        if source == "bfloat16":
            text += f" shl.b32 t, {word}, 16; mov.b32 {low}, t; and.b32 t, {word}, 0xffff0000; mov.b32 {high}, t;"
        else:
            text += f" mov.b32 {{l, h}}, {word}; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h;"
    return text


def _round(target: str, out: str) -> str:
    """PTX: the word `out` of four 8-bit values of the f32 a, b, c, d."""
    if target == "int8":
        text = ""
        for x, n in zip("abcd", "tuvw", strict=True):  # half: 0.5 with the sign of x
            text += f" mov.b32 {n}, {x}; and.b32 {n}, {n}, 0x80000000; or.b32 {n}, {n}, 0x3f000000;"
            text += f" mov.b32 half, {n}; add.rn.f32 {x}, {x}, half; cvt.rzi.s32.f32 {n}, {x};"
            text += f" max.s32 {n}, {n}, -127; min.s32 {n}, {n}, 127;"
        return text + f" prmt.b32 t, t, u, 0x0040; prmt.b32 v, v, w, 0x0040; prmt.b32 {out}, t, v, 0x5410;"
    kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[target]
    text = f" cvt.rn.satfinite.{kind}.f32 l, b, a; cvt.rn.satfinite.{kind}.f32 h, d, c;"
    return text + f" mov.b32 {out}, {{l, h}};"


def _move_scales(shape: _Pool, slots, source, target, first, tokens: int, chunks: int = CHUNKS):
    """Copies the f32 scale of each row whose first chunk this thread copies."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def move(ctx, slots, source, target, first):
        slots, source, target = (ptx.pointer(ref, 0) for ref in (slots, source, target))
        start = arith.addi(ptx.scalar_value(first), ptx.thread_index())
        for i in range(chunks):
            row, chunk, slot, head, ok, _ = place_of(shape, slots, arith.addi(start, ptx.i32(i * THREADS)), tokens)
            ok = ptx.bool_to_i32(arith.andi(ok, ptx.equal(chunk, ptx.i32(0))))
            place = arith.addi(source, arith.muli(ptx.to_i64(row), ptx.i64(4)))
            word = ptx.asm_value(ptx.predicated_load("b32"), "=&r,l,r", place, ok, pure=True)
            where = arith.addi(target, arith.muli(shape.row(slot, head), ptx.i64(4)))
            ptx.store_if(where, ok, word)

    move(slots, source, target, first)


def lanes_of_row(chunks: int) -> int:
    """Threads that share a row and its scale: the power of two from `chunks` on."""
    return 1 << (chunks - 1).bit_length()


def quantise_rows(shape: _Pool, slots, source, target, scales, first, tokens: int, chunks: int = CHUNKS):
    """_move of rows that are divided by a scale of their own, which goes to the pool `scales` f32.

    The lanes of a row compare their largest magnitudes: of bfloat16 and float16, bits are in the order of magnitudes,
    and a NaN is the largest.
    """
    lanes, largest = lanes_of_row(shape.chunks), quant.DTYPES[shape.target].largest
    assert largest is not None and shape.source is not None

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, ptx.SCALAR))
    def quantise(ctx, slots, source, target, scales, first):
        slots, source, target, scales = (ptx.pointer(ref, 0) for ref in (slots, source, target, scales))
        start = ptx.add(ptx.scalar_value(first), ptx.thread_index())
        loaded = []
        for i in range(chunks):
            number = ptx.add(start, ptx.i32(i * THREADS))
            row, chunk, slot, head, ok, there = place_of(shape, slots, number, tokens, lanes)
            words, at = load_chunk(shape, source, row, chunk, there, 2), shape.row(slot, head)
            where = ptx.add(arith.muli(at, ptx.i64(shape.chunks)), ptx.to_i64(chunk))
            first_lane = ptx.bool_to_i32(arith.andi(ok, ptx.equal(chunk, ptx.i32(0))))
            places = ptx.add(target, arith.muli(where, ptx.i64(16))), ptx.add(scales, arith.muli(at, ptx.i64(4)))
            loaded.append((*places, ptx.bool_to_i32(ok), first_lane, words))
        for place, of_scale, ok, first_lane, words in loaded:
            top = ptx.largest_halves(words, [lanes >> n for n in range(1, lanes.bit_length())])
            text = row_scale(shape.source, largest)
            scale = ptx.asm_value(text, "=f,r", top, pure=True)
            ptx.store_if(place, ok, *encode_chunk(shape, words, scale, bounded=True))
            ptx.store_if(of_scale, first_lane, scale, kind="f32")

    quantise(slots, source, target, scales, first)


def row_scale(source: str, largest: float) -> str:
    """PTX: the f32 scale of a row, quant.token_head_scale, of the largest magnitudes in the halves of $1."""
    text = "{ .reg .b32 t, u; .reg .b16 l, h; .reg .f32 x; shr.u32 t, $1, 16; and.b32 u, $1, 0xffff; max.u32 t, t, u;"
    if source == "bfloat16":
        text += " shl.b32 t, t, 16; mov.b32 x, t;"
    else:
        text += " mov.b32 {l, h}, t; cvt.f32.f16 x, l;"
    return (
        text
        + f" mul.rn.f32 x, x, {ptx.hex_f32(np.float32(1) / np.float32(largest))};"
        + (f" max.NaN.f32 $0, x, {ptx.hex_f32(quant.MIN_TOKEN_SCALE)}; }}")
    )
