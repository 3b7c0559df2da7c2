"""The static arguments of the warp-level kernel, and what a chip has for it."""

import dataclasses
import math

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu.config import KV_DTYPES_8BIT, TOKEN_SCALE_BYTES, WARPGROUP_ROWS, GpuKernelConfig


@dataclasses.dataclass(frozen=True)
class WarpChip:
    """What the kernel needs to know of a GPU."""

    processors: int  # multiprocessors of the largest product; a card of another number is asked for its own
    smem: int  # bytes of shared memory of a multiprocessor
    smem_cta: int  # bytes that one CTA may use
    lazy_columns: int = 256  # over an 8-bit cache, wider values have no lazy_rescale: it would spill registers
    pairs: bool = False  # LLVM computes with pairs of float32


CHIPS = {
    "sm_80": WarpChip(108, 164 << 10, 163 << 10),  # A100
    "sm_86": WarpChip(84, 100 << 10, 99 << 10),  # RTX 3090, A10, A40
    "sm_87": WarpChip(16, 164 << 10, 163 << 10),  # Jetson Orin
    "sm_89": WarpChip(128, 100 << 10, 99 << 10),  # RTX 4090, L4, L40S
    "sm_90": WarpChip(132, 228 << 10, 227 << 10),  # H100, to check and time the kernel on a Hopper card
    "sm_100": WarpChip(148, 228 << 10, 227 << 10, lazy_columns=192, pairs=True),  # B200
    "sm_103": WarpChip(160, 228 << 10, 227 << 10, lazy_columns=192, pairs=True),  # B300
    "sm_110": WarpChip(20, 228 << 10, 227 << 10, lazy_columns=192, pairs=True),  # Jetson Thor
    "sm_120": WarpChip(170, 100 << 10, 99 << 10),  # RTX 5090
    "sm_121": WarpChip(48, 100 << 10, 99 << 10),  # DGX Spark
}
SMEM_UNIT = 1024  # bytes: Mosaic gives every buffer in shared memory a multiple of them
SMALL_ROWS = 4  # of one buffer i32[.., block_kv]: the pool's rows of two blocks, row statistics, the numbers of a piece
SMEM_RESERVED = 1024  # bytes of shared memory that CUDA keeps for each CTA
FP8_CONVERSIONS = 89  # the first compute capability that converts float8 in one instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpKernelConfig(GpuKernelConfig):
    """A GpuKernelConfig with a few more fields, chosen by tile_policy_sm80.py. A CTA is four warps; block_kv is 64."""

    chip: str = "sm_80"
    block_kv: int = 64
    narrow_rows: int = 8  # tiles of at most so many rows, 8 or 16, are narrow (narrow_sm80.py)
    wide_tiles: bool = False  # False: no request has more than narrow_rows packed rows
    tile_halves: int = 1  # halves of a wide tile, of 64 rows, that share each load of a key; 2: at most 128 columns
    lazy_rescale: bool = True  # a wide tile's output is multiplied only in blocks that change the maximum

    @property
    def converts_fp8(self) -> bool:
        return int(self.chip[3:]) >= FP8_CONVERSIONS

    @property
    def few_rows(self) -> int:
        return WARPGROUP_ROWS if self.wide_tiles else self.narrow_rows

    @property
    def lean(self) -> bool:
        """Numbers of lanes and rows are computed again in each block, rather than kept in registers."""
        return True

    @property
    def has_options(self) -> bool:
        """Whether logits or masks are not those of causal attention: they take registers."""
        return self.qq_bias or self.mask != MaskRule() or self.logits != LogitRule(scale=self.logits.scale)

    @property
    def stored_queries(self) -> bool:
        """Whether a narrow tile reads its queries from shared memory in each block, since registers have no room."""
        return self.narrow_rows == 16 and self.head_dim > 192

    @property
    def query_shape(self) -> tuple[int, ...] | None:
        """Of the tile of queries in shared memory; None: there is none."""
        if self.wide_tiles:
            return self.tile_halves, WARPGROUP_ROWS, self.head_dim
        return (1, self.narrow_rows, self.head_dim) if self.stored_queries else None

    @property
    def least_stages(self) -> int:
        """Two where all tiles are narrow and keys have 8 bits: the warps' states are merged in the keys' buffers."""
        return 2 if self.quantised and not self.wide_tiles else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA, as paged_attention_sm80.py allocates it."""
        keys, size = self.stages * self.block_kv, 1 if self.kv_dtype in KV_DTYPES_8BIT else 2
        buffers = [keys * self.head_dim * size, keys * self.v_head_dim * size, SMALL_ROWS * self.block_kv * 4]
        buffers += [2 * math.prod(self.query_shape)] if self.query_shape else []
        buffers += [self.block_kv * self.head_dim * 2] if self.wide_tiles and self.quantised else []
        buffers += [keys * TOKEN_SCALE_BYTES] if self.token_scales else []
        return sum(cdiv(size, SMEM_UNIT) * SMEM_UNIT for size in buffers)
