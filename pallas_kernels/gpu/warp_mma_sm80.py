"""Warp-level products of keys and values with few query rows, in PTX; 8-bit ones are decoded in registers.

Each warp computes 16 keys of a block with mma.m16n8k16: the 16 rows are keys (then value columns), the 8 columns are
query rows:

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

KEYS = 64  # of a block, for each warpgroup: 16 for each warp
M_START = -1e38  # maximum before any key; finite, so that -inf minus it is -inf and not NaN
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = ptx.SCALAR


def read_queries(q_ref, *, rows8: int, dim: int, dtype: str, decoded: bool = True):
    """The first 8 * rows8 rows of an SMEM tile [64, D] as the columns of S^T's second factor.

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
    """The same of packed rows row0 .. row0 + 8 * rows8 - 1 in GMEM [T, H, D]; rows past `nrows` are 0.

    decoded: the keys are of 8 bits, whose columns are used in another order (see the top).
    """
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
            for byte in range(0, 2 * dim, 16):  # words 2i and 2i + 1 are 32 i + 8 t, + 4 if decoded, else 4 t, + 16
                at = byte // 32 * 32 + byte % 32 // (4 if decoded else 1)
                text = "{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1+{}]; }}"
                words.append(ptx.asm_value(text.format(at), "=&r,l,r", place, ptx.bool_to_i32(ok), pure=True))
        return rows.fragment_of_words(shape, utils.dtype_to_ir_type(jnp.dtype(dtype)), words)

    return load(q_ref, tok0, head0, row0, nrows)


def put_queries(tile, queries, *, dim: int, dtype: str):
    """16 rows of queries -> an SMEM tile [16 or more, D], as raw memory: four words of a lane for each 16 columns.

    Every warp stores the same.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(rows.tile_transforms(dim, dtype)), _WGMMA))
    def put(ctx, tile, queries):
        words, steps = [utils.bitcast(r, ptx.int_type()) for r in queries.registers.flat], dim // 16
        place = _queries_of_lane(tile)
        for step in range(steps):
            four = [words[2 * (n * steps + step) + i] for n in range(2) for i in range(2)]
            ptx.asm(f"st.shared.v4.b32 [$0+{512 * step}], {{$1, $2, $3, $4}};", "r,r,r,r,r", place, *four)

    put(tile, queries)


def _queries_of_lane(tile):
    _, _, lane, _ = ptx.lane_position(hidden=True)
    return ptx.add(ptx.pointer(tile, 3), ptx.mul(lane, 16))


def start_state(*, rows8: int, dim: int):
    """(acc, stats) before any key."""
    shapes = ((64, rows8 * dim // 2), (64, 8 * rows8))

    @plgpu.inline_mgpu(return_type=tuple(plgpu.ShapeDtypeStruct(s, jnp.float32, _WGMMA) for s in shapes))
    def start(ctx):
        zero, low = ptx.f32(0.0), ptx.f32(M_START)
        count = shapes[0][0] * shapes[0][1] // 128
        acc, stats = [zero] * count, [low, low, zero, zero] * rows8
        return _fragment_of_floats(shapes[0], acc), _fragment_of_floats(shapes[1], stats)

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
        words = [] if stored else [utils.bitcast(r, ptx.int_type()) for r in queries.registers.flat]
        place = _queries_of_lane(queries) if stored else None

        def columns(step):
            """Of the queries, two words for each 8 rows."""
            if stored:
                four = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{512 * step}];"
                found = ptx.asm_values(four, "=r,=r,=r,=r,r", 4, place)
                return [found[:2], found[2:]]
            return [words[2 * (n * steps + step) :][:2] for n in range(rows8)]

        sums = [[[ptx.f32(0.0)] * 4 for _ in range(chains)] for _ in range(rows8)]
        for loaded in _load_tile(base, key, lane, dim, source):
            for a in _key_factors(loaded, decoded):
                for n, pair in enumerate(columns(step)):
                    sums[n][step % chains] = ptx.mma(a, pair, sums[n][step % chains], target)
                step += 1
        total = [functools.reduce(_fadd, parts) for chain in sums for parts in zip(*chain, strict=True)]
        return _scores(rows8, total)

    return multiply(k_ref, queries, first)


def softmax_times_values(
    v_ref, x, factor, acc, stats, first, scales=None,
    *, rows8: int, dim: int, source: str, target: str, parts: int = 1, converts_fp8=True, hidden: bool = False,
    shuffles: bool = True, apart: bool = False,
):  # fmt: skip
    """(acc, stats) after keys first .. first + 63. Base-2 logits are x * factor, -inf where masked.

    hidden: of ptx.lane_position: addresses are computed anew for each block. shuffles: they may be calls
    (lanes_sm80.py); False: none. apart: no value is loaded before the softmax is done: they take registers.

    scales: f32 (64,) of the values, None for 1. target: dtype of both operands of the product. parts: number of
    operands whose sum is a weight; 2 with target bfloat16.
    """
    shapes = ((64, rows8 * dim // 2), (64, 8 * rows8))
    decoded = decode_word(source, target, converts_fp8) if source != target else ""
    own = () if scales is None else (scales,)
    kinds = (plgpu.RefType(rows.tile_transforms(dim, source)), _WGMMA, _SCALAR, _WGMMA, _WGMMA, _SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(*kinds, *(_WGMMA.reduce(1) for _ in own)),
        return_type=tuple(plgpu.ShapeDtypeStruct(s, jnp.float32, _WGMMA) for s in shapes),
    )
    def add(ctx, tile, x, factor, acc, stats, first, *own):
        base, (_, _, lane, warp) = ptx.pointer(tile, 3), ptx.lane_position(hidden=hidden)
        factor, old, scores = ptx.scalar_value(factor), _floats_of(stats), _scores_of(x, rows8)
        acc, new, weights = _floats_of(acc), [], []
        own = [rows.register_value(r) for scale in own for r in scale.registers.flat]  # of keys g, g + 8
        size = 4 * (dim // 16)  # floats of acc for 8 rows
        for n in range(rows8):
            stat, p, alpha = _softmax(scores[4 * n : 4 * n + 4], factor, old[4 * n : 4 * n + 4], shuffles)
            new += stat
            p = [_fmul(x, own[i // 2]) for i, x in enumerate(p)] if own else p
            weights.append([_transposed_weights(part, target) for part in _split(p, parts)])
            acc[n * size : (n + 1) * size] = [
                _fmul(a, alpha[i % 2]) for i, a in enumerate(acc[n * size : (n + 1) * size])
            ]
        if apart:
            sync_lanes_of(warp)
        key, step = _key_of_lane(first, lane, warp), 0
        for loaded in _load_tile(base, key, lane, dim, source, transpose=True):
            for a in _value_factors(loaded, decoded):
                for n in range(rows8):
                    at = n * size + 4 * step
                    for part in weights[n]:
                        acc[at : at + 4] = ptx.mma(a, part, acc[at : at + 4], target)
                step += 1
        return _fragment_of_floats(shapes[0], acc), _fragment_of_floats(shapes[1], new)

    return add(v_ref, x, factor, acc, stats, first, *own)


def _key_of_lane(first, lane, warp):
    """The row of the tile whose address this lane gives to ldmatrix: matrices 1 and 3 are keys 8 .. 15 of the warp."""
    return ptx.add(ptx.scalar_value(first), ptx.mul(warp, 16), arith.remui(lane, ptx.i32(8)), ptx.mul(_bit(lane, 3), 8))


def _load_tile(base, key, lane, dim: int, source: str, transpose: bool = False):
    """Four words of each 32 bytes of the warp's 16 rows; matrices 2 and 3 are the second 16 bytes."""
    row_bytes = dim * jnp.dtype(source).itemsize
    for pair in range(row_bytes // 32):
        byte = ptx.add(ptx.i32(32 * pair), ptx.mul(_bit(lane, 4), 16))
        place = arith.addi(base, ptx.swizzled(key, byte, row_bytes, rows.swizzle_bytes(dim, source)))
        yield ptx.ldmatrix(place, transpose)


def _key_factors(loaded, decode: str):
    """The first factors [16 keys, 16 columns] in 32 bytes of the keys: one, or two decoded by the PTX `decode`."""
    if not decode:
        return [loaded]
    decoded = [_decode(word, decode) for word in loaded]
    return [(low[0], high[0], low[1], high[1]) for low, high in (decoded[:2], decoded[2:])]


def _value_factors(loaded, decode: str):
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
        acc, stat = _floats_of(acc)[n * size : (n + 1) * size], _floats_of(stats)[4 * n : 4 * n + 4]
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
        mine = ptx.add(ptx.mul(wg, 4), warp, ptx.i32(line * warps))
        row = ptx.add(mine, ptx.i32(8 * n))
        ok = ptx.less(row, nrows)
        # Conditions of stores are numbers, and few: ptxas 13.0 lost predicates that were computed from others here.
        cut = arith.andi(ptx.bool_to_i32(ok), is_part)
        whole = arith.andi(ptx.bool_to_i32(ok), arith.xori(is_part, ptx.i32(1)))
        place = ptx.add(ptx.pointer(stats, 3), ptx.mul(mine, 8))
        load = "ld.shared.v2.f32 {{$0, $1}}, [$2+{}];"
        pairs = [ptx.asm_values(load.format(64 * w), "=f,=f,r", 2, place) for w in range(warps)]
        top = pairs[0][0]
        for m, _ in pairs[1:]:
            top = ptx.fmax(top, m)
        weights, total = [ptx.exp2(arith.subf(m, top)) for m, _ in pairs], ptx.f32(0.0)
        for weight, (_, part_sum) in zip(weights, pairs, strict=True):
            total = _fadd(total, _fmul(weight, part_sum))
        seen = arith.cmpf(arith.CmpFPredicate.OGT, total, ptx.f32(0.0))
        none, minus = ptx.f32(0.0), ptx.f32(float("-inf"))
        safe = arith.select(seen, total, ptx.f32(1.0))
        cut_lse = arith.select(seen, _fadd(top, ptx.log2(safe)), minus)
        cut_factor = arith.select(seen, ptx.divide(scale, safe), none)
        shift, sum_all, up = top, safe, ptx.f32(1.0)
        flat = ptx.flat_row(row, tok0, head0, row0, group, heads)
        if has_sinks:
            head = ptx.add(head0, arith.remui(ptx.add(row0, row), ptx.i32(group)))
            head = arith.select(ok, head, head0)  # rows past the tile's end have no head
            source = arith.addi(
                ptx.pointer(heads_ref, 0), ptx.to_i64(ptx.add(ptx.mul(head, 8), ptx.i32(4 * sink_column)))
            )
            sink = _fmul(ptx.asm_value("ld.global.f32 $0, [$1];", "=f,l", source), ptx.f32(1.4426950408889634))
            shift = ptx.fmax(top, sink)
            up = ptx.exp2(arith.subf(top, shift))
            sum_all = _fadd(_fmul(safe, up), ptx.exp2(arith.subf(sink, shift)))
        lse = arith.select(seen, _fmul(_fadd(shift, ptx.log2(sum_all)), ptx.f32(0.6931471805599453)), minus)
        factor = arith.select(seen, _fmul(ptx.divide(up, sum_all), scale), none)
        part_row = ptx.to_i64(ptx.add(ptx.mul(slot, 128), row))
        store = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.f32 [$0], $2; }"
        for ref, index, value, when in ((lse_ref, flat, lse, whole), (part_lse_ref, part_row, cut_lse, cut)):
            target = arith.addi(ptx.pointer(ref, 0), arith.muli(index, ptx.i64(4)))
            ptx.asm(store, "l,r,f", target, when, value)  # every lane stores the same
        for column in range(0, dim, 128):
            col = ptx.add(ptx.mul(lane, 4), ptx.i32(column))
            inside = ptx.less(col, ptx.i32(dim))
            col = arith.select(inside, col, ptx.i32(0))
            place = ptx.add(ptx.pointer(scratch, 3), ptx.mul(mine, dim * 4), ptx.mul(col, 4))
            sums = [none] * 4
            for w, weight in enumerate(weights):
                text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{w * 8 * dim * 4}];"
                values = ptx.asm_values(text, "=f,=f,=f,=f,r", 4, place)
                sums = [ptx.fma(weight, v, s) for s, v in zip(sums, values, strict=True)]
            inside = ptx.bool_to_i32(inside) if column + 128 > dim else ptx.i32(1)
            target = arith.addi(
                ptx.pointer(part_ref, 0),
                arith.muli(arith.addi(arith.muli(part_row, ptx.i64(dim)), ptx.to_i64(col)), ptx.i64(4)),
            )
            both = "{{ .reg .pred p; .reg .b32 t; and.b32 t, $1, $2; setp.ne.u32 p, t, 0; @p {}; }}"
            text = both.format("st.global.v4.f32 [$0], {$3, $4, $5, $6}")
            ptx.asm(text, "l,r,r,f,f,f,f", target, inside, cut, *(_fmul(s, cut_factor) for s in sums))
            size = 4 if out_dtype == "float32" else 2
            target = arith.addi(
                ptx.pointer(out_ref, 0),
                arith.muli(arith.addi(arith.muli(flat, ptx.i64(dim)), ptx.to_i64(col)), ptx.i64(size)),
            )
            final = [_fmul(s, factor) for s in sums]
            if size == 4:
                text = both.format("st.global.v4.f32 [$0], {$3, $4, $5, $6}")
                ptx.asm(text, "l,r,r,f,f,f,f", target, inside, whole, *final)
            else:
                words = [ptx.pack_16bit(final[2 * i], final[2 * i + 1], out_dtype) for i in range(2)]
                text = both.format("st.global.v2.b32 [$0], {$3, $4}")
                ptx.asm(text, "l,r,r,r,r", target, inside, whole, *words)

    refs = (refs.out, refs.lse, refs.part, refs.part_lse, refs.per_head)
    join(scratch_ref, stats_ref, *refs, *part, scale, *where)


def _decode(word, text: str):
    """Four 8-bit values -> two words of two 16-bit values, by the PTX of decode_sm90.decode_word."""
    return ptx.asm_values(text, "=r,=r,r", 2, word, pure=True)


def _scores(rows8: int, values):
    """S^T from 4 floats for each 8 rows: key g with rows 2t, 2t+1, then key g + 8."""
    fragment = rows.empty_fragment((KEYS, 8 * rows8), _WGMMA)
    places = list(rows.pair_places(fragment))

    def read(i):
        second, col = places[i]
        at = 4 * (col // 8) + 2 * second
        return values[at : at + 2]

    rows.fill(fragment, read)
    return fragment


def _scores_of(fragment, rows8: int):
    """The inverse of _scores."""
    values = [None] * (4 * rows8)
    flat = list(fragment.registers.flat)
    for (second, col), pair in zip(rows.pair_places(fragment), flat, strict=True):
        at = 4 * (col // 8) + 2 * second
        values[at : at + 2] = [rows.pair_element(pair, k) for k in range(2)]
    return values


def _fragment_of_floats(shape, values):
    """A f32 fragment whose registers are pairs of these floats."""
    fragment = rows.empty_fragment(shape, _WGMMA)
    assert 2 * fragment.registers.size == len(values), (fragment.registers.size, len(values))
    rows.fill(fragment, lambda i: values[2 * i : 2 * i + 2])
    return fragment


def _floats_of(fragment):
    return [rows.pair_element(pair, k) for pair in fragment.registers.flat for k in range(2)]


def _bit(value, place: int):
    return arith.andi(arith.shrui(value, ptx.i32(place)), ptx.i32(1))


def _fadd(a, b):
    return arith.addf(a, b)


def _fmul(a, b):
    return arith.mulf(a, b)
