"""Scatter of new keys and values into pages, in place: one launch for both pools and their token scales.

A row is one (token, kv head): D * itemsize bytes. A thread writes CHUNKS chunks of 16 bytes at a time. Rows come in the
pool's dtype, quantised by XLA (algebra/quant.py), and the kernel copies bytes; or they come in 16 bits with one divisor
for each head, and the kernel computes what quant.to_dtype does.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.branch import when

THREADS = 128
SOURCES = ("bfloat16", "float16")  # dtypes of rows that the kernel quantises
CHUNKS = 4  # chunks of 16 bytes that a thread loads before it stores the first


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


def write_rows(rows, scales, slots, pools, scale_pools, *, page_size: int, heads_first: bool, divisors=()):
    """Writes rows (k [T, K, D], v [T, K, V]) to slots i32[T] of the pools. A slot < 0 or past the end is not written.

    A row must be a multiple of 16 bytes (supports.py). scales, scale_pools: two f32 [T, K] and their pools [N, K, S] or
    [N, S, K], or (). Returns (new pools, new scale pools), in place where the caller donates them.
    divisors: two f32[K] by which rows of SOURCES are divided and rounded to pools of 8 bits, or ().
    """
    tokens, heads = rows[0].shape[:2]
    shapes = [
        _Pool(
            heads, x.shape[-1] * pool.dtype.itemsize // 16, pool.shape[0], page_size, heads_first,
            *((x.dtype.name, pool.dtype.name) if divisors else ()),
        )
        for x, pool in zip(rows, pools, strict=True)
    ]  # fmt: skip
    total = max(tokens * heads * shape.chunks for shape in shapes)
    step = THREADS * CHUNKS
    mesh = plgpu.Mesh(grid=(pl.cdiv(total, step), 2), grid_names=("part", "pool"), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    refs, count = [jax.new_ref(x) for x in (*pools, *scale_pools)], len(divisors)

    def write_kv_pages(slots, *refs):
        divisors, refs = refs[:count], refs[count:]
        sources, targets = refs[: len(refs) // 2], refs[len(refs) // 2 :]
        for i, shape in enumerate(shapes):

            @when(lax.axis_index("pool") == i)
            def _(i=i, shape=shape):
                first = lax.axis_index("part") * step
                _move(shape, slots, sources[i], targets[i], first, tokens, *divisors[i : i + 1])
                if scales:
                    _move_scales(shape, slots, sources[2 + i], targets[2 + i], first, tokens)

    write = pl.kernel(write_kv_pages, out_type=(), mesh=mesh, compiler_params=params, name="write_kv_pages")
    write(slots, *divisors, *rows, *scales, *refs)
    done = [jax.freeze(ref) for ref in refs]
    return tuple(done[:2]), tuple(done[2:])


def _place(shape: _Pool, slots, chunk, tokens: int):
    """Of a chunk's number: (row of the source, chunk of the row, slot, head, is it to be written)."""
    row, heads = arith.divui(chunk, ptx.i32(shape.chunks)), ptx.i32(shape.heads)
    token = arith.divui(row, heads)
    inside = ptx.less(token, ptx.i32(tokens))
    source = arith.addi(slots, arith.muli(ptx.to_i64(arith.select(inside, token, ptx.i32(0))), ptx.i64(4)))
    slot = ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", source, pure=True)
    ok = arith.andi(inside, ptx.less_unsigned(slot, ptx.i32(shape.blocks * shape.page)))
    return row, arith.remui(chunk, ptx.i32(shape.chunks)), slot, arith.remui(row, heads), ok


def _move(shape: _Pool, slots, source, target, first, tokens: int, *divisors):
    """Writes CHUNKS chunks a thread, from chunk `first` on: all loads before the first store."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, ptx.SCALAR, *(plgpu.RefType() for _ in divisors)))
    def move(ctx, slots, source, target, first, *divisors):
        slots, source, target, *divisors = (ptx.pointer(ref, 0) for ref in (slots, source, target, *divisors))
        start = arith.addi(ptx.scalar_value(first), ptx.thread_index())
        loaded, pieces = [], 1 if shape.source is None else 2  # of 16 bytes of the source, for a chunk of the pool
        for i in range(CHUNKS):
            row, chunk, slot, head, ok = _place(shape, slots, arith.addi(start, ptx.i32(i * THREADS)), tokens)
            inside = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(shape.chunks)), ptx.to_i64(chunk))
            place, words = arith.addi(source, arith.muli(inside, ptx.i64(16 * pieces))), []
            for piece in range(pieces):
                text = (
                    "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
                    f" @p ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{16 * piece}]; }}"
                )
                words += ptx.asm_values(text, "=&r,=&r,=&r,=&r,l,r", 4, place, ptx.bool_to_i32(ok), pure=True)
            if divisors:
                of_head = arith.addi(divisors[0], arith.muli(ptx.to_i64(head), ptx.i64(4)))
                divisor = ptx.asm_value("ld.global.nc.f32 $0, [$1];", "=f,l", of_head, pure=True)
                text = encode_words(shape.source, shape.target)
                pairs = zip(words[::2], words[1::2], strict=True)
                words = [ptx.asm_value(text, "=r,r,r,f", *pair, divisor, pure=True) for pair in pairs]
            where = arith.addi(arith.muli(shape.row(slot, head), ptx.i64(shape.chunks)), ptx.to_i64(chunk))
            loaded.append((arith.addi(target, arith.muli(where, ptx.i64(16))), ptx.bool_to_i32(ok), words))
        for place, ok, words in loaded:
            text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }"
            ptx.asm(text, "l,r,r,r,r,r", place, ok, *words)

    move(slots, source, target, first, *divisors)


def encode_words(source: str, target: str) -> str:
    """PTX that divides the four 16-bit values of $1 and $2 by the f32 $3 and rounds them to the 8-bit values of $0.

    NaN becomes NaN, or 0 in int8; halves of integers are rounded away from 0; values beyond the largest become it.
    """
    text = "{ .reg .f32 a, b, c, d, half; .reg .b32 t, u, v, w; .reg .b16 l, h;"
    for word, (low, high) in (("$1", "ab"), ("$2", "cd")):
        if source == "bfloat16":
            text += f" shl.b32 t, {word}, 16; mov.b32 {low}, t; and.b32 t, {word}, 0xffff0000; mov.b32 {high}, t;"
        else:
            text += f" mov.b32 {{l, h}}, {word}; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h;"
    text += "".join(f" div.rn.f32 {x}, {x}, $3;" for x in "abcd")
    if target == "int8":
        for x, n in zip("abcd", "tuvw", strict=True):  # half: 0.5 with the sign of x
            text += f" mov.b32 {n}, {x}; and.b32 {n}, {n}, 0x80000000; or.b32 {n}, {n}, 0x3f000000;"
            text += f" mov.b32 half, {n}; add.rn.f32 {x}, {x}, half; cvt.rzi.s32.f32 {n}, {x};"
            text += f" max.s32 {n}, {n}, -127; min.s32 {n}, {n}, 127;"
        return text + " prmt.b32 t, t, u, 0x0040; prmt.b32 v, v, w, 0x0040; prmt.b32 $0, t, v, 0x5410; }"
    kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[target]
    text += f" cvt.rn.satfinite.{kind}.f32 l, b, a; cvt.rn.satfinite.{kind}.f32 h, d, c;"
    return text + " mov.b32 $0, {l, h}; }"


def _move_scales(shape: _Pool, slots, source, target, first, tokens: int):
    """Copies the f32 scale of each row whose first chunk this thread copies."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def move(ctx, slots, source, target, first):
        slots, source, target = (ptx.pointer(ref, 0) for ref in (slots, source, target))
        start = arith.addi(ptx.scalar_value(first), ptx.thread_index())
        for i in range(CHUNKS):
            row, chunk, slot, head, ok = _place(shape, slots, arith.addi(start, ptx.i32(i * THREADS)), tokens)
            ok = ptx.bool_to_i32(arith.andi(ok, ptx.equal(chunk, ptx.i32(0))))
            place = arith.addi(source, arith.muli(ptx.to_i64(row), ptx.i64(4)))
            text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
            word = ptx.asm_value(text, "=&r,l,r", place, ok, pure=True)
            where = arith.addi(target, arith.muli(shape.row(slot, head), ptx.i64(4)))
            ptx.asm("{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.b32 [$0], $2; }", "l,r,r", where, ok, word)

    move(slots, source, target, first)
