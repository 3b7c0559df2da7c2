"""The static arguments of the GPU attention kernel, and the shared memory that they need."""

import dataclasses
import math

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.shards import ShardRule

WARPGROUP_ROWS = 64  # query rows of one warpgroup's tile: the M of wgmma
KV_DTYPES_8BIT = ("float8_e4m3fn", "float8_e5m2", "int8")
SMEM_LIMIT = 232448 - 4096  # bytes a CTA may use on Hopper, less barriers and reduction scratch
SMEM_FIXED = 2304  # bytes: row statistics, the numbers of the pieces in flight, alignment
DECODED = 2  # blocks of an 8-bit cache in shared memory that are decoded already
TOKEN_SCALE_BYTES = 8  # f32 scales of one key and its value
MAX_FIXED_LOGIT = 80.0  # base 2


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
    token_scales: bool = False  # a f32 scale for each token and kv head: [N, K, S] or [N, S, K] beside each pool
    mask: MaskRule = MaskRule()
    logits: LogitRule = LogitRule(scale=1.0)
    has_sinks: bool = False
    per_request_causal: bool = False
    qq_bias: bool = False  # a bias among a request's new tokens is added to the logits
    shards: ShardRule = ShardRule()  # of a request's keys, if several ranks hold them: the pools have those of one

    block_kv: int = 128  # keys of one block: one step of the softmax loop
    stages: int = 2  # blocks of keys and values in shared memory
    q_buffers: int = 2  # pieces whose queries are in shared memory; 2: the next piece's load overlaps this one
    keys_first: bool = False  # a piece's first block is asked for before its queries are waited for
    num_ctas: int = 132  # one on each SM of an H100 or H200
    heads_together: int = 0  # kv heads whose pages are read at the same time; 0: work_list.py decides
    short_weight: int = 4  # cost of one key block of a tile of at most WARPGROUP_ROWS rows ...
    long_weight: int = 9  # ... and of a longer tile
    min_split: int = 1  # key blocks: a split leaves at least this many on either side
    long_tiles: bool = True  # False: no request has more than WARPGROUP_ROWS packed rows
    flat_list: bool = False  # with long_tiles=False: the flat work list of work_list.py
    piece_blocks: int = 0  # of a flat list: key blocks that a CTA's second piece costs; not with merges_inside
    whole_units: bool = False  # no unit is cut: the bits of a request do not depend on the rest of the batch
    fixed_max: bool = False  # soft-capped logits without a running maximum; needs can_fix_max
    cap_fourths: int = 0  # of every 4 scores, how many get their soft cap by FMA instead of tanh.approx
    merges_inside: bool = False  # the last CTA of a split unit merges its parts; needs flat_list and counters
    narrow_rows: int = 0  # 8 or 16: no request has more rows, and narrow_sm90.py computes them; 0: unknown

    @property
    def group(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.num_kv_heads

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
    def decodes_ahead(self) -> bool:
        """Does a warpgroup of its own decode tiles before they are multiplied? Narrow tiles: in registers instead."""
        return self.quantised and not self.narrow_rows

    @property
    def ring(self) -> int:
        """Blocks that the multiplying warpgroups find in shared memory."""
        return DECODED if self.decodes_ahead else self.stages

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
        """Operand type of the product of weights and values.

        float16 and bfloat16 both hold every 8-bit value exactly; float16 keeps more bits of a weight. With token
        scales, a weight is multiplied by its value's scale, which may be as small as 1e-9 (a row of 1e-4 over 57344)
        or as large as 80 (1e4 over 127) in one tile: that needs the exponent range of bfloat16.
        """
        if self.token_scales:
            return "bfloat16"
        return "float16" if self.quantised else self.dtype

    @property
    def weight_parts(self) -> int:
        """Operands whose sum is a weight: 2 where a float16 result needs more than bfloat16's 8 bits of mantissa."""
        return 2 if self.token_scales and self.dtype == "float16" else 1

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key and value of one kv head."""
        return (self.head_dim + self.v_head_dim) * (1 if self.quantised else 2)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: queries, stages of keys and values, and decoded blocks if it decodes there."""
        dims = self.head_dim + self.v_head_dim
        key = dims * (1 if self.kv_dtype in KV_DTYPES_8BIT else 2)
        scales = TOKEN_SCALE_BYTES if self.token_scales else 0
        decoded = DECODED * self.block_kv * (dims * 2 + scales) if self.decodes_ahead else 0
        queries = 2 * self.q_buffers * WARPGROUP_ROWS * self.head_dim * 2
        return queries + self.stages * self.block_kv * (key + scales) + decoded + SMEM_FIXED
