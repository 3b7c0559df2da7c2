"""What a compute warpgroup does with one piece: scores, softmax, values, and where the result goes."""

import dataclasses
import functools
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.mask import key_range
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import token_scales_sm90 as token_scales
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.pieces_sm90 import HEAD, Config, Piece, Refs
from pallas_kernels.gpu.soft_cap_sm90 import tanh_of_scaled

LOG2E = math.log2(math.e)
M_START = -1e38  # below every real logit, yet finite: m - m is 0, and exp2(-inf - m) is 0
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
M = rows.ROWS


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What this warpgroup's 64 rows see; vectors are i32 or f32 (64,)."""

    q_pos: object
    start: object  # keys start <= kv < stop are visible to the row
    stop: object
    slope: object  # f32, already times log2(e); None without ALiBi
    head: object  # absolute query head


def _heads_of(cfg: Config, piece: Piece, row_offset):
    """(packed row, token of the request, head of the group) of each row."""
    packed = plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW_LAYOUT) + (piece[wl.ROW0] + row_offset)
    token = lax.div(packed, jnp.int32(cfg.group))
    return packed, token, packed - token * cfg.group


def per_head(cfg: Config, heads, head0, member, column):
    """f32 (64,): column of heads f32[H, 2] for each row's head, in base 2."""
    value = _rows_full(0.0)
    for g in range(cfg.group):
        value = jnp.where(member == g, heads[head0 + g, column], value)
    return value * LOG2E


def _rows_of(cfg: Config, refs: Refs, piece: Piece, row_offset) -> _Rows:
    _, token, member = _heads_of(cfg, piece, row_offset)
    q_pos = token + piece[wl.QPOS0]
    causal = piece[wl.CAUSAL] != 0 if cfg.per_request_causal else None
    start, stop = key_range(cfg.mask, q_pos, q_pos, piece[wl.SEQ], causal)
    head0 = piece[HEAD] * cfg.group
    slope = per_head(cfg, refs.heads, head0, member, 0) if cfg.logits.has_alibi else None
    start, stop = (plgpu.layout_cast(jnp.broadcast_to(x, (M,)), ROW_LAYOUT) for x in (start, stop))
    return _Rows(q_pos, start, stop, slope, head0 + member)


def _rows_full(value):
    return plgpu.layout_cast(jnp.full((M,), value, jnp.float32), ROW_LAYOUT)


def start_state(width: int):
    acc = plgpu.layout_cast(jnp.full((M, width), 0, jnp.float32), plgpu.Layout.WGMMA)
    return acc, _rows_full(M_START), _rows_full(0.0)


def _start(cfg: Config):
    acc, m, total = start_state(cfg.v_head_dim)
    return acc, _rows_full(0.0) if cfg.fixed_max else m, total


def across(vector, shape):
    """(64,) -> (64, n)."""
    return lax.broadcast_in_dim(vector, shape, [0])


def _logits(cfg: Config, row: _Rows, dots, kv0, scale, masked):
    """Raw dots (64, block_kv) -> (x, c): base-2 logits are x * c. Masked ones are -inf. algebra/logits.py, in base 2.

    scale: f32 scalar, spec scale times k_scale.
    """
    rule, shape = cfg.logits, dots.shape
    factor = scale * LOG2E
    if rule.soft_cap:
        inner, factor = scale / rule.soft_cap, jnp.float32(rule.soft_cap * LOG2E)
        dots = tanh_of_scaled(dots, inner, cfg.cap_fourths) if cfg.cap_fourths else jnp.tanh(dots * inner)
    key = lambda: plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    if rule.has_alibi:
        shift = (kv0 - row.q_pos).astype(jnp.float32) * row.slope
        dots, factor = rows.add_slope(dots, factor, row.slope, shift), jnp.float32(1.0)
    if rule.score_fn is not None:
        where = (across(row.head, shape), across(row.q_pos, shape), key() + kv0)
        dots, factor = rule.score_fn(dots * (factor * (1 / LOG2E)), *where), jnp.float32(LOG2E)
    if masked:
        seen = key() < across(row.stop - kv0, shape)
        if cfg.mask.left >= 0 or cfg.mask.chunk > 0:
            seen = seen & (key() >= across(row.start - kv0, shape))
        if cfg.mask.mask_fn is not None:
            seen = seen & cfg.mask.mask_fn(across(row.head, shape), across(row.q_pos, shape), key() + kv0)
        dots = jnp.where(seen, dots, -jnp.inf)
    return dots, factor


def zero_unseen_values(cfg: Config, refs: Refs, piece: Piece, slot, kv0):
    """Values past the request's end or before its window may be anything, NaN included, and 0 * NaN is NaN.

    Positions between the tile's last visible key and the request's end hold tokens, or copies of a full page.
    """
    first, last = piece[wl.KSTART] - kv0, piece[wl.SEQ] - kv0

    @pl.when((first > 0) | (last < cfg.block_kv))
    def _():
        kind = dict(rows=cfg.block_kv, dim=cfg.v_head_dim, dtype=cfg.kv_dtype)
        rows.zero_rows(refs.v_tile.at[slot], first, last, **kind)
        plgpu.commit_smem()


def _keys(cfg: Config, refs: Refs, wg, slot):
    """(key tile to multiply with, what to call once it was multiplied)."""
    free = lambda: plgpu.barrier_arrive(refs.k_free.at[slot])
    if not cfg.quantised:
        return refs.k_tile.at[slot], free
    work, kind = refs.k_work.at[wg], dict(rows=cfg.block_kv, dim=cfg.head_dim, source=cfg.kv_dtype)
    rows.decode_tile(refs.k_tile.at[slot], work, target=cfg.dtype, **kind)
    plgpu.commit_smem()
    free()
    return work, lambda: None


def _values(cfg: Config, refs: Refs, wg, slot):
    """Likewise for values."""
    free = lambda: plgpu.barrier_arrive(refs.v_free.at[slot])
    if not cfg.quantised:
        return refs.v_tile.at[slot], free
    work, kind = refs.v_work.at[wg], dict(rows=cfg.block_kv, dim=cfg.v_head_dim, source=cfg.kv_dtype)
    rows.decode_tile(refs.v_tile.at[slot], work, target=cfg.value_dtype, **kind)
    plgpu.commit_smem()
    free()
    return work, lambda: None


def _token_scales(cfg: Config, refs: Refs, slot):
    """(keys', values') scales of a block, to be read before its keys are given back; (None, None): there are none."""
    return token_scales.across_keys(refs.token, slot, 1, cfg.block_kv) if cfg.token_scales else (None, None)


def _weights(cfg: Config, p, of_values) -> tuple:
    """f32 weights -> the operands that are multiplied with the stored values and added up."""
    p = token_scales.times(p, of_values, 1)
    parts = [p.astype(cfg.value_dtype)]
    if cfg.weight_parts == 2:
        parts.append((p - parts[0].astype(jnp.float32)).astype(cfg.value_dtype))
    return tuple(parts)


def _finish(cfg: Config, refs: Refs, piece: Piece, state, tile_row, stage=None):
    """Writes the state of a tile's 64 rows: to out and lse, or to this CTA's partial slot.

    stage: SMEM [64, D] that is free to stage full rows in (the warpgroup's own queries), or None.
    """
    acc, m, total = state
    shape = acc.shape
    v_scale = refs.scales[piece[HEAD], 1]
    nrows = piece[wl.NROWS] - tile_row

    @pl.when(piece.is_part)
    def _():
        safe = jnp.where(total > 0.0, total, 1.0)
        lse = jnp.where(total > 0.0, m + lax.log(safe) * LOG2E, -jnp.inf)
        slot = 2 * lax.axis_index("cta") + (piece.lo == 0).astype(jnp.int32)
        out = acc * across(v_scale / safe, shape)
        rows.store_partial(refs.part, refs.part_lse, out, lse, slot, tile_row, nrows)

    @pl.when(jnp.logical_not(piece.is_part))
    def _():
        sink, head0 = None, piece[HEAD] * cfg.group
        if cfg.has_sinks:
            sink = per_head(cfg, refs.heads, head0, _heads_of(cfg, piece, tile_row)[2], 1)
        factor, lse = finish_rows(m, total, sink)
        out = acc * across(factor * v_scale, shape)
        where = (piece[wl.TOK0], head0, piece[wl.ROW0] + tile_row, nrows)
        kind = dict(group=cfg.group, heads=cfg.num_heads)
        if stage is None or cfg.v_head_dim != cfg.head_dim:
            rows.store_rows(refs.out, refs.lse, out, lse, *where, jnp.int32(0), stride=shape[1], **kind)
        else:
            stage[...] = out.astype(cfg.dtype)
            plgpu.commit_smem()
            rows.store_tile(stage, refs.out, refs.lse, lse, *where, dim=shape[1], dtype=cfg.dtype, **kind)


def finish_rows(m, total, sink):
    """Base-2 state -> (factor of acc, natural-log lse); the sink (base 2) counts once. Nothing seen: (0, -inf)."""
    seen = total > 0.0
    shift = m
    if sink is not None:
        shift = jnp.maximum(m, sink)
        total = total * jnp.exp2(m - shift) + jnp.exp2(sink - shift)
    safe = jnp.where(seen, total, 1.0)
    factor = jnp.exp2(m - shift) / safe if sink is not None else 1.0 / safe
    lse = (shift + lax.log(safe) * LOG2E) * (1 / LOG2E)
    return jnp.where(seen, factor, 0.0), jnp.where(seen, lse, -jnp.inf)


def _softmax_step(cfg: Config, x, c, m, total, acc):
    """(p f32, new m, new total without p's sum, rescaled acc).

    A soft cap bounds base-2 logits by FIXED_LOGIT: exponentials then need no maximum, and none is kept (m stays 0).
    """
    if cfg.fixed_max:
        return jnp.exp2(x * c), m, total, acc
    new_m = jnp.maximum(m, x.max(axis=1) * c)
    alpha = jnp.exp2(m - new_m)
    p = jnp.exp2(x * c - across(new_m, x.shape))
    return p, new_m, total * alpha, acc * across(alpha, acc.shape)


def _dots(cfg, q_tile, k_tile, after=lambda: None):
    def body(acc):
        plgpu.wgmma(acc, q_tile, k_tile.transpose((1, 0)))
        after()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((M, cfg.block_kv), jnp.float32))


def _add_values(acc, weights, v_tile, after=lambda: None):
    def body(ref):
        for part in weights:
            plgpu.wgmma(ref, part, v_tile)
        after()

    return pl.run_state(body)(plgpu.ACC.init(acc))


def three_loops(cfg, step, bounds, carry):
    """Blocks [0, a) masked, [a, b) full, [b, n) masked; the first loop only where a mask has a left edge."""
    a, b, n = bounds
    if cfg.mask.left >= 0 or cfg.mask.chunk > 0:
        carry = lax.fori_loop(0, a, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(a, b, functools.partial(step, masked=False), carry)
    return lax.fori_loop(b, n, functools.partial(step, masked=True), carry)


def full_bounds(piece: Piece):
    """Blocks of the piece, counted from its own first, that every row sees whole: [a, b) of n."""
    a = jnp.clip(piece[wl.FULL0] - piece.lo, 0, piece.count)
    return a, jnp.clip(piece[wl.FULL1] - piece.lo, a, piece.count), piece.count


def long_tile(cfg: Config, refs: Refs, piece: Piece, wg, turn):
    """Two warpgroups, 64 rows each, in ping-pong: one on the tensor cores while the other does softmax."""
    row = _rows_of(cfg, refs, piece, 64 * wg)
    q_tile = refs.q_tile.at[piece.buffer, wg]
    scale = refs.scales[piece[HEAD], 0]
    first_key = (piece[wl.BLK0] + piece.lo) * cfg.block_kv
    n = piece.count
    slot_of = lambda j: lax.rem(turn + j, jnp.int32(cfg.stages))

    def swap():
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.turn)

    @pl.when(n > 0)
    def _():
        plgpu.barrier_wait(refs.k_full.at[slot_of(0)])

    pl.when(wg == 1)(swap)

    def step(j, carry, masked):
        acc, m, total = carry
        slot, kv0 = slot_of(j), first_key + j * cfg.block_kv
        of_keys, of_values = _token_scales(cfg, refs, slot)
        keys, used = _keys(cfg, refs, wg, slot)
        dots = token_scales.times(_dots(cfg, q_tile, keys, swap), of_keys, 1)
        used()
        x, c = _logits(cfg, row, dots, kv0, scale, masked)
        p, m, total, acc = _softmax_step(cfg, x, c, m, total, acc)
        weights = _weights(cfg, p, of_values)
        total += p.sum(axis=1)
        acc, total, m, *weights = lax.optimization_barrier((acc, total, m, *weights))
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if masked:
            zero_unseen_values(cfg, refs, piece, slot, kv0)
        values, used = _values(cfg, refs, wg, slot)
        plgpu.barrier_wait(refs.turn)

        def await_next():
            @pl.when(j + 1 < n)
            def _():
                plgpu.barrier_wait(refs.k_full.at[slot_of(j + 1)])

        acc = _add_values(acc, weights, values, await_next)
        used()
        return acc, m, total

    state = three_loops(cfg, step, full_bounds(piece), _start(cfg))
    pl.when(wg == 0)(swap)
    _finish(cfg, refs, piece, state, 64 * wg, q_tile)


def blank_tile(cfg: Config, refs: Refs, piece: Piece, wg, turn):
    """Padding tokens, 64 rows a warpgroup: their one block is passed over, and they come out as (0, -inf)."""

    def body(j, carry):
        pass_over(cfg, refs, turn + j)
        return carry

    lax.fori_loop(0, piece.count, body, jnp.int32(0))
    _finish(cfg, refs, piece, start_state(cfg.v_head_dim), 64 * wg)


def pass_over(cfg: Config, refs: Refs, turn):
    """Somebody else's block: every warpgroup sees every phase of every barrier."""
    slot = lax.rem(turn, jnp.int32(cfg.stages))
    for full, free in ((refs.k_full, refs.k_free), (refs.v_full, refs.v_free)):
        plgpu.barrier_wait(full.at[slot])
        plgpu.barrier_arrive(free.at[slot])


def short_tile(cfg: Config, refs: Refs, piece: Piece, wg, turn):
    """At most 64 rows: both warpgroups hold all of them, and take turns at the key blocks."""
    row = _rows_of(cfg, refs, piece, jnp.int32(0))
    q_tile = refs.q_tile.at[piece.buffer, 0]
    scale = refs.scales[piece[HEAD], 0]
    first_key = (piece[wl.BLK0] + piece.lo) * cfg.block_kv
    n = piece.count

    def step(t, carry, masked):
        acc, m, total = carry
        j = 2 * t + wg
        slot, kv0 = lax.rem(turn + j, jnp.int32(cfg.stages)), first_key + j * cfg.block_kv
        plgpu.barrier_wait(refs.k_full.at[slot])
        of_keys, of_values = _token_scales(cfg, refs, slot)
        keys, used = _keys(cfg, refs, wg, slot)
        dots = token_scales.times(_dots(cfg, q_tile, keys), of_keys, 1)
        used()
        x, c = _logits(cfg, row, dots, kv0, scale, masked)
        p, m, total, acc = _softmax_step(cfg, x, c, m, total, acc)
        total += p.sum(axis=1)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if masked:
            zero_unseen_values(cfg, refs, piece, slot, kv0)
        values, used = _values(cfg, refs, wg, slot)
        acc = _add_values(acc, _weights(cfg, p, of_values), values)
        used()
        pl.when(j + 1 < n)(lambda: pass_over(cfg, refs, turn + j + 1))
        return acc, m, total

    pl.when((wg == 1) & (n > 0))(lambda: pass_over(cfg, refs, turn))
    own = [lax.div(bound - wg + 1, jnp.int32(2)) for bound in full_bounds(piece)]
    state = three_loops(cfg, step, own, _start(cfg))
    _join_warpgroups(cfg, refs, piece, state, wg)


def _join_warpgroups(cfg: Config, refs: Refs, piece: Piece, state, wg):
    """The second warpgroup hands its state to the first, which merges and writes."""

    def meet():
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.turn)

    scratch = (refs.q_tile.at[piece.buffer], refs.stats)  # nobody needs the queries any more
    kind = dict(dim=cfg.v_head_dim, q_dim=cfg.head_dim, q_dtype=cfg.dtype)
    meet()

    @pl.when(wg == 1)
    def _():
        rows.put_fragment(*scratch, *state, **kind)
        meet()

    @pl.when(wg == 0)
    def _():
        meet()
        acc, m, total = state
        acc1, m1, total1 = rows.get_fragment(*scratch, **kind)
        top = jnp.maximum(m, m1)
        a, a1 = jnp.exp2(m - top), jnp.exp2(m1 - top)
        acc = acc * across(a, acc.shape) + acc1 * across(a1, acc.shape)
        _finish(cfg, refs, piece, (acc, top, total * a + total1 * a1), jnp.int32(0))
