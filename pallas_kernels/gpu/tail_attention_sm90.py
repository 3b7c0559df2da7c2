"""Attention of one new token a request inside layer_tail_sm90.py: the launch's first phase, while weights arrive.

    q, k = rotate(q), rotate(k);  pools[slot] = k, v;  a = softmax(scale q K^T) V over the cached keys and the new one

A unit is a token and `together` query heads of one kv head. `plan` cuts each unit's cached keys into equal parts, one a
CTA; the last part has the new token too, straight from its projections, and writes its key and value to the pools.

    compute warpgroup   attend: a part's unnormalised sums, maximum and denominator -> global memory; an arrival
    token warpgroup     load_merged: waits for the heads that its CTA multiplies, adds their parts up, and puts the
                        tokens where wgmma reads them; no CTA waits for a merged row of another

Within a part a key belongs to head_dim / 8 neighbouring lanes, 8 dimensions each. Every such group of lanes keeps its
own maximum, denominator and output of its keys, and they are merged once, at the end.
"""

import math
from typing import TypeVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu import layer_tail_arrivals_sm90 as arrivals
from pallas_kernels.gpu import layer_tail_pairs_sm90 as pairs
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.layer_tail_config import PARTS, SCRATCH, SHARES, THREADS, LayerTailConfig, TailAttention
from pallas_kernels.gpu.stage_ring_sm90 import Ring
from pallas_kernels.gpu.token_share_sm90 import floats, inverse_root, norm_factor, packed, scale_floats
from pallas_kernels.gpu.token_tile_sm90 import TokenTile

TOKEN, UNIT, FIRST, END, HAS_NEW, PART, REQUEST, SLOT, PLAN_COLUMNS = range(9)
"""Columns of a CTA's row of the plan: its token (or -1) and unit of that token; its cached keys, half open; 1 if it has
the new token; the number of the part; the token's request and slot. The last row: LIVE, the tokens that are not
padding, and COUNT, the parts of each unit."""
LIVE, COUNT = 0, 1
LOWEST = -1e30  # a maximum over no key
LOG2E = math.log2(math.e)
_WGMMA = plgpu.Layout.WGMMA
Number = TypeVar("Number", int, jax.Array)


def plan(attention: TailAttention, ctas: int, query_start_loc, seq_lens, slots) -> jax.Array:
    """i32[ctas + 1, 8] of a batch in which each request has at most one token: i32[R+1], i32[R], i32[T]. Traced."""
    units, starts = attention.units, query_start_loc.astype(jnp.int32)
    seq_lens, tokens = seq_lens.astype(jnp.int32), slots.shape[0]
    live = jnp.minimum(starts[-1], tokens)
    count = parts_of(attention, ctas, live, jnp.max(seq_lens))
    me = jnp.arange(ctas, dtype=jnp.int32)
    unit, part = lax.div(me, count), lax.rem(me, count)
    token = lax.div(unit, jnp.int32(units))
    is_used = token < live
    token = jnp.where(is_used, token, 0)
    request = jnp.minimum(jnp.sum(starts[None, 1:] <= token[:, None], axis=1), seq_lens.shape[0] - 1)
    cached = jnp.maximum(seq_lens[request] - 1, 0)
    begin = jnp.zeros_like(cached) if attention.left < 0 else jnp.maximum(cached - attention.left, 0)
    each = cdiv(cached - begin, count)
    first = jnp.minimum(begin + part * each, cached)
    columns = [jnp.where(is_used, token, -1), lax.rem(unit, jnp.int32(units)), first,
               jnp.minimum(first + each, cached), part == count - 1, part, request, slots[token]]  # fmt: skip
    table = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    last = jnp.where(jnp.arange(PLAN_COLUMNS) == LIVE, live, jnp.where(jnp.arange(PLAN_COLUMNS) == COUNT, count, 0))
    return jnp.concatenate([table, last.astype(jnp.int32)[None]])


def most_turns(attention: TailAttention, ctas: int, live: Number, longest: Number) -> Number:
    """Turns of a CTA over its keys, at most: `live` new tokens, of requests of at most `longest` tokens.

    It never falls as one of them grows: upper bounds of both give an upper bound. Of ints an int, also inside jit; of
    i32[] an i32[].
    """
    cached = _visible_keys(attention, longest) - 1  # the new key takes none
    return cdiv(cdiv(cached, parts_of(attention, ctas, live, longest)), attention.keys_a_turn)


def parts_of(attention: TailAttention, ctas: int, live, longest):
    """The parts of each unit: so many that every CTA has work, if each has a key for each group of lanes.

    Arguments and types as in most_turns.
    """
    smaller, larger = _min_max(live, longest)
    even = ctas // (larger(live, 1) * attention.units)
    enough = cdiv(_visible_keys(attention, longest), attention.groups)
    return larger(smaller(smaller(even, enough), PARTS), 1)


def _visible_keys(attention: TailAttention, longest):
    """The most keys that a new token sees."""
    smaller, _ = _min_max(longest)
    return longest if attention.left < 0 else smaller(longest, attention.left + 1)


def _min_max(*numbers):
    """The functions min and max of two of these numbers: of ints they give an int, also inside jit."""
    return (jnp.minimum, jnp.maximum) if any(isinstance(x, jax.Array) for x in numbers) else (min, max)


def part_shapes(cfg: LayerTailConfig) -> tuple:
    """Of the parts' sums f32, and of their (maximum, denominator) f32."""
    n = cfg.rows * cfg.attention.heads * PARTS
    return jax.ShapeDtypeStruct((n, cfg.attention.head_dim), jnp.float32), jax.ShapeDtypeStruct((n, 2), jnp.float32)


def attend(cfg: LayerTailConfig, refs) -> None:
    """The compute warpgroup: this CTA's part."""
    a, cta = cfg.attention, pairs.number(cfg)
    row = [refs.plan[cta, column] for column in range(PLAN_COLUMNS)]

    @when(row[TOKEN] >= 0)
    def _():
        state = _start(cfg, refs, row)

        def turn(i, state):
            return _step(cfg, refs, state, row[FIRST] + i * a.keys_a_turn, row)

        several = lax.div(row[END] - row[FIRST] + (a.keys_a_turn - 1), jnp.int32(a.keys_a_turn))
        state = lax.fori_loop(0, several, turn, state)
        _store_part(cfg, refs, state, row)
        arrivals.arrive(refs.counters, arrivals.attended(lax.div(row[UNIT], jnp.int32(a.chunks))))


class _State:
    """The values of a thread between turns: 8 dimensions of each head's query and output, its maximum and denominator,
    and the pages of the next turn's keys. It is carried as a fragment of so many f32."""

    def __init__(self, attention: TailAttention, q, out, top, total, pages):
        self.attention, self.q, self.out, self.top, self.total, self.pages = attention, q, out, top, total, pages

    @staticmethod
    def shape(a: TailAttention) -> tuple[int, int]:
        values = a.together * 18 + a.unrolled
        return 64, 8 * cdiv(values, 4)

    def fragment(self):
        pages = [ptx.asm_value("mov.b32 $0, $1;", "=f,r", page, pure=True) for page in self.pages]
        values = [*(x for row in (*self.q, *self.out) for x in row), *self.top, *self.total, *pages]
        shape = self.shape(self.attention)
        values += [ptx.f32(0.0)] * (shape[1] // 2 - len(values))
        fragment = rows.empty_fragment(shape, _WGMMA)
        rows.fill(fragment, lambda i: values[2 * i : 2 * i + 2])
        return fragment

    @classmethod
    def of(cls, a: TailAttention, fragment):
        values = iter([rows.pair_element(pair, k) for pair in fragment.registers.flat for k in range(2)])
        take = lambda n: [next(values) for _ in range(n)]
        q, out = ([take(8) for _ in range(a.together)] for _ in range(2))
        top, total = take(a.together), take(a.together)
        pages = [ptx.asm_value("mov.b32 $0, $1;", "=r,f", value, pure=True) for value in take(a.unrolled)]
        return cls(a, q, out, top, total, pages)


def _state_type(a: TailAttention):
    return plgpu.ShapeDtypeStruct(_State.shape(a), jnp.float32, _WGMMA)


def _lanes(a: TailAttention):
    """(the thread's 8 dimensions, the number of its group of lanes)."""
    thread = ptx.thread_index()
    return arith.remui(thread, ptx.i32(a.lanes)), arith.divui(thread, ptx.i32(a.lanes))


def _start(cfg: LayerTailConfig, refs, row):
    """The rotated queries; the state of the new token or of no key; the pages of the first turn. Writes the new key."""
    a = cfg.attention
    squares = refs.row_squares if a.sums else refs.rows
    norms = (refs.q_norm, refs.k_norm) if a.norm_eps is not None else (refs.cos, refs.cos)
    biases = (refs.q_bias, refs.k_bias, refs.v_bias) if a.has_bias else ()
    given = *norms, refs.rows, squares, refs.cos, refs.sin, refs.block_table, refs.k_pool, refs.v_pool, *biases

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * len(given), *(ptx.SCALAR,) * len(row)), return_type=_state_type(a)
    )
    def start(ctx, q_norm, k_norm, projected, squares, cos, sin, block_table, k_pool, v_pool, *rest):
        biases, row = rest[:-PLAN_COLUMNS], [ptx.scalar_value(x) for x in rest[-PLAN_COLUMNS:]]
        at, group = _lanes(a)
        kv_head, chunk = arith.divui(row[UNIT], ptx.i32(a.chunks)), arith.remui(row[UNIT], ptx.i32(a.chunks))
        pages = _pages(a, block_table, row, arith.addi(row[FIRST], group))
        is_low = ptx.less(at, ptx.i32(a.lanes // 2))
        head0 = ptx.mul(row[UNIT], a.together)
        heads = [ptx.add(head0, ptx.i32(i)) for i in range(a.together)]
        heads += [ptx.add(kv_head, ptx.i32(n)) for n in (a.heads, a.heads + a.kv_heads)]
        *turning, v = _projections(cfg, projected, squares, row[TOKEN], heads, at)
        if a.has_bias:
            *turning, v = _with_biases(a, [*turning, v], biases, heads, at)
        if a.norm_eps is not None:
            scales = [_norm_scale(a, ref, at) for ref in (q_norm, k_norm)]
            turning = [_normed(a, words, scales[n == a.together]) for n, words in enumerate(turning)]
        pairs = [(own, [ptx.shuffle_xor_word(word, a.lanes // 2) for word in own]) for own in turning]
        place = ptx.add(ptx.mul(row[TOKEN], a.lanes // 2), arith.remui(at, ptx.i32(a.lanes // 2)))
        place = arith.muli(ptx.to_i64(place), ptx.i64(32))
        cos, sin = (ptx.load_floats(arith.addi(ptx.pointer(ref, 0), place)) for ref in (cos, sin))
        sin = [arith.select(is_low, arith.negf(x), x) for x in sin]
        *q, k = [_rotated(own, other, cos, sin) for own, other in pairs]
        q = [[arith.mulf(x, ptx.f32(a.scale * LOG2E)) for x in floats(words)] for words in q]
        score = [_dot(a, head, floats(k)) for head in q]
        has_new = ptx.equal(row[HAS_NEW], ptx.i32(1))
        mine = arith.andi(has_new, ptx.equal(group, ptx.i32(0)))
        choose = lambda x, otherwise: arith.select(mine, x, ptx.f32(otherwise))
        out = [choose(x, 0.0) for x in floats(v)]
        usable = ptx.less_unsigned(row[SLOT], ptx.i32(a.blocks * a.page))
        writes = arith.andi(arith.andi(mine, usable), ptx.equal(chunk, ptx.i32(0)))
        block, offset = arith.divui(row[SLOT], ptx.i32(a.page)), arith.remui(row[SLOT], ptx.i32(a.page))
        target = _pool_place(a, block, offset, kv_head, at)
        for pool, new in ((k_pool, k), (v_pool, v)):
            ptx.store_if(arith.addi(ptx.pointer(pool, 0), target), ptx.bool_to_i32(writes), *new)
        total = [choose(ptx.f32(1.0), 0.0) for _ in q]
        return _State(a, q, [out] * a.together, [choose(x, LOWEST) for x in score], total, pages).fragment()

    return start(*given, *row)


def _projections(cfg: LayerTailConfig, projected, squares, token, heads, at):
    """4 words, the thread's 8 dimensions, of each head of a token's projections."""
    a, base = cfg.attention, ptx.pointer(projected, 0)
    places = [ptx.add(ptx.mul(head, a.lanes), at) for head in heads]
    if not a.sums:
        start = arith.addi(base, arith.muli(ptx.to_i64(token), ptx.i64(2 * a.width)))
        return [ptx.load_words(arith.addi(start, arith.muli(ptx.to_i64(at), ptx.i64(16)))) for at in places]
    place = arith.addi(ptx.pointer(squares, 0), arith.muli(ptx.to_i64(token), ptx.i64(4 * SHARES)))
    factor = norm_factor(place, cfg.hidden, a.shares, a.eps)
    start, found = arith.addi(base, arith.muli(ptx.to_i64(token), ptx.i64(4 * a.width))), []
    loaded = [
        [
            ptx.load_floats(
                ptx.add(start, ptx.i64(4 * cfg.rows8 * a.width * n), arith.muli(ptx.to_i64(at), ptx.i64(32)))
            )
            for n in range(a.sums)
        ]
        for at in places
    ]
    for total, *more in loaded:
        for other in more:
            total = [arith.addf(x, y) for x, y in zip(total, other, strict=True)]
        total = [arith.mulf(x, factor) for x in total]
        found.append(packed(total))
    return found


def _with_biases(a: TailAttention, words, biases, heads, at):
    """The words of each head plus its bias; rounded to bf16. biases: of q, k and v."""
    first_heads, found = [0] * a.together + [a.heads, a.heads + a.kv_heads], []
    for own, bias, head, first in zip(words, [biases[0]] * a.together + [*biases[1:]], heads, first_heads, strict=True):
        place = ptx.add(ptx.mul(arith.subi(head, ptx.i32(first)), a.lanes), at)
        bias = ptx.load_words(arith.addi(ptx.pointer(bias, 0), arith.muli(ptx.to_i64(place), ptx.i64(16))))
        total = [arith.addf(x, y) for x, y in zip(floats(own), floats(bias), strict=True)]
        found.append(packed(total))
    return found


def _norm_scale(a: TailAttention, scale, at):
    """The scale of a norm, of the thread's 8 dimensions."""
    words = ptx.load_words(arith.addi(ptx.pointer(scale, 0), arith.muli(ptx.to_i64(at), ptx.i64(16))))
    return scale_floats(words, a.norm_one_plus)


def _normed(a: TailAttention, words, scale):
    """The words of a head over the root of its mean square, times the scale; rounded to bf16."""
    x = floats(words)
    factor = inverse_root(_dot(a, x, x), a.head_dim, a.norm_eps)
    x = [arith.mulf(arith.mulf(y, factor), s) for y, s in zip(x, scale, strict=True)]
    return packed(x)


def _step(cfg: LayerTailConfig, refs, state, first, row):
    """The state after `unrolled` more keys for each group of lanes, from key `first` on."""
    a = cfg.attention
    given = refs.block_table, refs.k_pool, refs.v_pool

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * 3, _WGMMA, *(ptx.SCALAR,) * (1 + len(row))), return_type=_state_type(a)
    )
    def step(ctx, block_table, k_pool, v_pool, state, first, *row):
        state, row = _State.of(a, state), [ptx.scalar_value(x) for x in row]
        at, group = _lanes(a)
        key, kv_head = arith.addi(ptx.scalar_value(first), group), arith.divui(row[UNIT], ptx.i32(a.chunks))
        keys = [ptx.add(key, ptx.i32(i * a.groups)) for i in range(a.unrolled)]
        seen = [ptx.less(key, row[END]) for key in keys]
        loaded = []
        for key, ok, page in zip(keys, seen, state.pages, strict=True):
            place = _pool_place(a, page, arith.remui(key, ptx.i32(a.page)), kv_head, at)
            loaded.append([ptx.load_words(arith.addi(ptx.pointer(pool, 0), place), ok) for pool in (k_pool, v_pool)])
        pages = _pages(a, block_table, row, ptx.add(key, ptx.i32(a.groups)))
        values = [floats(v) for _, v in loaded]
        out, top, total = [], [], []
        for i in range(a.together):
            scores = [_dot(a, state.q[i], floats(k)) for k, _ in loaded]
            scores = [arith.select(ok, x, ptx.f32(LOWEST)) for ok, x in zip(seen, scores, strict=True)]
            most = state.top[i]
            for score in scores:
                most = ptx.fmax(most, score)
            factor = ptx.exp2(arith.subf(state.top[i], most))
            weights = [ptx.exp2(arith.subf(score, most)) for score in scores]
            weights = [arith.select(ok, w, ptx.f32(0.0)) for ok, w in zip(seen, weights, strict=True)]
            sums = [arith.mulf(x, factor) for x in (*state.out[i], state.total[i])]
            for weight, v in zip(weights, values, strict=True):
                sums = [ptx.fma(weight, x, y) for x, y in zip((*v, ptx.f32(1.0)), sums, strict=True)]
            out.append(sums[:-1])
            top.append(most)
            total.append(sums[-1])
        return _State(a, state.q, out, top, total, pages).fragment()

    return step(*given, state, first, *row)


def _pages(a: TailAttention, block_table, row, key):
    """The block of each key that this thread reads in the turn in which `key` is its first; 0 past the part's end."""
    found, base = [], ptx.pointer(block_table, 0)
    start = arith.muli(ptx.to_i64(row[REQUEST]), ptx.i64(a.columns))
    for i in range(a.unrolled):
        number = ptx.add(key, ptx.i32(i * a.groups))
        place = arith.addi(start, ptx.to_i64(arith.divui(number, ptx.i32(a.page))))
        found.append(
            ptx.load_word(arith.addi(base, arith.muli(place, ptx.i64(4))), ptx.less(number, row[END]))
        )  # fmt: skip
    return found


def _pool_place(a: TailAttention, block, offset, head, at):
    """Bytes before the thread's 8 dimensions of a key or value in its pool."""
    row = ptx.pool_row(block, offset, head, heads=a.kv_heads, page=a.page, heads_first=a.heads_first)
    return arith.muli(arith.addi(arith.muli(row, ptx.i64(a.lanes)), ptx.to_i64(at)), ptx.i64(16))


def _rotated(own, other, cos, sin):
    """The words of 8 dimensions turned: own cos + other sin, in f32, rounded once to bf16."""
    turned = [ptx.fma(x, c, arith.mulf(y, s)) for x, y, c, s in zip(floats(own), floats(other), cos, sin, strict=True)]
    return packed(turned)


def _dot(a: TailAttention, x, y):
    """The sum of x y over the lanes of the thread's group."""
    total = arith.mulf(x[0], y[0])
    for u, v in zip(x[1:], y[1:], strict=True):
        total = ptx.fma(u, v, total)
    distance = a.lanes // 2
    while distance:
        total, distance = arith.addf(total, ptx.shuffle_xor(total, distance)), distance // 2
    return total


def _merged(states):
    """(out, top, total) of several states with a maximum each."""
    most = states[0][1]
    for _, top, _ in states[1:]:
        most = ptx.fmax(most, top)
    out, total = None, None
    for own, top, count in states:
        weight = ptx.exp2(arith.subf(top, most))
        own, count = [arith.mulf(x, weight) for x in own], arith.mulf(count, weight)
        out = own if out is None else [arith.addf(x, y) for x, y in zip(out, own, strict=True)]
        total = count if total is None else arith.addf(total, count)
    return out, most, total


def _store_part(cfg: LayerTailConfig, refs, state, row):
    """Merges the groups of lanes, of a warp by shuffles and of the four warps in shared memory; stores the part."""
    a = cfg.attention
    given = refs.scratch, refs.parts_of_heads, refs.part_stats

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, _WGMMA, *(ptx.SCALAR,) * len(row)))
    def store(ctx, states, parts, stats, state, *row):
        state, row = _State.of(a, state), [ptx.scalar_value(x) for x in row]
        at, _ = _lanes(a)
        _, _, lane, warp = ptx.lane_position()
        base = ptx.add(ptx.pointer(states, 3), ptx.i32(4 * SCRATCH))
        first = ptx.bool_to_i32(ptx.less(lane, ptx.i32(a.lanes)))
        writes_stats = ptx.bool_to_i32(ptx.equal(lane, ptx.i32(0)))
        size = (a.head_dim + 4) * 4  # bytes of a head: its output, maximum and denominator
        for i in range(a.together):
            own, distance = (state.out[i], state.top[i], state.total[i]), a.lanes
            while distance < 32:
                told = [ptx.shuffle_xor(x, distance) for x in (*own[0], *own[1:])]
                own, distance = _merged([own, (told[:8], *told[8:])]), 2 * distance
            place = ptx.add(base, ptx.mul(warp, a.together * size), ptx.i32(i * size))
            target = ptx.add(place, ptx.mul(at, 32))
            for j in range(2):
                four = own[0][4 * j : 4 * j + 4]
                ptx.store_if(target, first, *four, kind="f32", space="shared", offset=16 * j)
            ptx.store_if(place, writes_stats, *own[1:], kind="f32", space="shared", offset=4 * a.head_dim)
        ptx.asm(f"bar.sync 10, {THREADS};", "")
        fours = a.head_dim // 4
        four = arith.remui(ptx.thread_index(), ptx.i32(a.together * fours))
        head, column = arith.divui(four, ptx.i32(fours)), arith.remui(four, ptx.i32(fours))
        warps = []
        for n in range(4):
            place = ptx.add(base, ptx.mul(head, size), ptx.i32(n * a.together * size))
            text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            out = ptx.asm_values(text, "=f,=f,=f,=f,r", 4, ptx.add(place, ptx.mul(column, 16)))
            text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{4 * a.head_dim}];"
            warps.append((out, *ptx.asm_values(text, "=f,=f,r", 2, place)))
        out, top, total = _merged(warps)
        number = _part_number(a, row[TOKEN], ptx.add(ptx.mul(row[UNIT], a.together), head), row[PART])
        target = arith.addi(arith.muli(number, ptx.i64(fours)), ptx.to_i64(column))
        target = arith.addi(ptx.pointer(parts, 0), arith.muli(target, ptx.i64(16)))
        is_mine = ptx.less(ptx.thread_index(), ptx.i32(a.together * fours))
        ptx.store_if(target, ptx.bool_to_i32(is_mine), *out, kind="f32")
        target = arith.addi(ptx.pointer(stats, 0), arith.muli(number, ptx.i64(8)))
        is_first = arith.andi(is_mine, ptx.equal(column, ptx.i32(0)))
        ptx.store_if(target, ptx.bool_to_i32(is_first), top, total, kind="f32")

    store(*given, state, *row)


def _part_number(a: TailAttention, token, head, part):
    """i64 row of parts_of_heads and part_stats."""
    row = ptx.add(ptx.mul(token, a.heads), head)
    return arith.addi(arith.muli(ptx.to_i64(row), ptx.i64(PARTS)), ptx.to_i64(part))


def load_merged(cfg: LayerTailConfig, refs, ring: Ring, share, before) -> None:
    """The token warpgroup: the merged tokens of this CTA's share of the output projection's inner dimension."""
    live, count = refs.plan[cfg.ctas, LIVE], refs.plan[cfg.ctas, COUNT]
    tile = TokenTile(cfg, 0)

    def fill(number, column):
        await_heads(cfg, tile, refs.counters, column, live * count)

        def of_token(t, carry):
            merge_token(cfg, tile, refs, number, column, t, count)
            return carry

        lax.fori_loop(0, live, of_token, jnp.int32(0))

    tile.each_turn(refs, ring, share, before, fill)


def await_heads(cfg: LayerTailConfig, tile: TokenTile, counters, column, count):
    """Each thread waits for the parts of the kv head of its columns: count times chunks arrivals."""
    a = cfg.attention

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(ptx.SCALAR,) * 2))
    def wait(ctx, counters, column, count):
        column = ptx.add(ptx.scalar_value(column), ptx.mul(tile.four()[0], 4))
        head = arith.divui(column, ptx.i32(a.head_dim * a.group))
        arrivals.every_thread_waits(counters, arrivals.attended(head), ptx.mul(ptx.scalar_value(count), a.chunks))

    wait(counters, column, count)


def merge_token(cfg: LayerTailConfig, tile: TokenTile, refs, number, column, token, count):
    """The thread's 4 columns of a token: the parts' sums, over their denominators."""
    a = cfg.attention
    given = refs.parts_of_heads, refs.part_stats

    @plgpu.inline_mgpu(arg_types=(tile.type, *(plgpu.RefType(),) * 2, *(ptx.SCALAR,) * 4))
    def merge(ctx, target, parts, stats, number, column, token, count):
        number, column, token, count = (ptx.scalar_value(x) for x in (number, column, token, count))
        column = ptx.add(column, ptx.mul(tile.four()[0], 4))
        head, inside = arith.divui(column, ptx.i32(a.head_dim)), arith.remui(column, ptx.i32(a.head_dim))
        first = _part_number(a, token, head, ptx.i32(0))
        stats = arith.addi(ptx.pointer(stats, 0), arith.muli(first, ptx.i64(8)))
        place = arith.addi(arith.muli(first, ptx.i64(a.head_dim)), ptx.to_i64(inside))
        place, states, tops = arith.addi(ptx.pointer(parts, 0), arith.muli(place, ptx.i64(4))), [], []
        there = [ptx.less(ptx.i32(part), count) for part in range(PARTS)]
        for part in range(0, PARTS, 2):
            tops += ptx.load_now(arith.addi(stats, ptx.i64(8 * part)), there[part])
        for part in range(PARTS):
            sums = ptx.load_now(arith.addi(place, ptx.i64(4 * a.head_dim * part)), there[part])
            top = arith.select(there[part], tops[2 * part], ptx.f32(LOWEST))
            states.append((sums, top, arith.select(there[part], tops[2 * part + 1], ptx.f32(0.0))))
        out, _, total = _merged(states)
        out = [ptx.divide(x, total) for x in out]
        tile.put(target, number, token, packed(out))

    merge(refs.x_tile, *given, number, column, token, count)
