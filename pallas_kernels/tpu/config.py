"""The static arguments of the TPU attention kernel, and the sizes that follow from them."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.shards import ShardRule

PACK = 16
"""Query rows that are copied together: a bf16 VMEM tile has 16 sublanes. A query tile is a whole number of packs."""

LANES = 128

TOKENS_TOGETHER = 8
"""Tokens that row_order.py moves at once."""

LATENT_FORMS = ("split", "whole")
"""How rows [latent | rope] are stored, whose latents are the values. split: ropes in the key pool and latents in the
value pool. whole: rows in the key pool, and the value pool is not read."""


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(n for n in range(min(most, number), 0, -1) if number % n == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuKernelConfig:
    """Everything that is static about one kernel; hashable. Not checked here: see supports.py and tile_policy.py."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: str  # of queries
    kv_dtype: str
    out_dtype: str  # of the output: the queries', or float32 for a caller that quantises it
    mask: MaskRule
    logits: LogitRule
    has_sinks: bool = False
    per_head_q_scale: bool = False
    per_request_causal: bool = False
    layout: str = "HND"  # order of a page: HND [K S D], NHD [S K D]; HND128 [K S*D/128 128], see `beside`
    token_scales: bool = False  # keys and values have a scale for each token and kv head
    qq_bias: bool = False  # a bias among a request's new tokens is added to the logits
    shards: ShardRule = ShardRule()  # the ranks that hold a request's keys
    latent: str = ""  # latent attention: see LATENT_FORMS; "": keys and values of their own
    block_kv: int = 1536  # keys of one block, fetched at once; rounded to whole parts
    part_kv: int = 256  # keys of one part: where keys are masked, a block is computed by parts; rounded to whole pages
    step_kv: int = 512  # keys that a chunk of rows takes at once where it sees them all; rounded to whole parts
    tile_rows: int = 512  # query rows (token x head of the group) that share one pass over the keys
    chunk_rows: int = 128  # query rows of one matrix product
    short_heads: int = 8  # kv heads that are unrolled in the body of few rows
    long_heads: int = 8  # the same in the body of many rows
    values_behind: int = 2  # the product with values is so many heads behind the weights; 0: half are not stored
    early_heads: int = 0  # so many of these products come before a later head's logits, not after; 0 if behind is 0

    @property
    def group(self) -> int:
        """Query heads of one kv head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_dim(self) -> int:
        """Elements of a row of the key pool."""
        return self.head_dim - self.v_head_dim if self.latent == "split" else self.head_dim

    @property
    def pool_dims(self) -> tuple[int, ...]:
        """Elements of a row of each pool that is read."""
        return (self.key_dim,) if self.latent == "whole" else (self.key_dim, self.v_head_dim)

    @property
    def beside(self) -> int:
        """Keys that lie side by side in a row of the pool: in a page of HND128, row r of a head has keys
        beside * r, beside * r + 1, ... Each group of lanes has products of its own, in which the others are 0."""
        return LANES // self.head_dim if self.layout == "HND128" else 1

    @property
    def acc_dim(self) -> int:
        """Lanes of a row's weighted sum of values, in groups if keys lie side by side."""
        return self.v_head_dim * self.beside

    def page_dims(self, dim: int) -> tuple[int, int]:
        """Rows and numbers of a head's page in VMEM."""
        return self.page_size // self.beside, dim * self.beside

    @property
    def paged_arrays(self) -> tuple[str, ...]:
        """What is fetched page by page."""
        pools = ("k", "v")[: len(self.pool_dims)]
        return (*pools, "k_token", "v_token") if self.token_scales else pools

    @property
    def row_arrays(self) -> tuple[str, ...]:
        """What is fetched with the queries, pack by pack: the range of keys and the biases of each row."""
        return ("ranges",) * self.has_ranges + ("bias",) * self.qq_bias

    @property
    def has_ranges(self) -> bool:
        """Are the keys that each row sees given one by one, instead of by the mask's rule?"""
        return self.mask.spans or self.shards.world > 1

    @property
    def bias_lanes(self) -> int:
        """Lanes of a row's biases: those of a part, over which they are rotated."""
        return cdiv(self.part_keys, LANES) * LANES

    @property
    def lse_lanes(self) -> int:
        """Lanes of the lse, at least one for each kv head."""
        return cdiv(self.num_kv_heads, LANES) * LANES

    @property
    def part_pages(self) -> int:
        """Pages of a part."""
        return max(1, self.part_kv // self.page_size)

    @property
    def part_keys(self) -> int:
        """Keys of a part."""
        return self.part_pages * self.page_size

    @property
    def step_parts(self) -> int:
        """Parts of a step, at most a block."""
        return min(max(1, self.step_kv // self.part_keys), self.block_pages // self.part_pages)

    @property
    def step_keys(self) -> int:
        """Keys of a step."""
        return self.step_parts * self.part_keys

    @property
    def block_pages(self) -> int:
        """Pages of a block."""
        return max(1, self.block_kv // self.part_keys) * self.part_pages

    @property
    def block_keys(self) -> int:
        """Keys of a block."""
        return self.block_pages * self.page_size

    @property
    def staged_heads(self) -> int:
        """kv heads that are unrolled in the body of many rows: each has a place for its logits."""
        return largest_divisor(self.num_kv_heads, self.long_heads)

    @property
    def tile_tokens(self) -> int:
        """Queries of a tile, whole tokens."""
        return max(1, self.tile_rows // self.group)

    @property
    def few_rows(self) -> int:
        """Rows of the body for few rows, at least those of one token: half a pack, or whole packs."""
        return 8 if self.group <= 8 else cdiv(self.group, PACK) * PACK

    @property
    def in_place(self) -> bool:
        """Are the rows of a kv head read from tokens [H D] as they are? Elsewhere row_order.py orders them once a tile.

        Groups of whole packs are such rows if a chunk has whole tokens. A smaller group is where every tile has one
        token: it is in one half pack, 8 rows of [H D], which may have the heads of several kv heads.
        """
        if self.group % PACK == 0:
            return not self.long_tiles or (self.chunk_rows % self.group == 0 and self.beside == 1)
        # half a pack needs a place that is known when the kernel is compiled, so all heads are unrolled
        known = self.heads_at_once == self.num_kv_heads
        return self.tile_tokens == 1 and 8 % self.group == 0 and self.num_heads % PACK == 0 and known

    @property
    def has_half_packs(self) -> bool:
        """Are the rows of a kv head read in place from half a pack, which it may share with other kv heads?"""
        return self.in_place and self.group < PACK

    @property
    def buffered_tokens(self) -> int:
        """Tokens of the buffers of queries and outputs."""
        if self.in_place:
            return self.rows // self.group if self.long_tiles else 1
        return cdiv(self.tile_tokens, TOKENS_TOGETHER) * TOKENS_TOGETHER

    @property
    def ordered_rows(self) -> int:
        """Rows of each kv head in the buffers of row_order.py."""
        return 0 if self.in_place else max(self.rows, cdiv(self.buffered_tokens * self.group, PACK) * PACK)

    @property
    def heads_of_half_pack(self) -> int:
        """kv heads whose query heads are in one half pack."""
        return max(1, self.few_rows // self.group)

    @property
    def heads_at_once(self) -> int:
        """kv heads that are unrolled in the body of few rows."""
        return largest_divisor(self.num_kv_heads, self.short_heads)

    @property
    def packs_of_token(self) -> int:
        """Packs of a tile of one token."""
        return cdiv(self.group, PACK)

    @property
    def long_tiles(self) -> bool:
        """Does any tile have more rows than few_rows?"""
        return self.tile_tokens * self.group > self.few_rows

    @property
    def rows(self) -> int:
        """Rows of a tile's buffers: whole chunks, or whole packs where no tile is long."""
        unit = self.chunk_rows if self.long_tiles else PACK
        return cdiv(self.tile_tokens * self.group, unit) * unit

    @property
    def compute_dtype(self) -> str:
        """Operand dtype of the products: bfloat16 holds every 8-bit value exactly."""
        return "float32" if "float32" in (self.dtype, self.kv_dtype) else "bfloat16"

    @property
    def has_functions(self) -> bool:
        """Is there a mask_fn or a score_fn?"""
        return self.mask.mask_fn is not None or self.logits.score_fn is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers that differ from row to row, in the order of their lanes."""
        wanted = (("q_scale", self.per_head_q_scale), ("slope", self.logits.has_alibi), ("sink", self.has_sinks))
        return tuple(name for name, given in wanted if given)

    def vmem_bytes(self) -> int:
        """Bytes of VMEM scratch of one launch, lanes padded to 128. Spilled registers need more: supports.SPILL."""
        wide = lambda dim: cdiv(dim, LANES) * LANES
        item = jnp.dtype(self.dtype).itemsize
        out_item = jnp.dtype(self.out_dtype).itemsize
        padded = cdiv(self.num_heads, PACK) * PACK
        tokens = 2 * self.buffered_tokens * padded * (wide(self.head_dim) * item + wide(self.v_head_dim) * out_item)
        # words of float32 at most
        ordered = 4 * (self.num_kv_heads * self.ordered_rows + 2 * TOKENS_TOGETHER * padded * (not self.in_place))
        tokens += ordered * (wide(self.head_dim * self.beside) + wide(self.v_head_dim))
        packed = 2 * self.rows * self.lse_lanes * 4
        packed += 2 * self.rows * 4 * (LANES * self.has_ranges + self.bias_lanes * self.qq_bias)
        state = self.num_kv_heads * self.rows * (2 * LANES + wide(self.v_head_dim)) * 4
        table = self.num_kv_heads * self.rows * LANES * 4 if self.columns else 0
        place = self.step_keys * (4 + jnp.dtype(self.compute_dtype).itemsize) + 2 * LANES * 4
        staged = self.staged_heads * self.chunk_rows * place if self.long_tiles else 0
        return self.page_bytes(self.block_keys) + tokens + packed + state + table + staged

    def page_bytes(self, keys: int) -> int:
        """Bytes of VMEM for the pages of a block of so many keys."""
        item = jnp.dtype(self.kv_dtype).itemsize
        stored = keys * item * sum(cdiv(dim, LANES) * LANES for dim in self.pool_dims) // self.beside
        scales = 4 * cdiv(keys, self.page_size) * cdiv(self.num_kv_heads, 8) * 8 * cdiv(self.page_size, LANES) * LANES
        if self.layout != "NHD":
            return 2 * (stored * self.num_kv_heads + 2 * scales * self.token_scales)
        sublanes = 32 // item  # pages are put into the order HND in a buffer of their own
        return stored * (2 * cdiv(self.num_kv_heads, sublanes) * sublanes + self.num_kv_heads)
