"""The static arguments of the GPU attention kernel, and the shared memory that they need."""

import dataclasses
import math

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.shards import ShardRule

WARPGROUP_ROWS = 64  # query rows of one warpgroup's tile: the M of wgmma
FP8 = "float8_e4m3fn"
KV_DTYPES_8BIT = (FP8, "float8_e5m2", "int8")
SMEM_OF_MOSAIC = 5 * 1024  # bytes: barriers, and 2 KiB of a reduction where logits rise; up to 4216 are needed
SMEM_LIMIT = 232448 - SMEM_OF_MOSAIC  # bytes a CTA may use on Hopper, less those
SMEM_FIXED = 2304  # bytes: row statistics, the numbers of the pieces in flight, alignment
SMEM_UNIT = 1024  # bytes: Mosaic gives every buffer in shared memory a multiple of them
PIECE_BOXES = 2  # pieces of a pipeline whose numbers are in shared memory
MAX_FIXED_LOGIT = 80.0  # base 2


def in_units(size: int) -> int:
    """Bytes of shared memory that a buffer of so many takes."""
    return cdiv(size, SMEM_UNIT) * SMEM_UNIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuKernelConfig:
    """Everything that is static about one kernel; hashable.

    Not checked here: supports.py says why a config cannot be served. tile_policy.default_config chooses the second
    group of fields.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    layout: str = "HND"
    dtype: str = "bfloat16"  # of the queries
    out_dtype: str | None = None  # of the output: float32, for states that are merged later; None: the queries'
    kv_dtype: str = "bfloat16"
    compute_dtype: str | None = None  # float8_e4m3fn: queries and weights are rounded to it; None: exact products
    token_scales: bool = False  # a f32 scale for each token and kv head: [N, K, S] or [N, S, K] beside each pool
    mask: MaskRule = MaskRule()
    logits: LogitRule = LogitRule(scale=1.0)
    has_sinks: bool = False
    per_request_causal: bool = False
    qq_bias: bool = False  # a bias among a request's new tokens is added to the logits
    shards: ShardRule = ShardRule()  # of a request's keys, if several ranks hold them: the pools have those of one

    block_kv: int = 128  # keys of one block: one step of the softmax loop
    stages: int = 2  # blocks of keys and values in shared memory
    q_buffers: int = 2  # 2: the memory warpgroup loads the next piece's queries; 1: see loads_queries
    num_ctas: int = 132  # one on each SM of an H100 or H200
    heads_together: int = 0  # kv heads whose pages are read at the same time; 0: ranked_list.py decides
    narrow_weight: int = 4  # cost of one key block of a tile of at most narrow_rows rows ...
    short_weight: int = 4  # ... of another of at most WARPGROUP_ROWS rows ...
    long_weight: int = 9  # ... and of a longer tile
    unit_cost: int = 11  # of a ranked list: what a unit costs besides its blocks; 11 is about 2 us
    min_split: int = 1  # key blocks: a split leaves at least this many on either side
    long_tiles: bool = True  # False: no request has more than WARPGROUP_ROWS packed rows
    flat_list: bool = False  # with long_tiles=False: the work list of flat_list.py
    unit_blocks: int = 0  # of a flat list: blocks that take as long as what a unit costs besides its own
    whole_keys: int = 512  # of a flat list: a unit of so few keys is not cut; a piece and a merge cost more
    in_waves: bool = False  # of a flat list: units may be whole and in waves, longest first; see flat_list.py
    piece_blocks: int = 0  # of a flat list: equal pieces, one a CTA, if so many blocks above an equal share are enough
    whole_units: bool = False  # no unit is cut: the bits of a request do not depend on the rest of the batch
    fixed_max: bool = False  # soft cap without a running maximum, by soft_cap_sm90.py; needs can_fix_max
    merges_inside: bool = False  # the last CTA of a split unit merges its parts; needs flat_list and counters
    narrow_rows: int = 0  # 8 or 16: narrow_sm90.py computes tiles of at most so many rows; all, if none is long
    computing: int = 2  # warpgroups that compute, 2 or 3: each has 64 rows of a long tile, and all share a load of keys
    last_block_first: bool = False  # a piece's blocks of keys are read from the last to the first
    weights_first: bool = False  # long tiles: weights without a block's maximum (softmax_sm90.py); needs more registers
    pipelines: int = 1  # 2: each compute warpgroup has units, stages and a memory warpgroup of its own

    @property
    def group(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def workers(self) -> int:
        """How many workers share the units: the CTAs, or their pipelines."""
        return self.num_ctas * self.pipelines

    @property
    def has_long_tiles(self) -> bool:
        """Are there tiles of more rows than one warpgroup takes? Not in a pipeline, which has one that computes."""
        return self.long_tiles and self.pipelines == 1

    @property
    def has_short_tiles(self) -> bool:
        """Are there tiles of one warpgroup's rows? Not where narrow ones are all but padding."""
        return not self.narrow_rows or self.has_long_tiles

    @property
    def loads_queries(self) -> bool:
        """Does each computing warpgroup load its own queries? Yes with one buffer: a memory warpgroup would have to
        wait for all of them, and the end of one piece could not overlap the begin of the next."""
        return self.q_buffers == 1

    @property
    def moves_padding(self) -> bool:
        """In a flat list, do CTAs without keys have the padding before others?"""
        return self.flat_list

    @property
    def few_rows(self) -> int:
        """The most rows of a tile, where none is long."""
        return self.narrow_rows or WARPGROUP_ROWS

    @property
    def tile_rows(self) -> int:
        """The most packed rows of a tile."""
        return self.computing * WARPGROUP_ROWS // self.pipelines

    @property
    def part_rows(self) -> int:
        """Rows of a slot of partial results."""
        return self.computing * WARPGROUP_ROWS

    @property
    def lean(self) -> bool:
        """Whether numbers that depend on the lane are computed where they are used, and kept in no register."""
        return False

    @property
    def result_dtype(self) -> str:
        """Of the output."""
        return self.out_dtype or self.dtype

    @property
    def copied_keys(self) -> int:
        """Keys that one copy to shared memory brings: the most that divide a block and never cross a page's end."""
        return math.gcd(self.page_size, self.block_kv)

    @property
    def quantised(self) -> bool:
        """Are keys and values decoded before they are multiplied?"""
        return self.kv_dtype != self.dtype

    @property
    def converts_tiles(self) -> bool:
        """Does a warpgroup convert tiles of the cache for wgmma (stored_tiles_sm90.py)? Narrow tiles need none."""
        return self.quantised and self.has_short_tiles

    @property
    def two_rings(self) -> bool:
        """Do narrow tiles have stages of their own, as in the pool, in the memory of those that are converted?"""
        return self.converts_tiles and self.narrow_rows > 0

    @property
    def narrow_stages(self) -> int:
        """Blocks of keys and values of narrow tiles: 8 bits take half of the memory of 16."""
        return 2 * self.stages if self.two_rings else self.stages

    @property
    def converted_scales(self) -> int:
        """Rows of token scales for converted tiles: one more than stages, since the scales of a block's values come
        with its keys, while the values `stages` blocks earlier may still be in use."""
        return self.stages + 1 if self.converts_tiles else 0

    @property
    def scale_rows(self) -> int:
        """Rows of token scales in all: of converted tiles, then of narrow ones. The rings share tiles only."""
        return self.converted_scales + (self.narrow_stages if self.narrow_rows else 0)

    @property
    def scale_columns(self) -> int:
        """Numbers of a row of token scales: two for each key, or three of a converted tile (token_scales_sm90.py)."""
        return (3 if self.converts_tiles else 2) * self.block_kv

    @property
    def query_dtype(self) -> str:
        """Operand type of the product of queries and keys.

        Where tiles are converted it is float16, to which 8 bits are decoded by a quarter of the instructions that
        bfloat16 takes. Rows of queries are multiplied by powers of two for it: queries_sm90.py.
        """
        if self.compute_dtype is not None:
            return self.compute_dtype
        return "float16" if self.converts_tiles else self.dtype

    @property
    def stored_stages(self) -> tuple[int, int]:
        """Blocks of keys and of values in shared memory as in the pool, before they are converted.

        Keys of 8-bit products are multiplied as they are. What is decoded comes in time with one stage of values: the
        keys of the next block are converted before them.
        """
        if not self.converts_tiles:
            return 0, 0
        return (0, 2) if self.compute_dtype is not None else (2, 1)

    @property
    def converts_queries(self) -> bool:
        """Does a warpgroup convert its queries before it multiplies them?"""
        return self.query_dtype != self.dtype

    @property
    def can_fix_max(self) -> bool:
        """May the softmax leave out its running maximum?

        With |logit| <= MAX_FIXED_LOGIT in base 2, float32 and bfloat16 hold the exponentials, and sums of a million.
        """
        rule = self.logits
        if rule.has_alibi or self.qq_bias or rule.score_fn is not None or not rule.soft_cap:
            return False  # the logits have no bound
        bounded = rule.soft_cap * math.log2(math.e) <= MAX_FIXED_LOGIT
        return bounded and not self.quantised and self.dtype == "bfloat16"

    @property
    def value_dtype(self) -> str:
        """Operand type of the warp-level product of weights and values.

        float16 and bfloat16 both hold every 8-bit value exactly; float16 keeps more bits of a weight. With token
        scales, a weight is multiplied by its value's scale, which may be as small as 1e-9 (a row of 1e-4 over 57344)
        or as large as 80 (1e4 over 127) in one tile: that needs the exponent range of bfloat16.
        """
        return "bfloat16" if self.token_scales else self.weight_dtype

    @property
    def weight_dtype(self) -> str:
        """Operand type of wgmma's product of weights and values. There the scale of a value is a part of its logit, so
        that the largest weight is about 1 whatever the scales."""
        return self.compute_dtype or ("float16" if self.quantised else self.dtype)

    @property
    def weight_parts(self) -> int:
        """Operands of a warp-level product whose sum is a weight: 2 where a float16 result needs more than bfloat16's 8
        bits of mantissa."""
        return 2 if self.token_scales and self.dtype == "float16" else 1

    @property
    def logits_rise(self) -> bool:
        """May logits rise all along a row, in the order in which its keys are read?"""
        return (self.logits.has_alibi or self.logits.score_fn is not None) and not self.last_block_first

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key and value of one kv head."""
        return (self.head_dim + self.v_head_dim) * (1 if self.quantised else 2)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: queries, and stages of keys and values as they are multiplied."""
        dims = self.head_dim + self.v_head_dim
        key = dims * (1 if self.kv_dtype in KV_DTYPES_8BIT else 2)
        queries = self.computing * self.q_buffers * WARPGROUP_ROWS * self.head_dim * 2
        if self.compute_dtype is not None:
            queries += self.computing * WARPGROUP_ROWS * self.head_dim
        elif self.converts_tiles:
            key = 2 * dims
        of_keys, of_values = self.stored_stages
        queries += self.block_kv * (of_keys * self.head_dim + of_values * self.v_head_dim)
        scales = self.scale_rows * self.scale_columns * 4 if self.token_scales else 0
        return queries + self.stages * self.block_kv * key + in_units(scales) + SMEM_FIXED
