"""Latent attention of at most 16 query rows over a cache of 8 bits, by warp-level products instead of wgmma's 64 rows.

Warpgroup 2 computes the scores of a block of 64 keys, 16 keys a warp, from queries in registers. Warpgroups 0 and 1 add
weights times rows, each warp for its own columns. Rows are read from shared memory as they are cached, and decoded in
registers (see warp_mma_sm80.py); nothing decoded is written back. The barriers are those of mla_tile_sm90.py.

    scores S^T [64 keys, 16]  = rows [64, L+R] . Q^T      output O^T [L, 16] += latents^T [L, 64] . P^T [64, 16]

The arrays that only carry registers from one function to the next:

    queries 16-bit [64, L+R]    sums f32 [64, 32]: two parts of S^T    state f32 [64, 16]: maxima and sums of rows
    weights 16-bit [64, 16], factors f32 [64, 8]: of one block         acc f32 [64, L/8]: of one warpgroup

A thread (g = lane / 4, t = lane % 4) holds rows 2t, 2t+1, 2t+8 and 2t+9 of each. In SMEM, `weights` holds for 16 keys
after 16 keys the four words of each lane, and `stats` the factors (or maxima) of 16 rows, then their sums, then from
place 32 on the maxima of 4 warps for two blocks in turn.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tiles_sm90 as tiles
from pallas_kernels.gpu import warp_mma_sm80 as warps
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import as_number, when
from pallas_kernels.gpu.decode_sm90 import decode_word
from pallas_kernels.gpu.fragments_sm80 import floats_of, fragment_of_floats, fragment_of_quads, quads_of
from pallas_kernels.gpu.gather_sm90 import gather
from pallas_kernels.gpu.mla_config import BLOCK_KV, NARROW_ROWS, SLACK, MlaKernelConfig
from pallas_kernels.gpu.mla_pieces_sm90 import MlaRefs, barrier_of, order_of_parts, zero_past_end
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, count_pieces, piece_from_list
from pallas_kernels.gpu.row_states_sm90 import LN2, M_START

ROWS8 = NARROW_ROWS // 8
MAXIMA = 2 * NARROW_ROWS  # place in stats
_WGMMA, _SCALAR = plgpu.Layout.WGMMA, ptx.SCALAR
_SCORES = (BLOCK_KV, NARROW_ROWS)


def score_narrow(cfg: MlaKernelConfig, refs: MlaRefs):
    """Warpgroup 2: scores and weights of the CTA's pieces in order."""

    def piece_body(j, blocks_before):
        piece = piece_from_list(cfg.attention, refs, j)
        nrows = jnp.minimum(piece[wl.NROWS], NARROW_ROWS)
        where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0], nrows)
        kind = dict(rows8=ROWS8, dim=cfg.head_dim, dtype=cfg.dtype, group=cfg.group, heads=cfg.num_heads)
        queries = warps.load_queries(refs.q, *where, decoded=True, **kind)
        factor = _factors(cfg, refs, *where)

        def step(i, state, masked):
            number = blocks_before + i
            stage = lax.rem(number, jnp.int32(cfg.loaded_stages))
            x = fold(_sums(cfg, refs, queries, stage)) * factor
            if masked:
                kv0 = (piece[wl.BLK0] + piece.lo + i) * BLOCK_KV
                x = jnp.where(_iota(0) + kv0 < _stops(cfg, piece), x, -jnp.inf)
                zero_past_end(cfg, refs, stage, piece[wl.SEQ] - kv0, commits=True)
            state, weights, factors = weigh(refs.stats, x, state, lax.rem(number, jnp.int32(2)), cfg.bias, cfg.dtype)
            _await_use(refs, number + j)
            put_weights(refs.weights, refs.stats, weights, factors)
            plgpu.barrier_arrive(refs.published)
            return state

        bounds = tiles.full_block_bounds(cfg.attention, piece)
        state = tiles.loop_over_blocks(cfg.attention, step, bounds, start_state())
        _await_use(refs, blocks_before + j + piece.count)
        put_sums(refs.stats, state)
        plgpu.barrier_arrive(refs.published)
        return blocks_before + piece.count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def _await_use(refs: MlaRefs, number):
    """Publication `number` of the CTA may be written: the one before it has been used."""
    when(number > 0)(lambda: plgpu.barrier_wait(refs.used))


def _iota(axis: int):
    return plgpu.broadcasted_iota(jnp.int32, _SCORES, axis, layout=_WGMMA)


def _factors(cfg: MlaKernelConfig, refs: MlaRefs, tok0, head0, row0, nrows):
    """f32 of S^T's shape: what makes a product a logit of base 2."""
    row = jnp.minimum(_iota(1), jnp.maximum(nrows - 1, 0)) + row0
    token = lax.div(row, jnp.int32(cfg.group))
    place = (token + tok0) * cfg.num_heads + head0 + row - token * cfg.group
    return gather(refs.factors, place, _WGMMA) * (cfg.logits.scale * tiles.LOG2E)


def _stops(cfg: MlaKernelConfig, piece: Piece):
    """i32 of S^T's shape: a row sees keys 0 .. stop - 1."""
    q_pos = lax.div(_iota(1) + piece[wl.ROW0], jnp.int32(cfg.group)) + piece[wl.QPOS0]
    causal = piece[wl.CAUSAL] != 0 if cfg.per_request_causal else None
    _, stop = key_range(cfg.mask, q_pos, q_pos, piece[wl.SEQ], causal)
    return plgpu.layout_cast(jnp.broadcast_to(stop, _SCORES), _WGMMA)


def _sums(cfg: MlaKernelConfig, refs: MlaRefs, queries, stage):
    """The products of the block in this stage and the queries, in two parts."""
    sums = start_sums()
    kind = dict(head_dim=cfg.head_dim, source=cfg.cache_dtype, target=cfg.dtype)
    for part in order_of_parts(cfg):
        plgpu.barrier_wait(refs.full.at[barrier_of(cfg, stage, part)])
        tile = refs.latent.at[stage, part]
        sums = add_products(tile, queries, sums, column=part * cfg.part, columns=cfg.part, **kind)
        if part == 0:
            plgpu.barrier_wait(refs.rope_full.at[stage])
            tile = refs.rope.at[stage]
            sums = add_products(tile, queries, sums, column=cfg.latent_dim, columns=cfg.rope_dim, **kind)
    return sums


def add_narrow(cfg: MlaKernelConfig, refs: MlaRefs, wg):
    """Warpgroup 0 or 1: adds the blocks of the CTA's pieces to its half of the columns, and stores them."""

    def piece_body(j, blocks_before):
        def step(i, acc):
            stage = lax.rem(blocks_before + i, jnp.int32(cfg.loaded_stages))
            plgpu.barrier_wait(refs.published)
            acc = add_weighted(cfg, refs.latent.at[stage], refs.weights, refs.stats, acc, wg)
            rows.end_reads()
            for part in range(cfg.parts_of_half):
                plgpu.barrier_arrive(refs.free.at[barrier_of(cfg, stage, wg * cfg.parts_of_half + part)])
            plgpu.barrier_arrive(refs.used)
            return acc

        count = piece_from_list(cfg.attention, refs, j).count
        acc = lax.fori_loop(0, count, step, start_output(cfg.latent_dim // 8))
        plgpu.barrier_wait(refs.published)
        piece = piece_from_list(cfg.attention, refs, j)
        place = (as_number(piece.is_part), 2 * lax.axis_index("cta") + as_number(piece.lo == 0))
        head0, nrows = piece[HEAD] * cfg.group, piece[wl.NROWS]

        def store(k, _):  # more than once for padding tokens only: all of their rows are (0, -inf)
            skipped = k * NARROW_ROWS
            where = (piece[wl.TOK0], head0, piece[wl.ROW0], nrows, skipped, wg)
            store_columns(cfg, refs, acc, *place, *where)

        lax.fori_loop(0, lax.div(nrows + (NARROW_ROWS - 1), jnp.int32(NARROW_ROWS)), store, None)
        plgpu.barrier_arrive(refs.used)
        return blocks_before + count

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def start_sums():
    return _constants((BLOCK_KV, 2 * NARROW_ROWS), [0.0] * 16)


def start_state():
    return _constants(_SCORES, [M_START] * 4 + [0.0] * 4)


def start_output(columns: int):
    return _constants((64, columns), [0.0] * (columns // 2))


def _constants(shape, values):
    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA))
    def constants(ctx):
        return fragment_of_floats(shape, [ptx.f32(value) for value in values])

    return constants()


def add_products(tile_ref, queries, sums, *, column: int, columns: int, head_dim: int, source: str, target: str):
    """sums + the products of an SMEM tile [64, columns], which are columns column .. of the rows, and the queries."""
    decoded, steps = decode_word(source, target), head_dim // 16

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(rows.tile_transforms(columns, source)), _WGMMA, _WGMMA),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, _WGMMA),
    )
    def add_products(ctx, tile, queries, sums):
        base, (_, _, lane, warp) = ptx.pointer(tile, 3), ptx.lane_position()
        words = [utils.bitcast(r, ptx.int_type()) for r in queries.registers.flat]
        key = ptx.add(ptx.mul(warp, 16), arith.remui(lane, ptx.i32(8)), ptx.mul(ptx.bit(lane, 3), 8))
        flat, step = floats_of(sums), 0
        for loaded in warps.load_tile(base, key, lane, columns, source):
            for a in warps.key_factors(loaded, decoded):
                for n in range(ROWS8):
                    at, chain = n * steps + column // 16 + step, 4 * (2 * n + step % 2)
                    chain = slice(chain, chain + 4)
                    flat[chain] = ptx.mma(a, words[2 * at : 2 * at + 2], flat[chain], target)
                step += 1
        return fragment_of_floats(sums.shape, flat)

    return add_products(tile_ref, queries, sums)


def fold(sums):
    """S^T f32 [64, 16], as a WGMMA fragment."""

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(_SCORES, jnp.float32, _WGMMA))
    def fold(ctx, sums):
        flat = floats_of(sums)
        return fragment_of_quads(
            [[arith.addf(flat[8 * n + i], flat[8 * n + 4 + i]) for i in range(4)] for n in range(ROWS8)]
        )

    return fold(sums)


def weigh(stats_ref, x, state, turn, bias: float, target: str):
    """Base-2 logits [64, 16], -inf where masked -> (new state, weights, factors of what was added before).

    A row's maximum is replaced when a logit exceeds it by SLACK; a weight is 2 ** (logit - maximum + bias).
    """
    kind = (_SCORES, jnp.float32), (_SCORES, jnp.dtype(target)), ((64, 8), jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _WGMMA, _WGMMA, _SCALAR),
        return_type=tuple(plgpu.ShapeDtypeStruct(*k, _WGMMA) for k in kind),
    )
    def weigh(ctx, stats, x, state, turn):
        _, t, lane, warp = ptx.lane_position()
        x, old = quads_of(x), floats_of(state)
        x = [[[quad[2 * s + e] for s in range(2)] for e in range(2)] for quad in x]  # [n][row][key]
        tops = []
        for n in range(ROWS8):
            for e in range(2):
                top = ptx.fmax(*x[n][e])
                for distance in (4, 8, 16):
                    top = ptx.fmax(top, ptx.shuffle_xor(top, distance))
                tops.append(top)
        base = ptx.add(ptx.pointer(stats, 3), ptx.mul(ptx.scalar_value(turn), 4 * 4 * NARROW_ROWS), ptx.mul(t, 8))
        own = ptx.add(base, ptx.mul(warp, 4 * NARROW_ROWS))
        for n in range(ROWS8):
            place = 4 * MAXIMA + 32 * n
            text = f"{{ .reg .pred p; setp.lt.u32 p, $1, 4; @p st.shared.v2.f32 [$0+{place}], {{$2, $3}}; }}"
            ptx.asm(text, "r,r,f,f", own, lane, *tops[2 * n : 2 * n + 2])
        utils.warpgroup_barrier()
        for w in range(4):
            for n in range(ROWS8):
                text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * MAXIMA + 4 * NARROW_ROWS * w + 32 * n}];"
                pair = ptx.asm_values(text, "=f,=f,r", 2, base)
                tops[2 * n : 2 * n + 2] = map(ptx.fmax, tops[2 * n : 2 * n + 2], pair)
        new, sums, factors, words = [], [], [], []
        for n in range(ROWS8):
            p = [[None, None], [None, None]]  # [key][row]
            for e in range(2):
                at = 2 * n + e
                limit = arith.addf(old[at], ptx.f32(SLACK + bias))
                above = arith.cmpf(arith.CmpFPredicate.OGT, tops[at], limit)
                m = arith.select(above, arith.subf(tops[at], ptx.f32(bias)), old[at])
                factor = ptx.exp2(arith.subf(old[at], m))
                for s in range(2):
                    p[s][e] = ptx.exp2(arith.subf(x[n][e][s], m))
                new.append(m)
                factors.append(factor)
                sums.append(ptx.fma(old[4 + at], factor, arith.addf(p[0][e], p[1][e])))
            words += [ptx.transpose_8x8(ptx.pack_16bit(*p[s], target)) for s in range(2)]
        element = utils.dtype_to_ir_type(jnp.dtype(target))
        return (
            fragment_of_floats(_SCORES, new + sums),
            rows.fragment_of_words(_SCORES, element, words),
            fragment_of_floats((64, 8), factors),
        )

    return weigh(stats_ref, x, state, turn)


def put_weights(weights_ref, stats_ref, weights, factors):
    """The weights of a block, and the factors of what was added before -> SMEM."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _WGMMA, _WGMMA))
    def put_weights(ctx, out, stats, weights, factors):
        _, t, lane, _ = ptx.lane_position()
        words = [utils.bitcast(r, ptx.int_type()) for r in weights.registers.flat]
        place = ptx.add(ptx.pointer(out, 3), ptx.mul(ptx.thread_index(), 16))
        ptx.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", place, *words)
        _put_rows(stats, floats_of(factors), 0, t)

    put_weights(weights_ref, stats_ref, weights, factors)


def put_sums(stats_ref, state):
    """The maxima and sums of a piece -> SMEM. The sums of the four warps are added."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))
    def put_sums(ctx, stats, state):
        _, t, lane, warp = ptx.lane_position()
        values, base = floats_of(state), ptx.pointer(stats, 3)
        sums = values[4:]
        for i in range(4):
            for distance in (4, 8, 16):
                sums[i] = arith.addf(sums[i], ptx.shuffle_xor(sums[i], distance))
        utils.warpgroup_barrier()  # the maxima of the last block have been read
        own = ptx.add(base, ptx.mul(warp, 4 * NARROW_ROWS), ptx.mul(t, 8))
        for n in range(ROWS8):
            text = f"st.shared.v2.f32 [$0+{4 * MAXIMA + 32 * n}], {{$1, $2}};"  # lanes of one t store the same
            ptx.asm(text, "r,f,f", own, *sums[2 * n : 2 * n + 2])
        utils.warpgroup_barrier()
        total = [ptx.f32(0.0)] * 4
        for w in range(4):
            for n in range(ROWS8):
                text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * MAXIMA + 4 * NARROW_ROWS * w + 32 * n}];"
                pair = ptx.asm_values(text, "=f,=f,r", 2, ptx.add(base, ptx.mul(t, 8)))
                total[2 * n : 2 * n + 2] = map(arith.addf, total[2 * n : 2 * n + 2], pair)
        _put_rows(stats, values[:4], 0, t)
        _put_rows(stats, total, NARROW_ROWS, t)
        utils.warpgroup_barrier()  # before the maxima of the next piece

    put_sums(stats_ref, state)


def _put_rows(stats, values, first: int, t):
    """The thread's four rows -> stats, from place `first` on. Threads of one t store the same."""
    place = ptx.add(ptx.pointer(stats, 3), ptx.mul(t, 8))
    for n in range(ROWS8):
        text = f"st.shared.v2.f32 [$0+{4 * first + 32 * n}], {{$1, $2}};"
        ptx.asm(text, "r,f,f", place, *values[2 * n : 2 * n + 2])


def _get_rows(stats, first: int, t):
    """What _put_rows stored."""
    place, values = ptx.add(ptx.pointer(stats, 3), ptx.mul(t, 8)), []
    for n in range(ROWS8):
        text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * first + 32 * n}];"
        values += ptx.asm_values(text, "=f,=f,r", 2, place)
    return values


def add_weighted(cfg: MlaKernelConfig, tiles_ref, weights_ref, stats_ref, acc, wg):
    """acc times the published factors, plus the published weights times the rows of SMEM tiles [parts, 64, part].

    Warp w adds columns 32 (4 j + w) .. + 31 of the warpgroup's half, for each j.
    """
    part, source, target, shape = cfg.part, cfg.cache_dtype, cfg.dtype, acc.shape
    decoded, in_part, swizzle = decode_word(source, target), part // 32, rows.swizzle_bytes(cfg.part, cfg.cache_dtype)
    kinds = (plgpu.RefType(rows.tile_transforms(part, source)), plgpu.RefType(), plgpu.RefType(), _WGMMA, _SCALAR)
    first_part = wg * cfg.parts_of_half

    @plgpu.inline_mgpu(arg_types=kinds, return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA))
    def add_weighted(ctx, tile, weights, stats, acc, first_part):
        _, t, lane, warp = ptx.lane_position()
        base, flat = ptx.pointer(tile, 3), floats_of(acc)
        own = ptx.add(ptx.pointer(weights, 3), ptx.mul(lane, 16))
        text = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{}];"
        p = [ptx.asm_values(text.format(512 * k), "=r,=r,=r,=r,r", 4, own) for k in range(BLOCK_KV // 16)]
        factors = _get_rows(stats, 0, t)
        flat = [arith.mulf(a, factors[2 * (i // 4 % ROWS8) + i % 2]) for i, a in enumerate(flat)]
        key = ptx.add(arith.remui(lane, ptx.i32(8)), ptx.mul(ptx.bit(lane, 3), 8))
        for j in range(len(flat) // 16):
            column = ptx.add(warp, ptx.i32(4 * j))
            number = ptx.add(ptx.scalar_value(first_part), arith.divui(column, ptx.i32(in_part)))
            byte = ptx.mul(arith.remui(column, ptx.i32(in_part)), 32)
            byte = ptx.add(byte, ptx.mul(ptx.bit(lane, 4), 16))
            place = ptx.add(base, ptx.mul(number, BLOCK_KV * part), ptx.swizzled(key, byte, part, swizzle))
            for k in range(BLOCK_KV // 16):
                loaded = ptx.ldmatrix(place, True, 16 * part * k)
                for i, a in enumerate(warps.value_factors(loaded, decoded)):
                    for n in range(ROWS8):
                        at = slice(4 * (4 * j + 2 * i + n), 4 * (4 * j + 2 * i + n) + 4)
                        flat[at] = ptx.mma(a, p[k][2 * n : 2 * n + 2], flat[at], target)
        return fragment_of_floats(shape, flat)

    return add_weighted(tiles_ref, weights_ref, stats_ref, acc, first_part)


def store_columns(cfg: MlaKernelConfig, refs: MlaRefs, acc, is_part, slot, tok0, head0, row0, nrows, skipped, wg):
    """Stores the warpgroup's columns of rows `skipped` .. + 15, and warpgroup 0 their log-sum-exp.

    A part is written as f32 with a base-2 lse, a whole unit in the output's dtype with a natural one.
    """
    latent, half, group, heads, target = cfg.latent_dim, cfg.half, cfg.group, cfg.num_heads, cfg.dtype
    gmem = (plgpu.RefType(),) * 5

    @plgpu.inline_mgpu(arg_types=(*gmem, _WGMMA, *(_SCALAR,) * 8))
    def store_columns(ctx, out, lse, part, part_lse, stats, acc, *numbers):
        is_part, slot, tok0, head0, row0, nrows, skipped, wg = map(ptx.scalar_value, numbers)
        g, t, lane, warp = ptx.lane_position()
        flat, maxima, sums = floats_of(acc), _get_rows(stats, 0, t), _get_rows(stats, NARROW_ROWS, t)
        column = ptx.add(ptx.mul(wg, half), ptx.mul(warp, 32), ptx.mul(g, 2))
        lead = arith.andi(ptx.bool_to_i32(ptx.less(lane, ptx.i32(4))), ptx.bool_to_i32(ptx.less(warp, ptx.i32(1))))
        lead = arith.andi(lead, ptx.bool_to_i32(ptx.less(wg, ptx.i32(1))))
        for r in range(4):
            n, e = r // 2, r % 2
            row = ptx.add(skipped, ptx.mul(t, 2), ptx.i32(8 * n + e))
            ok = ptx.bool_to_i32(ptx.less(row, nrows))
            cut = arith.andi(ok, is_part)
            whole = arith.andi(ok, arith.xori(is_part, ptx.i32(1)))
            seen = arith.cmpf(arith.CmpFPredicate.OGT, sums[r], ptx.f32(0.0))
            safe = arith.select(seen, sums[r], ptx.f32(1.0))
            factor = arith.select(seen, ptx.divide(ptx.f32(1.0), safe), ptx.f32(0.0))
            base2 = arith.select(seen, arith.addf(maxima[r], ptx.log2(safe)), ptx.f32(float("-inf")))
            natural = arith.mulf(base2, ptx.f32(LN2))
            row_of_out = ptx.flat_row(
                arith.select(ptx.less(row, nrows), row, ptx.i32(0)), tok0, head0, row0, group, heads
            )
            row_of_part = ptx.to_i64(ptx.add(ptx.mul(slot, wl.TILE_ROWS), row))
            for ref, at, value, stored in ((lse, row_of_out, natural, whole), (part_lse, row_of_part, base2, cut)):
                place = arith.addi(ptx.pointer(ref, 0), arith.muli(at, ptx.i64(4)))
                ptx.store_if(place, arith.andi(stored, lead), value, kind="f32")
            places = [
                arith.addi(
                    ptx.pointer(ref, 0),
                    arith.muli(arith.addi(arith.muli(at, ptx.i64(latent)), ptx.to_i64(column)), ptx.i64(size)),
                )
                for ref, at, size in ((out, row_of_out, 2), (part, row_of_part, 4))
            ]
            for tile in range(len(flat) // 8):  # of 16 columns: 2 j + i of add_weighted
                offset = 128 * (tile // 2) + 16 * (tile % 2)
                at = 4 * (2 * tile + n) + e
                pair = [arith.mulf(flat[at + 2 * k], factor) for k in range(2)]
                word = ptx.pack_16bit(*pair, target)
                ptx.store_if(places[0], whole, word, offset=2 * offset)
                ptx.store_if(places[1], cut, *pair, kind="f32", offset=4 * offset)

    numbers = (is_part, slot, tok0, head0, row0, nrows, skipped, wg)
    store_columns(refs.out, refs.lse, refs.part, refs.part_lse, refs.stats, acc, *numbers)
