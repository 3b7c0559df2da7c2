"""The arithmetic of one tile of queries: initial state, one block of keys, final output.

Logits are in base 2 (times log2(e)), since the chip's exponential unit computes exp2.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.algebra import mask, softmax
from pallas_kernels.algebra.logits import shape_logits
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, PACK, TpuKernelConfig, largest_divisor
from pallas_kernels.tpu.copies import Buffers, TileItem
from pallas_kernels.tpu.row_order import output_order, query_order

LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)  # the maximum of a row that has seen no key: -inf - LOWEST is -inf


class KeySlice(NamedTuple):
    """The keys of one step: a part, several parts or a whole block, in one half of the double buffer."""

    side: Any  # i32[]
    page: Any  # i32[] first page
    pages: int
    first: Any  # i32[] index of the first key in its request; with keys on several ranks, among those of this rank
    masked: bool  # False: every row sees every key


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """What the steps of one tile share."""

    c: TpuKernelConfig
    buf: Buffers
    columns: Any  # f32[K rows C] in VMEM, or None
    scales: Any  # f32[2 K] in SMEM
    item: TileItem
    half: Any  # i32[] half of the double buffers of queries and outputs

    def start(self):
        """Puts the queries into the order of rows, and sets the state of every row to that of no key."""
        if not self.c.in_place:
            tokens = self.buf.q.at[self.half]
            query_order(self.c).to_rows(tokens, self.buf.q_words, self.buf.q_rows, self.item.tokens)

        def fresh(heads, first, rows):
            for head in heads:
                if self.c.has_half_packs:  # once a tile: half a pack is not read again in each block
                    place = self._rows_of(self._half_pack_of(head))
                    self.buf.q_half_packs[head, :rows] = self.buf.q[self.half, 0, place]
                at = (head, pl.ds(first, rows))
                self.buf.m[at] = jnp.full((rows, LANES), LOWEST, jnp.float32)
                self.buf.l[at] = jnp.zeros((rows, LANES), jnp.float32)
                self.buf.acc[at] = jnp.zeros((rows, self.c.acc_dim), jnp.float32)

        self._each(fresh)

    def add_block(self, side, first_key):
        """Adds the keys of one half of the buffer, the first of which has index first_key in its request."""
        self._clear_outside(side, first_key)
        self._few_or_chunks(
            lambda: self._add_to_few(side, first_key), lambda first: self._add_to_chunk(side, first_key, first)
        )

    def _clear_outside(self, side, first_key):
        """Sets the values outside the tile's range to 0 in the parts that it touches: what lies there may be NaN.

        Keys too, where they lie side by side: a key's products include 0 times its neighbours.
        """
        c, item = self.c, self.item
        values = self.buf.k if self.buf.v is None else self.buf.v
        pools = [values] if c.beside == 1 else [self.buf.k, self.buf.v]
        start, stop = (lax.clamp(0, key - first_key, c.block_keys) for key in (item.kv_start, item.kv_end))

        def page(j, _):
            at = first_key + j * c.page_size + self._keys_of_page()
            for pool in pools:
                x = pool[side, j]
                pool[side, j] = jnp.where((at >= item.kv_start) & (at < item.kv_end), x, jnp.zeros_like(x))
            return ()

        lax.fori_loop(_down(start, c.part_keys) * c.part_pages, _up(start, c.page_size), page, ())
        lax.fori_loop(_down(stop, c.page_size), _up(stop, c.part_keys) * c.part_pages, page, ())

    def _keys_of_page(self):
        """i32[1 rows 1] or [1 rows 128]: the key of each number of a page of values."""
        c = self.c
        rows, lanes = c.page_dims(c.v_head_dim)
        if c.beside == 1:
            return lax.broadcasted_iota(jnp.int32, (1, rows, 1), 1)
        row, lane = (lax.broadcasted_iota(jnp.int32, (1, rows, lanes), axis) for axis in (1, 2))
        return row * c.beside + self._group_of(lane)

    def _group_of(self, lane):
        """lane // D, where D is a power of two."""
        return lane >> (self.c.head_dim.bit_length() - 1)

    def _keys_of_columns(self, count: int):
        """i32[1 count]: which key of a part each column of its logits is. Groups of lanes follow one another."""
        column = lax.broadcasted_iota(jnp.int32, (1, count), 1)
        if self.c.beside == 1:
            return column
        group = lax.div(column, jnp.int32(count // self.c.beside))
        return (column - group * (count // self.c.beside)) * self.c.beside + group

    def _add_to_few(self, side, first_key):
        """Where every row sees every key, all at once without a mask; elsewhere only the parts that some row sees."""
        c, item = self.c, self.item
        whole = (first_key >= item.full_start) & (first_key + c.block_keys <= item.full_end)

        def add(keys: KeySlice):
            _heads(c, c.short_heads, lambda heads: self._step(keys, heads, 0, c.few_rows))

        def parts():
            def part(j, _):
                add(KeySlice(side, j * c.part_pages, c.part_pages, first_key + j * c.part_keys, True))
                return ()

            start, stop = (lax.clamp(0, key - first_key, c.block_keys) for key in (item.kv_start, item.kv_end))
            lax.fori_loop(_down(start, c.part_keys), _up(stop, c.part_keys), part, ())

        lax.cond(whole, lambda: add(KeySlice(side, 0, c.block_pages, first_key, False)), parts)

    def _add_to_chunk(self, side, first_key, first):
        """Only the parts that some row of the chunk sees. Those that every row sees need no mask: several at once."""
        c = self.c
        seen, by_all = self._ranges(first)
        clamped = lambda key: lax.clamp(0, key - first_key, c.block_keys)
        begin, end = _down(clamped(seen[0]), c.part_keys), _up(clamped(seen[1]), c.part_keys)
        full = lax.clamp(begin, _up(clamped(by_all[0]), c.part_keys), end)
        full_end = lax.clamp(full, _down(clamped(by_all[1]), c.part_keys), end)
        steps = lax.div(full_end - full, c.step_parts)

        def add(part, parts: int, masked: bool):
            keys = KeySlice(side, part * c.part_pages, parts * c.part_pages, first_key + part * c.part_keys, masked)
            _heads(c, c.long_heads, lambda heads: self._staged_step(keys, heads, first, c.chunk_rows))
            return ()

        def edge(j, _):
            return add(jnp.where(j < full - begin, begin + j, full_end + j - (full - begin)), 1, True)

        lax.fori_loop(0, steps, lambda j, _: add(full + j * c.step_parts, c.step_parts, False), ())
        if c.step_parts > 1:
            lax.fori_loop(full + steps * c.step_parts, full_end, lambda j, _: add(j, 1, False), ())
        lax.fori_loop(0, full - begin + end - full_end, edge, ())

    def _ranges(self, first):
        """Positions, half open: the keys that some row of the chunk sees, and those that every row sees."""
        c, item = self.c, self.item
        if c.mask.chunk or c.has_ranges:  # the tile's, which are known: those of a row take a division, or a copy
            return (item.kv_start, item.kv_end), (item.full_start, item.full_end)
        causal = (item.causal != 0) if c.per_request_causal else None
        q_first, q_last = (item.q_first + _token_of(c, row) for row in (first, first + c.chunk_rows - 1))
        if c.mask.mask_fn is not None:
            return mask.key_range(c.mask, q_first, q_last, item.kv_end, causal), (item.full_start, item.full_end)
        start, end = (mask.key_range(c.mask, q, q, item.kv_end, causal)[i] for i, q in enumerate((q_last, q_first)))
        if c.qq_bias:
            end = jnp.minimum(end, item.context)
        return mask.key_range(c.mask, q_first, q_last, item.kv_end, causal), (start, end)

    def finish(self):
        """Writes the output and the lse of the state; lane k of the lse is kv head k."""
        if self.c.has_half_packs:
            return _heads(self.c, self.c.short_heads, self._finish_half_packs)

        def end(heads, first, rows):
            lane = lax.broadcasted_iota(jnp.int32, (rows, self.c.lse_lanes), 1)
            lses = jnp.zeros((rows, self.c.lse_lanes), jnp.float32)
            for head in heads:
                out, lse = self._finished(head, first, rows)
                lses = jnp.where(lane == head, lse[:, None], lses)
                if self.c.in_place:
                    out = out.astype(self.buf.out.dtype).reshape(-1, self.c.group, out.shape[1])
                    self.buf.out[self.half, *self._tokens_of(head, first, rows)] = out
                else:
                    output_order(self.c).write(self.buf.out_rows, head, first, out)
            self._keep_lse(lane, heads, lses, first, rows)

        self._each(end)
        if not self.c.in_place:
            tokens = self.buf.out.at[self.half]
            output_order(self.c).to_tokens(self.buf.out_rows, self.buf.out_words, tokens, self.item.tokens)

    def _finish_half_packs(self, heads):
        """The same where several heads share half a pack; lane k of the lse is half pack k."""
        c = self.c
        rows, half_packs = c.few_rows, []
        shape, row = (rows, c.lse_lanes), lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        lane, lses = lax.broadcasted_iota(jnp.int32, shape, 1), jnp.zeros(shape, jnp.float32)
        for i in range(0, len(heads), c.heads_of_half_pack):
            half_pack, total = self._half_pack_of(heads[i]), None
            half_packs.append(half_pack)
            for j, head in enumerate(heads[i : i + c.heads_of_half_pack]):
                out, lse = self._finished(head, 0, rows)
                mine = (row >= j * c.group) & (row < (j + 1) * c.group)
                total = out if total is None else jnp.where(mine, out, total)
                lses = jnp.where((lane == half_pack) & mine, lse[:, None], lses)
            assert total is not None
            self.buf.out[self.half, 0, self._rows_of(half_pack)] = total.astype(self.buf.out.dtype)
        self._keep_lse(lane, half_packs, lses, 0, rows)

    def _finished(self, head, first, rows: int):
        """(out f32[rows V], lse f32[rows]) of a head's state."""
        at = (head, pl.ds(first, rows))
        m, l = self.buf.m[at][:, :1], jnp.sum(self.buf.l[at], -1, keepdims=True)
        m = jnp.where(m == LOWEST, softmax.NEG_INF, m * (1 / LOG2E))
        sink = self._column("sink", head, first, rows)
        out, lse = softmax.finish(m, l, self._whole_sum(self.buf.acc[at]), sink)
        return out * self.scales[self.c.num_kv_heads + head], lse

    def _half_pack_of(self, head):
        """The number of the half pack that has a kv head's query heads."""
        return head // self.c.heads_of_half_pack if self.c.heads_of_half_pack > 1 else head

    def _rows_of(self, half_pack):
        """The rows of a half pack in [H D]."""
        rows = self.c.few_rows
        return pl.ds(half_pack * rows if isinstance(half_pack, int) else pl.multiple_of(half_pack * rows, rows), rows)

    def _tokens_of(self, head, first, rows: int):
        """Where rows of a kv head are in [tokens H D], in place."""
        group = self.c.group
        heads = head * group if isinstance(head, int) else pl.multiple_of(head * group, PACK)
        return pl.ds(lax.div(jnp.int32(first), jnp.int32(group)), rows // group), pl.ds(heads, group)

    def _whole_sum(self, acc):
        """f32[rows V]: the sum over groups of lanes."""
        dim = self.c.v_head_dim
        return acc if self.c.beside == 1 else sum(acc[:, i * dim : (i + 1) * dim] for i in range(self.c.beside))

    def _keep_lse(self, lane, heads, lses, first, rows):
        """Writes the lanes of these heads and keeps the others."""
        if rows < PACK:
            at, shape = (self.half, 0, slice(0, rows)), lses.shape
        else:
            at, shape = (self.half, _packs(first, rows)), (rows // PACK, PACK, lses.shape[1])
        mine = (lane >= heads[0]) & (lane <= heads[-1])
        kept = self.buf.lse[at].reshape(lses.shape)
        self.buf.lse[at] = jnp.where(mine, lses, kept).reshape(shape)

    def _each(self, do):
        """do(heads, first row, rows) over all heads and live rows."""
        c = self.c
        self._few_or_chunks(
            lambda: _heads(c, c.short_heads, lambda heads: do(heads, 0, c.few_rows)),
            lambda first: _heads(c, 1, lambda heads: do(heads, first, c.chunk_rows)),
        )

    def _few_or_chunks(self, few, chunk):
        """few() if the tile has few rows, else chunk(first row) for each of its live chunks."""
        c, live = self.c, self.item.tokens * self.c.group
        if not c.long_tiles:
            return few()

        def chunks():
            def one(i, _):
                chunk(pl.multiple_of(i * c.chunk_rows, c.chunk_rows))
                return ()

            lax.fori_loop(0, lax.div(live + c.chunk_rows - 1, c.chunk_rows), one, ())

        return lax.cond(live <= c.few_rows, few, chunks)

    def _step(self, keys: KeySlice, heads, first, rows: int):
        """One step of the recurrence for some heads and few rows.

        The dots of all heads are computed before the first softmax, so that the compiler can overlap one head's
        products with another's exponentials.
        """
        at = [(head, pl.ds(first, rows)) for head in heads]
        states = [(self.buf.m[x], self.buf.l[x], self.buf.acc[x]) for x in at]
        dots = [self._dots(keys, head, first, rows) for head in heads]
        weights = [
            self._weights(state, keys, head, first, rows, x) for state, head, x in zip(states, heads, dots, strict=True)
        ]
        for x, weighed, head in zip(at, weights, heads, strict=True):
            self.buf.m[x], self.buf.l[x], self.buf.acc[x] = self._sum_values(weighed, keys, head)

    def _staged_step(self, keys: KeySlice, heads, first, rows: int):
        """The same for many rows, through VMEM: few logits and weights are in registers at a time.

        A turn computes the logits of one head, the weights of the head before it, and the sum of values of the head
        values_behind before that; of the first early_heads of a step the sum comes before the logits. Each head has a
        place of its own for what it stores: where two heads shared one, the loads of the first had to come before the
        stores of the second, and what was loaded early spilled.
        """
        count, weights = keys.pages * self.c.page_size, {}
        early = self.c.early_heads if keys.pages > self.c.part_pages else 0

        def add_values(k):
            at = (heads[k], pl.ds(first, rows))
            stored = [self.buf.p[k, :rows, c] for c in self._stored_columns(count)]
            new = self._weighed_values(jnp.concatenate(stored + weights.pop(k), axis=1), keys, heads[k])
            self.buf.acc[at] = self.buf.acc[at] * _lanes(self.buf.alpha[k, :rows], self.c.acc_dim) + new

        for turn in range(len(heads) + 1 + self.c.values_behind):
            i, j, k = turn, turn - 1, turn - 1 - self.c.values_behind
            if 0 <= k < early:
                add_values(k)
            if i < len(heads):
                self._stage_logits(keys, heads[i], first, rows, i)
            if 0 <= j < len(heads):
                weights[j] = self._stage_weights(keys, heads[j], first, rows, j)
            if early <= k < len(heads):
                add_values(k)

    def _stage_logits(self, keys: KeySlice, head, first, rows: int, i: int):
        """Stores the masked logits of a head in place i, and their maxima by lane."""
        logits = self._masked_logits(self._dots(keys, head, first, rows), keys, head, first, rows)
        columns = [logits[:, c] for c in self._columns(logits.shape[1])]
        for c, x in zip(self._columns(logits.shape[1]), columns, strict=True):
            self.buf.s[i, :rows, c] = x
        top = functools.reduce(jnp.maximum, columns)
        self.buf.top[i, :rows] = top if top.shape[1] == LANES else _lanes(jnp.max(top, -1, keepdims=True), LANES)

    def _stage_weights(self, keys: KeySlice, head, first, rows: int, i: int):
        """Stores the weights of the logits in place i, and the factor of the sum of values before these keys.

        Returns the columns of weights that are not stored.
        """
        at, found = (head, pl.ds(first, rows)), []
        before = self.buf.m[at]
        m = jnp.maximum(before, jnp.max(self.buf.top[i, :rows], axis=-1, keepdims=True))
        alpha, total = jnp.exp2(before - m), 0.0
        count = keys.pages * self.c.page_size
        for c in self._columns(count):
            p = jnp.exp2(self.buf.s[i, :rows, c] - _lanes(m, c.stop - c.start))
            total += _sum_by_lane(p)
            if self.c.token_scales:
                p = p * self._token_scales(self.buf.v_token, keys, head)[:, c]
            p = p.astype(self.c.compute_dtype)
            if c in self._stored_columns(count):
                self.buf.p[i, :rows, c] = p
            else:
                found.append(p)
        self.buf.m[at], self.buf.l[at] = m, self.buf.l[at] * alpha + total
        self.buf.alpha[i, :rows] = alpha
        return found

    def _stored_columns(self, count: int):
        """The columns of weights that are stored: half of them where the product with values follows at once.

        v5e and v5p have one store slot: it is full if all are stored, and registers spill if none is.
        """
        columns = self._columns(count)
        return columns if self.c.values_behind else columns[: len(columns) // 2]

    def _columns(self, count: int):
        """Slices of 128 keys; one slice where the keys are no multiple."""
        width = LANES if count % LANES == 0 else count
        return [slice(i, i + width) for i in range(0, count, width)]

    def _dots(self, keys: KeySlice, head, first, rows: int):
        """f32[rows keys] of a head."""
        q = self._queries(head, first, rows).astype(self.c.compute_dtype)
        k = self._stored(self.buf.k, keys, head)
        if self.c.beside > 1:
            return jnp.concatenate([_dot(x, k, 1) for x in self._by_group(q)], axis=1)
        if self.c.latent != "split":
            return _dot(q, k, 1)
        latent = self.c.v_head_dim
        return _dot(q[:, :latent], self._stored(self.buf.v, keys, head), 1) + _dot(q[:, latent:], k, 1)

    def _by_group(self, x):
        """x [rows 128], once for each group of lanes, with 0 in the others; chosen as words, which are half as many."""
        words = x if x.dtype == jnp.float32 else pltpu.bitcast(x, jnp.uint32)
        group = self._group_of(lax.broadcasted_iota(jnp.int32, words.shape, 1))
        chosen = [jnp.where(group == i, words, jnp.zeros_like(words)) for i in range(self.c.beside)]
        return chosen if words is x else [pltpu.bitcast(y, x.dtype) for y in chosen]

    def _stored(self, buffer, keys: KeySlice, head):
        """[keys dim] of a head, in the dtype of the products."""
        rows = buffer[keys.side, pl.ds(keys.page, keys.pages), head]
        return _cast(rows.reshape(-1, rows.shape[-1]), self.c)

    def _masked_logits(self, dots, keys: KeySlice, head, first, rows: int):
        """Base-2 logits; -inf where a row does not see a key."""
        c = self.c
        where = self._coordinates(keys, head, first, dots.shape)
        if c.token_scales:
            dots = dots * self._token_scales(self.buf.k_token, keys, head)
        logits = self._logits(dots, keys, head, first, rows, where)
        if keys.masked:
            seen = self._seen_by_range(keys, first, rows, where) if c.has_ranges else self._seen_by_rule(where)
            logits = jnp.where(seen, logits, softmax.NEG_INF)
        return logits

    def _weights(self, state, keys: KeySlice, head, first, rows: int, dots):
        """(m, l, acc, alpha, p) of a head after these keys, where acc still has to be updated with alpha and p."""
        c = self.c
        logits = self._masked_logits(dots, keys, head, first, rows)
        m, l, acc = state  # noqa: E741
        m, before = jnp.maximum(m, jnp.max(logits, axis=-1, keepdims=True)), m
        alpha, p = jnp.exp2(before - m), jnp.exp2(logits - _lanes(m, logits.shape[1]))
        l = l * alpha + _sum_by_lane(p)  # noqa: E741
        if c.token_scales:
            p = p * self._token_scales(self.buf.v_token, keys, head)
        return m, l, acc, alpha, p.astype(c.compute_dtype)

    def _seen_by_rule(self, where):
        """Which keys the mask's rule shows."""
        c, item, (query_head, q_pos, kv_pos) = self.c, self.item, where
        causal = (item.causal != 0) if c.per_request_causal else None
        seen = mask.visible(c.mask, query_head, q_pos, kv_pos, causal)
        if causal is not None or not c.mask.causal:  # otherwise `visible` hides every key past the range
            seen = seen & (kv_pos < item.kv_end)
        return seen

    def _seen_by_range(self, keys: KeySlice, first, rows: int, where):
        """Which keys are in the range of each row, and not hidden by mask_fn."""
        bounds = self._given_by_row(self.buf.ranges, first, rows)
        at = keys.first + self._keys_of_columns(keys.pages * self.c.page_size)
        seen = (at >= bounds[:, 0:1]) & (at < bounds[:, 1:2])
        return seen if self.c.mask.mask_fn is None else seen & self.c.mask.mask_fn(*where)

    def _given_by_row(self, buffer, first, rows: int):
        """[rows lanes] of what was fetched for each row."""
        if self.c.has_half_packs:  # of one token, whose first rows alone were given
            return jnp.broadcast_to(buffer[self.half, 0, :1], (rows, buffer.shape[-1]))
        if rows < PACK:
            return buffer[self.half, 0, :rows]
        return buffer[self.half, _packs(first, rows)].reshape(rows, buffer.shape[-1])

    def _token_scales(self, buffer, keys: KeySlice, head):
        """f32[1 keys] scales of a head's keys or values; 0 outside the tile's range, where they may be NaN."""
        item, size = self.item, self.c.page_size
        if size % LANES == 0:
            pages = [buffer[keys.side, keys.page + j, pl.ds(head, 1)] for j in range(keys.pages)]
            scales = jnp.concatenate(pages, axis=1) if len(pages) > 1 else pages[0]
        else:  # pages [P S] side by side, by products with 0 and 1
            pages = buffer[keys.side, pl.ds(keys.page, keys.pages), head]
            numbers = lambda rows: (lax.broadcasted_iota(jnp.int32, (rows, keys.pages * size), axis) for axis in (0, 1))
            row, key = numbers(size)
            pages = _dot(_finite(pages), (lax.rem(key, jnp.int32(size)) == row).astype(jnp.float32), 0)
            row, key = numbers(keys.pages)
            scales = jnp.sum(jnp.where(lax.div(key, jnp.int32(size)) == row, pages, 0.0), 0, keepdims=True)
        if not keys.masked:
            return scales
        at = keys.first + lax.broadcasted_iota(jnp.int32, scales.shape, 1)
        return jnp.where((at >= item.kv_start) & (at < item.kv_end), scales, 0.0)

    def _coordinates(self, keys: KeySlice, head, first, shape: tuple[int, int]):
        """(query head, q_pos, kv_pos) of some rows and keys: None if no rule needs them, whole for a user's function.

        Such a function may return the shape of any of its arguments, and Mosaic does not broadcast bools.
        """
        c = self.c
        needed = c.logits.has_alibi or c.has_functions or (keys.masked and not c.has_ranges)
        if not needed:
            return None, None, None
        row = first + lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
        kv_pos = self._positions(keys.first + self._keys_of_columns(shape[1]))
        q_pos = self.item.q_first + (jnp.zeros_like(row) if c.has_half_packs else _token_of(c, row))
        if not c.has_functions:
            return None, q_pos, kv_pos
        return tuple(jnp.broadcast_to(x, shape) for x in (head * c.group + _member_of(c, row), q_pos, kv_pos))

    def _positions(self, index):
        """Positions of keys in their request: see metadata/parallel.py."""
        world, run = self.c.shards.world, jnp.int32(self.c.shards.interleave)
        if world == 1:
            return index
        turn = lax.div(index, run)
        return (turn * world + self.item.rank) * run + (index - turn * run)

    def _bias(self, keys: KeySlice, first, rows: int):
        """f32[rows keys] biases of the request's new tokens, whose token j is key context + j; 0 elsewhere."""
        lanes, count = self.c.bias_lanes, keys.pages * self.c.page_size
        shift = self.item.context - keys.first  # of token 0
        rows_bias = self._given_by_row(self.buf.bias, first, rows)
        rolled = pltpu.roll(rows_bias, lax.rem(lax.rem(shift, lanes) + lanes, lanes), 1)
        token = lax.broadcasted_iota(jnp.int32, (1, lanes), 1) - shift
        return jnp.where((token >= 0) & (token < lanes), rolled, 0.0)[:, :count]

    def _sum_values(self, weighed, keys: KeySlice, head):
        """The state of a head from its _weights."""
        m, l, acc, alpha, p = weighed  # noqa: E741
        return m, l, acc * _lanes(alpha, self.c.acc_dim) + self._weighed_values(p, keys, head)

    def _weighed_values(self, p, keys: KeySlice, head):
        """f32[rows acc_dim] of weights [rows keys]."""
        values = self.buf.k if self.buf.v is None else self.buf.v
        if self.c.beside == 1:
            return _dot(p, self._stored(values, keys, head)[:, : self.c.v_head_dim], 0)
        v, size = self._stored(values, keys, head), p.shape[1] // self.c.beside
        sums = [_dot(p[:, i * size : (i + 1) * size], v, 0) for i in range(self.c.beside)]
        group = self._group_of(lax.broadcasted_iota(jnp.int32, sums[0].shape, 1))
        return sum(jnp.where(group == i, x, 0.0) for i, x in enumerate(sums))

    def _logits(self, dots, keys: KeySlice, head, first, rows: int, where):
        """Base-2 logits. log2(e) is part of the scale where no other step follows, else it is applied last.

        where: query head, q_pos and kv_pos, as far as the rules need them.
        """
        c, factor = self.c, self.scales[head]
        if c.per_head_q_scale:
            factor = factor * self._column("q_scale", head, first, rows)
        bias = self._bias(keys, first, rows) if c.qq_bias and keys.masked else None
        if not (c.logits.soft_cap or c.logits.has_alibi or c.logits.score_fn or bias is not None):
            return dots * (factor * LOG2E)
        rule = dataclasses.replace(c.logits, scale=factor)
        query_head, q_pos, kv_pos = where
        slopes = self._column("slope", head, first, rows)
        logits = shape_logits(rule, dots, query_head, q_pos, kv_pos, slopes, bias)
        return logits.astype(jnp.float32) * LOG2E  # a score_fn may return another dtype

    def _queries(self, head, first, rows: int):
        """[rows D] of a head."""
        if self.c.has_half_packs:
            return self.buf.q_half_packs[head, :rows]
        if self.c.in_place:
            return self.buf.q[self.half, *self._tokens_of(head, first, rows)].reshape(rows, -1)
        return query_order(self.c).read(self.buf.q_rows, head, first, rows)

    def _column(self, name: str, head, first, rows: int):
        """f32[rows 1]: a number of each row, or None where the layer has none of that name."""
        if name not in self.c.columns:
            return None
        lane = self.c.columns.index(name)
        return self.columns[head, pl.ds(first, rows), lane : lane + 1]


def _heads(c: TpuKernelConfig, at_once: int, do):
    """do(heads) for all kv heads, unrolled over at most `at_once` of them, a divisor of their number."""
    size = largest_divisor(c.num_kv_heads, at_once)
    if size == c.num_kv_heads:
        return do(list(range(size)))

    def some(i, _):
        do([i * size + j for j in range(size)])
        return ()

    lax.fori_loop(0, c.num_kv_heads // size, some, ())


def _packs(first, rows: int):
    """The packs of rows first .. first + rows - 1; both are multiples of PACK."""
    return pl.ds(lax.div(jnp.int32(first), PACK), rows // PACK)


def _token_of(c: TpuKernelConfig, row):
    """A row's token in the tile, row // G, by a multiplication that is exact for these sizes."""
    if c.group & (c.group - 1) == 0:
        return row >> (c.group.bit_length() - 1)
    return (row * cdiv(1 << 16, c.group)) >> 16


def _member_of(c: TpuKernelConfig, row):
    """A row's head within the group of its kv head, row % G."""
    return row - _token_of(c, row) * c.group


def _down(keys, unit: int):
    """keys // unit, for keys >= 0."""
    return lax.div(keys, jnp.int32(unit))


def _up(keys, unit: int):
    """ceil(keys / unit)."""
    return lax.div(keys + (unit - 1), jnp.int32(unit))


def _lanes(x, lanes: int):
    """f32[rows 1] or f32[rows 128] of equal lanes -> f32[rows lanes] of equal lanes."""
    if x.shape[1] == 1 or lanes % LANES:
        return jnp.broadcast_to(x[:, :1], (x.shape[0], lanes))
    return jnp.concatenate([x] * (lanes // LANES), axis=1) if lanes > LANES else x


def _sum_by_lane(p):
    """f32[rows 128] whose lanes add up to the sum over p's keys: a partial sum each, or 1 / 128 of the sum."""
    rows, keys = p.shape
    if keys % LANES:
        return jnp.broadcast_to(jnp.sum(p, -1, keepdims=True) * (1 / LANES), (rows, LANES))
    return sum(p[:, i : i + LANES] for i in range(0, keys, LANES))


def _cast(x, c: TpuKernelConfig):
    """x in the dtype of the products; 8-bit values by way of float32, a conversion that every generation has."""
    dtype = jnp.dtype(c.compute_dtype)
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def _finite(x):
    """x with 0 in place of NaN and infinity."""
    return jnp.where(jnp.abs(x) < float("inf"), x, 0.0)


def _dot(a, b, axis: int):
    """f32 product of a [M X] and b, contracted over axis `axis` of b."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
