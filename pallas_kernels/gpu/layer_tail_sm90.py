"""The part of a decoder layer after attention, and the next layer's projections, for few tokens: one launch.

    x1 = x + a o;   h = silu(n1 gate) * (n1 up), n1 = norm(x1);   x2 = x1 + h down;   rows = n2 [q k v], n2 = norm(x2)

Every product takes its time from the memory that holds its weights. The launches in between cost more than their work,
because the memory is idle until a product's first weights arrive. Here a warpgroup loads the weights of all products one
after the other, as far ahead as there is shared memory, while the others still wait for a product's tokens:

    warpgroup 0: _compute        products; sums of the CTAs' shares; norms
    warpgroup 1: _load_weights   blocks of [128, 64] weights, never waits for another CTA
    warpgroup 2: _load_tokens    blocks of [T, 128] tokens, once the CTAs that compute them have arrived at a counter

Weight columns are the rows of wgmma and the tokens its columns, so that 8 tokens cost no more than 8. The CTAs that share
a strip's inner dimension write float32 sums to global memory, and the CTA of a token adds them in their order, so that
equal inputs give equal bits. All CTAs wait for one another: the launch has at most as many as there are SMs.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import launch_context, utils

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.layer_tail_config import BLOCK, PIECE, THREADS, LayerTailConfig, supports

_WGMMA = plgpu.Layout.WGMMA
COUNTERS = 8 * 32  # one in each line of 128 bytes
_WEIGHT_BLOCK = (BLOCK, PIECE)
_DTYPE = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Stages of shared memory that one warpgroup fills and another empties."""

    stages: int
    bytes: int  # of a stage
    arrivals: int  # at `free`
    first: int  # place of its mbarriers: first .. first + 2 stages

    def place(self, barriers, number, kind: int):
        """Address of the mbarrier "full" (kind 0) or "free" (kind 1) of block `number`'s stage."""
        stage = arith.remui(number, ptx.i32(self.stages))
        return _add(ptx.pointer(barriers, 3), _mul(stage, 8), ptx.i32(8 * (self.first + self.stages * kind)))


@dataclasses.dataclass(frozen=True)
class _Refs:
    """Every Ref of the kernel, with its shape. W: hidden size."""

    a: object  # GMEM [T8, inner of o]
    x: object  # GMEM [T8, W]
    weights: tuple  # for each product, GMEM [inner, width] of each weight
    norms: tuple  # GMEM [W] each
    counters: object  # GMEM i32[COUNTERS], zero: arrivals
    cleared: object  # GMEM i32[COUNTERS]: set to zero, for the next launch
    x1: object  # GMEM [T8, W]
    x2: object  # GMEM [T8, W]
    n1: object  # GMEM [T8, W]
    n2: object  # GMEM [T8, W]
    h: object  # GMEM [T8, mlp width]
    parts: tuple  # for each product but the gated, GMEM f32[splits * T8, width]
    out: object  # GMEM [T8, width of the next projections], or None
    trace: object = None
    w_tile: object = None  # SMEM [slots, 128, 64]
    x_tile: object = None  # SMEM [token stages, T8, 128]
    scratch: object = None  # SMEM f32[8]
    barriers: object = None  # SMEM i32[4 (slots + token stages)], of mbarriers


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def layer_tail(a, x, weights, norms, counters, config: LayerTailConfig):
    """(x2 [T, W], rows [T, width of the next projections] or norm(x2), counters of the next launch).

    a [T, heads * dim]; x [T, W]; weights: a tuple of [inner, width] for each product; norms: scales [W] of the MLP's norm
    and the next layer's; counters: two i32[COUNTERS], of which the first is zero.
    """
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    pad = ((0, c.rows8 - c.rows), (0, 0))
    a, x = (jnp.pad(y, pad) if c.rows8 > c.rows else y for y in (a, x))
    has_next = len(c.products) == 4
    shape = lambda width, dtype=_DTYPE, height=c.rows8: jax.ShapeDtypeStruct((height, width), dtype)
    summed = [p for p in c.products if not p.gated]
    out_type = [shape(c.hidden) for _ in range(4)] + [shape(c.products[1].widths[0])]
    out_type += [shape(p.width, jnp.float32, p.splits * c.rows8) for p in summed]
    out_type += [shape(c.products[3].width)] if has_next else []
    out_type += [jax.ShapeDtypeStruct((c.ctas * 32,), jnp.int32)] if c.trace else []
    used, cleared = (jax.new_ref(y) for y in counters)
    flat = [w for group in weights for w in group]

    def layer_tail(*refs):  # the kernel's name in a profile
        take = iter(refs)
        some = lambda arrays: tuple(next(take) for _ in arrays)
        given = dict(a=next(take), x=next(take), weights=tuple(some(group) for group in weights), norms=some(norms))
        given |= dict(counters=next(take), cleared=next(take))
        given |= dict(x1=next(take), x2=next(take), n1=next(take), n2=next(take), h=next(take), parts=some(summed))
        given |= dict(out=next(take) if has_next else None, trace=next(take) if c.trace else None)
        _kernel(c, _Refs(**given), tuple(take))

    mesh = plgpu.Mesh(grid=(c.ctas,), grid_names=("cta",), num_threads=3, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(layer_tail, out_type=out_type, mesh=mesh, compiler_params=params, name="layer_tail")
    results = call(a, x, *flat, *norms, used, cleared)
    trace = results[-1] if c.trace else None
    results = results[:-1] if c.trace else results
    rows_out = results[-1] if has_next else results[3]
    return results[1][: c.rows], rows_out[: c.rows], (jax.freeze(cleared), jax.freeze(used), *([trace] if c.trace else []))


def _rings(cfg: LayerTailConfig) -> tuple[_Ring, _Ring]:
    """(of weights, of tokens)"""
    weights = _Ring(cfg.slots, PIECE * BLOCK * 2, 4, 0)
    return weights, _Ring(cfg.token_stages, cfg.token_bytes, 4, 2 * cfg.slots)


def _kernel(cfg: LayerTailConfig, given: _Refs, rest: tuple):
    """One CTA: allocates, then gives each warpgroup its role."""
    assert not rest

    def roles(w_tile, x_tile, scratch, barriers):
        refs = dataclasses.replace(given, w_tile=w_tile, x_tile=x_tile, scratch=scratch, barriers=barriers)
        wg = lax.axis_index("wg")
        _start(cfg, refs)
        lax.switch(wg, [lambda: _compute(cfg, refs), lambda: _load_weights(cfg, refs), lambda: _load_tokens(cfg, refs)])

    w_tile = plgpu.SMEM((cfg.slots, *_WEIGHT_BLOCK), _DTYPE, transforms=_transforms(_WEIGHT_BLOCK))
    x_tile = plgpu.SMEM(
        (cfg.token_stages, cfg.rows8, BLOCK), _DTYPE, transforms=_transforms((cfg.rows8, BLOCK))
    )
    barriers = plgpu.SMEM((4 * (cfg.slots + cfg.token_stages),), jnp.int32)
    pl.run_scoped(roles, w_tile, x_tile, plgpu.SMEM((8,), jnp.float32), barriers, collective_axes="wg")


def _transforms(block: tuple[int, int]):
    return rows.tile_transforms(block[1], _DTYPE)


def _start(cfg: LayerTailConfig, refs: _Refs):
    """Initialises the mbarriers; CTA 0 clears the other launch's counters."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def start(ctx, barriers, cleared, cta):
        base, text = ptx.pointer(barriers, 3), "{ .reg .pred p; setp.eq.u32 p, $1, 0; "
        for ring in _rings(cfg):
            for stage in range(ring.stages):
                full, free = (8 * (ring.first + stage + k * ring.stages) for k in range(2))
                text += f"@p mbarrier.init.shared.b64 [$0+{full}], 1; "
                text += f"@p mbarrier.init.shared.b64 [$0+{free}], {ring.arrivals}; "
        ptx.asm(text + "}", "r,r", base, utils.thread_idx())
        me = utils.thread_idx()
        mine = arith.andi(ptx.less(me, ptx.i32(COUNTERS)), ptx.equal(ptx.scalar_value(cta), ptx.i32(0)))
        place = arith.addi(ptx.pointer(cleared, 0), arith.muli(ptx.to_i64(me), ptx.i64(4)))
        text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.b32 [$0], $2; }"
        ptx.asm(text, "l,r,r", place, ptx.bool_to_i32(mine), ptx.i32(0))
        ptx.asm("fence.mbarrier_init.release.cluster;", "")
        ptx.asm("bar.sync 0;", "")

    start(refs.barriers, refs.cleared, lax.axis_index("cta"))


def _wait(ring: _Ring, barriers, number, kind: int):
    """Waits until the stage of block `number` is full (kind 0), or free (kind 1) of the block that it held before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def wait(ctx, barriers, number):
        number = ptx.scalar_value(number)
        turn = arith.divui(number, ptx.i32(ring.stages))
        parity = arith.andi(_add(turn, ptx.i32(kind)), ptx.i32(1))
        text = "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }"
        ptx.asm(text, "r,r", ring.place(barriers, number, kind), parity)

    wait(barriers, number)


def _free(ring: _Ring, barriers, number):
    """Says that this warp has used the stage of block `number`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def free(ctx, barriers, number):
        _, _, lane, _ = ptx.lane_position()
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }"
        ptx.asm(text, "r,r", ring.place(barriers, ptx.scalar_value(number), 1), lane)

    free(barriers, number)


def _copy(ring: _Ring, source, tile, barriers, number, start: tuple, block: tuple[int, int]):
    """One TMA copy of a block of a GMEM array [rows, columns] from `start` on to the stage of block `number`.

    Plain copy_gmem_to_smem lets all 128 threads arrive at the barrier, once for each copy.
    """
    scalars = (number, *start)
    kinds = (plgpu.RefType(), plgpu.RefType(_transforms(block)), plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=(*kinds, *(ptx.SCALAR,) * len(scalars)))
    def copy(ctx, source, tile, barriers, *scalars):
        number, *corner = map(ptx.scalar_value, scalars)
        place = ring.place(barriers, number, 0)
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.arrive.expect_tx.shared.b64 _, [$0], $2; }"
        ptx.asm(text, "r,r,r", place, ptx.thread_index(), ptx.i32(ring.bytes))
        stage = arith.remui(number, ptx.i32(ring.stages))
        as_index = lambda value: arith.index_cast(ir.IndexType.get(), value)
        target = utils.memref_slice(tile, (as_index(stage),))
        ctx.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_slice=tuple(utils.DynamicSlice(as_index(at), size) for at, size in zip(corner, block, strict=True)),
            gmem_transform=(launch_context.TileTransform((8, rows.swizzle_columns(block[1], _DTYPE))),),
            barrier=utils.BarrierRef(ptx.raw_pointer(barriers, 3), _add(stage, ptx.i32(ring.first)), None, 1),
            swizzle=rows.swizzle_bytes(block[1], _DTYPE),
            arrive=False,
            predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
        )

    copy(source, tile, barriers, *scalars)


def _arrive(refs: _Refs, counter: int):
    """The computing warpgroup's stores so far become visible to those that wait for this counter."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def arrive(ctx, counters):
        ptx.asm(f"bar.sync 8, {THREADS};", "")
        place = arith.addi(ptx.pointer(counters, 0), ptx.i64(128 * counter))
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p red.release.gpu.global.add.u32 [$0], 1; }"
        ptx.asm(text, "l,r", place, ptx.thread_index())

    arrive(refs.counters)


def _await(refs: _Refs, counter: int, count: int, name: int | None):
    """Waits until `count` CTAs have arrived. name: of a barrier of this warpgroup; None: only its first warp waits.

    After the wait, TMA reads what the CTAs stored before.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx, counters):
        place = arith.addi(ptx.pointer(counters, 0), ptx.i64(128 * counter))
        last = 31 if name is None else 0
        text = (
            f"{{ .reg .pred p; .reg .b32 seen; setp.gt.u32 p, $1, {last}; @p bra DONE;"
            " AGAIN: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 p, seen, $2; @p bra AGAIN; DONE: }"
        )
        ptx.asm(text, "l,r,r", place, ptx.thread_index(), ptx.i32(count))
        if name is None:
            ptx.asm("fence.proxy.async.global;", "")
        else:
            ptx.asm(f"bar.sync {name}, {THREADS};", "")

    wait(refs.counters)


# The order of arrivals: counter 2 p of the CTAs that compute product p, counter 2 p + 1 of the CTAs that add its sums.


def _mark(cfg, refs, slot: int):
    if not cfg.trace:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def mark(ctx, trace, cta):
        place = arith.addi(ptx.pointer(trace, 0), ptx.to_i64(_mul(_add(_mul(ptx.scalar_value(cta), 32), ptx.i32(slot)), 4)))
        text = "{ .reg .pred p; .reg .b32 t; mov.u32 t, %clock; setp.eq.u32 p, $1, 0; @p st.global.u32 [$0], t; }"
        ptx.asm(text, "l,r", place, ptx.thread_index())

    mark(refs.trace, lax.axis_index("cta"))


def _is_active(product, cta):
    return jnp.where(cta < product.units, jnp.int32(1), jnp.int32(0))


def _place(product, cta):
    """(strip, share of the inner dimension) of a CTA."""
    return lax.rem(cta, jnp.int32(product.strips)), lax.div(cta, jnp.int32(product.strips))


def _each(cfg: LayerTailConfig, run):
    """run(number of the product, product, weight blocks before it, token blocks before it), where this CTA has work."""
    cta, weights, tokens = lax.axis_index("cta"), jnp.int32(0), jnp.int32(0)
    for i, product in enumerate(cfg.products):
        before = weights, tokens
        run(i, product, *before)
        blocks = _is_active(product, cta) * product.blocks
        weights, tokens = weights + blocks * product.pieces, tokens + blocks


def _load_weights(cfg: LayerTailConfig, refs: _Refs):
    ring, _ = _rings(cfg)
    cta = lax.axis_index("cta")

    def run(i, p, before, _):
        strip, share = _place(p, cta)

        def block(b, carry):
            k = (share * p.blocks + b) * BLOCK
            for piece in range(p.pieces):
                number = before + b * p.pieces + piece

                @when(number >= ring.stages)
                def _(number=number):
                    _wait(ring, refs.barriers, number, 1)

                @when(number >= cfg.in_flight)
                def _(number=number):
                    _wait(ring, refs.barriers, number - cfg.in_flight, 0)

                def copy(weight, column, number=number):
                    _copy(ring, weight, refs.w_tile, refs.barriers, number, (k, column * PIECE), _WEIGHT_BLOCK)

                _of_piece(p, refs.weights[i], strip, piece, copy)
            return carry

        @when(cta < p.units)
        def _():
            lax.fori_loop(0, p.blocks, block, jnp.int32(0))

    _each(cfg, run)


def _of_piece(p, weights, strip, piece, use):
    """use(weight, its column in pieces) of the strip's piece."""
    if p.gated:
        half = p.pieces // 2
        use(weights[piece // half], strip * half + piece % half)
    elif len(weights) == 1:
        use(weights[0], strip * p.pieces + piece)
    else:
        column, firsts = strip * p.pieces + piece, [0]
        for width in p.widths:
            firsts.append(firsts[-1] + width // PIECE)
        index = sum(jnp.where(column >= first, jnp.int32(1), jnp.int32(0)) for first in firsts[1:-1])
        lax.switch(index, [functools.partial(use, w, column - first) for w, first in zip(weights, firsts, strict=False)])


def _load_tokens(cfg: LayerTailConfig, refs: _Refs):
    _, ring = _rings(cfg)
    cta = lax.axis_index("cta")
    sources = refs.a, refs.n1, refs.h, refs.n2

    def run(i, p, _, before):
        share = _place(p, cta)[1]

        def block(b, carry):
            number = before + b

            @when(number >= ring.stages)
            def _():
                _wait(ring, refs.barriers, number, 1)

            k = (share * p.blocks + b) * BLOCK
            _copy(ring, sources[i], refs.x_tile, refs.barriers, number, (jnp.int32(0), k), (cfg.rows8, BLOCK))
            return carry

        @when(cta < p.units)
        def _():
            if i in (1, 3):
                _await(refs, 2 * (i - 1) + 1, cfg.rows, None)
            elif i == 2:
                _await(refs, 2, cfg.products[1].units, None)
            lax.fori_loop(0, p.blocks, block, jnp.int32(0))

    _each(cfg, run)


def _compute(cfg: LayerTailConfig, refs: _Refs):
    cta = lax.axis_index("cta")
    _mark(cfg, refs, 0)
    parts = iter(refs.parts)
    summed = {i: next(parts) for i, p in enumerate(cfg.products) if not p.gated}

    def run(i, p, w_before, x_before):
        strip, share = _place(p, cta)

        @when(cta < p.units)
        def _():
            accs = _sums(cfg, refs, p, w_before, x_before, 1 + 6 * i)
            _mark(cfg, refs, 2 + 6 * i)
            if p.gated:
                half = p.pieces // 2
                for j in range(half):
                    gate, up = accs[j], accs[half + j]
                    y = gate / (1.0 + jnp.exp(-gate)) * up
                    _store_columns(cfg, refs.h, y, jnp.int32(0), (strip * half + j) * PIECE)
            else:
                for j, acc in enumerate(accs):
                    _store_columns(cfg, summed[i], acc, share * cfg.rows8, (strip * p.pieces + j) * PIECE)
            _mark(cfg, refs, 3 + 6 * i)
            _arrive(refs, 2 * i)
            _mark(cfg, refs, 4 + 6 * i)

        if p.gated:
            return
        if i == 3:
            spread = max(cfg.ctas // cfg.rows, 1)
            spread = max(s for s in (1, 2, 4) if s <= spread)

            @when(cta < cfg.rows * spread)
            def _():
                _await(refs, 2 * i, p.units, 9)
                _mark(cfg, refs, 5 + 6 * i)
                row, share_of_row = lax.rem(cta, jnp.int32(cfg.rows)), lax.div(cta, jnp.int32(cfg.rows))
                _add_up(cfg, p, refs, summed[i], row, None, None, (refs.out,), (share_of_row, spread))
                _mark(cfg, refs, 6 + 6 * i)

            return
        number = 0 if i == 0 else 1
        old, new, normed = ((refs.x, refs.x1, refs.n1), (refs.x1, refs.x2, refs.n2))[number]

        @when(cta < cfg.rows)
        def _():
            _await(refs, 2 * i, p.units, 9)
            _mark(cfg, refs, 5 + 6 * i)
            _add_up(cfg, p, refs, summed[i], cta, old, number, (new, normed), (jnp.int32(0), 1))
            _arrive(refs, 2 * i + 1)
            _mark(cfg, refs, 6 + 6 * i)

    _each(cfg, run)


def _sums(cfg: LayerTailConfig, refs: _Refs, p, w_before, x_before, slot):
    """f32 (64, T8) of each piece of this CTA's strip, over its share of the inner dimension."""
    w_ring, x_ring = _rings(cfg)

    def block(b, accs):
        x_number = x_before + b
        x_stage = lax.rem(x_number, jnp.int32(x_ring.stages))
        _wait(x_ring, refs.barriers, x_number, 0)
        if cfg.trace:
            when(b == 0)(lambda: _mark(cfg, refs, slot))

        def multiply(accs):
            for j, acc in enumerate(accs):
                number = w_before + b * p.pieces + j
                _wait(w_ring, refs.barriers, number, 0)
                slot = lax.rem(number, jnp.int32(w_ring.stages))
                plgpu.wgmma(acc, refs.w_tile.at[slot].transpose((1, 0)), refs.x_tile.at[x_stage].transpose((1, 0)))

        accs = pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in accs))
        for j in range(p.pieces):
            _free(w_ring, refs.barriers, w_before + b * p.pieces + j)
        _free(x_ring, refs.barriers, x_number)
        return accs

    zeros = lambda: plgpu.layout_cast(jnp.zeros((PIECE, cfg.rows8), jnp.float32), _WGMMA)
    return lax.fori_loop(0, p.blocks, block, tuple(zeros() for _ in range(p.pieces)))


def _store_columns(cfg: LayerTailConfig, target, acc, first_row, first_column):
    """acc f32 (64 columns, T8 tokens) -> target[first_row + token, first_column + column], f32 or bf16."""
    width = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, ptx.SCALAR, ptx.SCALAR))
    def store(ctx, target, acc, first_row, first_column):
        g, t, _, warp = ptx.lane_position()
        size = utils.bitwidth(ir.MemRefType(target.type).element_type) // 8
        column = _add(ptx.scalar_value(first_column), _mul(warp, 16), g)
        row = _add(ptx.scalar_value(first_row), _mul(t, 2))
        place = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(width)), ptx.to_i64(column))
        base = arith.addi(ptx.pointer(target, 0), arith.muli(place, ptx.i64(size)))
        for (second, token), pair in zip(rows.pair_places(acc), list(acc.registers.flat), strict=True):
            for k in range(2):
                offset = size * ((token + k) * width + 8 * second)
                value = rows.pair_element(pair, k)
                if size == 4:
                    ptx.asm(f"st.global.f32 [$0+{offset}], $1;", "l,f", base, value)
                else:
                    text = f"{{ .reg .b16 v; cvt.rn.bf16.f32 v, $1; st.global.b16 [$0+{offset}], v; }}"
                    ptx.asm(text, "l,f", base, value)

    store(target, acc, first_row, first_column)


def _add_up(cfg: LayerTailConfig, p, refs: _Refs, parts, row, old, norm: int | None, outs: tuple, share: tuple):
    """A token's sums of all CTAs, in their order, to outs[0]; with `old` the residual stream, and its norm to outs[1].

    share: (number, count) of the part of the columns that this CTA adds up.
    """
    width, (share, shares) = p.width, share
    quads = -(-(width // 4) // (THREADS * shares))  # of a thread
    given = [refs.scratch, parts, *([] if old is None else [old, refs.norms[norm]]), *outs]

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * len(given), ptx.SCALAR, ptx.SCALAR))
    def add(ctx, scratch, parts, *rest):
        *refs_, row, share = rest
        row, share, me = ptx.scalar_value(row), ptx.scalar_value(share), ptx.thread_index()
        first = _add(_mul(share, quads * THREADS), me)
        f32s, addresses = lambda ref: ptx.pointer(ref, 0), []
        for i in range(quads):
            quad = _add(first, ptx.i32(i * THREADS))
            addresses.append((quad, ptx.bool_to_i32(ptx.less(quad, ptx.i32(width // 4)))))

        def at(ref, row, quad, size):
            place = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(width)), arith.muli(ptx.to_i64(quad), ptx.i64(4)))
            return arith.addi(f32s(ref), arith.muli(place, ptx.i64(size)))

        load4 = (
            "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4]; }"
        )
        load2 = (
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
            " @p ld.global.cg.v2.b32 {$0, $1}, [$2]; }"
        )
        store2 = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.v2.b32 [$0], {$2, $3}; }"
        loaded = []
        for quad, ok in addresses:
            of_splits = []
            for split in range(p.splits):
                place = at(parts, _add(row, ptx.i32(split * cfg.rows8)), quad, 4)
                of_splits.append(ptx.asm_values(load4, "=&f,=&f,=&f,=&f,l,r", 4, place, ok))
            loaded.append(of_splits)
        if old is None:
            (out,) = refs_
            olds = [None] * quads
        else:
            before, scale, out, normed = refs_
            olds = [ptx.asm_values(load2, "=&r,=&r,l,r", 2, at(before, row, quad, 2), ok) for quad, ok in addresses]
        values, total = [], ptx.f32(0.0)
        for (quad, ok), of_splits, words in zip(addresses, loaded, olds, strict=True):
            four = of_splits[0]
            for more in of_splits[1:]:
                four = [arith.addf(x, y) for x, y in zip(four, more, strict=True)]
            packed = [ptx.pack_16bit(*four[j : j + 2], "bfloat16") for j in (0, 2)]
            if words is not None:
                four = [ptx.float_of_bf16(word, half) for word in packed for half in range(2)]  # rounded as a product is
                four = [
                    arith.addf(ptx.float_of_bf16(words[j // 2], j % 2), y) for j, y in enumerate(four)
                ]
                packed = [ptx.pack_16bit(*four[j : j + 2], "bfloat16") for j in (0, 2)]
                four = [ptx.float_of_bf16(word, half) for word in packed for half in range(2)]
                for y in four:
                    total = ptx.fma(y, y, total)
            ptx.asm(store2, "l,r,r,r", at(out, row, quad, 2), ok, *packed)
            values.append(four)
        if old is None:
            return
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, ptx.shuffle_xor(total, distance))
        _, _, lane, warp = ptx.lane_position()
        spot = _add(ptx.pointer(scratch, 3), _mul(warp, 4))
        ptx.asm("{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.f32 [$0], $1; }", "r,f,r", spot, total, lane)
        ptx.asm(f"bar.sync 8, {THREADS};", "")
        warps = ptx.asm_values("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", 4, ptx.pointer(scratch, 3))
        total = arith.addf(arith.addf(warps[0], warps[1]), arith.addf(warps[2], warps[3]))
        mean = arith.addf(arith.mulf(total, ptx.f32(1.0 / width)), ptx.f32(cfg.eps[norm]))
        factor = ptx.asm_value("rsqrt.approx.f32 $0, $1;", "=f,f", mean)
        for (quad, ok), four in zip(addresses, values, strict=True):
            words = ptx.asm_values(load2, "=&r,=&r,l,r", 2, at(scale, ptx.i32(0), quad, 2), ok)
            scales = [ptx.float_of_bf16(word, half) for word in words for half in range(2)]
            if cfg.one_plus[norm]:
                scales = [arith.addf(s, ptx.f32(1.0)) for s in scales]
            four = [arith.mulf(arith.mulf(y, factor), s) for y, s in zip(four, scales, strict=True)]
            packed = [ptx.pack_16bit(*four[j : j + 2], "bfloat16") for j in (0, 2)]
            ptx.asm(store2, "l,r,r,r", at(normed, row, quad, 2), ok, *packed)

    add(*given, row, share)


def _add(*terms):
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _mul(value, constant: int):
    return arith.muli(value, ptx.i32(constant))
