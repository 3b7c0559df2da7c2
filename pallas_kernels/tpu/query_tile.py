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

from pallas_kernels.algebra import mask, softmax
from pallas_kernels.algebra.logits import shape_logits
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, PACK, TpuKernelConfig
from pallas_kernels.tpu.copies import Buffers, TileItem

LOG2E = math.log2(math.e)


class KeyPart(NamedTuple):
    """Consecutive pages in one half of the double buffer."""

    side: Any  # i32[]
    page: Any  # i32[] first page
    pages: int
    first: Any  # i32[] position of the first key
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
        """Sets the state of every row to that of no key."""

        def fresh(heads, first, rows):
            for head in heads:
                at = (head, pl.ds(first, rows))
                self.buf.m[at], self.buf.l[at], self.buf.acc[at] = softmax.start((rows,), self.c.v_head_dim)

        self._each(fresh)

    def add_block(self, side, first_key):
        """Adds the keys of one half of the buffer, the first of which has position first_key.

        Where every row sees every key, all at once without a mask; elsewhere only the parts that some row sees.
        """
        c, item = self.c, self.item
        whole = (first_key >= item.full_start) & (first_key + c.block_keys <= item.full_end)

        def at_once():
            self._each(functools.partial(self._step, KeyPart(side, 0, c.block_pages, first_key, False)), c.long_heads)

        def part(j, _):
            keys = KeyPart(side, j * c.part_pages, c.part_pages, first_key + j * c.part_keys, True)
            self._each(functools.partial(self._step, keys), c.long_heads)
            return ()

        def parts():
            first = lax.div(jnp.maximum(item.kv_start - first_key, 0), c.part_keys)
            last = lax.div(jnp.maximum(item.kv_end - first_key, 0) + c.part_keys - 1, c.part_keys)
            lax.fori_loop(first, jnp.minimum(last, c.block_pages // c.part_pages), part, ())

        lax.cond(whole, at_once, parts)

    def finish(self):
        """Writes the output and the lse of the state; lane k of the lse is kv head k."""

        def end(heads, first, rows):
            lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
            lses = jnp.zeros((rows, LANES), jnp.float32)
            for head in heads:
                at = (head, pl.ds(first, rows))
                sink = self._column("sink", head, first, rows)
                out, lse = softmax.finish(self.buf.m[at] * (1 / LOG2E), self.buf.l[at], self.buf.acc[at], sink)
                out = (out * self.scales[self.c.num_kv_heads + head]).astype(self.buf.out.dtype)
                lses = jnp.where(lane == head, lse[:, None], lses)
                if rows < PACK:
                    self.buf.out[self.half, head, 0, :rows] = out
                else:
                    packs = _packs(first, rows)
                    self.buf.out[self.half, head, packs] = out.reshape(rows // PACK, PACK, -1)
            self._keep_lse(lane, heads, lses, first, rows)

        self._each(end)

    def _keep_lse(self, lane, heads, lses, first, rows):
        """Writes the lanes of these heads and keeps the others."""
        if rows < PACK:
            at, shape = (self.half, 0, slice(0, rows)), (rows, LANES)
        else:
            at, shape = (self.half, _packs(first, rows)), (rows // PACK, PACK, LANES)
        mine = (lane >= heads[0]) & (lane <= heads[-1])
        kept = self.buf.lse[at].reshape(rows, LANES)
        self.buf.lse[at] = jnp.where(mine, lses, kept).reshape(shape)

    def _each(self, do, long_heads: int = 1):
        """do(heads, first row, rows) over all heads and live rows: few rows at once, many rows in chunks."""
        c = self.c
        short = lambda: _heads(c, c.short_heads, lambda heads: do(heads, 0, c.few_rows))
        if not c.long_tiles:
            return short()

        def long():
            def chunk(i, _):
                first = pl.multiple_of(i * c.chunk_rows, c.chunk_rows)
                _heads(c, long_heads, lambda heads: do(heads, first, c.chunk_rows))
                return ()

            lax.fori_loop(0, lax.div(self.item.rows + c.chunk_rows - 1, c.chunk_rows), chunk, ())

        return lax.cond(self.item.rows <= c.few_rows, short, long)

    def _step(self, keys: KeyPart, heads, first, rows: int):
        """One step of the recurrence for some heads and rows.

        States are read first and written last, and the dots of the next head are computed before the softmax of this
        one, so that the compiler can overlap one head's products with another's exponentials.
        """
        at = [(head, pl.ds(first, rows)) for head in heads]
        states = [(self.buf.m[x], self.buf.l[x], self.buf.acc[x]) for x in at]
        dots = self._dots(keys, heads[0], first, rows)
        for i, head in enumerate(heads):
            ahead = self._dots(keys, heads[i + 1], first, rows) if i + 1 < len(heads) else None
            states[i] = self._next(states[i], keys, head, first, rows, dots)
            dots = ahead
        for x, state in zip(at, states, strict=True):
            self.buf.m[x], self.buf.l[x], self.buf.acc[x] = state

    def _dots(self, keys: KeyPart, head, first, rows: int):
        """f32[rows keys] of a head."""
        compute = jnp.dtype(self.c.compute_dtype)
        k = self.buf.k[keys.side, pl.ds(keys.page, keys.pages), head].reshape(-1, self.c.head_dim)
        return _dot(self._queries(head, first, rows).astype(compute), _cast(k, compute), 1)

    def _next(self, state, keys: KeyPart, head, first, rows: int, dots):
        """The state of a head after these keys."""
        c, item, compute = self.c, self.item, jnp.dtype(self.c.compute_dtype)
        v = self.buf.v[keys.side, pl.ds(keys.page, keys.pages), head].reshape(-1, c.v_head_dim)
        kv_pos = q_pos = None
        if keys.masked or c.logits.has_alibi:
            kv_pos = keys.first + lax.broadcasted_iota(jnp.int32, (1, dots.shape[1]), 1)
            q_pos = item.q_first + _token_of(c, first, rows)
        logits = self._logits(dots, head, first, rows, q_pos, kv_pos)
        if keys.masked:
            assert kv_pos is not None
            live = (kv_pos >= item.kv_start) & (kv_pos < item.kv_end)
            causal = (item.causal != 0) if c.per_request_causal else None
            logits = jnp.where(live & mask.visible(c.mask, None, q_pos, kv_pos, causal), logits, softmax.NEG_INF)
            v_pos = keys.first + lax.broadcasted_iota(jnp.int32, (dots.shape[1], 1), 0)
            v = jnp.where((v_pos >= item.kv_start) & (v_pos < item.kv_end), v, jnp.zeros_like(v))
        m, l, acc = state  # noqa: E741
        m, alpha, p = softmax.weights(m, logits, jnp.exp2)
        l = l * alpha + jnp.sum(p, -1, keepdims=True)  # noqa: E741
        return m, l, acc * alpha + _dot(p.astype(compute), _cast(v, compute), 0)

    def _logits(self, dots, head, first, rows: int, q_pos, kv_pos):
        """Base-2 logits: log2(e) is part of the scale where no other step follows, else it is applied last."""
        c, factor = self.c, self.scales[head]
        if c.per_head_q_scale:
            factor = factor * self._column("q_scale", head, first, rows)
        if not (c.logits.soft_cap or c.logits.has_alibi):
            return dots * (factor * LOG2E)
        rule = dataclasses.replace(c.logits, scale=factor)
        return shape_logits(rule, dots, None, q_pos, kv_pos, self._column("slope", head, first, rows)) * LOG2E

    def _queries(self, head, first, rows: int):
        """[rows D] of a head."""
        if rows < PACK:
            return self.buf.q[self.half, head, 0, :rows]
        packs = _packs(first, rows)
        return self.buf.q[self.half, head, packs].reshape(rows, self.c.head_dim)

    def _column(self, name: str, head, first, rows: int):
        """f32[rows 1]: a number of each row, or None where the layer has none of that name."""
        if name not in self.c.columns:
            return None
        lane = self.c.columns.index(name)
        return self.columns[head, pl.ds(first, rows), lane : lane + 1]


def _heads(c: TpuKernelConfig, at_once: int, do):
    """do(heads) for all kv heads, unrolled over at most `at_once` of them, a divisor of their number."""
    size = next(n for n in range(min(at_once, c.num_kv_heads), 0, -1) if c.num_kv_heads % n == 0)
    if size == c.num_kv_heads:
        return do(list(range(size)))

    def some(i, _):
        do([i * size + j for j in range(size)])
        return ()

    lax.fori_loop(0, c.num_kv_heads // size, some, ())


def _packs(first, rows: int):
    """The packs of rows first .. first + rows - 1; both are multiples of PACK."""
    return pl.ds(lax.div(jnp.int32(first), PACK), rows // PACK)


def _token_of(c: TpuKernelConfig, first, rows: int):
    """i32[rows 1]: each row's token in the tile, row // G, by a multiplication that is exact for these sizes."""
    row = first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    if c.group & (c.group - 1) == 0:
        return row >> (c.group.bit_length() - 1)
    return (row * cdiv(1 << 16, c.group)) >> 16


def _cast(x, dtype):
    """x as `dtype`; 8-bit values by way of float32, a conversion that every generation has."""
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def _dot(a, b, axis: int):
    """f32 product of a [M X] and b, contracted over axis `axis` of b."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
