"""The pieces of work of one CTA, and the warpgroup that fetches them: queries, keys and values ahead of their use."""

import dataclasses
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import token_scales_sm90 as token_scales
from pallas_kernels.gpu import work_list as wl

M = rows.ROWS
FIXED_LOGIT = 80.0


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
    token_scales: bool = False  # f32 [N, K, S] or [N, S, K] beside each pool: one a stored row
    mask: MaskRule = MaskRule()
    logits: LogitRule = LogitRule(scale=1.0)
    has_sinks: bool = False
    per_request_causal: bool = False
    block_kv: int = 128
    stages: int = 2
    q_buffers: int = 2  # pieces whose queries are in SMEM: 2, the next one's too; 1 where a head is too wide for that
    num_ctas: int = 132
    heads_together: int = 0  # kv heads whose pages are read at the same time; 0: as work_list.py decides
    short_weight: int = 4
    long_weight: int = 9
    min_split: int = 1
    long_tiles: bool = True  # False: every request has at most 64 // G new tokens, known statically
    flat_list: bool = False  # with long_tiles=False: the work list is the line alone (work_list.py)
    fixed_max: bool = False  # soft-capped logits without a running maximum, where can_fix_max
    cap_fourths: int = 0  # of every 4 scores, how many get their soft cap by FMA instead of tanh.approx
    narrow_rows: int = 0  # 8 or 16: every request has at most so many rows, computed by narrow_sm90; 0: not known

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def quantised(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def can_fix_max(self) -> bool:
        """Exponentials of 2 ** +-FIXED_LOGIT and sums of a million of them are float32 and bfloat16 numbers."""
        rule = self.logits
        unbounded = rule.has_alibi or rule.score_fn is not None or not rule.soft_cap
        return (
            not unbounded
            and not self.quantised
            and self.dtype == "bfloat16"
            and rule.soft_cap * math.log2(math.e) <= FIXED_LOGIT
        )

    @property
    def value_dtype(self) -> str:
        """Operand type of weights and values: float16 holds every 8-bit value exactly, and so does bfloat16.

        A weight times its value's own scale can be as small as 1e-9 (a row of 1e-4 over 57344) or as large as 80 (1e4
        over 127) beside any other: that takes float32's exponents.
        """
        if self.token_scales:
            return "bfloat16"
        return "float16" if self.quantised else self.dtype

    @property
    def weight_parts(self) -> int:
        """Operands whose sum a weight is: float16 results want more than bfloat16's 8 bits, and two have 16."""
        return 2 if self.token_scales and self.dtype == "float16" else 1

    @property
    def list_config(self) -> wl.ListConfig:
        return wl.ListConfig(
            rule=self.mask,
            group=self.group,
            num_kv_heads=self.num_kv_heads,
            heads_together=self.heads_together,
            key_bytes=(self.head_dim + self.v_head_dim) * (1 if self.quantised else 2),
            block_kv=self.block_kv,
            num_ctas=self.num_ctas,
            short_weight=self.short_weight,
            long_weight=self.long_weight,
            min_split=self.min_split,
            flat=self.flat_list,
        )


@dataclasses.dataclass(frozen=True)
class Refs:
    """Every Ref of the kernel, with its shape."""

    q: object  # GMEM [T, H, D]
    k: object  # GMEM [N, K, S, D] (HND) or [N, S, K, D] (NHD)
    v: object  # GMEM [N, K, S, V] or [N, S, K, V]
    table: object  # GMEM i32[R, B]
    info: object  # GMEM i32[tiles, 16]
    cta: object  # GMEM i32[C, 12]
    scales: object  # GMEM f32[K, 2]: logit scale (times k_scale), v_scale
    heads: object  # GMEM f32[H, 2]: ALiBi slope, sink
    k_token: object  # GMEM f32 [N, K, S] or [N, S, K]: scales of stored keys; None unless token_scales
    v_token: object
    out: object  # GMEM [T, H, V]
    lse: object  # GMEM f32[T, H]
    part: object  # GMEM f32[2 C, 128, V]: normalised partial outputs
    part_lse: object  # GMEM f32[2 C, 128], base 2
    q_tile: object = None  # SMEM [q_buffers, 2, 64, D]
    k_tile: object = None  # SMEM [stages, block_kv, D]
    v_tile: object = None  # SMEM [stages, block_kv, V]
    k_work: object = None  # SMEM [2, block_kv, D]: each warpgroup's decoded keys; None unless quantised
    v_work: object = None  # SMEM [2, block_kv, V]
    stats: object = None  # SMEM f32[512]: maxima and sums that the second warpgroup hands over
    box: object = None  # SMEM i32[q_buffers, 16]: the piece in each Q buffer, see Piece
    token: object = None  # SMEM f32[stages, 2 block_kv]: scales of keys, then of values; filled and freed with k_tile
    k_full: object = None  # barriers [stages], one arrival a page, and one of a key block's scales
    v_full: object = None
    k_free: object = None  # barriers [stages], one arrival a compute warpgroup
    v_free: object = None
    q_full: object = None  # barriers [q_buffers]
    q_free: object = None
    turn: object = None  # the two compute warpgroups' barrier: ping-pong and exchange


HEAD, LO, HI = 13, 14, 15  # columns of the box beyond those of the work list's info


@dataclasses.dataclass(frozen=True)
class Piece:
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


def count_pieces(cta, me):
    waves, u0, _, u1, b1 = (cta[me, i] for i in range(5))
    return waves + (u1 - u0) + (b1 > 0).astype(jnp.int32)


def _piece_from_list(cfg: Config, refs: Refs, j) -> Piece:
    """This CTA's j-th piece: whole waves in snake order, then its stretch of the line."""
    me = lax.axis_index("cta")
    waves, u0, b0, u1, b1 = (refs.cta[me, i] for i in range(5))
    k = jnp.where(refs.cta[me, wl.BACKWARD] != 0, count_pieces(refs.cta, me) - 1 - j, j)
    snake = jnp.where(lax.rem(k, jnp.int32(2)) == 0, me, cfg.num_ctas - 1 - me)
    unit = jnp.where(k < waves, k * cfg.num_ctas + snake, u0 + k - waves)
    set_units, set_heads = refs.cta[me, wl.SET_UNITS], refs.cta[me, wl.SET_HEADS]
    tile, head = wl.place_of(unit, set_units, cfg.num_kv_heads, set_heads)
    info = [refs.info[tile, i] for i in range(HEAD)]
    lo = jnp.where(unit == u0, b0, 0)
    hi = jnp.where(unit == u1, b1, info[wl.NBLK])
    return Piece((*info, head, lo, hi).__getitem__, lax.rem(j, jnp.int32(cfg.q_buffers)))


def _send_piece(cfg: Config, refs: Refs, j) -> Piece:
    """Memory warpgroup: fetch piece j's numbers and query rows into its buffer, ahead of the compute warpgroups."""
    piece = _piece_from_list(cfg, refs, j)
    buffer = piece.buffer

    @pl.when(j >= cfg.q_buffers)
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


def receive_piece(cfg: Config, refs: Refs, j) -> Piece:
    """Compute warpgroups: await piece j."""
    buffer = lax.rem(j, jnp.int32(cfg.q_buffers))
    plgpu.barrier_wait(refs.q_full.at[buffer])
    return Piece(lambda column: refs.box[buffer, column], buffer)


def load_pages(cfg: Config, refs: Refs):
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

        kind = dict(block=block, page=page)

        def ids_of(i):
            where = ((blk0 + i) * block, piece[wl.KSTART], piece[wl.KSTOP])
            return token_scales.load_ids(refs.table, req, *where, **kind, columns=refs.table.shape[1])

        def scales_of(i, ids):
            where = ((blk0 + i) * block, piece[wl.KSTART], piece[wl.KSTOP])
            order = dict(heads=cfg.num_kv_heads, heads_first=cfg.layout == "HND")
            return token_scales.load_scales(refs.k_token, refs.v_token, ids, piece[HEAD], *where, **kind, **order)

        def load_block(i, carry):
            turn, pages, *scales = carry
            coming = page_ids(i + 1)  # in flight while this block waits for its slot
            ahead = (scales_of(i + 1, scales[1]), ids_of(i + 2)) if cfg.token_scales else ()
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
            if cfg.token_scales:
                refs.token[slot] = scales[0]
                plgpu.barrier_arrive(refs.k_full.at[slot])
            fill(refs.v, refs.v_tile, refs.v_full, refs.v_free)
            return turn + 1, coming, *ahead

        first_scales = (scales_of(0, ids_of(0)), ids_of(1)) if cfg.token_scales else ()
        return lax.fori_loop(0, piece.count, load_block, (turn, page_ids(0), *first_scales))[0]

    lax.fori_loop(0, count_pieces(refs.cta, lax.axis_index("cta")), load_piece, jnp.int32(0))
