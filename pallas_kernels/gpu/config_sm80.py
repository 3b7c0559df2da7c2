"""The static arguments of the warp-level kernel, and what a chip has for it."""

import dataclasses
import math

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config import KV_DTYPES_8BIT, WARPGROUP_ROWS, GpuKernelConfig, in_units


@dataclasses.dataclass(frozen=True)
class WarpChip:
    """What the kernel needs to know of a GPU."""

    processors: int  # multiprocessors of a large product; used only where no card is there to be asked
    smem: int  # bytes of shared memory of a multiprocessor
    smem_cta: int  # bytes that one CTA may use
    lazy_columns: int = 256  # over an 8-bit cache, wider values have no lazy_rescale: it would spill registers
    pairs: bool = False  # LLVM uses the chip's arithmetic on pairs of float32, which takes more registers


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
SMALL_ROWS = 4  # of the buffer `small` i32[SMALL_ROWS, block_kv] of paged_attention_sm80.py
SMEM_OF_CUDA = 1024  # bytes of shared memory that CUDA keeps for each CTA
TOKEN_SCALE_BYTES = 8  # f32 scales of one key and its value
FP8_CONVERSIONS = 89  # 10 major + minor of the first compute capability that converts float8 in one instruction
BLOCK_KV = 64  # keys of a block: a narrow tile gives 16 to each of the four warps
NARROW_ROWS = (8, 16)  # the choices of narrow_rows
MOST_COLUMNS_OF_TWO_HALVES = 128
"""The widest output for which a tile has two halves, which share each load of a key. On an H200 a prompt of 8192 tokens
took 1556 us with two and 2212 with one, over an 8-bit cache 1967 and 3380 (2026-11-27, tiles of sm_80 and sm_86)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpKernelConfig(GpuKernelConfig):
    """A GpuKernelConfig with a few more fields, chosen by tile_policy_sm80.py. A CTA is four warps.

    The kernel has at most two loops over keys: for narrow tiles, of at most narrow_rows rows, and for wide ones.
    """

    chip: str = "sm_80"
    block_kv: int = BLOCK_KV
    narrow_rows: int = 8  # 8 or 16: a tile of at most so many rows is narrow (narrow_sm80.py)
    wide_tiles: bool = False  # larger tiles are wide (wide_sm80.py); False: no request has more than narrow_rows rows
    tile_halves: int = 1  # of a wide tile: groups of 64 rows, 1 or 2, that share each load of a key
    lazy_rescale: bool = True  # a wide tile's output is rescaled only in blocks whose logits exceed m by MOST_RISE

    @property
    def converts_fp8(self) -> bool:
        """Whether the chip has an instruction that converts float8."""
        return int(self.chip[3:]) >= FP8_CONVERSIONS

    @property
    def moves_padding(self) -> bool:
        """No: to read its place costs a tile with every option a register that it does not have."""
        return False

    @property
    def few_rows(self) -> int:
        """The most rows of a tile, where none is long."""
        return WARPGROUP_ROWS if self.wide_tiles else self.narrow_rows

    @property
    def lean(self) -> bool:
        """Always: numbers that depend on the lane are computed again in each block, and kept in no register."""
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
        """The shape of the queries in shared memory; None: they stay in registers."""
        if self.wide_tiles:
            return self.tile_halves, WARPGROUP_ROWS, self.head_dim
        return (1, self.narrow_rows, self.head_dim) if self.stored_queries else None

    @property
    def least_stages(self) -> int:
        """Stages whose keys' buffers hold the outputs of four warps, 8 rows of float32 each, which are merged there.

        One stage holds them if keys have 16 bits, two if they have 8; a kernel with wide tiles uses its decoded tile.
        """
        return 2 if self.quantised and not self.wide_tiles else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA, as paged_attention_sm80.py allocates it."""
        keys, itemsize = self.stages * self.block_kv, 1 if self.kv_dtype in KV_DTYPES_8BIT else 2
        buffers = [keys * self.head_dim * itemsize, keys * self.v_head_dim * itemsize]
        buffers += [SMALL_ROWS * self.block_kv * 4]
        buffers += [2 * math.prod(self.query_shape)] if self.query_shape else []
        buffers += [self.block_kv * self.head_dim * 2] if self.wide_tiles and self.quantised else []
        buffers += [keys * TOKEN_SCALE_BYTES] if self.token_scales else []
        return sum(map(in_units, buffers))
