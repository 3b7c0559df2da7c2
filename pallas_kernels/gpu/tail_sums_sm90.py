"""The last residual of layer_tail_sm90.py added up by the CTAs that multiply it: one wait of CTAs for others less.

    x2 = x1 + factor * the sums of the CTAs of the product before;   the tokens that are multiplied: x2 * norm's scale

Each CTA of the next projections needs only its share of the columns, and the norm's factor is applied by the next
launch (attention.sums), so no CTA needs a whole token. Those with the first strip store x2 and its squares.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import layer_tail_arrivals_sm90 as arrivals
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.branch import as_number, when
from pallas_kernels.gpu.layer_tail_config import SCRATCH, SHARES, THREADS, LayerTailConfig
from pallas_kernels.gpu.stage_ring_sm90 import Ring
from pallas_kernels.gpu.token_share_sm90 import floats, packed, plus
from pallas_kernels.gpu.token_tile_sm90 import TokenTile

LAST = 3  # the product whose tokens they are


def load_added(cfg: LayerTailConfig, refs, ring: Ring, strip, share, before, live) -> None:
    """The token warpgroup: the tokens of this CTA's share of the last product's inner dimension. live: not padding."""
    tile, stores = TokenTile(cfg, LAST), as_number(strip == 0)
    first = share * cfg.products[LAST].blocks

    def fill(number, column):
        await_columns(cfg, tile, refs.counters, column)

        def of_token(t, carry):
            is_first = as_number(column == first * 128)
            add_token(cfg, tile, refs, number, column, t, stores, is_first)
            return carry

        lax.fori_loop(0, live, of_token, jnp.int32(0))

    tile.each_turn(refs, ring, share, before, fill)
    when(strip == 0)(lambda: store_squares(cfg, refs, share, live))


def await_columns(cfg: LayerTailConfig, tile: TokenTile, counters, column):
    """Each thread waits for the CTAs that have stored its columns of the product before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def wait(ctx, counters, column):
        count = arrivals.groups(cfg, LAST - 1)
        group = arith.divui(ptx.add(ptx.scalar_value(column), ptx.mul(tile.four()[0], 4)), ptx.i32(cfg.hidden // count))
        counter = ptx.add(group, ptx.i32(arrivals.columns_stored(LAST - 1, 0)))
        arrivals.every_thread_waits(counters, counter, arrivals.group_size(cfg, LAST - 1))

    wait(counters, column)


def add_token(cfg: LayerTailConfig, tile: TokenTile, refs, number, column, token, stores, is_first):
    """The thread's 4 columns of a token. stores: x2 and the warp's squares, too, added to those of the turns before
    unless is_first."""
    given = refs.parts[1], refs.x1, refs.norms[1], refs.x2, refs.scratch, *refs.biases[LAST - 1]

    @plgpu.inline_mgpu(arg_types=(tile.type, *(plgpu.RefType(),) * len(given), *(ptx.SCALAR,) * 5))
    def add_up(ctx, target, parts, x1, scale, x2, states, *rest):
        bias, (number, column, token, stores, is_first) = rest[:-5], (ptx.scalar_value(x) for x in rest[-5:])
        four, is_used = tile.four()
        column = ptx.add(column, ptx.mul(four, 4))

        def place(ref, row, size):
            at = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(cfg.hidden)), ptx.to_i64(column))
            return arith.addi(ptx.pointer(ref, 0), arith.muli(at, ptx.i64(size)))

        two = "ld.global.cg.v2.b32 {$0, $1}, [$2];"
        old, scales, *bias = (
            floats(ptx.asm_values(two, "=r,=r,l", 2, place(ref, row, 2)))
            for ref, row in ((x1, token), *((ref, ptx.i32(0)) for ref in (scale, *bias)))
        )
        loaded = [
            ptx.load_now(place(parts, ptx.add(token, ptx.i32(split * cfg.rows8)), 4), is_used)
            for split in range(cfg.products[LAST - 1].splits)
        ]
        total = loaded[0]
        for other in loaded[1:]:
            total = [arith.addf(x, y) for x, y in zip(total, other, strict=True)]
        total = floats(packed(total))
        total = plus(total, 1.0, *bias) if bias else total
        words = packed(plus(old, cfg.factors[1], total))
        new = floats(words)
        scales = [arith.addf(s, ptx.f32(1.0)) for s in scales] if cfg.one_plus[1] else scales
        tile.put(target, number, token, packed([arith.mulf(x, s) for x, s in zip(new, scales, strict=True)]))
        writes = arith.andi(is_used, ptx.equal(stores, ptx.i32(1)))
        ptx.store_if(place(x2, token, 2), ptx.bool_to_i32(writes), *words)
        squares = ptx.f32(0.0)
        for x in new:
            squares = ptx.fma(x, x, squares)
        squares = arith.select(is_used, squares, ptx.f32(0.0))
        for distance in (16, 8, 4, 2, 1):
            squares = arith.addf(squares, ptx.shuffle_xor(squares, distance))
        _, _, lane, warp = ptx.lane_position()
        spot = ptx.add(ptx.pointer(states, 3), ptx.mul(token, 16), ptx.mul(warp, 4), ptx.i32(4 * SCRATCH))
        before = ptx.asm_value("ld.shared.f32 $0, [$1];", "=f,r", spot)
        before = arith.select(ptx.equal(is_first, ptx.i32(1)), ptx.f32(0.0), before)
        text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.f32 [$0], $1; }"
        ptx.asm(text, "r,f,r", spot, arith.addf(before, squares), lane)

    add_up(refs.x_tile, *given, number, column, token, stores, is_first)


def store_squares(cfg: LayerTailConfig, refs, share, live):
    """The sums of squares of this share of the columns, and zeros for the shares that there are not."""
    splits = cfg.products[LAST].splits

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 2, *(ptx.SCALAR,) * 2))
    def store(ctx, states, squares, share, live):
        share, live, token = ptx.scalar_value(share), ptx.scalar_value(live), ptx.thread_index()
        ptx.asm(f"bar.sync 11, {THREADS};", "")
        spot = ptx.add(
            ptx.pointer(states, 3), ptx.mul(arith.remui(token, ptx.i32(cfg.rows8)), 16), ptx.i32(4 * SCRATCH)
        )
        warps = ptx.asm_values("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", 4, spot)
        total = arith.addf(arith.addf(warps[0], warps[1]), arith.addf(warps[2], warps[3]))
        base = arith.addi(ptx.pointer(squares, 0), arith.muli(ptx.to_i64(token), ptx.i64(4 * SHARES)))
        mine = ptx.less(token, live)
        own = arith.addi(base, arith.muli(ptx.to_i64(share), ptx.i64(4)))
        ptx.store_if(own, ptx.bool_to_i32(mine), total, kind="f32")
        is_first = arith.andi(mine, ptx.equal(share, ptx.i32(0)))
        for missing in range(splits, SHARES):
            other = arith.addi(base, ptx.i64(4 * missing))
            ptx.store_if(other, ptx.bool_to_i32(is_first), ptx.f32(0.0), kind="f32")

    store(refs.scratch, refs.squares[1], share, live)
