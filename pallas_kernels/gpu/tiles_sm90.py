"""A compute warpgroup's work on one piece: scores, online softmax, values, and where the result is stored."""

import dataclasses
import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import lanes_sm80 as lanes
from pallas_kernels.gpu import new_tokens_sm90 as new_tokens
from pallas_kernels.gpu import queries_sm90 as queries
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import softmax_sm90 as softmax
from pallas_kernels.gpu import token_scales_sm90 as token_scales
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import as_number, when
from pallas_kernels.gpu.config import WARPGROUP_ROWS, GpuKernelConfig
from pallas_kernels.gpu.merge_few_sm90 import merge_few_rows, steps_of
from pallas_kernels.gpu.pieces_sm90 import (
    HEAD,
    Piece,
    Refs,
    load_queries,
    queries_of,
    stage_of,
    worker,
    zero_unseen_values,
)
from pallas_kernels.gpu.row_states_sm90 import (
    LOG2E,
    ROW_LAYOUT,
    across_columns,
    finish_rows,
    full_rows,
    start_state,
    value_per_row,
)
from pallas_kernels.gpu.soft_cap_sm90 import capped

MOST_COLUMNS = 128  # of one wgmma, where four warpgroups leave it 128 registers


@dataclasses.dataclass(frozen=True)
class _RowBounds:
    """The keys that each of this warpgroup's 64 rows sees, and its head; i32 or f32 (64,)."""

    q_pos: object
    start: object  # the row sees keys start <= kv_pos < stop, unless there is a mask_fn
    stop: object
    slope: object  # f32 ALiBi slope times log2(e), or None
    head: object  # query head
    bias: object = None  # function: positions of keys -> f32 (64, n), with a qq_bias


def _packed_rows(cfg: GpuKernelConfig, piece: Piece, row_offset):
    """(packed row, token of the request, head of the group), i32 (64,) each."""
    kind = dict(dimension=0, layout=ROW_LAYOUT)
    row = rows.row_numbers() if cfg.lean else plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), **kind)
    packed = row + (piece[wl.ROW0] + row_offset)
    token = lax.div(packed, jnp.int32(cfg.group))
    return packed, token, packed - token * cfg.group


def row_bounds(cfg: GpuKernelConfig, refs: Refs, piece: Piece, row_offset, ranges: bool = True) -> _RowBounds:
    """ranges: compute the keys that each row sees, which only blocks with a mask need."""
    _, token, member = _packed_rows(cfg, piece, row_offset)
    q_pos, head0 = token + piece[wl.QPOS0], piece[HEAD] * cfg.group
    start = stop = bias = slope = None
    if ranges:
        start, stop = _key_ranges(cfg, refs, piece, token, q_pos)
        bias = functools.partial(_bias, cfg, refs, piece, token) if cfg.qq_bias else None
    if cfg.logits.has_alibi:
        slope = value_per_row(cfg, refs.per_head, head0, member, 0)
    return _RowBounds(q_pos, start, stop, slope, head0 + member, bias)


def _key_ranges(cfg: GpuKernelConfig, refs: Refs, piece: Piece, token, q_pos):
    """(start, stop) of each row."""
    causal = piece[wl.CAUSAL] & 1 != 0 if cfg.per_request_causal else None
    rank = piece[wl.CAUSAL] >> 1 if cfg.shards.world > 1 else 0
    if cfg.mask.spans:
        found = wl.token_range(refs.info, refs.q.shape[0], token + piece[wl.TOK0], ROW_LAYOUT)
    else:
        found = wl.visible_keys(cfg, q_pos, q_pos, piece[wl.SEQ], causal, rank)
    return (plgpu.layout_cast(jnp.broadcast_to(x, (WARPGROUP_ROWS,)), ROW_LAYOUT) for x in found)


def _bias(cfg: GpuKernelConfig, refs: Refs, piece: Piece, token, key):
    of_row = across_columns(token, key.shape)
    return new_tokens.bias_of(cfg, refs.per_head, of_row, key - piece[wl.QPOS0], plgpu.Layout.WGMMA)


def _start(cfg: GpuKernelConfig):
    acc, m, total = start_state(cfg.v_head_dim)
    return acc, full_rows(0.0) if cfg.fixed_max else m, total


def logits(cfg: GpuKernelConfig, row: _RowBounds, dots, kv0, scale, masked):
    """Raw dots (64, block_kv) -> (x, c): base-2 logits are x * c, -inf where masked. The steps of algebra/logits.py.

    scale: the softmax scale times k_scale, an f32 scalar or f32 (64,) by row; c is the same.
    """
    rule, shape = cfg.logits, dots.shape
    if jnp.ndim(scale) and (rule.soft_cap or rule.has_alibi or cfg.qq_bias or rule.score_fn is not None):
        dots, scale = dots * across_columns(scale, shape), jnp.float32(1.0)
    factor = scale * LOG2E
    if cfg.fixed_max:
        dots, factor = capped(dots, scale / rule.soft_cap, rule.soft_cap * LOG2E), jnp.float32(1.0)
    elif rule.soft_cap:
        inner, factor = scale / rule.soft_cap, jnp.float32(rule.soft_cap * LOG2E)
        dots = jnp.tanh(dots * inner)
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    key = lambda: rows.numbers(shape, 1) if cfg.lean else iota()
    if rule.has_alibi:
        shift = (kv0 - row.q_pos).astype(jnp.float32) * row.slope
        dots, factor = rows.add_slope(dots, factor, row.slope, shift), jnp.float32(1.0)
    if cfg.qq_bias and masked:
        dots, factor = dots * factor + row.bias(key() + kv0) * LOG2E, jnp.float32(1.0)
    if rule.score_fn is not None:
        where = (across_columns(row.head, shape), across_columns(row.q_pos, shape), key() + kv0)
        dots, factor = rule.score_fn(dots * (factor * (1 / LOG2E)), *where), jnp.float32(LOG2E)
    if masked:
        seen = key() < across_columns(row.stop - kv0, shape)
        if cfg.mask.left >= 0 or cfg.mask.chunk > 0:
            seen = seen & (key() >= across_columns(row.start - kv0, shape))
        if cfg.mask.mask_fn is not None:
            where = (across_columns(row.head, shape), across_columns(row.q_pos, shape), key() + kv0)
            seen = seen & cfg.mask.mask_fn(*where)
        dots = jnp.where(seen, dots, -jnp.inf)
    return dots, factor


def _token_scales(cfg: GpuKernelConfig, refs: Refs, block_number, *of: int):
    """Parts of the scales of a block whose keys are there; None for each without scales of tokens."""
    if not cfg.token_scales:
        return (None,) * len(of)
    row = lax.rem(block_number, jnp.int32(cfg.converted_scales))
    return token_scales.load_per_key(refs.token_scale, row, 1, cfg.block_kv, of=of)


def weight_operand(cfg: GpuKernelConfig, p):
    """f32 weights -> the operand of their product with the stored values."""
    return queries.eight_bit_weights(p) if cfg.compute_dtype is not None else p.astype(cfg.weight_dtype)


def finish(cfg: GpuKernelConfig, refs: Refs, piece: Piece, state, tile_row, spare_tile=None):
    """Stores the state of a tile's 64 rows: to out and lse, or to this CTA's slot of partial results.

    tile_row: the first of them. spare_tile: SMEM [64, D] through which rows may go, so that each thread stores 16 bytes
    at a time (the warpgroup's queries, no longer used), or None.
    """
    acc, m, total = state
    shape = acc.shape
    v_scale = refs.scales[piece[HEAD], 1]
    nrows = piece[wl.NROWS] - tile_row

    @when(piece.is_part)
    def _():
        safe = jnp.where(total > 0.0, total, 1.0)
        lse = jnp.where(total > 0.0, m + lax.log(safe) * LOG2E, -jnp.inf)
        slot = 2 * worker(cfg, refs) + as_number(piece.lo == 0)
        out = acc * across_columns(v_scale / safe, shape)
        where = (slot, tile_row, nrows, jnp.int32(0))
        rows.store_partial(refs.part, refs.part_lse, out, lse, *where, stride=shape[1])
        if cfg.merges_inside:
            merge_if_last(cfg, refs, piece)

    @when(jnp.logical_not(piece.is_part))
    def _():
        sink, head0 = None, piece[HEAD] * cfg.group
        if cfg.has_sinks:
            sink = value_per_row(cfg, refs.per_head, head0, _packed_rows(cfg, piece, tile_row)[2], 1)
        factor, lse = finish_rows(m, total, sink)
        out = acc * across_columns(factor * v_scale, shape)
        where = (piece[wl.TOK0], head0, piece[wl.ROW0] + tile_row, nrows)
        kind = dict(group=cfg.group, heads=cfg.num_heads)
        if spare_tile is None or cfg.v_head_dim != cfg.head_dim or cfg.result_dtype != cfg.dtype:
            rows.store_rows(refs.out, refs.lse, out, lse, *where, jnp.int32(0), stride=shape[1], **kind)
        else:
            if cfg.converts_queries:  # the tile's dtype is another
                queries.stage_rows(spare_tile, out, dim=shape[1], dtype=cfg.dtype)
            else:
                spare_tile[...] = out.astype(cfg.dtype)
            plgpu.commit_smem()
            rows.store_tile(spare_tile, refs.out, refs.lse, lse, *where, dim=shape[1], dtype=cfg.dtype, **kind)


def merge_if_last(cfg: GpuKernelConfig, refs: Refs, piece: Piece):
    """After storing a part of a unit: merge all its parts, if those of the other CTAs are stored, too."""
    me = worker(cfg, refs)
    begins = piece.lo == 0
    first = jnp.where(begins, me, refs.cta[me, wl.FROM])
    last = jnp.where(begins, refs.cta[me, wl.JOIN + 2], refs.cta[me, wl.UNTIL])
    arrived = refs.arrived.at[refs.pipeline]
    rows.arrive(refs.counters, arrived, first, last - first + 1)

    @when(arrived[0] == 1)
    def _():
        gmem = (refs.per_head, refs.part, refs.part_lse, refs.out, refs.lse)
        step = lambda i, _: merge_few_rows(cfg, gmem, piece.column, piece[HEAD], (first, last), i)
        lax.fori_loop(0, steps_of(cfg, piece[wl.NROWS]), step, None)


def softmax_step(cfg: GpuKernelConfig, x, c, state, log_scales=None, reciprocals=None):
    """(p f32, state with p's sums). With logs and reciprocals of values' token scales, p is multiplied by those scales,
    and its sums are without them.

    With fixed_max the soft cap bounds base-2 logits by MAX_FIXED_LOGIT: m stays 0 and nothing is rescaled. Logits that
    rise with the key's position raise m in nearly every block, for which a branch would only cost time.
    """
    across_rows = lambda numbers: lax.broadcast_in_dim(numbers, x.shape, [1])
    by_row = lambda c: across_columns(c, x.shape) if jnp.ndim(c) else c
    if log_scales is not None:
        x, c = x * by_row(c) + across_rows(log_scales), jnp.float32(1.0)
    if cfg.logits_rise and cfg.compute_dtype is None:
        acc, m, total = state
        new_m = jnp.maximum(m, x.max(axis=1) * c)
        alpha = jnp.exp2(m - new_m)
        state = acc * across_columns(alpha, acc.shape), new_m, total * alpha
    elif not cfg.fixed_max:
        state = softmax.raise_shift(x, c, state, eight_bits=cfg.compute_dtype is not None)
    acc, m, total = state
    p = jnp.exp2(x * by_row(c) if cfg.fixed_max else x * by_row(c) - across_columns(m, x.shape))
    if reciprocals is not None:
        return p, (acc, m, total + token_scales.weighted_row_sums(p, across_rows(reciprocals)))
    return p, (acc, m, total + lanes.partial_row_sums(p))


def _completed(state):
    """The state with the sums of whole rows, at a piece's end."""
    acc, m, total = state
    return acc, m, lanes.complete_row_sums(total)


def _dots(cfg, q_tile, k_tile, after=lambda: None):
    def body(acc):
        plgpu.wgmma(acc, q_tile, k_tile.transpose((1, 0)))
        after()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((WARPGROUP_ROWS, cfg.block_kv), jnp.float32))


def _add_weighted_values(cfg, acc, weights, v_tile, after=lambda: None):
    """acc plus the products of a block. Sums of 8-bit products must not pass through the tensor cores again, which keep
    14 bits: each block's are added in float32."""
    if cfg.compute_dtype is not None:

        def products(ref):
            plgpu.wgmma(ref, weights, v_tile.transpose((1, 0)))
            after()
            return ref[...]

        return acc + pl.run_scoped(products, plgpu.ACC(acc.shape, jnp.float32))

    def body(ref):
        most = MOST_COLUMNS if cfg.converts_tiles else cfg.v_head_dim
        for first in range(0, cfg.v_head_dim, most):
            columns = pl.ds(first, min(most, cfg.v_head_dim - first))
            plgpu.wgmma(ref.at[:, columns], weights, v_tile.at[:, columns])
        after()

    return pl.run_state(body)(plgpu.ACC.init(acc))


def _queries(cfg: GpuKernelConfig, refs: Refs, piece: Piece, wg, loaded, skipped):
    """(the SMEM tile of this warpgroup's queries, the logit scale: f32, or f32 (64,) by row).

    loaded: SMEM [64, D], the queries as in q: 64 rows of the piece, those after `skipped`. If loads_queries, they come
    there now.
    """
    scale = refs.scales[piece[HEAD], 0]
    if cfg.loads_queries:
        rows.sync_warpgroup()  # the rows of the piece before are stored
        load_queries(cfg, refs, piece, loaded, skipped)
        rows.await_rows()
        plgpu.commit_smem()
    if not cfg.converts_queries:
        return loaded, scale
    tile = loaded if refs.q_rounded is None else refs.q_rounded.at[wg]
    factors = queries.convert_rows(loaded, tile, dim=cfg.head_dim, target=cfg.query_dtype)
    plgpu.commit_smem()
    return tile, factors * scale


def loop_over_blocks(cfg, step, bounds, carry):
    """Blocks [0, a) masked, [a, b) unmasked, [b, n) masked, in the order in which they are read.

    Where the mask has no left edge, the loop there is left out: the first one, or with last_block_first the last one.
    """
    a, b, n = bounds
    has_left_edge = cfg.mask.left >= 0 or cfg.mask.chunk > 0
    if has_left_edge or cfg.last_block_first:
        carry = lax.fori_loop(0, a, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(a, b, functools.partial(step, masked=False), carry)
    if has_left_edge or not cfg.last_block_first:
        carry = lax.fori_loop(b, n, functools.partial(step, masked=True), carry)
    return carry


def full_block_bounds(cfg, piece: Piece):
    """(a, b, n): of the piece's n blocks, in the order in which they are read, every row sees blocks [a, b) whole."""
    n = piece.count
    a = jnp.clip(piece[wl.FULL0] - piece.lo, 0, n)
    b = jnp.clip(piece[wl.FULL1] - piece.lo, a, n)
    return (n - b, n - a, n) if cfg.last_block_first else (a, b, n)


def long_tile(cfg: GpuKernelConfig, refs: Refs, piece: Piece, wg, blocks_before):
    """65 to 128 rows, 64 for each of two warpgroups: one uses the tensor cores while the other computes softmax.

    Three warpgroups compute up to 192 rows, and have turns on the tensor cores in the order 0, 1, 2, 0, ..: in a turn a
    warpgroup issues the products of a block's values and of the next block's keys. Of a piece of n blocks each has
    n + 1 turns, also without rows of its own or with n = 0; so after every piece the next turn is warpgroup 0's.
    """
    row = row_bounds(cfg, refs, piece, 64 * wg)
    loaded = queries_of(cfg, refs, piece).at[wg]
    q_tile, scale = _queries(cfg, refs, piece, wg, loaded, WARPGROUP_ROWS * wg)
    block_of, n = piece.blocks(cfg), piece.count
    slot_of = lambda j: stage_of(cfg, refs, blocks_before + j)

    in_pairs = cfg.computing == 2

    def say_done():
        if in_pairs:
            plgpu.barrier_arrive(refs.compute_barrier)

    def take_turn():
        plgpu.barrier_wait(refs.compute_barrier if in_pairs else refs.turn.at[wg])

    def end_turn():
        if in_pairs:
            say_done()
            take_turn()
        else:
            plgpu.barrier_arrive(refs.turn.at[lax.rem(wg + 1, jnp.int32(cfg.computing))])

    @when(n > 0)
    def _():
        plgpu.barrier_wait(refs.k_full.at[slot_of(0)])

    when(wg == 1)(end_turn) if in_pairs else take_turn()

    def step(j, state, masked):
        slot, kv0 = slot_of(j), block_of(j) * cfg.block_kv
        # They come while the products run.
        (of_keys,) = _token_scales(cfg, refs, blocks_before + j, token_scales.OF_KEYS)
        dots = _dots(cfg, q_tile, refs.k_tile.at[slot], end_turn)
        dots = token_scales.multiply_per_key(dots, of_keys, 1)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        x, c = logits(cfg, row, dots, kv0, scale, masked)
        if cfg.weights_first:
            weights, (acc, m, total) = softmax.weights_first(x, c, state, dtype=cfg.weight_dtype)
        else:
            of_values = _token_scales(cfg, refs, blocks_before + j, token_scales.LOGS, token_scales.RECIPROCALS)
            p, (acc, m, total) = softmax_step(cfg, x, c, state, *of_values)
            weights = weight_operand(cfg, p)
        acc, total, m, weights = lax.optimization_barrier((acc, total, m, weights))
        say_done()
        plgpu.barrier_wait(refs.v_full.at[slot])
        if masked and not cfg.converts_tiles:
            zero_unseen_values(cfg, refs.v_tile.at[slot], piece, kv0)
        take_turn()

        def wait_for_next_keys():
            @when(j + 1 < n)
            def _():
                plgpu.barrier_wait(refs.k_full.at[slot_of(j + 1)])

        acc = _add_weighted_values(cfg, acc, weights, refs.v_tile.at[slot], wait_for_next_keys)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, m, total

    state = loop_over_blocks(cfg, step, full_block_bounds(cfg, piece), _start(cfg))
    when(wg == 0)(end_turn) if in_pairs else end_turn()
    finish(cfg, refs, piece, _completed(state), 64 * wg, loaded)


def blank_tile(cfg: GpuKernelConfig, refs: Refs, piece: Piece, wg, blocks_before):
    """Padding tokens, 64 rows for each warpgroup: skips their one block of keys and stores (0, -inf)."""

    def body(j, carry):
        skip_block(cfg, refs, blocks_before + j)
        return carry

    lax.fori_loop(0, piece.count, body, jnp.int32(0))
    finish(cfg, refs, piece, start_state(cfg.v_head_dim), 64 * wg if cfg.pipelines == 1 else jnp.int32(0))


def skip_block(cfg: GpuKernelConfig, refs: Refs, block_number):
    """Waits for and releases a block that this warpgroup does not compute: each must see every phase of a barrier."""
    slot = stage_of(cfg, refs, block_number)
    for full, free in ((refs.k_full, refs.k_free), (refs.v_full, refs.v_free)):
        plgpu.barrier_wait(full.at[slot])
        plgpu.barrier_arrive(free.at[slot])


def short_tile(cfg: GpuKernelConfig, refs: Refs, piece: Piece, wg, blocks_before):
    """At most 64 rows: each of N warpgroups computes all rows over every N-th key block; a pipeline, all blocks."""
    alone = cfg.pipelines == 2
    row = row_bounds(cfg, refs, piece, jnp.int32(0))
    own = (cfg.converts_queries or cfg.loads_queries) and not alone
    q_tile, scale = _queries(cfg, refs, piece, wg, queries_of(cfg, refs, piece).at[wg if own else 0], 0)
    block_of, n = piece.blocks(cfg), piece.count

    def step(t, state, masked):
        j = t if alone else cfg.computing * t + wg
        slot, kv0 = stage_of(cfg, refs, blocks_before + j), block_of(j) * cfg.block_kv
        plgpu.barrier_wait(refs.k_full.at[slot])
        dots = _dots(cfg, q_tile, refs.k_tile.at[slot])
        (of_keys,) = _token_scales(cfg, refs, blocks_before + j, token_scales.OF_KEYS)
        dots = token_scales.multiply_per_key(dots, of_keys, 1)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        x, c = logits(cfg, row, dots, kv0, scale, masked)
        of_values = _token_scales(cfg, refs, blocks_before + j, token_scales.LOGS, token_scales.RECIPROCALS)
        p, (acc, m, total) = softmax_step(cfg, x, c, state, *of_values)
        plgpu.barrier_wait(refs.v_full.at[slot])
        if masked and not cfg.converts_tiles:
            zero_unseen_values(cfg, refs.v_tile.at[slot], piece, kv0)
        acc = _add_weighted_values(cfg, acc, weight_operand(cfg, p), refs.v_tile.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        for others in range(1, 1 if alone else cfg.computing):
            when(j + others < n)(lambda others=others: skip_block(cfg, refs, blocks_before + j + others))
        return acc, m, total

    if alone:
        state = loop_over_blocks(cfg, step, full_block_bounds(cfg, piece), _start(cfg))
        finish(cfg, refs, piece, _completed(state), jnp.int32(0), queries_of(cfg, refs, piece).at[0])
        return
    for j in range(cfg.computing - 1):
        when((wg > j) & (n > j))(lambda j=j: skip_block(cfg, refs, blocks_before + j))
    own = [
        lax.div(bound - wg + (cfg.computing - 1), jnp.int32(cfg.computing)) for bound in full_block_bounds(cfg, piece)
    ]
    state = loop_over_blocks(cfg, step, own, _start(cfg))
    _merge_warpgroups(cfg, refs, piece, _completed(state), wg)


def sync_warpgroups(refs: Refs):
    """Waits until all warpgroups that compute are here."""
    plgpu.barrier_arrive(refs.compute_barrier)
    plgpu.barrier_wait(refs.compute_barrier)


def _merge_warpgroups(cfg: GpuKernelConfig, refs: Refs, piece: Piece, state, wg):
    """The other warpgroups pass their states to warpgroup 0 through shared memory, which merges and stores."""

    scratch = (queries_of(cfg, refs, piece), refs.stats)  # the queries are no longer used
    kind = dict(dim=cfg.v_head_dim, q_dim=cfg.head_dim, q_dtype=cfg.dtype)
    sync_warpgroups(refs)

    for other in range(1, cfg.computing):

        @when(wg == other)
        def _(other=other):
            for turn in range(1, cfg.computing):
                if turn == other:
                    rows.put_fragment(*scratch, *state, **kind)
                sync_warpgroups(refs)
                if turn + 1 < cfg.computing or cfg.loads_queries:
                    sync_warpgroups(refs)  # warpgroup 0 has read it

    @when(wg == 0)
    def _():
        acc, m, total = state
        for turn in range(1, cfg.computing):
            sync_warpgroups(refs)
            acc1, m1, total1 = rows.get_fragment(*scratch, **kind)
            top = jnp.maximum(m, m1)
            a, a1 = jnp.exp2(m - top), jnp.exp2(m1 - top)
            acc = acc * across_columns(a, acc.shape) + acc1 * across_columns(a1, acc.shape)
            m, total = top, total * a + total1 * a1
            if turn + 1 < cfg.computing or cfg.loads_queries:
                sync_warpgroups(refs)
        finish(cfg, refs, piece, (acc, m, total), jnp.int32(0))
