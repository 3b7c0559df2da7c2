"""The DMA copies between HBM and VMEM. Every start has a wait for the same number of bytes.

Keys and values are copied page by page through the block table, all kv heads of a page in one copy; queries and outputs
as [tokens H D] of a tile; what else is given for each row, and lse, pack by pack. Each half of each double buffer has a
semaphore of its own.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.config import TpuKernelConfig
from pallas_kernels.tpu.work_list import fields_of

SEMAPHORES = ("q", "k", "v", "out", "lse", "k_token", "v_token", "ranges", "bias")
"""Rows of Buffers.sems."""


class ScalarRefs(NamedTuple):
    """Refs in SMEM, prefetched."""

    count: Any  # i32[1] tiles
    items: Any  # i32[fields tiles]
    block_table: Any  # i32[R B]
    scales: Any  # f32[2 K] factors of the logits, then of the outputs


class HbmRefs(NamedTuple):
    """Refs in HBM; None where the layer has no such array."""

    q: Any  # [T H D], in place [T H D * beside]
    k: Any  # [N K S key_dim]; in the layout NHD [N S K key_dim], in HND128 [N K S*D/128 128]
    out: Any  # [T H V]
    lse: Any  # f32[packs 16 lse_lanes]; lane k is kv head k, or half pack k
    v: Any = None  # the same with V; None where the values are part of the keys
    k_token: Any = None  # f32[N K S] scales
    v_token: Any = None  # the same of the values
    ranges: Any = None  # i32[packs 16 128]; lane 0 is the first key that a row sees, lane 1 the key after the last
    bias: Any = None  # f32[packs 16 bias_lanes]; lane j is the bias of the row and its request's new token j


class Buffers(NamedTuple):
    """Scratch in VMEM. A leading 2 is the two halves of a double buffer. None as above."""

    q: Any  # [2 tokens H D], in place [2 tokens H D * beside]
    k: Any  # [2 pages K *page_dims]; [1 ...] in the layout NHD
    out: Any  # [2 tokens H V]
    lse: Any  # f32[2 rows/16 16 lse_lanes]
    m: Any  # f32[K rows 128], all lanes equal
    l: Any  # f32[K rows 128], partial sums: their sum over lanes counts
    acc: Any  # f32[K rows acc_dim]
    sems: Any  # DMA[SEMAPHORES 2]; one for each half
    v: Any = None  # the same
    k_token: Any = None  # f32[2 pages K S]
    v_token: Any = None
    ranges: Any = None  # i32[2 rows/16 16 128]
    bias: Any = None  # f32[2 rows/16 16 bias_lanes]
    k_fetched: Any = None  # [2 pages S K key_dim], in the layout NHD only
    v_fetched: Any = None  # [2 pages S K V]
    q_words: Any = None  # these four: see row_order.py
    q_rows: Any = None
    out_words: Any = None
    out_rows: Any = None
    q_half_packs: Any = None  # [K 16 D * beside]: the half pack of each kv head, with config.has_half_packs
    s: Any = None  # f32[staged_heads chunk_rows step_keys] logits, in the body of many rows
    top: Any = None  # f32[staged_heads chunk_rows 128] their maxima by lane
    alpha: Any = None  # the same: what the sums of values before are multiplied with
    p: Any = None  # [staged_heads chunk_rows step_keys] weights


class TileItem(NamedTuple):
    """The scalars of one tile: see work_list.FIELDS."""

    req: jax.Array
    token: jax.Array
    tokens: jax.Array
    pack: jax.Array
    packs: jax.Array
    q_first: jax.Array
    page: jax.Array
    pages: jax.Array
    kv_start: jax.Array
    kv_end: jax.Array
    full_start: jax.Array
    full_end: jax.Array
    causal: jax.Array
    context: Any = None  # None where fields_of has none
    rank: Any = None


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of one launch. i: a tile of the work list; b: a block of its key range.

    side: half of the double buffers of keys, alternating from block to block; half: of those of queries and outputs,
    alternating from tile to tile.
    """

    config: TpuKernelConfig
    num_columns: int  # B
    s: ScalarRefs
    hbm: HbmRefs
    buf: Buffers

    def item(self, i) -> TileItem:
        """Tile i's scalars."""
        names = fields_of(self.config)
        tiles = self.s.items.shape[0] // len(names)
        return TileItem(**{name: self.s.items[f * tiles + i] for f, name in enumerate(names)})

    def start_keys(self, i, b, side):
        """Starts to fetch the keys and values of block b of tile i."""
        item = self.item(i)
        first = item.req * self.num_columns + item.page + b * self.config.block_pages

        def page(j, _):
            for copy in self._page_copies(self.s.block_table[first + j], j, side):
                copy.start()
            return ()

        lax.fori_loop(0, self._live_pages(item, b), page, ())

    def wait_keys(self, item: TileItem, b, side):
        """Waits until they are in VMEM: for a whole block at once, otherwise page by page."""
        live = self._live_pages(item, b)

        def some():
            def page(j, _):
                for copy in self._page_copies(0, j, side):
                    copy.wait()
                return ()

            lax.fori_loop(0, live, page, ())

        def whole():
            for name, _, ref in self._pools:
                pltpu.make_async_copy(ref.at[side], ref.at[side], self._sem(name, side)).wait()

        lax.cond(live == self.config.block_pages, whole, some)

    def _live_pages(self, item: TileItem, b):
        """Pages of block b that the tile needs."""
        left = item.pages - b * self.config.block_pages
        return lax.clamp(0, left, self.config.block_pages)

    def _page_copies(self, page, j, side):
        """Of page `page` of each pool to place j of a buffer."""
        for name, pool, ref in self._pools:
            yield pltpu.make_async_copy(pool.at[page], ref.at[side, j], self._sem(name, side))

    def _sem(self, name: str, half):
        """The semaphore of one half of a double buffer."""
        return self.buf.sems.at[SEMAPHORES.index(name), half]

    @property
    def _pools(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, array in HBM, buffer) of what is fetched page by page."""
        for name in self.config.paged_arrays:
            ordered, fetched = (getattr(self.buf, field, None) for field in (name, f"{name}_fetched"))
            yield name, getattr(self.hbm, name), ordered if fetched is None else fetched

    def order_heads_first(self, item: TileItem, b, side):
        """Puts the pages of a block that were fetched in the order NHD into that of HND, in VMEM."""
        buf = self.buf

        def page(j, _):
            for fetched, ordered in ((buf.k_fetched, buf.k), (buf.v_fetched, buf.v)):
                ordered[0, j] = jnp.swapaxes(fetched[side, j], 0, 1)
            return ()

        lax.fori_loop(0, self._live_pages(item, b), page, ())

    def start_q(self, i):
        """Starts to fetch the queries of tile i, and what is given for each row."""
        self._each_copy(i, self._query_copy, self._row_copies, lambda copy: copy.start())

    def wait_q(self, i):
        """Waits until they are in VMEM."""
        self._each_copy(i, self._query_copy, self._row_copies, lambda copy: copy.wait())

    def _each_copy(self, i, of_tokens, of_pack, do):
        """do(copy) for the copies of tile i: the one of its tokens, and those of each of its packs."""
        item, half = self.item(i), lax.rem(i, 2)
        do(of_tokens(*self._tokens(item.token, item.tokens), half))
        self._each_pack(item, lambda j, pack: [do(copy) for copy in of_pack(pack, j, half)])

    def _tokens(self, first, count):
        """(slice of [T H D], slice of a buffer of tokens)."""
        count = 1 if self.config.tile_tokens == 1 else count
        return pl.ds(first, count), pl.ds(0, count)

    def _query_copy(self, tokens, buffered, half):
        return pltpu.make_async_copy(self.hbm.q.at[tokens], self.buf.q.at[half, buffered], self._sem("q", half))

    def _output_copy(self, tokens, buffered, half):
        return pltpu.make_async_copy(self.buf.out.at[half, buffered], self.hbm.out.at[tokens], self._sem("out", half))

    def _row_copies(self, pack, j, half):
        """Of what is given for each row of a pack."""
        for name in self.config.row_arrays:
            source, target = getattr(self.hbm, name).at[pack], getattr(self.buf, name).at[half, j]
            yield pltpu.make_async_copy(source, target, self._sem(name, half))

    def start_out(self, i):
        """Starts to write back the output and lse of tile i."""
        self._each_copy(i, self._output_copy, self._lse_copies, lambda copy: copy.start())

    def wait_out(self, i):
        """Waits until they are written; their half may then be used again."""
        self._each_copy(i, self._output_copy, self._lse_copies, lambda copy: copy.wait())

    def _lse_copies(self, pack, j, half):
        yield pltpu.make_async_copy(self.buf.lse.at[half, j], self.hbm.lse.at[pack], self._sem("lse", half))

    def clear_padding(self, count):
        """Sets the outputs of tokens behind those of all tiles to 0. No output is being written."""
        last, size, total = self.item(jnp.maximum(count - 1, 0)), self.config.tile_tokens, self.hbm.out.shape[0]
        end = jnp.where(count > 0, last.token + last.tokens, 0)
        boxes = lax.div(total - end + (size - 1), size)

        def each(do):
            def box(j, _):
                first = end + j * size
                do(self._output_copy(*self._tokens(first, jnp.minimum(total - first, size)), 0))
                return ()

            lax.fori_loop(0, boxes, box, ())

        def clear(t, _):
            self.buf.out[0, t] = jnp.zeros(self.buf.out.shape[2:], self.buf.out.dtype)
            return ()

        lax.fori_loop(0, jnp.minimum(total - end, size), clear, ())
        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    def _each_pack(self, item: TileItem, do):
        """do(j, pack) for the tile's live packs; without a loop where every tile has one."""
        if self.buf.lse.shape[1] == 1:
            do(0, item.pack)
            return

        def one(j, _):
            do(j, item.pack + j)
            return ()

        lax.fori_loop(0, item.packs, one, ())
