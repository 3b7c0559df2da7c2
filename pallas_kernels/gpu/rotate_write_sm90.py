"""Rotary rotation of new queries and keys, and the scatter of keys and values into pages: one launch.

A row is one (token, head) of the packed projections [T, (H + K) * D + K * V], bf16. A thread computes one job: two
chunks of 8 numbers of a row. In the rotated part of a query or key these are chunks i and i + dim / 16, which hold 8
pairs of the rotation. Elsewhere they are neighbours and are copied.

    a' = a cos - b sin,   b' = b cos + a sin      in float32, rounded once to bf16
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx

THREADS = 128
JOB_SIZE = 16  # numbers of a job: two chunks of 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotateWrite:
    """The static sizes of a launch."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dim: int  # so many dimensions of a head are rotated, the first ones
    blocks: int
    page: int  # slots of a block
    heads_first: bool
    counters: int  # zeros that are written beside, for the attention's launch

    @property
    def width(self) -> int:
        """Numbers of a token's projections."""
        return (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.v_head_dim

    @property
    def jobs(self) -> int:
        return self.tokens * self.width // JOB_SIZE


def supports(head_dim: int, v_head_dim: int, dim: int, interleaved: bool, dtypes: tuple[str, ...]) -> bool:
    """Does the kernel rotate and write such rows? dtypes: of the projections and of the pools."""
    fits = head_dim % JOB_SIZE == 0 and v_head_dim % JOB_SIZE == 0 and dim % JOB_SIZE == 0
    return fits and not interleaved and set(dtypes) == {"bfloat16"}


def rotate_and_write(rows, cos, sin, slots, pools, sizes: RotateWrite):
    """(rotated queries [T, H, D], the two pools with the rotated keys and the values in their slots, i32 zeros).

    rows [T, width]: queries, keys and values of each token, head by head; cos, sin f32[T, dim / 2]; slots i32[T]. A
    slot < 0 or past the end is not written. The pools are written in place where the caller donates them.
    """
    grid = (pl.cdiv(sizes.jobs, THREADS),)
    mesh = plgpu.Mesh(grid=grid, grid_names=("part",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    queries = jax.ShapeDtypeStruct((sizes.tokens, sizes.heads, sizes.head_dim), rows.dtype)
    out = queries, jax.ShapeDtypeStruct((sizes.counters,), jnp.int32)
    refs = [jax.new_ref(pool) for pool in pools]

    def rotate_and_write(*refs):  # the kernel's name in a profile
        part = lax.axis_index("part")
        *own, counters = refs
        _zero(counters, sizes.counters, part)
        _job(sizes, part * THREADS, *own)

    call = pl.kernel(rotate_and_write, out_type=out, mesh=mesh, compiler_params=params, name="rotate_and_write")
    q, counters = call(rows, cos, sin, slots, *refs)
    k, v = (jax.freeze(ref) for ref in refs)
    return q, (k, v), counters


def _job(sizes: RotateWrite, first, rows, cos, sin, slots, k_pool, v_pool, out):
    """The jobs first .. first + THREADS - 1, one a thread."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 7, ptx.SCALAR))
    def job(ctx, rows, cos, sin, slots, k_pool, v_pool, out, first):
        rows, cos, sin, slots, k_pool, v_pool, out = (
            ptx.pointer(ref, 0) for ref in (rows, cos, sin, slots, k_pool, v_pool, out)
        )
        s, number = sizes, arith.addi(ptx.scalar_value(first), ptx.thread_index())
        exists = ptx.less(number, ptx.i32(s.jobs))
        number = arith.select(exists, number, ptx.i32(0))
        token, job = ptx.divided(number, s.width // JOB_SIZE)
        is_value = ptx.less(ptx.i32((s.heads + s.kv_heads) * s.head_dim // JOB_SIZE - 1), job)
        is_query = ptx.less(job, ptx.i32(s.heads * s.head_dim // JOB_SIZE))
        begin = arith.select(is_value, ptx.i32((s.heads + s.kv_heads) * s.head_dim // JOB_SIZE), ptx.i32(0))
        job = arith.subi(job, begin)
        head, inside = ptx.divided(job, s.head_dim // JOB_SIZE)
        if s.v_head_dim != s.head_dim:
            v_head, v_inside = ptx.divided(job, s.v_head_dim // JOB_SIZE)
            head, inside = arith.select(is_value, v_head, head), arith.select(is_value, v_inside, inside)
        turns = arith.andi(ptx.negated(is_value), ptx.less(inside, ptx.i32(s.dim // JOB_SIZE)))
        # The two chunks of the job within its row.
        low = arith.select(turns, inside, arith.addi(inside, inside))
        high = arith.addi(low, arith.select(turns, ptx.i32(s.dim // JOB_SIZE), ptx.i32(1)))
        chunk = arith.muli(begin, ptx.i32(2))  # of the token: a row of values begins after all queries and keys
        row_chunks = arith.select(is_value, ptx.i32(s.v_head_dim // 8), ptx.i32(s.head_dim // 8))
        chunk = arith.addi(chunk, arith.muli(head, row_chunks))
        source = _bytes(rows, token, s.width * 2, chunk)
        a, b = (ptx.load_words(_at(source, c), exists) for c in (low, high))
        angles = arith.muli(ptx.to_i64(token), ptx.i64(s.dim * 2))  # bytes before the token's cos, and its sin
        place = arith.addi(angles, arith.muli(ptx.to_i64(arith.select(turns, inside, ptx.i32(0))), ptx.i64(32)))
        angle_cos, angle_sin = (_load_floats(arith.addi(x, place), arith.andi(exists, turns)) for x in (cos, sin))
        a, b = _rotated(a, b, angle_cos, angle_sin, turns)
        own_slot = arith.addi(slots, arith.muli(ptx.to_i64(token), ptx.i64(4)))
        slot = ptx.asm_value("ld.global.nc.b32 $0, [$1];", "=r,l", own_slot, pure=True)
        usable = ptx.less_unsigned(slot, ptx.i32(s.blocks * s.page))
        block, offset = ptx.divided(slot, s.page)
        kv_head = arith.select(is_value, head, arith.subi(head, ptx.i32(s.heads)))
        row = ptx.pool_row(block, offset, kv_head, heads=s.kv_heads, page=s.page, heads_first=s.heads_first)
        k_row = arith.addi(k_pool, arith.muli(row, ptx.i64(s.head_dim * 2)))
        v_row = arith.addi(v_pool, arith.muli(row, ptx.i64(s.v_head_dim * 2)))
        q_row = _bytes(out, token, s.heads * s.head_dim * 2, arith.muli(head, ptx.i32(s.head_dim // 8)))
        target = arith.select(is_query, q_row, arith.select(is_value, v_row, k_row))
        writes = ptx.bool_to_i32(arith.andi(exists, _or(is_query, usable)))
        for c, words in ((low, a), (high, b)):
            ptx.store_if(_at(target, c), writes, *words)

    job(rows, cos, sin, slots, k_pool, v_pool, out, jnp.int32(first))


def _zero(array, size: int, cta):
    """CTA 0: zeros in an i32 array."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def zero(ctx, array, cta):
        base, is_first = ptx.pointer(array, 0), ptx.equal(ptx.scalar_value(cta), ptx.i32(0))
        for start in range(0, size, THREADS):
            number = arith.addi(ptx.thread_index(), ptx.i32(start))
            mine = arith.andi(is_first, ptx.less(number, ptx.i32(size)))
            place = arith.addi(base, arith.muli(ptx.to_i64(number), ptx.i64(4)))
            ptx.store_if(place, ptx.bool_to_i32(mine), ptx.i32(0))

    zero(array, jnp.int32(cta))


def _or(a, b):
    return ptx.negated(arith.andi(ptx.negated(a), ptx.negated(b)))


def _bytes(base, token, stride: int, chunk):
    """The address base + token * stride + chunk * 16."""
    return _at(arith.addi(base, arith.muli(ptx.to_i64(token), ptx.i64(stride))), chunk)


def _at(base, chunk):
    return arith.addi(base, arith.muli(ptx.to_i64(chunk), ptx.i64(16)))


def _load_floats(place, mask):
    """8 f32; 0 without the mask."""
    text = ptx.predicated_load("f32", 4)
    load = lambda place: ptx.asm_values(text, "=&f,=&f,=&f,=&f,l,r", 4, place, ptx.bool_to_i32(mask), pure=True)
    return [*load(place), *load(arith.addi(place, ptx.i64(16)))]


def _rotated(a, b, cos, sin, turns):
    """The words a, b of 8 pairs rotated; unchanged where `turns` is false."""
    new_a, new_b = [], []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        pairs = []
        for half in range(2):
            p, q = ptx.float_of_bf16(x, half), ptx.float_of_bf16(y, half)
            c, s = cos[2 * i + half], sin[2 * i + half]
            pairs.append((ptx.fma(p, c, arith.negf(arith.mulf(q, s))), ptx.fma(q, c, arith.mulf(p, s))))
        (a0, b0), (a1, b1) = pairs
        new_a.append(arith.select(turns, ptx.pack_16bit(a0, a1, "bfloat16"), x))
        new_b.append(arith.select(turns, ptx.pack_16bit(b0, b1, "bfloat16"), y))
    return new_a, new_b
