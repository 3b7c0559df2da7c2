"""What the TPU kernel is specialised for, and the sizes that follow from it."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv

PACK = 16
"""Query rows that move together: a bf16 tile has 16 sublanes. A tile of queries is a whole number of packs."""

LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static arguments; hashable. Not checked here: see supports.supports."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: str  # of queries and output
    kv_dtype: str
    mask: MaskRule
    logits: LogitRule
    has_sinks: bool = False
    per_head_q_scale: bool = False
    per_request_causal: bool = False
    block_kv: int = 1536  # keys of one step, rounded to whole parts
    part_kv: int = 256  # the same where some are masked, rounded to whole pages
    tile_rows: int = 512  # query rows (token x head of the group) that share one pass over the keys
    chunk_rows: int = 128  # of these, rows of one matrix product
    short_heads: int = 8  # heads of one straight piece of code in the short body
    long_heads: int = 4  # the same where there are many rows: with 8, tpu7x takes minutes to compile

    @property
    def group(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def part_pages(self) -> int:
        """Pages of a part."""
        return max(1, self.part_kv // self.page_size)

    @property
    def part_keys(self) -> int:
        """Keys of a part."""
        return self.part_pages * self.page_size

    @property
    def block_pages(self) -> int:
        """Pages of one step."""
        return max(1, self.block_kv // self.part_keys) * self.part_pages

    @property
    def block_keys(self) -> int:
        """Keys of one step."""
        return self.block_pages * self.page_size

    @property
    def tile_tokens(self) -> int:
        """Queries of a tile, whole tokens."""
        return max(1, self.tile_rows // self.group)

    @property
    def few_rows(self) -> int:
        """Rows of a tile that gets the short body, one token's: half a pack, or whole packs."""
        return 8 if self.group <= 8 else cdiv(self.group, PACK) * PACK

    @property
    def long_tiles(self) -> bool:
        """False where no tile has more rows than the short body takes."""
        return self.tile_tokens * self.group > self.few_rows

    @property
    def rows(self) -> int:
        """Rows of a tile's buffers: whole chunks, or where there are short tiles only, whole packs."""
        unit = self.chunk_rows if self.long_tiles else PACK
        return cdiv(self.tile_tokens * self.group, unit) * unit

    @property
    def compute_dtype(self) -> str:
        """What the matrix unit multiplies: bfloat16 holds every 8-bit value exactly."""
        return "float32" if "float32" in (self.dtype, self.kv_dtype) else "bfloat16"

    @property
    def columns(self) -> tuple[str, ...]:
        """Numbers that differ from row to row, in the order of the table's lanes."""
        wanted = (("q_scale", self.per_head_q_scale), ("slope", self.logits.has_alibi), ("sink", self.has_sinks))
        return tuple(name for name, there in wanted if there)

    def vmem_bytes(self) -> int:
        """Scratch of one launch as it lies in VMEM, lanes padded to 128; registers that spill come on top."""
        wide = lambda dim: cdiv(dim, LANES) * LANES
        item, kv_item = jnp.dtype(self.dtype).itemsize, jnp.dtype(self.kv_dtype).itemsize
        dims = wide(self.head_dim) + wide(self.v_head_dim)
        pages = 2 * self.block_keys * self.num_kv_heads * dims * kv_item
        packed = 2 * self.rows * self.num_kv_heads * dims * item + 2 * self.rows * LANES * 4
        state = self.num_kv_heads * self.rows * (2 * LANES + wide(self.v_head_dim)) * 4
        table = self.num_kv_heads * self.rows * LANES * 4 if self.columns else 0
        return pages + packed + state + table
