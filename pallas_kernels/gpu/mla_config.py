"""The static arguments of the latent attention kernel, the shared memory that they need, and what it cannot serve."""

import dataclasses
import math

from pallas_kernels.algebra.checks import Reasons, Subject, unlisted_fields
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config import KV_DTYPES_8BIT, WARPGROUP_ROWS, GpuKernelConfig
from pallas_kernels.gpu.flat_list import may_be_in_waves

BLOCK_KV = 64  # cached rows of one block
STAGES = 2  # blocks in shared memory, as they are cached
PART = 128  # most columns of a part of a stage, see mla_pieces_sm90.py
PIECE_BLOCKS = 4  # see GpuKernelConfig
UNIT_BLOCKS, WHOLE_KEYS = 6, 128
"""GpuKernelConfig.unit_blocks and whole_keys. us, an H200, where with 0 and 512 and all units on a line it was more: 2
requests of 32000 keys and 60 of 100 to 500, 128 heads, 70 (147); 256 of 50 to 800 keys 101 (162), of 16 heads 48 (67);
64 of 100 to 30000 217 (273). 20 us of the first gain are the merge's, see merge_sm90.split_unit."""
SMEM_BYTES = 232448  # what a CTA may use on Hopper
NARROW_ROWS = 16  # most rows of a tile of warp-level products, see mla_narrow_sm90.py
NARROW_STAGES = 6  # most blocks of 8 bits in shared memory for them
BARRIERS = 32  # Mosaic's most barriers of one array
STATS = 10 * NARROW_ROWS  # f32: see MlaRefs.stats
SMEM_FIXED = 4 * STATS + 1024  # bytes: statistics, barriers, alignment
SLACK = 8.0  # a row's maximum is replaced when a base-2 logit exceeds it by more
FLOAT16_BIAS = 7.0  # float16 weights are so many powers of two larger: at most 2 ** 15, and 0 only below 2 ** -32
MASKS = ("causal",)  # fields of a MaskRule that it honours
LOGITS = ("scale",)  # fields of a LogitRule that it honours
DTYPES = ("bfloat16", "float16")
MAX_QUERY_LEN = 8  # most new tokens of a request


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaKernelConfig:
    """Everything that is static about one kernel; hashable. Checked by `supports_mla`, not here."""

    num_heads: int
    group: int  # query heads of one unit of work, see heads_of_unit
    max_rows: int = WARPGROUP_ROWS  # most rows of a unit: `group` times the new tokens of a request
    latent_dim: int = 512  # L, values of a row that are keys and values
    rope_dim: int = 64  # R, values of a row that are only keys
    page_size: int
    dtype: str = "bfloat16"  # of queries and output
    kv_dtype: str | None = None  # of a cache of 8 bits, which is decoded to `dtype`; None: that of queries
    listed: bool = False  # each token, a request of its own, names its keys: see mla_listed_sm90.py
    whole_rows: bool = False  # one pool of rows [latent | rope], not one pool of each
    mask: MaskRule = MaskRule()
    logits: LogitRule = LogitRule(scale=1.0)
    has_sinks: bool = False
    per_request_causal: bool = False
    num_ctas: int = 132  # one on each SM of an H100 or H200

    @property
    def is_decoded(self) -> bool:
        """Is the cache of 8 bits?"""
        return self.kv_dtype is not None

    @property
    def cache_dtype(self) -> str:
        """The dtype of the cached rows."""
        return self.kv_dtype or self.dtype

    @property
    def is_narrow(self) -> bool:
        """Are the few rows multiplied by warp-level products, which decode 8 bits in registers?"""
        return self.is_decoded and self.max_rows <= NARROW_ROWS and self.latent_dim % 256 == 0

    @property
    def decodes_tiles(self) -> bool:
        """Are blocks of 8 bits decoded in shared memory?"""
        return self.is_decoded and not self.is_narrow

    @property
    def bias(self) -> float:
        """Of the exponent of a weight."""
        return FLOAT16_BIAS if self.dtype == "float16" else 0.0

    @property
    def loaded_stages(self) -> int:
        """Blocks in shared memory as they are cached."""
        if not self.is_narrow:
            return STAGES
        room = SMEM_BYTES - SMEM_FIXED - 2 * NARROW_ROWS * BLOCK_KV
        return min(NARROW_STAGES, BARRIERS // (2 * self.parts_of_half), room // (BLOCK_KV * self.head_dim))

    @property
    def stages(self) -> int:
        """Blocks in shared memory that are multiplied: one decoded block, or the blocks as they are cached."""
        return 1 if self.decodes_tiles else self.loaded_stages

    @property
    def head_dim(self) -> int:
        """Values of a query or of a cached row, L + R."""
        return self.latent_dim + self.rope_dim

    @property
    def half(self) -> int:
        """Columns of the output of one warpgroup."""
        return self.latent_dim // 2

    @property
    def part(self) -> int:
        """Latent columns of a part of a stage."""
        columns = math.gcd(self.half, PART)
        if self.is_decoded and self.whole_rows:  # TMA's tiles, here as wide as a part, must divide the pool's rows
            columns = math.gcd(columns, self.head_dim)
        return columns

    @property
    def parts_of_half(self) -> int:
        """Parts whose columns one warpgroup has."""
        return self.half // self.part

    @property
    def attention(self) -> GpuKernelConfig:
        """The config for the merge and the work list of listed keys: a kv head for each group of query heads."""
        return GpuKernelConfig(
            num_heads=self.num_heads, num_kv_heads=self.num_heads // self.group, head_dim=self.head_dim,
            v_head_dim=self.latent_dim, page_size=self.page_size, dtype=self.dtype, kv_dtype=self.dtype,
            mask=self.mask, logits=self.logits, has_sinks=self.has_sinks,
            per_request_causal=self.per_request_causal, block_kv=BLOCK_KV, stages=self.stages, q_buffers=1,
            num_ctas=self.num_ctas, long_tiles=False, flat_list=True, piece_blocks=PIECE_BLOCKS,
            unit_blocks=UNIT_BLOCKS, whole_keys=WHOLE_KEYS,
        )  # fmt: skip

    def list_of(self, requests: int) -> GpuKernelConfig:
        """The config for the work list of so many requests: perhaps in waves, or few units in equal pieces."""
        waves = dataclasses.replace(self.attention, piece_blocks=0, in_waves=True)
        return waves if may_be_in_waves(waves, requests) else self.attention

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: the queries, the stages of rows and one block of weights."""
        block = BLOCK_KV * self.head_dim
        if self.is_narrow:
            return self.stages * block + 2 * NARROW_ROWS * BLOCK_KV + SMEM_FIXED
        values = WARPGROUP_ROWS * self.head_dim + self.stages * block + WARPGROUP_ROWS * BLOCK_KV
        cached = STAGES * block if self.decodes_tiles else 0
        return 2 * values + cached + SMEM_FIXED


def heads_of_unit(num_heads: int, max_query_len: int) -> int:
    """The most query heads, a divisor of num_heads, whose rows of max_query_len tokens fit in one tile; at least 1."""
    return next((n for n in range(num_heads, 1, -1) if num_heads % n == 0 and n * max_query_len <= WARPGROUP_ROWS), 1)


def supports_mla(config: MlaKernelConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    refuse(c.dtype not in DTYPES, f"dtype {c.dtype}: wanted queries of one of {', '.join(DTYPES)}")
    known = not c.is_decoded or c.kv_dtype in KV_DTYPES_8BIT
    refuse(not known, f"kv_dtype {c.kv_dtype}: wanted None or one of {', '.join(KV_DTYPES_8BIT)}")
    refuse(c.num_heads % c.group != 0, f"group {c.group}: wanted a divisor of {c.num_heads} heads")
    refuse(not 1 <= c.group <= WARPGROUP_ROWS, f"group {c.group}: wanted 1 to {WARPGROUP_ROWS} heads")
    latent, rope = c.latent_dim, c.rope_dim
    refuse(latent % 128 != 0 or not 128 <= latent <= 512, f"kv_lora_rank {latent}: wanted 128, 256, 384 or 512")
    refuse(rope % 64 != 0 or rope < 64, f"qk_rope_head_dim {rope}: wanted a multiple of 64")
    for seen in (*unlisted_fields(c.mask, MASKS), *unlisted_fields(c.logits, LOGITS)):
        refuse(True, f"{seen}: not in this kernel")
    refuse(c.has_sinks, "sinks: not in this kernel")
    refuse(c.listed and c.is_decoded, "listed keys: wanted a cache of 16 bits")
    page = c.page_size
    fits = page >= 8 and page & (page - 1) == 0
    refuse(not fits, f"page size {page}: wanted a power of two of at least 8", Subject.PAGE_SIZE)
    wanted = c.smem_bytes
    seen = f"{wanted} bytes of shared memory; there are {SMEM_BYTES}"
    refuse(not reasons and wanted > SMEM_BYTES, seen, Subject.MEMORY)
    return reasons
