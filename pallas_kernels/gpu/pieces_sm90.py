"""The pieces of one CTA, and the warpgroups beside those that compute: one fetches keys, values and, with two buffers,
queries ahead of use; another converts tiles or loads scales."""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import token_scales_sm90 as token_scales
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import as_number, when, when_in_warp
from pallas_kernels.gpu.config import PIECE_BOXES, WARPGROUP_ROWS, GpuKernelConfig
from pallas_kernels.gpu.ptx_sm90 import put_numbers
from pallas_kernels.gpu.stored_tiles_sm90 import StoredTile, convert


@dataclasses.dataclass(frozen=True)
class Refs:
    """Every Ref of the kernel, with its shape.

    The warp-level kernel (paged_attention_sm80.py) has no barriers and no buffers from which tiles are converted. Its
    q_tile is [tile_halves, 64, D], or [1, narrow_rows, D]; its stats, piece_box and pool_rows are rows of one buffer.
    """

    q: object  # GMEM [T, H, D]
    k: object  # GMEM [N, K, S, D] (HND) or [N, S, K, D] (NHD)
    v: object  # GMEM [N, K, S, V] or [N, S, K, V]
    block_table: object  # GMEM i32[R, B]
    info: object  # GMEM i32[tiles, 16]
    cta: object  # GMEM i32[C, 16]
    scales: object  # GMEM f32[K, 2]: logit scale (times k_scale), v_scale
    per_head: object  # GMEM f32[H, 2]: ALiBi slope, sink; any array where there are none
    k_token_scale: object  # GMEM f32 [N, K, S] or [N, S, K]; None unless token_scales
    v_token_scale: object
    out: object  # GMEM [T, H, V]
    lse: object  # GMEM f32[T, H]
    part: object  # GMEM f32[2 C, part_rows, V]: normalised partial outputs
    part_lse: object  # GMEM f32[2 C, part_rows], base 2
    counters: object = None  # GMEM i32[C], zeros at first: parts stored of the unit that CTA c cut; None: merged later
    arrived: object = None  # SMEM i32[pipelines, 4]: [p, 0] is 1 if pipeline p stored the last part of a unit
    q_tile: object = None  # SMEM [q_buffers, computing, 64, D]; with pipelines [pipelines * q_buffers, 1, 64, D]
    k_tile: object = None  # SMEM [stages, block_kv, D]
    v_tile: object = None  # SMEM [stages, block_kv, V]; of an 8-bit product [stages, V, block_kv]
    q_rounded: object = None  # SMEM 8 bits [computing, 64, D]; None unless compute_dtype
    k_stored: object = None  # SMEM [stored_stages, block_kv, D]: as in the pool; k_tile itself if it is not converted
    v_stored: object = None  # SMEM [stored_stages, block_kv, V]
    stats: object = None  # SMEM f32[512], or [2, 256] for two pipelines: maxima and sums on their way to a merge
    piece_box: object = None  # SMEM i32[boxes, 16]: the numbers of the pieces that are begun, see Piece
    token_scale: object = None  # SMEM f32[scale_rows, scale_columns]: see token_scales_sm90.py
    k_full: object = None  # barriers [stages] of k_tile
    v_full: object = None
    k_free: object = None  # barriers [stages]; one arrival of each compute warpgroup that reads the stage
    v_free: object = None
    k_stored_full: object = None  # barriers of k_stored; one arrival a page, and one for the scales of narrow tiles
    v_stored_full: object = None
    k_stored_free: object = None  # barriers of k_stored; one arrival, or those of k_free
    v_stored_free: object = None
    q_full: object = None  # barriers of the boxes: a piece's numbers are there, and its queries unless loads_queries
    q_free: object = None
    turn: object = None  # barriers, one for each of three compute warpgroups: its turn on the tensor cores; None: two
    compute_barrier: object = None  # of all compute warpgroups: exchange of states, and turns of two
    decoded: object = None  # SMEM [block_kv, D]: the warp-level kernel's keys or values of 8 bits, decoded
    pool_rows: object = None  # SMEM i32[2 or more, block_kv]: rows in the pools of the warp-level kernel's next keys
    pipeline: object = 0  # which pipeline of the CTA this warpgroup belongs to
    k_narrow: object = None  # SMEM [narrow_stages, block_kv, D]: k_tile itself, or with two rings the same memory
    v_narrow: object = None
    k_narrow_full: object = None  # barriers of k_narrow: those of k_tile, or with two rings its own: an arrival a copy,
    v_narrow_full: object = None  # and another of the converting warpgroup
    k_narrow_free: object = None
    v_narrow_free: object = None


NARROW_FIELDS = ("k_narrow", "v_narrow", "k_narrow_full", "v_narrow_full", "k_narrow_free", "v_narrow_free")
"""Of Refs: the ring of narrow tiles."""


def output_types(cfg: GpuKernelConfig, num_tokens: int, slots: int) -> list[jax.ShapeDtypeStruct]:
    """Of Refs.out, lse, part and part_lse. slots: of partial results, two for each worker."""
    return [
        jax.ShapeDtypeStruct((num_tokens, cfg.num_heads, cfg.v_head_dim), jnp.dtype(cfg.result_dtype)),
        jax.ShapeDtypeStruct((num_tokens, cfg.num_heads), jnp.float32),
        jax.ShapeDtypeStruct((slots, cfg.part_rows, cfg.v_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((slots, cfg.part_rows), jnp.float32),
    ]


def with_scale_pools(cfg: GpuKernelConfig, gmem: tuple) -> tuple:
    """A kernel's arrays as the first fields of Refs, with None for the pools of token scales that it was not given."""
    return gmem if cfg.token_scales else (*gmem[:8], None, None, *gmem[8:])


WARPS = 4  # of a warpgroup
HEAD, LO, HI = 13, 14, 15  # columns of piece_box after those of the work list's info


@dataclasses.dataclass(frozen=True)
class Piece:
    """Key blocks lo .. hi - 1 of a unit (tile, kv head); piece[column] is an i32 scalar of info or piece_box."""

    column: object  # function: column number -> its value. Read at each use, which saves registers in the loop
    box: object  # which of piece_box holds its numbers

    def __getitem__(self, number):
        return self.column(number)

    @property
    def lo(self):
        return self[LO]

    @property
    def count(self):
        return self[HI] - self[LO]

    def blocks(self, cfg: GpuKernelConfig):
        """Function: j -> the request's block of keys that is read j-th. The first one's number is read once."""
        if cfg.last_block_first:
            last = self[wl.BLK0] + self[HI] - 1
            return lambda j: last - j
        first = self[wl.BLK0] + self[LO]
        return lambda j: first + j

    @property
    def is_part(self):
        return (self[LO] > 0) | (self[HI] < self[wl.NBLK])


def worker(cfg, refs):
    """The row of the work list with this warpgroup's pieces: the CTA's, or its pipeline's."""
    return lax.axis_index("cta") if cfg.pipelines == 1 else lax.axis_index("cta") * cfg.pipelines + refs.pipeline


def place_in_ring(cfg: GpuKernelConfig, refs: Refs, number, size: int):
    """The stage (or buffer) of a pipeline's block (or piece) `number`, of `size` in the CTA.

    Each pipeline has a ring of size / pipelines of them.
    """
    own = size // cfg.pipelines
    place = lax.rem(number, jnp.int32(own))
    return place if cfg.pipelines == 1 else place + refs.pipeline * own


def stage_of(cfg: GpuKernelConfig, refs: Refs, block_number):
    """The stage of keys and values of this pipeline's block, counted over all its pieces."""
    return place_in_ring(cfg, refs, block_number, cfg.stages)


def _box_of(cfg, refs, j):
    """The box of this pipeline's piece j."""
    return place_in_ring(cfg, refs, j, PIECE_BOXES * cfg.pipelines)


def queries_of(cfg: GpuKernelConfig, refs: Refs, piece: Piece):
    """SMEM [computing, 64, D]: the buffer of the piece's queries."""
    return refs.q_tile.at[refs.pipeline if cfg.loads_queries else piece.box]


def in_narrow_ring(cfg: GpuKernelConfig, piece: Piece):
    """With two rings: is it a narrow tile, whose keys and values are in the ring of those?

    The rings share their memory. Before a narrow piece that follows one of another kind, the memory warpgroup waits
    until all earlier pieces are released. Before a tile after a narrow piece, the converting warpgroup waits until the
    narrow ring is free.
    """
    return piece[wl.NROWS] <= cfg.narrow_rows


def no_blocks(cfg: GpuKernelConfig) -> tuple:
    """Before the first piece: see count_blocks."""
    return (jnp.int32(0),) * (2 if cfg.two_rings else 1)


def count_blocks(cfg: GpuKernelConfig, piece: Piece, before: tuple) -> tuple:
    """Key blocks up to the piece's end, given those before it: of each ring, wgmma's first, if there are two."""
    if not cfg.two_rings:
        return (before[0] + piece.count,)
    narrow = jnp.where(in_narrow_ring(cfg, piece), piece.count, 0)
    return before[0] + piece.count - narrow, before[1] + narrow


def count_pieces(cta, me):
    """The pieces of row `me` of the work list: units of whole waves, then u0 (from block b0) .. u1 (up to block b1)."""
    waves, u0, _, u1, b1 = (cta[me, i] for i in range(5))
    return waves + (u1 - u0) + as_number(b1 > 0)


def piece_from_list(cfg: GpuKernelConfig, refs: Refs, j) -> Piece:
    """The j-th piece of this CTA or pipeline: its units of whole waves, then its part of the line."""
    me = worker(cfg, refs)
    waves, u0, b0, u1, b1 = (refs.cta[me, i] for i in range(5))
    if cfg.moves_padding:  # in flat lists, of which none is walked backward
        k, place = j, refs.cta[me, wl.PLACE]
    else:
        k, place = jnp.where(refs.cta[me, wl.BACKWARD] != 0, count_pieces(refs.cta, me) - 1 - j, j), me
    unit = jnp.where(k < waves, k * cfg.workers + wl.snake(k, place, cfg.workers), u0 + k - waves)
    set_units, set_heads = refs.cta[me, wl.SET_UNITS], refs.cta[me, wl.SET_HEADS]
    tile, head = wl.place_of(unit, set_units, cfg.num_kv_heads, set_heads)
    info = [refs.info[tile, i] for i in range(HEAD)]
    lo = jnp.where(unit == u0, b0, 0)
    hi = jnp.where(unit == u1, b1, info[wl.NBLK])
    return Piece((*info, head, lo, hi).__getitem__, _box_of(cfg, refs, j))


def send_piece(cfg: GpuKernelConfig, refs: Refs, piece: Piece, j, released):
    """Memory warpgroup: hands over piece j, with its queries unless loads_queries. Gives how many pieces are released.

    released: of how many pieces it has waited until the warpgroups that compute have released them.
    """
    box = piece.box
    if cfg.loads_queries:
        released = await_released(cfg, refs, released, j - PIECE_BOXES + 1)
    else:
        when(j >= PIECE_BOXES)(lambda: plgpu.barrier_wait(refs.q_free.at[box]))
    put_numbers(refs.piece_box.at[box], [jnp.asarray(piece[column], jnp.int32) for column in range(HI + 1)])
    if not cfg.loads_queries:
        few = dict(unrolled=rows.LOADS_UNROLLED)  # this warpgroup has few registers
        load_queries(cfg, refs, piece, refs.q_tile.at[box, 0], 0, **few)
        for n in range(1, refs.q_tile.shape[1]):
            is_long, skipped = piece[wl.NROWS] > WARPGROUP_ROWS, n * WARPGROUP_ROWS
            if cfg.converts_queries:  # in place: of a short tile, each warpgroup has a copy
                load_queries(cfg, refs, piece, refs.q_tile.at[box, n], jnp.where(is_long, skipped, 0), **few)
            else:
                load = functools.partial(load_queries, cfg, refs, piece, refs.q_tile.at[box, n], skipped, **few)
                when(is_long)(load)
        rows.await_rows()
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.q_full.at[box])
    return released


def await_released(cfg: GpuKernelConfig, refs: Refs, released, count):
    """Waits until `count` pieces are released; it knows of the first `released`. Gives the number that it knows of."""

    def wait(n, _):
        plgpu.barrier_wait(refs.q_free.at[_box_of(cfg, refs, n)])

    lax.fori_loop(released, count, wait, None)
    return jnp.maximum(released, count)


def load_queries(cfg: GpuKernelConfig, refs: Refs, piece: Piece, tile, skipped, **how):
    """Begins to copy 64 rows of the piece, those after `skipped`, to an SMEM tile [64, D]: see rows.load_rows."""
    where = (piece[wl.TOK0], piece[HEAD] * cfg.group, piece[wl.ROW0] + skipped, piece[wl.NROWS] - skipped)
    kind = dict(group=cfg.group, heads=cfg.num_heads, dim=cfg.head_dim, dtype=cfg.dtype)
    rows.load_rows(refs.q, tile, *where, **kind, **how)


def receive_piece(cfg: GpuKernelConfig, refs: Refs, j) -> Piece:
    """Compute warpgroups: waits until piece j is in its box."""
    box = _box_of(cfg, refs, j)
    plgpu.barrier_wait(refs.q_full.at[box])
    return Piece(lambda column: refs.piece_box[box, column], box)


def load_pages(cfg: GpuKernelConfig, refs: Refs):
    """A memory warpgroup: fetches the pages of each block of its pipeline, which go to its stages in turn.

    Of a block's copies, those of keys and then those of values, warp w begins numbers w, w + WARPS and so on. It waits
    only for the stages to which it copies. Begun by a whole warpgroup, a copy would cost a barrier of its threads and
    an arrival of each warp: of eight copies for keys and eight for values as many instructions as their softmax.
    """
    page, block, width = cfg.page_size, cfg.block_kv, cfg.copied_keys
    copies, even = block // width, block % page == 0  # even: a block consists of whole pages

    def source(pool, page_id, head, offset):
        span = pl.ds(offset, width) if width < page else slice(None)
        return pool.at[page_id, head, span] if cfg.layout == "HND" else pool.at[page_id, span, head]

    def load_piece(j, carry):
        before, released, after_narrow = carry
        piece = piece_from_list(cfg, refs, j)
        if cfg.loads_queries:
            released = send_piece(cfg, refs, piece, j, released)
        narrow = in_narrow_ring(cfg, piece) if cfg.two_rings else after_narrow
        if cfg.two_rings:
            released = await_released(cfg, refs, released, jnp.where(narrow & ~after_narrow, j, 0))
        first = lax.div(piece[wl.KSTART], jnp.int32(page))
        last = jnp.maximum(lax.div(piece[wl.KSTOP] - 1, jnp.int32(page)), first)
        block_of, req, head, count = piece.blocks(cfg), piece[wl.REQ], piece[HEAD], piece.count

        def column(i, p):
            key = block_of(i) * block
            if even or copies == 1:
                return lax.div(key, jnp.int32(page)) + p
            return lax.div(key + p * width, jnp.int32(page))

        def load_blocks(begin, end, warp):
            of_keys, of_values = (OwnCopies(copies, warp, tile) for tile in range(2))

            def page_ids(i):
                at = lambda p: jnp.minimum(jnp.maximum(column(i, p), first), last)
                return tuple(refs.block_table[req, at(p)] for p in of_keys.numbers)

            def fill(own, i, pages, before, pool, tile, full, free):
                number = before + i
                slot = place_in_ring(cfg, refs, number, tile.shape[0])

                @when_in_warp((number >= tile.shape[0] // cfg.pipelines) & own.has_one)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                def copy(p, page_id):
                    target = tile.at[slot, pl.ds(p * width, width)]
                    offset = 0 if width == page else lax.rem(block_of(i) * block + p * width, jnp.int32(page))
                    plgpu.copy_gmem_to_smem(source(pool, page_id, head, offset), target, full.at[slot])

                own.each(pages, copy)

            def fill_ring(before, keys, values, begin, end, pages):
                def fill_block(i, pages):
                    next_pages = page_ids(i + 1)  # loaded while this block waits for its stage
                    fill(of_keys, i, pages, before, *keys)
                    fill(of_values, i, pages, before, *values)
                    return next_pages

                return lax.fori_loop(begin, end, fill_block, pages)

            pages = page_ids(begin)
            if cfg.two_rings:
                keys = refs.k, refs.k_narrow, refs.k_narrow_full, refs.k_narrow_free
                values = refs.v, refs.v_narrow, refs.v_narrow_full, refs.v_narrow_free
                other = jnp.where(narrow, end, begin)
                pages = fill_ring(before[1], keys, values, begin, other, pages)
                begin = other
            keys = refs.k, refs.k_stored, refs.k_stored_full, refs.k_stored_free
            values = refs.v, refs.v_stored, refs.v_stored_full, refs.v_stored_free
            fill_ring(before[0], keys, values, begin, end, pages)

        load = lambda begin, end: plgpu.warp_map(functools.partial(load_blocks, begin, end))
        if cfg.loads_queries:
            load(0, count)
        else:  # the first block is on its way while the queries are waited for
            load(0, jnp.minimum(count, 1))
            released = send_piece(cfg, refs, piece, j, released)
            load(1, count)
        return count_blocks(cfg, piece, before), released, narrow

    start = (no_blocks(cfg), jnp.int32(0), jnp.bool_(True)) if cfg.two_rings else (no_blocks(cfg), jnp.int32(0), None)
    lax.fori_loop(0, count_pieces(refs.cta, worker(cfg, refs)), load_piece, start)


@dataclasses.dataclass(frozen=True)
class OwnCopies:
    """Of the `count` copies of a tile, those that a warp begins: warp, warp + WARPS and so on. Of one or two, those of
    the keys and those of the values are begun by different warps."""

    count: int
    warp: object
    tile: int  # 0: of keys; 1: of values

    @property
    def first(self):
        """Past the end where no copy is this warp's."""
        return lax.rem(self.warp + -self.tile * self.count % WARPS, WARPS) if self.count <= 2 else self.warp

    @property
    def numbers(self) -> list:
        """Of those that the warp may begin; the same for both tiles, and the last one may be past the end."""
        if self.count <= 2:
            return [lax.rem(self.warp, self.count)]
        return [self.warp + k for k in range(0, self.count, WARPS)]

    @property
    def has_one(self):
        return self.first < self.count

    def each(self, pages, copy):
        """copy(number, its page) for each; pages: of `numbers`."""
        for k, (number, page) in enumerate(zip(self.numbers, pages, strict=True)):
            begin = functools.partial(copy, number, page)
            if WARPS * (k + 1) <= self.count:
                begin()
            else:
                when_in_warp(self.first + WARPS * k < self.count)(begin)


def load_scales(cfg: GpuKernelConfig, refs: Refs):
    """A warpgroup beside load_pages: the scales of the tokens of each block. TMA's warpgroup has no time for them."""

    def load_piece(j, block_number):
        piece = piece_from_list(cfg, refs, j)
        first, req = (piece[wl.BLK0] + piece.lo) * cfg.block_kv, piece[wl.REQ]
        span = piece[wl.KSTART], piece[wl.KSTOP]
        kind = dict(block=cfg.block_kv, page=cfg.page_size)

        def ids_of(i):
            where = (first + i * cfg.block_kv, *span)
            return token_scales.load_ids(refs.block_table, req, *where, **kind, columns=refs.block_table.shape[1])

        def scales_of(i, ids):
            order = dict(heads=cfg.num_kv_heads, heads_first=cfg.layout == "HND")
            pools, where = (refs.k_token_scale, refs.v_token_scale), (first + i * cfg.block_kv, *span)
            return token_scales.load_scales(*pools, ids, piece[HEAD], *where, **kind, **order)

        def load_block(i, carry):
            block_number, scales, ids = carry
            ahead = scales_of(i + 1, ids), ids_of(i + 2)
            slot = lax.rem(block_number, jnp.int32(cfg.stages))

            @when(block_number >= cfg.stages)
            def _():
                plgpu.barrier_wait(refs.k_free.at[slot])

            refs.token_scale[slot] = scales
            plgpu.barrier_arrive(refs.k_full.at[slot])
            return block_number + 1, *ahead

        return lax.fori_loop(0, piece.count, load_block, (block_number, scales_of(0, ids_of(0)), ids_of(1)))[0]

    lax.fori_loop(0, count_pieces(refs.cta, worker(cfg, refs)), load_piece, jnp.int32(0))


def stored_tiles(cfg: GpuKernelConfig) -> tuple[StoredTile, StoredTile]:
    """How tiles of keys and of values are converted; keys of 8-bit products are not."""
    kind = dict(keys=cfg.block_kv, source=cfg.kv_dtype)
    keys = StoredTile(dim=cfg.head_dim, target=cfg.query_dtype, **kind)
    transposed = cfg.compute_dtype is not None
    return keys, StoredTile(dim=cfg.v_head_dim, target=cfg.weight_dtype, transposed=transposed, **kind)


def convert_tiles(cfg: GpuKernelConfig, refs: Refs):
    """The converting warpgroup: tiles as in the pool -> tiles that are multiplied, and the scales of tokens.

    Values that no row may see become 0. With two rings it also follows the blocks of narrow tiles, to know when the
    memory of both is free, and brings their scales.
    """
    of_keys, of_values = stored_tiles(cfg)

    def convert_block(n, tile, stored, target, stored_barriers, barriers, before):
        """Converts a block's keys or values; gives the arrivals that are due once they are committed."""
        slot, to = lax.rem(n, jnp.int32(stored.shape[0])), lax.rem(n, jnp.int32(cfg.stages))
        plgpu.barrier_wait(stored_barriers[0].at[slot])
        when(n >= cfg.stages)(lambda: plgpu.barrier_wait(barriers[1].at[to]))
        before(stored.at[slot], to)
        convert(tile, stored.at[slot], target.at[to])
        return stored_barriers[1].at[slot], barriers[0].at[to]

    def hand_over(arrivals):
        """Commits converted tiles, then arrives. Of keys and values together where that may be: a commit also waits for
        loads that are under way, those of the next block's scales."""
        plgpu.commit_smem()
        for barrier in arrivals:
            plgpu.barrier_arrive(barrier)
        return ()

    def await_narrow(begin, end):
        """Waits until blocks begin .. end - 1 of the narrow ring are free."""

        def wait(n, _):
            slot = lax.rem(n, jnp.int32(cfg.narrow_stages))
            plgpu.barrier_wait(refs.k_narrow_free.at[slot])
            plgpu.barrier_wait(refs.v_narrow_free.at[slot])

        lax.fori_loop(begin, end, wait, None)

    def convert_piece(j, carry):
        before, freed = carry if cfg.two_rings else (carry, None)
        piece = piece_from_list(cfg, refs, j)  # not from its box: tiles are converted before the piece has one
        block_of, head, req = piece.blocks(cfg), piece[HEAD], piece[wl.REQ]
        kind = dict(block=cfg.block_kv, page=cfg.page_size)

        def ids_of(i):
            where = (block_of(i) * cfg.block_kv, piece[wl.KSTART], piece[wl.KSTOP])
            return token_scales.load_ids(refs.block_table, req, *where, **kind, columns=refs.block_table.shape[1])

        def scales_of(i, ids):
            where = (block_of(i) * cfg.block_kv, piece[wl.KSTART], piece[wl.KSTOP])
            order = dict(heads=cfg.num_kv_heads, heads_first=cfg.layout == "HND")
            pools = refs.k_token_scale, refs.v_token_scale
            return [token_scales.load_block(pool, ids, head, *where, **kind, **order) for pool in pools]

        def put_scales(row, *numbers):
            for part, of_block in enumerate(numbers):
                first = part * cfg.block_kv
                token_scales.put_block(refs.token_scale.at[row], of_block, first, block=cfg.block_kv)

        def follow(i, carry):
            """A block of a narrow tile."""
            freed, *rest = carry
            n = before[1] + i
            slot = lax.rem(n, jnp.int32(cfg.narrow_stages))
            end = jnp.maximum(n - cfg.narrow_stages + 1, freed)
            await_narrow(freed, end)
            ahead = ()
            if cfg.token_scales:
                scales, ids = rest
                ahead = (scales_of(i + 1, ids), ids_of(i + 2))
                put_scales(cfg.converted_scales + slot, *scales)
                plgpu.commit_smem()
            plgpu.barrier_arrive(refs.k_narrow_full.at[slot])
            plgpu.barrier_arrive(refs.v_narrow_full.at[slot])
            return end, *ahead

        def step(i, carry):
            n, kv0 = before[0] + i, block_of(i) * cfg.block_kv
            ahead, put = (), lambda *_: None
            if cfg.token_scales:
                scales, ids = carry
                numbers = scales[0], *token_scales.in_logits(scales[1])  # in the order of token_scales' parts
                put = lambda *_: put_scales(lax.rem(n, jnp.int32(cfg.converted_scales)), *numbers)
                ahead = (scales_of(i + 1, ids), ids_of(i + 2))

            zero = lambda stored, _: zero_unseen_values(cfg, stored, piece, kv0)
            arrivals = ()
            if cfg.compute_dtype is None:
                pair = (refs.k_stored_full, refs.k_stored_free), (refs.k_full, refs.k_free)
                arrivals = convert_block(n, of_keys, refs.k_stored, refs.k_tile, *pair, put)
            if arrivals and cfg.stages == 1:  # the values before are not released until these keys are there
                arrivals = hand_over(arrivals)
            pair = (refs.v_stored_full, refs.v_stored_free), (refs.v_full, refs.v_free)
            hand_over(arrivals + convert_block(n, of_values, refs.v_stored, refs.v_tile, *pair, zero))
            return ahead

        start = (scales_of(0, ids_of(0)), ids_of(1)) if cfg.token_scales else ()
        if not cfg.two_rings:
            lax.fori_loop(0, piece.count, step, start)
            return count_blocks(cfg, piece, before)
        narrow = in_narrow_ring(cfg, piece)
        freed, *_ = lax.fori_loop(0, jnp.where(narrow, piece.count, 0), follow, (freed, *start))
        end = jnp.where(narrow, freed, before[1])
        await_narrow(freed, end)
        lax.fori_loop(0, jnp.where(narrow, 0, piece.count), step, start)
        return count_blocks(cfg, piece, before), end

    start = (no_blocks(cfg), jnp.int32(0)) if cfg.two_rings else no_blocks(cfg)
    lax.fori_loop(0, count_pieces(refs.cta, worker(cfg, refs)), convert_piece, start)


def zero_unseen_values(cfg: GpuKernelConfig, tile, piece: Piece, kv0, half=None):
    """Zeroes values outside the request's keys or before its window: they may be NaN, and 0 * NaN is NaN.

    Values between the tile's last visible key and the request's end are tokens, or copies of a full page: no NaN.
    half: zero only the first (0) or second (1) half of the rows; None: all.
    """
    first, last = piece[wl.KSTART] - kv0, piece[wl.SEQ] - kv0

    @when((first > 0) | (last < cfg.block_kv))
    def _():
        dtype = cfg.kv_dtype if tile.dtype == jnp.dtype(cfg.kv_dtype) else cfg.weight_dtype
        rows.zero_rows(tile, first, last, rows=cfg.block_kv, dim=cfg.v_head_dim, dtype=dtype, half=half)
        plgpu.commit_smem()
