"""Warp-level products of keys and values with few query rows, in PTX; 8-bit ones are decoded in registers.

For narrow tiles of the warp-level kernel (narrow_sm80.py), of Hopper's (narrow_sm90.py) and of latent attention
(mla_narrow_sm90.py). Each warp computes 16 keys of a block with mma.m16n8k16: the 16 rows are keys (then value
columns), the 8 columns are query rows:

    S^T [16 keys, 8]      = K [16 keys, D] . Q^T [D, 8]               K: ldmatrix
    O^T [16 columns, 8]  += V^T [16 columns, 16 keys] . P^T [16, 8]   V: ldmatrix.trans

16-bit keys and values (source == target) are the factors as they are loaded. Of 8-bit ones a thread (g = lane / 4,
t = lane % 4) gets the four bytes 4t .. 4t+3 of row g from ldmatrix. A product does not depend on the order of its inner
dimension: bytes (4t, 4t+1) are used as columns (2t, 2t+1) and bytes (4t+2, 4t+3) as columns (2t+8, 2t+9), and the
queries are read in the same order. Transposed, the four bytes are columns (2g, 2g+1) of keys (2t, 2t+1): row g of the
product is column 2g, row g + 8 is column 2g + 1.

For 8 n query rows, S^T of four warps is an ordinary WGMMA fragment f32[64 keys, 8 n]. The other arrays are fragments
only to carry registers; their shapes give the number of registers:

    queries  16-bit [64, n D / 2]    acc  f32 [64, n V / 2]    stats  f32 [64, 8 n]: max, max, sum, sum of rows 2t, 2t+1
"""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import lanes_sm80 as lanes
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.copies_sm80 import sync_lanes_of
from pallas_kernels.gpu.decode_sm90 import decode_word
from pallas_kernels.gpu.fragments_sm80 import floats_of, fragment_of_floats, fragment_of_quads, quads_of, words_of
from pallas_kernels.gpu.row_states_sm90 import LN2, LOG2E, M_START
from pallas_kernels.gpu.work_columns import TILE_ROWS

KEYS = 64  # of a block, for each warpgroup: 16 for each warp
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = ptx.SCALAR


def read_queries(q_ref, *, rows8: int, dim: int, dtype: str, decoded: bool = True):
    """The first 8 * rows8 rows of an SMEM tile [64, D], in registers as the columns of S^T's second factor.

    decoded: the keys are of 8 bits, whose columns are used in another order (see the top).
    """
    shape = (64, rows8 * dim // 2)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(rows.tile_transforms(dim, dtype)),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), _WGMMA),
    )
    def read(ctx, tile):
        base, (g, t, _, _) = ptx.pointer(tile, 3), ptx.lane_position()
        words = []
        for n in range(rows8):
            for step in range(dim // 16):
                row = arith.addi(g, ptx.i32(8 * n))
                for half in (0,) if decoded else (0, 16):
                    byte = arith.addi(arith.muli(t, ptx.i32(8 if decoded else 4)), ptx.i32(32 * step + half))
                    place = arith.addi(base, ptx.swizzled(row, byte, dim * 2, rows.swizzle_bytes(dim, dtype)))
                    if decoded:
                        words += ptx.asm_values("ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", 2, place)
                    else:
                        words.append(ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", place))
        return rows.fragment_of_words(shape, utils.dtype_to_ir_type(jnp.dtype(dtype)), words)

    return read(q_ref)


def load_queries(q_ref, tok0, head0, row0, nrows, *, rows8: int, dim: int, dtype: str, group, heads, decoded: bool):
    """read_queries of packed rows row0 .. row0 + 8 * rows8 - 1 in GMEM [T, H, D]; those past `nrows` rows are 0."""
    shape = (64, rows8 * dim // 2)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(_SCALAR,) * 4),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), _WGMMA),
    )
    def load(ctx, q_ref, tok0, head0, row0, nrows):
        tok0, head0, row0, nrows = map(ptx.scalar_value, (tok0, head0, row0, nrows))
        base, (g, t, _, _) = ptx.pointer(q_ref, 0), ptx.lane_position(hidden=True)
        words = []
        for n in range(rows8):
            row = ptx.add(g, ptx.i32(8 * n))
            ok = ptx.less(row, nrows)
            flat = ptx.flat_row(arith.select(ok, row, ptx.i32(0)), tok0, head0, row0, group, heads)
            place = arith.addi(base, arith.muli(flat, ptx.i64(dim * 2)))
            place = arith.addi(place, ptx.to_i64(ptx.mul(t, 8 if decoded else 4)))
            for byte in range(0, 2 * dim, 16):
                # two words of each 32 bytes: at 8 t and 8 t + 4 if decoded, else at 4 t and 4 t + 16
                at = byte // 32 * 32 + byte % 32 // (4 if decoded else 1)
                text = ptx.predicated_load("b32", offset=f"+{at}")
                words.append(ptx.asm_value(text, "=&r,l,r", place, ptx.bool_to_i32(ok), pure=True))
        return rows.fragment_of_words(shape, utils.dtype_to_ir_type(jnp.dtype(dtype)), words)

    return load(q_ref, tok0, head0, row0, nrows)


def put_queries(tile, queries, *, dim: int, dtype: str):
    """What load_queries gave for 16 rows -> an SMEM tile [16 or more, D], used as raw memory.

    A lane stores four words, 16 bytes, for each 16 columns: 512 bytes a warp. Every warp stores the same.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(rows.tile_transforms(dim, dtype)), _WGMMA))
    def put(ctx, tile, queries):
        words, steps = words_of(queries), dim // 16
        place = _queries_of_lane(tile)
        for step in range(steps):
            four = [words[2 * (n * steps + step) + i] for n in range(2) for i in range(2)]
            ptx.asm(f"st.shared.v4.b32 [$0+{512 * step}], {{$1, $2, $3, $4}};", "r,r,r,r,r", place, *four)

    put(tile, queries)


def _queries_of_lane(tile):
    """The address of this lane's first four words in a tile that put_queries fills."""
    _, _, lane, _ = ptx.lane_position(hidden=True)
    return ptx.add(ptx.pointer(tile, 3), ptx.mul(lane, 16))


def state_shapes(rows8: int, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the fragments acc and stats, see the top."""
    return (64, rows8 * dim // 2), (64, 8 * rows8)


def start_state(*, rows8: int, dim: int):
    """(acc, stats) before any key."""
    shapes = state_shapes(rows8, dim)

    @plgpu.inline_mgpu(return_type=tuple(plgpu.ShapeDtypeStruct(s, jnp.float32, _WGMMA) for s in shapes))
    def start(ctx):
        zero, low = ptx.f32(0.0), ptx.f32(M_START)
        count = shapes[0][0] * shapes[0][1] // 128
        acc, stats = [zero] * count, [low, low, zero, zero] * rows8
        return fragment_of_floats(shapes[0], acc), fragment_of_floats(shapes[1], stats)

    return start()


def keys_times_queries(
    k_ref, queries, first,
    *, rows8: int, dim: int, source: str, target: str, converts_fp8=True, hidden: bool = False, stored: bool = False,
):  # fmt: skip
    """S^T f32 [64, 8 rows8]: keys first .. first + 63 of an SMEM tile [block, D] times the queries.

    stored: the queries are the tile that put_queries has filled; else those of load_queries or read_queries.
    converts_fp8: see decode_sm90.decode_word. hidden: see softmax_times_values.
    """
    decoded = decode_word(source, target, converts_fp8) if source != target else ""
    kind = plgpu.RefType(rows.tile_transforms(dim, target)) if stored else _WGMMA
    chains = 1 if rows8 == 2 and dim > 128 else 2  # of mma for each 8 rows: a second one hides its latency

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(rows.tile_transforms(dim, source)), kind, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((KEYS, 8 * rows8), jnp.float32, _WGMMA),
    )
    def multiply(ctx, tile, queries, first):
        base, (_, _, lane, warp) = ptx.pointer(tile, 3), ptx.lane_position(hidden=hidden)
        key, steps, step = _key_of_lane(first, lane, warp), dim // 16, 0
        words = [] if stored else words_of(queries)
        place = _queries_of_lane(queries) if stored else None

        def columns(step):
            """Of the queries, two words for each 8 rows."""
            if stored:
                four = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{512 * step}];"
                found = ptx.asm_values(four, "=r,=r,=r,=r,r", 4, place)
                return [found[:2], found[2:]]
            return [words[2 * (n * steps + step) :][:2] for n in range(rows8)]

        sums = [[[ptx.f32(0.0)] * 4 for _ in range(chains)] for _ in range(rows8)]
        for loaded in load_tile(base, key, lane, dim, source):
            for a in key_factors(loaded, decoded):
                for n, pair in enumerate(columns(step)):
                    sums[n][step % chains] = ptx.mma(a, pair, sums[n][step % chains], target)
                step += 1
        return fragment_of_quads(
            [[functools.reduce(_fadd, parts) for parts in zip(*chain, strict=True)] for chain in sums]
        )

    return multiply(k_ref, queries, first)


def softmax_times_values(
    v_ref, x, factor, acc, stats, first, scales=None,
    *, rows8: int, dim: int, source: str, target: str, parts: int = 1, converts_fp8=True, hidden: bool = False,
    shuffles: bool = True, apart: bool = False,
):  # fmt: skip
    """(acc, stats) after keys first .. first + 63. Base-2 logits are x * factor, -inf where masked.

    scales: f32 (64,) of the values, None for 1. target: dtype of both operands of the product. parts: number of
    operands whose sum is a weight; 2 only with target bfloat16.

    hidden: see ptx.lane_position. shuffles: maxima over lanes by shuffles; False: by lanes_sm80.py, where a shuffle may
    be a call. apart: no value is loaded before the softmax is done, since values in flight take registers.
    """
    shapes = state_shapes(rows8, dim)
    decoded = decode_word(source, target, converts_fp8) if source != target else ""
    own = () if scales is None else (scales,)
    kinds = (plgpu.RefType(rows.tile_transforms(dim, source)), _WGMMA, _SCALAR, _WGMMA, _WGMMA, _SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(*kinds, *(_WGMMA.reduce(1) for _ in own)),
        return_type=tuple(plgpu.ShapeDtypeStruct(s, jnp.float32, _WGMMA) for s in shapes),
    )
    def add(ctx, tile, x, factor, acc, stats, first, *own):
        base, (_, _, lane, warp) = ptx.pointer(tile, 3), ptx.lane_position(hidden=hidden)
        factor, old, scores = ptx.scalar_value(factor), floats_of(stats), quads_of(x)
        acc, new, weights = floats_of(acc), [], []
        own = [rows.register_value(r) for scale in own for r in scale.registers.flat]  # of keys g, g + 8
        size = 4 * (dim // 16)  # floats of acc for 8 rows
        for n in range(rows8):
            stat, p, alpha = _softmax(scores[n], factor, old[4 * n : 4 * n + 4], shuffles)
            new += stat
            p = [_fmul(x, own[i // 2]) for i, x in enumerate(p)] if own else p
            weights.append([_transposed_weights(part, target) for part in _split(p, parts)])
            acc[n * size : (n + 1) * size] = [
                _fmul(a, alpha[i % 2]) for i, a in enumerate(acc[n * size : (n + 1) * size])
            ]
        if apart:
            sync_lanes_of(warp)
        key, step = _key_of_lane(first, lane, warp), 0
        for loaded in load_tile(base, key, lane, dim, source, transpose=True):
            for a in value_factors(loaded, decoded):
                for n in range(rows8):
                    at = n * size + 4 * step
                    for part in weights[n]:
                        acc[at : at + 4] = ptx.mma(a, part, acc[at : at + 4], target)
                step += 1
        return fragment_of_floats(shapes[0], acc), fragment_of_floats(shapes[1], new)

    return add(v_ref, x, factor, acc, stats, first, *own)


def _key_of_lane(first, lane, warp):
    """The row of the tile whose address this lane gives to ldmatrix: matrices 1 and 3 are keys 8 .. 15 of the warp."""
    return ptx.add(
        ptx.scalar_value(first), ptx.mul(warp, 16), arith.remui(lane, ptx.i32(8)), ptx.mul(ptx.bit(lane, 3), 8)
    )


def load_tile(base, key, lane, dim: int, source: str, transpose: bool = False):
    """Four words of each 32 bytes of the warp's 16 rows; matrices 2 and 3 are the second 16 bytes."""
    row_bytes = dim * jnp.dtype(source).itemsize
    for pair in range(row_bytes // 32):
        byte = ptx.add(ptx.i32(32 * pair), ptx.mul(ptx.bit(lane, 4), 16))
        place = arith.addi(base, ptx.swizzled(key, byte, row_bytes, rows.swizzle_bytes(dim, source)))
        yield ptx.ldmatrix(place, transpose)


def key_factors(loaded, decode: str):
    """The first factors [16 keys, 16 columns] in 32 bytes of the keys: one, or two decoded by the PTX `decode`."""
    if not decode:
        return [loaded]
    decoded = [_decode(word, decode) for word in loaded]
    return [(low[0], high[0], low[1], high[1]) for low, high in (decoded[:2], decoded[2:])]


def value_factors(loaded, decode: str):
    """The first factors [16 columns, 16 keys] in 32 bytes of the values: one, or two decoded by the PTX `decode`."""
    if not decode:
        return [(loaded[0], loaded[2], loaded[1], loaded[3])]
    decoded = [_decode(ptx.byte_permute(word, 0x3120), decode) for word in loaded]
    return [(*low, *high) for low, high in (decoded[:2], decoded[2:])]


def _split(p, parts: int):
    """Floats as sums of `parts` floats: of two, the first is truncated to bfloat16, the second is the exact rest."""
    if parts == 1:
        return [p]
    high = [ptx.upper_half(x) for x in p]
    return [high, [arith.subf(x, y) for x, y in zip(p, high, strict=True)]]


def _transposed_weights(p, target: str):
    """Four weights -> the words of P^T: of keys g, then of keys g + 8."""
    return [ptx.transpose_8x8(ptx.pack_16bit(p[2 * s], p[2 * s + 1], target)) for s in range(2)]


def _softmax(x, factor, stat, shuffles: bool):
    """(new max, max, sum, sum), four weights, two factors of the old sums. x: keys g, g+8 for each of rows 2t, 2t+1."""
    new, alphas, p, sums = [], [], [None] * 4, []
    tops = [ptx.fmax(x[e], x[2 + e]) for e in range(2)]
    for distance in (4, 8, 16) if shuffles else ():
        tops = [ptx.fmax(top, ptx.shuffle_xor(top, distance)) for top in tops]
    if not shuffles:
        tops = lanes.column_maxima([ptx.fmax(top, ptx.f32(lanes.LOWEST)) for top in tops])
    for e in range(2):
        top = ptx.fmax(stat[e], _fmul(tops[e], factor))
        alpha, lower = ptx.exp2(arith.subf(stat[e], top)), arith.negf(top)
        for s in range(2):
            p[2 * s + e] = ptx.exp2(ptx.fma(x[2 * s + e], factor, lower))
        new.append(top)
        alphas.append(alpha)
        sums.append(ptx.fma(stat[2 + e], alpha, _fadd(p[e], p[2 + e])))
    return new + sums, p, alphas


def put_state(
    scratch_ref, stats_ref, acc, stats, wg, n: int,
    *, rows8, dim, q_dim, q_dtype, decoded=True, warps=8, shuffles: bool = True,
):  # fmt: skip
    """Rows 8n .. 8n+7 of each warp -> SMEM: acc to f32 [warps, 8, V] in scratch, (max, sum) to stats [warps, 8, 2].

    scratch SMEM [.., q_dim] of q_dtype is used as raw memory. decoded: the values are of 8 bits, see the top.
    """
    tile = plgpu.RefType(rows.tile_transforms(q_dim, q_dtype))

    @plgpu.inline_mgpu(arg_types=(tile, plgpu.RefType(), _WGMMA, _WGMMA, _SCALAR))
    def put(ctx, scratch, stats_out, acc, stats, wg):
        g, t, lane, warp = ptx.lane_position(hidden=True)
        warp = ptx.add(ptx.mul(ptx.scalar_value(wg), 4), warp)
        size = 4 * (dim // 16)
        acc, stat = floats_of(acc)[n * size : (n + 1) * size], floats_of(stats)[4 * n : 4 * n + 4]
        row = ptx.add(ptx.mul(warp, 8), ptx.mul(t, 2))
        base = ptx.add(ptx.pointer(scratch, 3), ptx.mul(row, dim * 4), ptx.mul(g, 8 if decoded else 4))
        for j in range(dim // 16):
            for e, line in enumerate((acc[4 * j : 4 * j + 4 : 2], acc[4 * j + 1 : 4 * j + 4 : 2])):
                at = 64 * j + 4 * dim * e
                if decoded:
                    ptx.asm(f"st.shared.v2.f32 [$0+{at}], {{$1, $2}};", "r,f,f", base, *line)
                else:
                    ptx.asm(f"st.shared.f32 [$0+{at}], $1;", "r,f", base, line[0])
                    ptx.asm(f"st.shared.f32 [$0+{at + 32}], $1;", "r,f", base, line[1])
        place, sums = ptx.add(ptx.pointer(stats_out, 3), ptx.mul(row, 8)), list(stat[2:])
        for distance in (4, 8, 16) if shuffles else ():
            sums = [_fadd(x, ptx.shuffle_xor(x, distance)) for x in sums]
        sums = sums if shuffles else lanes.column_sums(sums)
        for e in range(2):
            text = f"{{ .reg .pred p; setp.lt.u32 p, $1, 4; @p st.shared.v2.f32 [$0+{8 * e}], {{$2, $3}}; }}"
            ptx.asm(text, "r,r,f,f", place, lane, stat[e], sums[e])

    put(scratch_ref, stats_ref, acc, stats, wg)


def merge_and_store(
    scratch_ref, stats_ref, refs, part, scale, sink_column, where,
    *, n, dim, q_dim, q_dtype, group, heads, has_sinks, out_dtype, warps=8, line=0,
):  # fmt: skip
    """After put_state: of rows 8n .. 8n+7, warp w of the `warps` that share them merges row `line` * warps + w.

    part: (is it a part of a unit, its slot); where: (tok0, head0, row0, nrows, wg); scale: of values. A part is written
    as f32 with a base-2 lse and without the sink; a whole unit in its final dtype with a natural lse and the sink.
    """
    tile = plgpu.RefType(rows.tile_transforms(q_dim, q_dtype))
    gmem = (plgpu.RefType(),) * 5

    @plgpu.inline_mgpu(arg_types=(tile, plgpu.RefType(), *gmem, *(_SCALAR,) * 8))
    def join(ctx, scratch, stats, out_ref, lse_ref, part_ref, part_lse_ref, heads_ref, *numbers):
        is_part, slot, scale, tok0, head0, row0, nrows, wg = map(ptx.scalar_value, numbers)
        _, _, lane, warp = ptx.lane_position(hidden=True)
        mine = ptx.add(ptx.mul(wg, 4), warp, ptx.i32(line * warps))  # of the eight rows
        row = ptx.add(mine, ptx.i32(8 * n))
        ok = ptx.less(row, nrows)
        # Conditions of stores are numbers, and few: ptxas 13.0 lost predicates that were computed from others here.
        stores_part = arith.andi(ptx.bool_to_i32(ok), is_part)
        stores_unit = arith.andi(ptx.bool_to_i32(ok), arith.xori(is_part, ptx.i32(1)))
        weights, top, total = _merged_stats(stats, mine, warps)
        seen = arith.cmpf(arith.CmpFPredicate.OGT, total, ptx.f32(0.0))
        zero, minus_inf = ptx.f32(0.0), ptx.f32(float("-inf"))
        safe = arith.select(seen, total, ptx.f32(1.0))
        part_lse = arith.select(seen, _fadd(top, ptx.log2(safe)), minus_inf)
        part_factor = arith.select(seen, ptx.divide(scale, safe), zero)
        shift, sum_all, up = top, safe, ptx.f32(1.0)
        flat = ptx.flat_row(row, tok0, head0, row0, group, heads)
        if has_sinks:
            head = ptx.add(head0, arith.remui(ptx.add(row0, row), ptx.i32(group)))
            head = arith.select(ok, head, head0)  # rows past the tile's end have no head
            source = arith.addi(
                ptx.pointer(heads_ref, 0), ptx.to_i64(ptx.add(ptx.mul(head, 8), ptx.i32(4 * sink_column)))
            )
            sink = _fmul(ptx.asm_value("ld.global.f32 $0, [$1];", "=f,l", source), ptx.f32(LOG2E))
            shift = ptx.fmax(top, sink)
            up = ptx.exp2(arith.subf(top, shift))
            sum_all = _fadd(_fmul(safe, up), ptx.exp2(arith.subf(sink, shift)))
        lse = arith.select(seen, _fmul(_fadd(shift, ptx.log2(sum_all)), ptx.f32(LN2)), minus_inf)
        factor = arith.select(seen, _fmul(ptx.divide(up, sum_all), scale), zero)
        part_row = ptx.to_i64(ptx.add(ptx.mul(slot, TILE_ROWS), row))
        for ref, index, value, stored in (
            (lse_ref, flat, lse, stores_unit),
            (part_lse_ref, part_row, part_lse, stores_part),
        ):
            target = arith.addi(ptx.pointer(ref, 0), arith.muli(index, ptx.i64(4)))
            ptx.store_if(target, stored, value, kind="f32")  # every lane stores the same
        for column in range(0, dim, 128):  # four columns to a lane
            col = ptx.add(ptx.mul(lane, 4), ptx.i32(column))
            inside = ptx.less(col, ptx.i32(dim))
            col = arith.select(inside, col, ptx.i32(0))
            sums = _weighted_columns(scratch, mine, col, weights, dim, zero)
            inside = ptx.bool_to_i32(inside) if column + 128 > dim else ptx.i32(1)
            _store_columns(part_ref, part_row, col, sums, part_factor, (inside, stores_part), dim, "float32")
            _store_columns(out_ref, flat, col, sums, factor, (inside, stores_unit), dim, out_dtype)

    refs = (refs.out, refs.lse, refs.part, refs.part_lse, refs.per_head)
    join(scratch_ref, stats_ref, *refs, *part, scale, *where)


def _merged_stats(stats, mine, warps: int):
    """(each warp's weight, the maximum, the weighted sum) of row `mine` of the eight, from f32 [warps, 8, 2]."""
    place = ptx.add(ptx.pointer(stats, 3), ptx.mul(mine, 8))
    load = "ld.shared.v2.f32 {{$0, $1}}, [$2+{}];"
    pairs = [ptx.asm_values(load.format(64 * w), "=f,=f,r", 2, place) for w in range(warps)]
    top = pairs[0][0]
    for m, _ in pairs[1:]:
        top = ptx.fmax(top, m)
    weights, total = [ptx.exp2(arith.subf(m, top)) for m, _ in pairs], ptx.f32(0.0)
    for weight, (_, part_sum) in zip(weights, pairs, strict=True):
        total = _fadd(total, _fmul(weight, part_sum))
    return weights, top, total


def _weighted_columns(scratch, mine, col, weights, dim: int, zero):
    """Columns col .. col + 3 of row `mine` of the eight: the sum of weight times output over the warps."""
    place = ptx.add(ptx.pointer(scratch, 3), ptx.mul(mine, dim * 4), ptx.mul(col, 4))
    sums = [zero] * 4
    for w, weight in enumerate(weights):
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{w * 8 * dim * 4}];"
        values = ptx.asm_values(text, "=f,=f,=f,=f,r", 4, place)
        sums = [ptx.fma(weight, v, s) for s, v in zip(sums, values, strict=True)]
    return sums


def _store_columns(ref, row, col, sums, factor, conditions, dim: int, dtype: str):
    """sums * factor -> columns col .. col + 3 of a row of GMEM [.., dim], if both conditions are 1."""
    size = 4 if dtype == "float32" else 2
    target = arith.addi(
        ptx.pointer(ref, 0),
        arith.muli(arith.addi(arith.muli(row, ptx.i64(dim)), ptx.to_i64(col)), ptx.i64(size)),
    )
    both = "{{ .reg .pred p; .reg .b32 t; and.b32 t, $1, $2; setp.ne.u32 p, t, 0; @p {}; }}"
    values = [_fmul(s, factor) for s in sums]
    if size == 4:
        ptx.asm(both.format("st.global.v4.f32 [$0], {$3, $4, $5, $6}"), "l,r,r,f,f,f,f", target, *conditions, *values)
    else:
        words = [ptx.pack_16bit(values[2 * i], values[2 * i + 1], dtype) for i in range(2)]
        ptx.asm(both.format("st.global.v2.b32 [$0], {$3, $4}"), "l,r,r,r,r", target, *conditions, *words)


def _decode(word, text: str):
    """Four 8-bit values -> two words of two 16-bit values, by the PTX of decode_sm90.decode_word."""
    return ptx.asm_values(text, "=r,=r,r", 2, word, pure=True)


def _fadd(a, b):
    return arith.addf(a, b)


def _fmul(a, b):
    return arith.mulf(a, b)
