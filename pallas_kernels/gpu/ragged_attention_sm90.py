"""Ragged paged attention for Hopper: one persistent launch for decode, speculative, prefill and mixed batches.

Three warpgroups a CTA: two compute, one loads pages by TMA. Each CTA walks its pieces of the work list
(work_list.py). A tile of more than 64 packed rows gives 64 rows to each compute warpgroup, which alternate on the
tensor cores (ping-pong); a tile of at most 64 rows (decode, speculation, remainders) is computed by both, each on
every other key block, and their states are merged through shared memory. Pieces that are only part of a unit go to
a small partial buffer that merge_sm90 joins. docs/performance.md explains the design and what was measured.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule, key_range
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import work_list as wl

LOG2E = math.log2(math.e)
M_START = -1e38  # below every real logit, yet finite: m - m is 0, and exp2(-inf - m) is 0
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
M = rows.ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything static about one kernel; validated by supports.reasons before a kernel is made."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    layout: str = "HND"
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    mask: MaskRule = MaskRule()
    logits: LogitRule = LogitRule(scale=1.0)
    has_sinks: bool = False
    per_request_causal: bool = False
    block_kv: int = 128
    stages: int = 2
    num_ctas: int = 132
    short_weight: int = 4
    long_weight: int = 9
    min_split: int = 1
    overlap: bool = False
    long_tiles: bool = True  # False: every request has at most 64 // G new tokens, known statically

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def quantised(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def value_dtype(self) -> str:
        """Operand type of weights and values: float16 holds every 8-bit value exactly."""
        return "float16" if self.quantised else self.dtype

    @property
    def list_config(self) -> wl.ListConfig:
        return wl.ListConfig(
            rule=self.mask,
            group=self.group,
            num_kv_heads=self.num_kv_heads,
            block_kv=self.block_kv,
            num_ctas=self.num_ctas,
            short_weight=self.short_weight,
            long_weight=self.long_weight,
            min_split=self.min_split,
        )


@dataclasses.dataclass(frozen=True)
class _Refs:
    """Every Ref of the kernel, with its shape."""

    q: object  # GMEM [T, H, D]
    k: object  # GMEM [N, K, S, D] (HND) or [N, S, K, D] (NHD)
    v: object  # GMEM [N, K, S, V] or [N, S, K, V]
    table: object  # GMEM i32[R, B]
    info: object  # GMEM i32[tiles, 16]
    cta: object  # GMEM i32[C, 8]
    scales: object  # GMEM f32[K, 2]: logit scale (times k_scale), v_scale
    heads: object  # GMEM f32[H, 2]: ALiBi slope, sink
    out: object  # GMEM [T, H, V]
    lse: object  # GMEM f32[T, H]
    part: object  # GMEM f32[2 C, 128, V]: normalised partial outputs
    part_lse: object  # GMEM f32[2 C, 128], base 2
    q_tile: object = None  # SMEM [2 buffers, 2, 64, D]
    k_tile: object = None  # SMEM [stages, block_kv, D]
    v_tile: object = None  # SMEM [stages, block_kv, V]
    k_work: object = None  # SMEM [2, block_kv, D]: each warpgroup's decoded keys; None unless quantised
    v_work: object = None  # SMEM [2, block_kv, V]
    stats: object = None  # SMEM f32[512]: maxima and sums that the second warpgroup hands over
    box: object = None  # SMEM i32[2, 16]: the piece in each Q buffer, see _Piece
    k_full: object = None  # barriers [stages], one arrival a page
    v_full: object = None
    k_free: object = None  # barriers [stages], one arrival a compute warpgroup
    v_free: object = None
    q_full: object = None  # barriers [2 buffers]
    q_free: object = None
    ready: object = None  # barriers [2]: the other warpgroup has issued its matmuls
    turn: object = None  # the two compute warpgroups' barrier: ping-pong and exchange


HEAD, LO, HI = 13, 14, 15  # columns of the box beyond those of the work list's info


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of work: blocks lo .. hi of a unit (tile, kv head); i32 scalars by column of work_list and the box."""

    column: object  # column number -> its value, read where it is used: registers are what the loop is short of
    buffer: object  # which Q buffer holds its rows

    def __getitem__(self, number):
        return self.column(number)

    @property
    def lo(self):
        return self[LO]

    @property
    def count(self):
        return self[HI] - self[LO]

    @property
    def is_part(self):
        return (self[LO] > 0) | (self[HI] < self[wl.NBLK])


def _count_pieces(cta, me):
    waves, u0, _, u1, b1 = (cta[me, i] for i in range(5))
    return waves + (u1 - u0) + (b1 > 0).astype(jnp.int32)


def _piece_from_list(cfg: Config, refs: _Refs, j) -> _Piece:
    """This CTA's j-th piece: whole waves in snake order, then its stretch of the line."""
    me = lax.axis_index("cta")
    waves, u0, b0, u1, b1 = (refs.cta[me, i] for i in range(5))
    k = jnp.where(refs.cta[me, wl.BACKWARD] != 0, _count_pieces(refs.cta, me) - 1 - j, j)
    snake = jnp.where(lax.rem(k, jnp.int32(2)) == 0, me, cfg.num_ctas - 1 - me)
    unit = jnp.where(k < waves, k * cfg.num_ctas + snake, u0 + k - waves)
    tile = lax.div(unit, jnp.int32(cfg.num_kv_heads))
    info = [refs.info[tile, i] for i in range(HEAD)]
    lo = jnp.where(unit == u0, b0, 0)
    hi = jnp.where(unit == u1, b1, info[wl.NBLK])
    head = lax.rem(unit, jnp.int32(cfg.num_kv_heads))
    return _Piece((*info, head, lo, hi).__getitem__, lax.rem(j, jnp.int32(2)))


def _send_piece(cfg: Config, refs: _Refs, j) -> _Piece:
    """Memory warpgroup: fetch piece j's numbers and query rows into its buffer, ahead of the compute warpgroups."""
    piece = _piece_from_list(cfg, refs, j)
    buffer = piece.buffer

    @pl.when(j >= 2)
    def _():
        plgpu.barrier_wait(refs.q_free.at[buffer])

    for column in range(HI + 1):
        refs.box[buffer, column] = piece[column]
    kind = dict(group=cfg.group, heads=cfg.num_heads, dim=cfg.head_dim, dtype=cfg.dtype)

    def load_half(half):
        where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0] + M * half, piece[wl.NROWS] - M * half)
        rows.load_rows(refs.q, refs.q_tile.at[buffer, half], *where, **kind)

    load_half(0)
    pl.when(piece[wl.NROWS] > M)(lambda: load_half(1))
    rows.await_rows()
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.q_full.at[buffer])
    return piece


def _receive_piece(refs: _Refs, j) -> _Piece:
    """Compute warpgroups: await piece j."""
    buffer = lax.rem(j, jnp.int32(2))
    plgpu.barrier_wait(refs.q_full.at[buffer])
    return _Piece(lambda column: refs.box[buffer, column], buffer)


def _load_pages(cfg: Config, refs: _Refs):
    """The memory warpgroup: key and value pages of every block of every piece, as slots become free."""
    page, block = cfg.page_size, cfg.block_kv
    copies, width = max(block // page, 1), min(page, block)

    def source(pool, page_id, head, offset):
        span = pl.ds(offset, width) if width < page else slice(None)
        return pool.at[page_id, head, span] if cfg.layout == "HND" else pool.at[page_id, span, head]

    def load_piece(j, turn):
        piece = _send_piece(cfg, refs, j)
        first = lax.div(piece[wl.KSTART], jnp.int32(page))
        last = jnp.maximum(lax.div(piece[wl.KSTOP] - 1, jnp.int32(page)), first)
        blk0, req = piece[wl.BLK0] + piece[LO], piece[wl.REQ]

        def page_ids(i):
            column = lax.div((blk0 + i) * block, jnp.int32(page))
            return tuple(refs.table[req, jnp.clip(column + p, first, last)] for p in range(copies))

        def load_block(i, carry):
            turn, pages = carry
            coming = page_ids(i + 1)  # in flight while this block waits for its slot
            slot = lax.rem(turn, jnp.int32(cfg.stages))
            offset = pl.multiple_of(lax.rem((blk0 + i) * block, jnp.int32(page)), 8) if width < page else 0

            def fill(pool, tile, full, free):
                @pl.when(turn >= cfg.stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                for p in range(copies):
                    target = tile.at[slot, pl.ds(p * width, width)]
                    plgpu.copy_gmem_to_smem(source(pool, pages[p], piece[HEAD], offset), target, full.at[slot])

            fill(refs.k, refs.k_tile, refs.k_full, refs.k_free)
            fill(refs.v, refs.v_tile, refs.v_full, refs.v_free)
            return turn + 1, coming

        return lax.fori_loop(0, piece.count, load_block, (turn, page_ids(0)))[0]

    lax.fori_loop(0, _count_pieces(refs.cta, lax.axis_index("cta")), load_piece, jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What this warpgroup's 64 rows see; vectors are i32 or f32 (64,)."""

    q_pos: object
    start: object  # keys start <= kv < stop are visible to the row
    stop: object
    slope: object  # f32, already times log2(e); None without ALiBi
    head: object  # absolute query head


def _heads_of(cfg: Config, piece: _Piece, row_offset):
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


def _rows_of(cfg: Config, refs: _Refs, piece: _Piece, row_offset) -> _Rows:
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
        dots, factor = jnp.tanh(dots * (scale / rule.soft_cap)), jnp.float32(rule.soft_cap * LOG2E)
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


def _zero_unseen_values(cfg: Config, refs: _Refs, piece: _Piece, slot, kv0):
    """Values past the request's end or before its window may be anything, NaN included, and 0 * NaN is NaN.

    Positions between the tile's last visible key and the request's end hold tokens, or copies of a full page.
    """
    first, last = piece[wl.KSTART] - kv0, piece[wl.SEQ] - kv0

    @pl.when((first > 0) | (last < cfg.block_kv))
    def _():
        kind = dict(rows=cfg.block_kv, dim=cfg.v_head_dim, dtype=cfg.kv_dtype)
        rows.zero_rows(refs.v_tile.at[slot], first, last, **kind)
        plgpu.commit_smem()


def _keys(cfg: Config, refs: _Refs, wg, slot):
    """(key tile to multiply with, what to call once it was multiplied)."""
    free = lambda: plgpu.barrier_arrive(refs.k_free.at[slot])
    if not cfg.quantised:
        return refs.k_tile.at[slot], free
    work, kind = refs.k_work.at[wg], dict(rows=cfg.block_kv, dim=cfg.head_dim, source=cfg.kv_dtype)
    rows.decode_tile(refs.k_tile.at[slot], work, target=cfg.dtype, **kind)
    plgpu.commit_smem()
    free()
    return work, lambda: None


def _values(cfg: Config, refs: _Refs, wg, slot):
    """Likewise for values."""
    free = lambda: plgpu.barrier_arrive(refs.v_free.at[slot])
    if not cfg.quantised:
        return refs.v_tile.at[slot], free
    work, kind = refs.v_work.at[wg], dict(rows=cfg.block_kv, dim=cfg.v_head_dim, source=cfg.kv_dtype)
    rows.decode_tile(refs.v_tile.at[slot], work, target=cfg.value_dtype, **kind)
    plgpu.commit_smem()
    free()
    return work, lambda: None


def _finish(cfg: Config, refs: _Refs, piece: _Piece, state, tile_row, stage=None):
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


def _softmax_step(x, c, m, total, acc):
    """(p f32, new m, new total without p's sum, rescaled acc)."""
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


def _add_values(acc, p, v_tile, after=lambda: None):
    def body(ref):
        plgpu.wgmma(ref, p, v_tile)
        after()

    return pl.run_state(body)(plgpu.ACC.init(acc))


def _three_loops(cfg, step, bounds, carry, first=0):
    """Blocks [first, a) masked, [a, b) full, [b, n) masked; the first loop only where a mask has a left edge."""
    a, b, n = bounds
    if cfg.mask.left >= 0 or cfg.mask.chunk > 0:
        carry = lax.fori_loop(first, a, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(a, b, functools.partial(step, masked=False), carry)
    return lax.fori_loop(b, n, functools.partial(step, masked=True), carry)


def _full_bounds(piece: _Piece):
    """Blocks of the piece, counted from its own first, that every row sees whole: [a, b) of n."""
    a = jnp.clip(piece[wl.FULL0] - piece.lo, 0, piece.count)
    return a, jnp.clip(piece[wl.FULL1] - piece.lo, a, piece.count), piece.count


def _long_tile(cfg: Config, refs: _Refs, piece: _Piece, wg, turn):
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
        keys, used = _keys(cfg, refs, wg, slot)
        dots = _dots(cfg, q_tile, keys, swap)
        used()
        x, c = _logits(cfg, row, dots, kv0, scale, masked)
        p, m, total, acc = _softmax_step(x, c, m, total, acc)
        p16 = p.astype(cfg.value_dtype)
        total += p.sum(axis=1)
        acc, total, m, p16 = lax.optimization_barrier((acc, total, m, p16))
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if masked:
            _zero_unseen_values(cfg, refs, piece, slot, kv0)
        values, used = _values(cfg, refs, wg, slot)
        plgpu.barrier_wait(refs.turn)

        def await_next():
            @pl.when(j + 1 < n)
            def _():
                plgpu.barrier_wait(refs.k_full.at[slot_of(j + 1)])

        acc = _add_values(acc, p16, values, await_next)
        used()
        return acc, m, total

    state = _three_loops(cfg, step, _full_bounds(piece), start_state(cfg.v_head_dim))
    pl.when(wg == 0)(swap)
    _finish(cfg, refs, piece, state, 64 * wg, q_tile)


def _long_tile_overlapped(cfg: Config, refs: _Refs, piece: _Piece, wg, turn):
    """As _long_tile, and within a warpgroup the scores of block j + 1 are computed beside the values of block j."""
    row = _rows_of(cfg, refs, piece, 64 * wg)
    q_tile, scale = refs.q_tile.at[piece.buffer, wg], refs.scales[piece[HEAD], 0]
    first_key, n = (piece[wl.BLK0] + piece.lo) * cfg.block_kv, piece.count
    slot_of = lambda j: lax.rem(turn + j, jnp.int32(cfg.stages))
    accs = (plgpu.ACC((M, cfg.v_head_dim), jnp.float32), plgpu.ACC((M, cfg.block_kv), jnp.float32))

    def weigh(dots, i, m, total, masked):
        """Scores of block i -> (p f32, new max, new total, factor of acc)."""
        x, c = _logits(cfg, row, dots, first_key + i * cfg.block_kv, scale, masked)
        new_m = jnp.maximum(m, x.max(axis=1) * c)
        alpha = jnp.exp2(m - new_m)
        p = jnp.exp2(x * c - across(new_m, x.shape))
        return p, new_m, total * alpha + p.sum(axis=1), alpha

    def multiply(acc, p16, j, with_next, finish):
        """acc + p16 v[j], and the scores of block j + 1 on the way: finish(dots) runs while v[j] is multiplied."""

        slot, after = slot_of(j), slot_of(j + 1)
        if with_next:
            plgpu.barrier_wait(refs.k_full.at[after])
        plgpu.barrier_wait(refs.v_full.at[slot])
        _zero_unseen_values(cfg, refs, piece, slot, first_key + j * cfg.block_kv)
        plgpu.barrier_wait(refs.ready.at[wg])
        # registers that a wgmma reads must not be written once the first is issued, or ptxas serialises them all
        acc, p16 = lax.optimization_barrier((acc, p16))

        def body(o_ref, s_ref):
            o_ref[...] = acc
            if with_next:
                plgpu.wgmma(s_ref, q_tile, refs.k_tile.at[after].transpose((1, 0)))
            plgpu.wgmma(o_ref, p16, refs.v_tile.at[slot])
            plgpu.barrier_arrive(refs.ready.at[1 - wg])
            rest = ()
            if with_next:
                dots = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=1))
                plgpu.barrier_arrive(refs.k_free.at[after])
                rest = finish(dots)
            # p becomes an operand only now: its old registers were being read
            out, *rest = lax.optimization_barrier((plgpu.wgmma_accumulator_load(o_ref, wait_n=0), *rest))
            plgpu.barrier_arrive(refs.v_free.at[slot])
            return out, *rest

        return pl.run_scoped(body, *accs)

    def step(i, carry, masked):
        acc, m, total, p16 = carry
        acc, p, m, total, alpha = multiply(acc, p16, i - 1, True, lambda d: weigh(d, i, m, total, masked))
        return acc * across(alpha, acc.shape), m, total, p.astype(cfg.dtype)

    def whole():
        acc, m, total = start_state(cfg.v_head_dim)
        plgpu.barrier_wait(refs.k_full.at[slot_of(0)])
        plgpu.barrier_wait(refs.ready.at[wg])
        issued = lambda: plgpu.barrier_arrive(refs.ready.at[1 - wg])
        dots = _dots(cfg, q_tile, refs.k_tile.at[slot_of(0)], issued)
        plgpu.barrier_arrive(refs.k_free.at[slot_of(0)])
        p, m, total, _ = weigh(dots, 0, m, total, True)
        a, b, _ = (jnp.maximum(bound, 1) for bound in _full_bounds(piece))
        acc, m, total, p16 = _three_loops(cfg, step, (a, b, n), (acc, m, total, p.astype(cfg.dtype)), first=1)
        (acc,) = multiply(acc, p16, n - 1, False, None)
        return acc, m, total

    _finish(cfg, refs, piece, lax.cond(n > 0, whole, lambda: start_state(cfg.v_head_dim)), 64 * wg, q_tile)


def _short_tile(cfg: Config, refs: _Refs, piece: _Piece, wg, turn):
    """At most 64 rows: both warpgroups hold all of them, and take turns at the key blocks."""
    row = _rows_of(cfg, refs, piece, jnp.int32(0))
    q_tile = refs.q_tile.at[piece.buffer, 0]
    scale = refs.scales[piece[HEAD], 0]
    first_key = (piece[wl.BLK0] + piece.lo) * cfg.block_kv
    n = piece.count

    def pass_over(j):
        """The other warpgroup's block: every warpgroup sees every phase of every barrier."""
        slot = lax.rem(turn + j, jnp.int32(cfg.stages))
        for full, free in ((refs.k_full, refs.k_free), (refs.v_full, refs.v_free)):
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(free.at[slot])

    def step(t, carry, masked):
        acc, m, total = carry
        j = 2 * t + wg
        slot, kv0 = lax.rem(turn + j, jnp.int32(cfg.stages)), first_key + j * cfg.block_kv
        plgpu.barrier_wait(refs.k_full.at[slot])
        keys, used = _keys(cfg, refs, wg, slot)
        dots = _dots(cfg, q_tile, keys)
        used()
        x, c = _logits(cfg, row, dots, kv0, scale, masked)
        p, m, total, acc = _softmax_step(x, c, m, total, acc)
        total += p.sum(axis=1)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if masked:
            _zero_unseen_values(cfg, refs, piece, slot, kv0)
        values, used = _values(cfg, refs, wg, slot)
        acc = _add_values(acc, p.astype(cfg.value_dtype), values)
        used()
        pl.when(j + 1 < n)(lambda: pass_over(j + 1))
        return acc, m, total

    pl.when((wg == 1) & (n > 0))(lambda: pass_over(0))
    own = [lax.div(bound - wg + 1, jnp.int32(2)) for bound in _full_bounds(piece)]
    state = _three_loops(cfg, step, own, start_state(cfg.v_head_dim))
    _join_warpgroups(cfg, refs, piece, state, wg)


def _join_warpgroups(cfg: Config, refs: _Refs, piece: _Piece, state, wg):
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


def _compute(cfg: Config, refs: _Refs, wg):
    def piece_body(j, turn):
        piece = _receive_piece(refs, j)
        short = piece[wl.NROWS] <= wl.SHORT_ROWS
        pl.when(short)(lambda: _short_tile(cfg, refs, piece, wg, turn))
        long_tile = _long_tile_overlapped if cfg.overlap and not cfg.quantised else _long_tile
        if cfg.long_tiles:
            pl.when(jnp.logical_not(short))(lambda: long_tile(cfg, refs, piece, wg, turn))
        plgpu.barrier_arrive(refs.q_free.at[piece.buffer])
        return turn + piece.count

    pl.when(wg == 1)(lambda: plgpu.barrier_arrive(refs.ready.at[0]))
    lax.fori_loop(0, _count_pieces(refs.cta, lax.axis_index("cta")), piece_body, jnp.int32(0))


def _kernel(cfg: Config, *gmem):
    """One CTA: allocate, then each warpgroup to its role."""

    def roles(tiles, small, full, free, queries, pair):
        tiles = (*tiles, None, None)[:5]
        refs = _Refs(*gmem, *tiles, *small, *full, *free, *queries, *pair)
        wg = lax.axis_index("wg")

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            _compute(cfg, refs, wg)

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _load_pages(cfg, refs)

    def tile(dtype, *shape):
        return plgpu.SMEM(shape, dtype, transforms=rows.tile_transforms(shape[-1], dtype))

    block, stages = cfg.block_kv, cfg.stages
    tiles = [tile(cfg.dtype, 2, 2, M, cfg.head_dim)]
    tiles += [tile(cfg.kv_dtype, stages, block, dim) for dim in (cfg.head_dim, cfg.v_head_dim)]
    if cfg.quantised:
        tiles += [tile(cfg.dtype, 2, block, cfg.head_dim), tile(cfg.value_dtype, 2, block, cfg.v_head_dim)]
    small = (plgpu.SMEM((512,), jnp.float32), plgpu.SMEM((2, wl.INFO_COLUMNS), jnp.int32))
    full = (plgpu.Barrier(num_arrivals=max(block // cfg.page_size, 1), num_barriers=stages),) * 2
    free = (plgpu.Barrier(num_arrivals=2, num_barriers=stages),) * 2
    queries = (plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_arrivals=2, num_barriers=2))
    pair = (plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_arrivals=2))
    pl.run_scoped(roles, tuple(tiles), small, full, free, queries, pair, collective_axes="wg")


def attend(cfg: Config, q, k_pages, v_pages, block_table, work: wl.WorkList, scales, heads):
    """The launch: (out [T, H, V], lse f32[T, H], partial outputs, partial lse base 2)."""
    num_tokens, num_heads, _ = q.shape
    v_dim, slots = cfg.v_head_dim, 2 * cfg.num_ctas
    out_type = [
        jax.ShapeDtypeStruct((num_tokens, num_heads, v_dim), q.dtype),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((slots, wl.TILE_ROWS, v_dim), jnp.float32),
        jax.ShapeDtypeStruct((slots, wl.TILE_ROWS), jnp.float32),
    ]

    def ragged_paged_attention(*refs):
        _kernel(cfg, *refs)

    call = plgpu.kernel(
        ragged_paged_attention,
        out_type=out_type,
        grid=(cfg.num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return call(q, k_pages, v_pages, block_table, work.info, work.cta, scales, heads)

