"""Scatter of new keys and values into pages, in place: one launch for both pools and their token scales.

A row is one (token, kv head): D * itemsize bytes, moved as chunks of 16 by one thread each, CHUNKS in flight. Rows
come already in the pool's dtype: XLA quantises (algebra/quant.py), the kernel moves bytes.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx

THREADS = 128
CHUNKS = 4  # of 16 bytes, in flight in a thread


@dataclasses.dataclass(frozen=True)
class _Pool:
    """How one pool's rows lie: chunks of 16 bytes a row, and where a slot's row is."""

    heads: int
    chunks: int
    blocks: int
    page: int
    heads_first: bool

    def row(self, slot, head):
        """i64 row of slot i32 and head i32 in the pool [N, K, S] or [N, S, K]."""
        block, offset = arith.divui(slot, ptx.i32(self.page)), arith.remui(slot, ptx.i32(self.page))
        return ptx.pool_row(block, offset, head, heads=self.heads, page=self.page, heads_first=self.heads_first)


def write_rows(rows, scales, slots, pools, scale_pools, *, page_size: int, heads_first: bool):
    """Stores rows (k [T, K, D], v [T, K, V]) at slots i32[T] of the pools; a slot < 0 or past the end writes nothing.

    A row is a multiple of 16 bytes (supports.py). scales, scale_pools: f32 [T, K] pairs and their pools [N, K, S] or
    [N, S, K], or (). Returns the new pools and scale pools: the same memory where the caller owns it.
    """
    tokens, heads = rows[0].shape[:2]
    shapes = [
        _Pool(heads, x.shape[-1] * x.dtype.itemsize // 16, pool.shape[0], page_size, heads_first)
        for x, pool in zip(rows, pools, strict=True)
    ]
    total = max(tokens * heads * shape.chunks for shape in shapes)
    step = THREADS * CHUNKS
    mesh = plgpu.Mesh(grid=(pl.cdiv(total, step), 2), grid_names=("part", "pool"), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    refs = [jax.new_ref(x) for x in (*pools, *scale_pools)]

    def write_kv_pages(slots, *refs):
        sources, targets = refs[: len(refs) // 2], refs[len(refs) // 2 :]
        for i, shape in enumerate(shapes):

            @pl.when(lax.axis_index("pool") == i)
            def _(i=i, shape=shape):
                first = lax.axis_index("part") * step
                _move(shape, slots, sources[i], targets[i], first, tokens)
                if scales:
                    _move_scales(shape, slots, sources[2 + i], targets[2 + i], first, tokens)

    write = pl.kernel(write_kv_pages, out_type=(), mesh=mesh, compiler_params=params, name="write_kv_pages")
    write(slots, *rows, *scales, *refs)
    done = [jax.freeze(ref) for ref in refs]
    return tuple(done[:2]), tuple(done[2:])


def _place(shape: _Pool, slots, chunk, tokens: int):
    """(row of the source, chunk of the row, slot, head, whether it is to be written) of a chunk's number."""
    row, heads = arith.divui(chunk, ptx.i32(shape.chunks)), ptx.i32(shape.heads)
    token = arith.divui(row, heads)
    inside = ptx.less(token, ptx.i32(tokens))
    source = arith.addi(slots, arith.muli(ptx.wide(arith.select(inside, token, ptx.i32(0))), ptx.i64(4)))
    slot = ptx.one("ld.global.nc.b32 $0, [$1];", "=r,l", source, pure=True)
    ok = arith.andi(inside, ptx.below(slot, ptx.i32(shape.blocks * shape.page)))
    return row, arith.remui(chunk, ptx.i32(shape.chunks)), slot, arith.remui(row, heads), ok


def _move(shape: _Pool, slots, source, target, first, tokens: int):
    """Chunks first .. of the rows, CHUNKS a thread: all loads before the first store."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def move(ctx, slots, source, target, first):
        slots, source, target = (ptx.pointer(ref, 0) for ref in (slots, source, target))
        start = arith.addi(ptx.scalar(first), ptx.thread())
        loaded = []
        for i in range(CHUNKS):
            row, chunk, slot, head, ok = _place(shape, slots, arith.addi(start, ptx.i32(i * THREADS)), tokens)
            inside = arith.addi(arith.muli(ptx.wide(row), ptx.i64(shape.chunks)), ptx.wide(chunk))
            place = arith.addi(source, arith.muli(inside, ptx.i64(16)))
            text = (
                "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
                " @p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
            )
            words = ptx.many(text, "=&r,=&r,=&r,=&r,l,r", 4, place, ptx.flag(ok), pure=True)
            where = arith.addi(arith.muli(shape.row(slot, head), ptx.i64(shape.chunks)), ptx.wide(chunk))
            loaded.append((arith.addi(target, arith.muli(where, ptx.i64(16))), ptx.flag(ok), words))
        for place, ok, words in loaded:
            text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }"
            ptx.run(text, "l,r,r,r,r,r", place, ok, *words)

    move(slots, source, target, first)


def _move_scales(shape: _Pool, slots, source, target, first, tokens: int):
    """The f32 of each row whose first chunk is this thread's."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def move(ctx, slots, source, target, first):
        slots, source, target = (ptx.pointer(ref, 0) for ref in (slots, source, target))
        start = arith.addi(ptx.scalar(first), ptx.thread())
        for i in range(CHUNKS):
            row, chunk, slot, head, ok = _place(shape, slots, arith.addi(start, ptx.i32(i * THREADS)), tokens)
            ok = ptx.flag(arith.andi(ok, ptx.equal(chunk, ptx.i32(0))))
            place = arith.addi(source, arith.muli(ptx.wide(row), ptx.i64(4)))
            text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
            word = ptx.one(text, "=&r,l,r", place, ok, pure=True)
            where = arith.addi(target, arith.muli(shape.row(slot, head), ptx.i64(4)))
            ptx.run("{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.b32 [$0], $2; }", "l,r,r", where, ok, word)

    move(slots, source, target, first)
