"""The part of a decoder layer after attention, and the next layer's projections, for few tokens: one launch.

    x1 = x + a o;   h = act(n1 gate) * (n1 up), n1 = norm(x1);   x2 = x1 + h down;   rows = n2 [q k v], n2 = norm(x2)

Some layers have other norms: of a o and of h down (config.after_eps), none before the MLP and the projections.

Every product takes as long as the memory takes to read its weights. Between two launches the memory is idle until the
first weights arrive. Here one warpgroup loads the weights of all products, one after the other and as far ahead as
there is shared memory, while the others still wait for a product's tokens:

    warpgroup 0: _compute        products; sums of the CTAs' shares; norms
    warpgroup 1: _load_weights   blocks of [128, 64] weights, never waits for another CTA
    warpgroup 2: _load_tokens    blocks of [T, 128] tokens, when the CTAs that compute them have arrived at a counter

Weight columns are the rows of wgmma and the tokens its columns, which are a multiple of 8: 8 tokens cost no padding. A
CTA has a strip of weight columns, and all or a share of their inner dimension: see ChainProduct. CTAs that share a
strip's inner dimension write float32 sums to global memory. Other CTAs add them up, each a share of a token's columns
and always in the same order, so that equal inputs give equal bits. Norms need the squares of all shares; so a token's
factor 1 / sqrt(mean + eps) is applied to the products of x * scale.

With config.attention the launch begins with the attention of the tokens (tail_attention_sm90.py), and `a` is not read:
the shared memory fills with weights meanwhile.

All CTAs wait for one another, so that all must run at the same time: there are at most as many as SMs, one on each.
Few blocks of weights are in flight (config.in_flight), because whatever the CTAs tell one another waits behind them.
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
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import layer_tail_arrivals_sm90 as arrivals
from pallas_kernels.gpu import layer_tail_biases_sm90 as bias_of
from pallas_kernels.gpu import layer_tail_pairs_sm90 as pairs
from pallas_kernels.gpu import layer_tail_ranks_sm90 as ranks
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import tail_attention_sm90 as tail_attention
from pallas_kernels.gpu import tail_sums_sm90 as tail_sums
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.gates import gated
from pallas_kernels.gpu.layer_tail_config import (
    BLOCK,
    COMPUTING_REGISTERS,
    LOADING_REGISTERS,
    PIECE,
    SHARES,
    THREADS,
    LayerTailConfig,
    supports,
)
from pallas_kernels.gpu.stage_ring_sm90 import DTYPE, FREE, FULL, Ring, block_transforms
from pallas_kernels.gpu.token_share_sm90 import (
    TokenShare,
    floats,
    inverse_root,
    norm_factor,
    packed,
    plus,
    scale_floats,
)

_WGMMA = plgpu.Layout.WGMMA
_WEIGHT_BLOCK = (BLOCK, PIECE)


@dataclasses.dataclass(frozen=True)
class _Refs:
    """Every Ref of the kernel, with its shape. W: hidden size; T: tokens; T8: config.rows8, T rounded up to 8s."""

    a: object  # GMEM [T, inner of o], or [T8, ..]; None with config.attention
    x: object  # GMEM [T, W]
    weights: tuple  # for each product, GMEM [inner, width] of each weight
    norms: tuple  # GMEM [W] each, or None: scales of the norms before the MLP and before the next projections
    norms_after: tuple  # GMEM [W] each, or None: of the norms of what o and down give
    biases: tuple  # for each product, of each weight GMEM [width], or ()
    counters: object  # GMEM i32[arrivals.WORDS], zero: arrivals
    cleared: object  # GMEM i32[arrivals.WORDS]: set to zero, for the next launch
    x1: object  # GMEM [T8, W]
    x2: object  # GMEM [T, W]
    n1: object  # GMEM [T8, W]
    n2: object  # GMEM [T8, W]
    h: object  # GMEM [T8, columns of all strips]
    squares: tuple  # for each norm, GMEM f32[T8, SHARES]: sums of squares of each share of a token's columns
    parts: tuple  # for each product but the gated, GMEM f32[splits * T8, width]
    exchange: tuple  # with several ranks: see layer_tail_ranks_sm90.exchange
    out: object  # GMEM [T, width of the next projections], or None
    rows: object = None  # from here to part_stats with config.attention: GMEM [T, width], or f32[sums T8, width]
    row_squares: object = None  # with attention.sums: GMEM f32[T8, SHARES]
    cos: object = None  # GMEM f32[T, head_dim / 2]
    sin: object = None
    block_table: object = None  # GMEM i32[R, columns]
    plan: object = None  # GMEM i32[ctas + 1, 8]
    q_bias: object = None  # with attention.has_bias: GMEM [heads head_dim]
    k_bias: object = None  # GMEM [kv_heads head_dim]
    v_bias: object = None
    q_norm: object = None  # with attention.norm_eps: GMEM [head_dim], the scale
    k_norm: object = None
    k_pool: object = None  # GMEM [blocks, ..]
    v_pool: object = None
    parts_of_heads: object = None  # GMEM f32[T heads PARTS, head_dim]
    part_stats: object = None  # GMEM f32[T heads PARTS, 2]
    w_tile: object = None  # SMEM [slots, 128, 64]
    x_tile: object = None  # SMEM [token stages, T8, 128]
    scratch: object = None  # SMEM f32[config.scratch_floats]
    barriers: object = None  # SMEM i32, of mbarriers
    received: object = None  # with config.in_pairs: SMEM f32[pairs.received_floats]


@functools.partial(jax.jit, static_argnames=("config",))  # equal layers share one compiled kernel
def layer_tail(a, x, weights, norms, counters, config: LayerTailConfig, keys=(), biases=()):
    """(x2 [T, W], rows [T, width of the next projections] or None, counters of the next launch, pools).

    a [T, heads * dim]; x [T, W]; weights: a tuple of [inner, width] for each product; norms: scales [W] of the norms
    before the MLP, before the next projections, of what o gives and of what down gives, None where there is no norm
    (the last two may be left out); counters: two i32[arrivals.WORDS], of which the first is zero, and with several
    ranks the arrays of layer_tail_ranks_sm90.exchange; biases: for each product () or [width] of each weight, or () if
    there are none.

    With config.attention, `a` is [T, width of q, k and v], not rotated; with attention.sums it is (f32[sums T8, width],
    f32[T8, SHARES]), and so are the rows of the result: the sums of each CTA, before the norm's factor, and the squares
    of that norm. keys = (cos, sin f32[T, head_dim / 2], block_table i32[R, columns], tail_attention.plan, the biases of
    q, k and v if it has biases, the scales of the norms of queries and keys if it has norms, k pool, v pool); the
    result's pools have the new keys and values.
    """
    c = config
    if reasons := supports(c):
        raise NotImplementedError("; ".join(reasons))
    norms = (*norms, *(None,) * (4 - len(norms)))
    if [scale is not None for scale in norms] != [eps is not None for eps in (*c.eps, *c.after_eps)]:
        raise ValueError(f"scales of {norms=} must be those of the norms of {c.eps=} and {c.after_eps=}")
    if c.rows > 8 and c.rows % 8 and c.attention is None:
        a = jnp.pad(a, ((0, c.rows8 - c.rows), (0, 0)))  # TMA takes whole groups of 8 rows; past the end it gives 0
    has_next = len(c.products) == 4
    shape = lambda width, dtype=DTYPE, height=c.rows8: jax.ShapeDtypeStruct((height, width), dtype)
    summed = [p for p in c.products if not p.gated]
    # x2 and `out` have T rows: XLA keeps two launches with a slice between them out of a CUDA graph.
    out_type = [shape(c.hidden, height=c.rows if i == 1 else c.rows8) for i in range(4)] + [
        shape(c.products[1].strips * c.products[1].columns // 2)
    ]
    out_type += [shape(SHARES, jnp.float32)] * 2
    out_type += [shape(p.width, jnp.float32, p.splits * c.rows8) for p in summed]
    gives_rows, attends = has_next and not c.gives_sums, c.attention is not None
    out_type += [shape(c.products[3].width, height=c.rows)] if gives_rows else []
    out_type += tail_attention.part_shapes(c) if attends else ()
    pools = [jax.new_ref(pool) for pool in keys[-2:]] if attends else []
    used, cleared, *shared = (jax.new_ref(y) for y in counters)
    flat, biases = [w for group in weights for w in group], biases or ((),) * len(weights)
    assert not (c.gives_sums and biases[3]), "the next launch adds the biases of its q, k and v"

    def layer_tail(*refs):  # the kernel's name in a profile
        take = iter(refs)
        some = lambda arrays: tuple(None if array is None else next(take) for array in arrays)
        given = dict(a=next(take), x=next(take), weights=tuple(some(group) for group in weights))
        given |= dict(norms=some(norms[:2]), norms_after=some(norms[2:]))
        given |= dict(biases=tuple(some(group) for group in biases))
        given |= dict(counters=next(take), cleared=next(take), exchange=some(shared))
        if attends:
            given |= dict(rows=given["a"], a=None, row_squares=next(take) if c.attention.sums else None)
            vectors = ("q_bias", "k_bias", "v_bias") * c.attention.has_bias
            vectors += ("q_norm", "k_norm") * (c.attention.norm_eps is not None)
            given |= {n: next(take) for n in ("cos", "sin", "block_table", "plan", *vectors, "k_pool", "v_pool")}
        given |= dict(x1=next(take), x2=next(take), n1=next(take), n2=next(take), h=next(take))
        given |= dict(squares=some(range(2)), parts=some(summed))
        given |= dict(out=next(take) if gives_rows else None)
        _kernel(c, _Refs(**given, **({n: next(take) for n in ("parts_of_heads", "part_stats")} if attends else {})))

    mesh = plgpu.Mesh(**pairs.grid(c), num_threads=3, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(layer_tail, out_type=out_type, mesh=mesh, compiler_params=params, name="layer_tail")
    a, *squares = a if isinstance(a, tuple) else (a,)
    flat += [scale for scale in norms if scale is not None] + [bias for group in biases for bias in group]
    results = call(a, x, *flat, used, cleared, *shared, *squares, *keys[:-2], *pools)
    rows_out = results[-3 if attends else -1] if has_next else None
    if c.gives_sums:
        rows_out = rows_out, results[6]
    counters = tuple(map(jax.freeze, (cleared, used, *shared)))
    return results[1], rows_out, counters, tuple(jax.freeze(pool) for pool in pools)


def _rings(cfg: LayerTailConfig) -> tuple[Ring, Ring]:
    """(of weights, of tokens)"""
    weights = Ring(cfg.slots, PIECE * BLOCK * 2, 4, 0)
    return weights, Ring(cfg.token_stages, cfg.token_bytes, 4, 2 * cfg.slots)


def _kernel(cfg: LayerTailConfig, given: _Refs):
    """One CTA: allocates, then gives each warpgroup its role."""

    def roles(w_tile, x_tile, scratch, barriers, *received):
        own = dict(w_tile=w_tile, x_tile=x_tile, scratch=scratch, barriers=barriers)
        own |= dict(received=received[0]) if received else {}
        refs = dataclasses.replace(given, **own)
        wg = lax.axis_index("wg")
        _start(cfg, refs)
        run = lambda role, registers: lambda: _with_registers(cfg, registers, functools.partial(role, cfg, refs))
        loading = [run(role, LOADING_REGISTERS) for role in (_load_weights, _load_tokens)]
        lax.switch(wg, [run(_compute, COMPUTING_REGISTERS), *loading])

    w_tile = plgpu.SMEM((cfg.slots, *_WEIGHT_BLOCK), DTYPE, transforms=block_transforms(_WEIGHT_BLOCK))
    x_tile = plgpu.SMEM((cfg.token_stages, cfg.rows8, BLOCK), DTYPE, transforms=block_transforms((cfg.rows8, BLOCK)))
    barriers = plgpu.SMEM((2 * cfg.ring_barriers + 2 * cfg.in_pairs,), jnp.int32)
    shared = [w_tile, x_tile, plgpu.SMEM((cfg.scratch_floats,), jnp.float32), barriers]
    shared += [plgpu.SMEM((pairs.received_floats(cfg),), jnp.float32)] if cfg.in_pairs else []
    pl.run_scoped(roles, *shared, collective_axes="wg")


def _with_registers(cfg: LayerTailConfig, registers: int, role):
    """role() of a warpgroup, with so many registers a thread if the config moves some."""
    if cfg.moves_registers:
        plgpu.set_max_registers(registers, action="increase" if registers == COMPUTING_REGISTERS else "decrease")
    role()


def _start(cfg: LayerTailConfig, refs: _Refs):
    """Initialises the mbarriers; CTA 0 clears the other launch's counters."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def start(ctx, barriers, cleared, cta):
        base, text = ptx.pointer(barriers, 3), "{ .reg .pred p; setp.eq.u32 p, $1, 0; "
        for ring in _rings(cfg):
            text += ring.initial()
        ptx.asm(text + pairs.initial(cfg) + "}", "r,r", base, utils.thread_idx())
        counter = utils.thread_idx()
        mine = arith.andi(ptx.less(counter, ptx.i32(arrivals.COUNTERS)), ptx.equal(ptx.scalar_value(cta), ptx.i32(0)))
        place = arrivals.address(cleared, counter)
        ptx.store_if(place, ptx.bool_to_i32(mine), ptx.i32(0))
        ptx.asm("fence.mbarrier_init.release.cluster;", "")
        ptx.wait_for_cluster(2 if cfg.in_pairs else 1)

    start(refs.barriers, refs.cleared, pairs.number(cfg))


def _is_active(product, cta):
    return jnp.where(cta < product.units, jnp.int32(1), jnp.int32(0))


def _place(product, cta):
    """(strip, share of the inner dimension) of a CTA."""
    if product.is_paired:
        return lax.div(cta, jnp.int32(2)), lax.rem(cta, jnp.int32(2))
    return lax.rem(cta, jnp.int32(product.strips)), lax.div(cta, jnp.int32(product.strips))


def _each(cfg: LayerTailConfig, run):
    """run(number of the product, product, weight blocks before it, token blocks before it), where this CTA has work."""
    cta, weights, tokens = pairs.number(cfg), jnp.int32(0), jnp.int32(0)
    for i, product in enumerate(cfg.products):
        before = weights, tokens
        run(i, product, *before)
        blocks = _is_active(product, cta) * product.blocks
        weights, tokens = weights + blocks * product.pieces, tokens + blocks


def _load_weights(cfg: LayerTailConfig, refs: _Refs):
    ring, _ = _rings(cfg)
    cta = pairs.number(cfg)

    def run(i, p, before, _):
        strip, share = _place(p, cta)

        def block(b, carry):
            k = (share * p.blocks + b) * BLOCK
            for piece in range(p.pieces):
                number = before + b * p.pieces + piece

                @when(number >= ring.stages)
                def _(number=number):
                    ring.wait(refs.barriers, number, FREE, one_warp=True)

                @when(number >= cfg.in_flight)
                def _(number=number):
                    ring.wait(refs.barriers, number - cfg.in_flight, FULL, one_warp=True)

                def copy(weight, column, number=number):
                    ring.copy(weight, refs.w_tile, refs.barriers, number, (k, column * PIECE), _WEIGHT_BLOCK)

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
        lax.switch(
            index, [functools.partial(use, w, column - first) for w, first in zip(weights, firsts, strict=False)]
        )


def _load_tokens(cfg: LayerTailConfig, refs: _Refs):
    _, ring = _rings(cfg)
    cta = pairs.number(cfg)
    sources = refs.a, refs.n1, refs.h, refs.n2

    def run(i, p, _, before):
        share = _place(p, cta)[1]
        of_share = cfg.hidden // cfg.shares // BLOCK  # blocks of a share of the columns that are added up

        def block(b, carry):
            number = before + b

            @when(number >= ring.stages)
            def _():
                ring.wait(refs.barriers, number, FREE, one_warp=True)

            place = share * p.blocks + b
            if i in (1, 3):

                @when((b == 0) | (lax.rem(place, jnp.int32(of_share)) == 0))
                def _():
                    counter = arrivals.share_added(i - 1, lax.div(place, jnp.int32(of_share)))
                    arrivals.wait_before_tma(refs.counters, counter, cfg.rows)

            if p.is_paired:

                @when(b == p.blocks - 1)
                def _():  # `_sums` takes this block as a sign that the squares of whole tokens have been stored
                    for other in range(cfg.shares // 2):
                        counter = arrivals.share_added(i - 1, (1 - share) * (cfg.shares // 2) + other)
                        arrivals.wait_before_tma(refs.counters, counter, cfg.rows)

            start = jnp.int32(0), place * BLOCK
            ring.copy(sources[i], refs.x_tile, refs.barriers, number, start, (cfg.rows8, BLOCK))
            return carry

        @when(cta < p.units)
        def _():
            if i == 0 and cfg.attention is not None:
                tail_attention.load_merged(cfg, refs, ring, share, before)
                return
            if i == 3 and cfg.adds_directly:
                live = refs.plan[cfg.ctas, tail_attention.LIVE]
                tail_sums.load_added(cfg, refs, ring, _place(p, cta)[0], share, before, live)
                return
            if i == 2:
                arrivals.wait_before_tma(refs.counters, arrivals.stored_for(cfg, 1, share), arrivals.group_size(cfg, 1))
            lax.fori_loop(0, p.blocks, block, jnp.int32(0))

    _each(cfg, run)


def _compute(cfg: LayerTailConfig, refs: _Refs):
    cta = pairs.number(cfg)
    if cfg.attention is not None:
        tail_attention.attend(cfg, refs)
    parts = iter(refs.parts)
    summed = {i: next(parts) for i, p in enumerate(cfg.products) if not p.gated}

    def run(i, p, w_before, x_before):
        strip, share = _place(p, cta)

        @when(cta < p.units)
        def _():
            accs, factors = _sums(cfg, refs, p, w_before, x_before)
            if p.is_paired:
                pairs.store(cfg, refs, *accs, factors, strip * PIECE)
            elif p.gated:
                half = p.pieces // 2
                for j in range(half):
                    pair = accs[j], accs[half + j]
                    pair = pair if factors is None else tuple(acc * factors for acc in pair)
                    y = _gated(cfg, *pair, refs.biases[i], (strip * half + j) * PIECE)
                    _store_columns(cfg, refs.h, y, jnp.int32(0), (strip * half + j) * PIECE)
            else:
                for j, acc in enumerate(accs):
                    _store_columns(cfg, summed[i], acc, share * cfg.rows8, (strip * p.pieces + j) * PIECE)
            if i == 3 and cfg.gives_sums:
                return
            strip_group = lax.div(strip, jnp.int32(p.strips // arrivals.groups(cfg, i)))
            arrivals.arrive(refs.counters, arrivals.stored_for(cfg, i, strip_group))

        if p.gated:
            return

        @when(cta < cfg.rows * cfg.shares)
        def _():
            row, share_of_row = lax.rem(cta, jnp.int32(cfg.rows)), lax.div(cta, jnp.int32(cfg.rows))
            if (i == 3 and cfg.gives_sums) or (i == 2 and cfg.adds_directly and len(cfg.products) == 4):
                return
            if i == 3:
                _add_rows(cfg, p, refs, summed[i], row, share_of_row)
            else:
                _add_residual(cfg, i, refs, summed[i], row, share_of_row)
                arrivals.arrive(refs.counters, arrivals.share_added(i, share_of_row))

    _each(cfg, run)


def _gated(cfg: LayerTailConfig, gate, up, biases, first_column):
    """activation(gate) * up, each with its bias if there are biases; of 64 columns of all tokens."""
    if biases:
        of_gate, of_up = (bias_of.of_columns(cfg, bias, first_column) for bias in biases)
        gate, up = gate + of_gate, up + of_up
    return gated(cfg.activation, gate, up)


def _sums(cfg: LayerTailConfig, refs: _Refs, p, w_before, x_before):
    """f32 (64, T8) of each piece of this CTA's strip, over its share of the inner dimension; of the gated product, the
    tokens' factors, if a norm comes before."""
    w_ring, x_ring = _rings(cfg)

    def several(turn, accs):
        b = turn * p.together

        def multiply(accs):
            for n in range(p.together):
                x_number = x_before + b + n
                x_ring.wait(refs.barriers, x_number, FULL)
                tokens = refs.x_tile.at[lax.rem(x_number, jnp.int32(x_ring.stages))]
                for j, acc in enumerate(accs):
                    number = w_before + (b + n) * p.pieces + j
                    w_ring.wait(refs.barriers, number, FULL)
                    weights = refs.w_tile.at[lax.rem(number, jnp.int32(w_ring.stages))]
                    plgpu.wgmma(acc, weights.transpose((1, 0)), tokens.transpose((1, 0)))

        accs = pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in accs))
        for n in range(p.together):
            for j in range(p.pieces):
                w_ring.free(refs.barriers, w_before + (b + n) * p.pieces + j)
            x_ring.free(refs.barriers, x_before + b + n)
        return accs

    zeros = lambda: plgpu.layout_cast(jnp.zeros((PIECE, cfg.rows8), jnp.float32), _WGMMA)
    accs = tuple(zeros() for _ in range(p.pieces))
    if not p.gated or cfg.eps[0] is None:
        return lax.fori_loop(0, p.blocks // p.together, several, accs), None
    accs = lax.fori_loop(0, p.blocks - 1, several, accs)
    x_ring.wait(refs.barriers, x_before + p.blocks - 1, FULL)  # all sums of squares have been stored
    factors = _token_factors(cfg, refs.squares[0], cfg.eps[0])
    return several(jnp.int32(p.blocks - 1), accs), factors


def _store_columns(cfg: LayerTailConfig, target, acc, first_row, first_column):
    """acc f32 (64 columns, T8 tokens) -> target[first_row + token, first_column + column], f32 or bf16."""
    width = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, ptx.SCALAR, ptx.SCALAR))
    def store(ctx, target, acc, first_row, first_column):
        g, t, _, warp = ptx.lane_position()
        size = utils.bitwidth(ir.MemRefType(target.type).element_type) // 8
        column, row = (g, ptx.mul(t, 2)) if size == 4 else (ptx.mul(t, 2), g)
        column = ptx.add(ptx.scalar_value(first_column), ptx.mul(warp, 16), column)
        row = ptx.add(ptx.scalar_value(first_row), row)
        place = arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(width)), ptx.to_i64(column))
        base = arith.addi(ptx.pointer(target, 0), arith.muli(place, ptx.i64(size)))
        for (second, token), pair in zip(rows.pair_places(acc), list(acc.registers.flat), strict=True):
            values = [rows.pair_element(pair, k) for k in range(2)]  # a column of two tokens
            if size == 4:
                for k, value in enumerate(values):
                    ptx.asm(f"st.global.f32 [$0+{4 * ((token + k) * width + 8 * second)}], $1;", "l,f", base, value)
            else:
                word = ptx.transpose_8x8(ptx.pack_16bit(*values, "bfloat16"))  # two columns of a token
                ptx.asm(f"st.global.b32 [$0+{2 * (token * width + 8 * second)}], $1;", "l,r", base, word)

    store(target, acc, first_row, first_column)


def _token_factors(cfg: LayerTailConfig, squares, eps: float):
    """f32 (64, T8), the same in each row: 1 / sqrt(mean of the token's squares + eps)."""
    shape = (PIECE, cfg.rows8)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA))
    def factors(ctx, squares):
        _, t, _, _ = ptx.lane_position()
        base = arith.addi(ptx.pointer(squares, 0), arith.muli(ptx.to_i64(t), ptx.i64(2 * SHARES * 4)))
        fragment, known, values = rows.empty_fragment(shape, _WGMMA), {}, []
        for _, token in rows.pair_places(fragment):
            for k in range(2):
                if token + k not in known:
                    place = arith.addi(base, ptx.i64((token + k) * SHARES * 4))
                    known[token + k] = norm_factor(place, cfg.hidden, cfg.shares, eps)
                values.append(known[token + k])
        rows.fill(fragment, lambda i: values[2 * i : 2 * i + 2])
        return fragment

    return factors(squares)


def _add_residual(cfg: LayerTailConfig, i: int, refs: _Refs, parts, row, number):
    """A share of a token's columns: x += factor * sums of product i, which a norm may have changed; x times the scale
    of the norm that follows; the squares of x."""
    p, norm = cfg.products[i], i // 2
    old, new, scaled = ((refs.x, refs.x1, refs.n1), (refs.x1, refs.x2, refs.n2))[norm]
    given = refs.counters, refs.scratch, parts, old, new, scaled, refs.squares[norm]
    scales = [scale for scale in (refs.norms[norm], refs.norms_after[norm]) if scale is not None]
    rest, count = (*scales, *refs.biases[i], *refs.exchange), len(scales) + len(refs.biases[i])
    types = (*(plgpu.RefType(),) * len(given), *(ptx.SCALAR,) * 3, *(plgpu.RefType(),) * len(rest))

    @plgpu.inline_mgpu(arg_types=types)
    def add_up(ctx, counters, scratch, parts, old, new, scaled, squares, row, number, cta, *rest):
        bias, exchange = rest[len(scales) : count], rest[count:]
        share = TokenShare(ptx.scalar_value(row), ptx.scalar_value(number), p.width, cfg.shares)
        before = share.words(old)  # on the way while this thread waits
        found = iter([share.words(scale, ptx.i32(0)) for scale in rest[: len(scales)]])
        of_next = None if refs.norms[norm] is None else next(found)
        of_sums = None if refs.norms_after[norm] is None else next(found)
        biases = bias_of.of_share(share, bias, p.widths) if bias else ()
        arrivals.one_thread_waits(cfg, i, counters, share.number)
        ptx.asm(f"bar.sync 9, {THREADS};", "")
        # a thread has some groups of four columns of the token; rounded as a product is
        fours = [floats(packed(four)) for four in share.sums(parts, p.splits, cfg.rows8)]
        if cfg.ranks > 1:
            fours = ranks.sum_over_ranks(cfg, i, share, exchange, ptx.scalar_value(cta), fours)
        if bias:
            fours = [plus(y, 1.0, z) for y, z in zip(fours, biases, strict=True)]
        if of_sums is not None:
            _store_squares(scratch, 1, fours)
            factor = inverse_root(_sum_of_squares(scratch, 1), cfg.hidden, cfg.after_eps[norm])
            fours = [[arith.mulf(y, factor) for y in four] for four in fours]
            fours = _scaled(fours, of_sums, cfg.after_one_plus[norm])
            fours = [floats(packed(four)) for four in fours]
        fours = [plus(floats(w), cfg.factors[norm], y) for w, y in zip(before, fours, strict=True)]
        fours = share.store(new, fours)
        _store_squares(scratch, 0, fours)
        share.store(scaled, fours if of_next is None else _scaled(fours, of_next, cfg.one_plus[norm]))
        total = _sum_of_squares(scratch, 0)
        place = arith.addi(
            ptx.pointer(squares, 0),
            arith.muli(ptx.to_i64(ptx.add(ptx.mul(share.row, SHARES), share.number)), ptx.i64(4)),
        )
        text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.global.f32 [$0], $1; }"
        ptx.asm(text, "l,f,r", place, total, ptx.thread_index())

    add_up(*given, row, number, pairs.number(cfg), *rest)


def _scaled(fours, scales, one_plus: bool) -> list:
    """The numbers of each four times their scales, two words of bf16."""
    return [
        [arith.mulf(a, b) for a, b in zip(four, scale_floats(words, one_plus), strict=True)]
        for four, words in zip(fours, scales, strict=True)
    ]


def _store_squares(scratch, place: int, fours) -> None:
    """The warp's sum of squares to the scratch, where the CTA has room for two sums of its four warps."""
    total = ptx.f32(0.0)
    for value in (value for four in fours for value in four):
        total = ptx.fma(value, value, total)
    for distance in (16, 8, 4, 2, 1):
        total = arith.addf(total, ptx.shuffle_xor(total, distance))
    _, _, lane, warp = ptx.lane_position()
    spot = ptx.add(ptx.pointer(scratch, 3), ptx.mul(warp, 4))
    text = f"{{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.shared.f32 [$0+{16 * place}], $1; }}"
    ptx.asm(text, "r,f,r", spot, total, lane)


def _sum_of_squares(scratch, place: int):
    """The sum over the warps, once all have given theirs."""
    ptx.asm(f"bar.sync 8, {THREADS};", "")
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{16 * place}];"
    warps = ptx.asm_values(text, "=f,=f,=f,=f,r", 4, ptx.pointer(scratch, 3))
    return arith.addf(arith.addf(warps[0], warps[1]), arith.addf(warps[2], warps[3]))


def _add_rows(cfg: LayerTailConfig, p, refs: _Refs, parts, row, number):
    """A share of a token's columns of the next projections: the sums, times the factor of the token's norm; biases."""
    biases = refs.biases[3]

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, ptx.SCALAR, ptx.SCALAR, *(plgpu.RefType(),) * len(biases)))
    def add_up(ctx, counters, parts, squares, out, row, number, *biases):
        share = TokenShare(ptx.scalar_value(row), ptx.scalar_value(number), p.width, cfg.shares)
        arrivals.one_thread_waits(cfg, 3, counters, share.number)
        ptx.asm(f"bar.sync 9, {THREADS};", "")
        place = arith.addi(ptx.pointer(squares, 0), arith.muli(ptx.to_i64(share.row), ptx.i64(4 * SHARES)))
        factor = None if cfg.eps[1] is None else norm_factor(place, cfg.hidden, cfg.shares, cfg.eps[1])
        fours = share.sums(parts, p.splits, cfg.rows8)
        fours = fours if factor is None else [[arith.mulf(y, factor) for y in four] for four in fours]
        if biases:
            fours = [plus(y, 1.0, z) for y, z in zip(fours, bias_of.of_share(share, biases, p.widths), strict=True)]
        share.store(out, fours)

    add_up(refs.counters, parts, refs.squares[1], refs.out, row, number, *biases)
