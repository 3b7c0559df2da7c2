"""ExpertPackedConfig: a launch of expert_packed_sm90.py, chosen from the shape. Needs no JAX."""

import dataclasses
import functools
import math

from pallas_kernels.algebra.checks import Reasons
from pallas_kernels.gpu.expert_product_config import SHARES
from pallas_kernels.gpu.packed_product_config import BITS, refuse_groups, refuse_types
from pallas_kernels.gpu.packed_wgmma_config import COLUMNS, MOST_STAGES, PIECE, SHARED_BYTES, StagedConfig

COPY_BYTES = 128  # of shared memory: a copy by TMA begins at a multiple, and Mosaic wants it to have one
ROW_TILES = 8, 16, 32, 64, 128, 192, 256
MOST_SUMS = {1: 128, 2: 128, 3: 64, 4: 64}
MOST_KEPT_SUMS = {1: 256, 2: 256, 3: 128, 4: 64}
"""Rows of a tile times matrices, by the number of warpgroups that multiply: they share the registers of an SM.

Kept sums stay in the accumulator; others need as many registers again for those of one group.
With 128 of four warpgroups ptxas lets wgmma wait for each step."""
MOST_SUMS_OF_SMALL_GROUPS = 32  # in stages of 128 inputs: with more, ptxas mixes the runs of a stage, and spills


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPackedConfig(StagedConfig):
    """A launch of expert_packed_sm90.py; `widths` are those of its matrices, of which a warpgroup has the same columns.

    Hashable. Not checked: `supports` says what the kernel serves.
    """

    experts: int
    # a property of the other launches, which they derive from their rows
    tile_rows: int = 8  # pyright: ignore[reportIncompatibleMethodOverride]  the rows of each expert are a multiple of it
    ctas: int = 132

    @property
    def matrices(self) -> int:
        """Of an expert: 2 are a gate and up."""
        return len(self.widths)

    @property
    def stage_matrices(self) -> int:
        """A stage has columns of all of them."""
        return self.matrices

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.widths[0]

    @property
    def strips(self) -> int:
        """Of the result."""
        return self.width // self.strip

    @property
    def tiles(self) -> int:
        """Tiles of rows, used or not."""
        return self.rows // self.tile_rows

    @property
    def scale_rows(self) -> int:
        """Rows of scales of a stage; one scale for each column is copied with every stage."""
        return 1 if self.is_whole else super().scale_rows


def supports(config: ExpertPackedConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    refuse(c.format not in BITS, f"format {c.format}: wanted one of {', '.join(BITS)}")
    refuse(c.matrices not in (1, 2) or len(set(c.widths)) != 1, f"widths {c.widths}: wanted one or two equal ones")
    refuse(not 1 <= c.warpgroups <= 4, f"{c.warpgroups} warpgroups: wanted 1 to 4")
    refuse(c.tile_rows not in ROW_TILES, f"tiles of {c.tile_rows} rows: wanted one of {ROW_TILES}")
    refuse(c.depth not in (64, 128), f"stages of {c.depth} inputs: wanted 64 or 128")
    refuse(c.experts < 1, f"{c.experts} experts: wanted 1 or more")
    refuse(c.ctas < 1, f"{c.ctas} CTAs: wanted 1 or more")
    if reasons:
        return reasons
    refuse_types(c, reasons)
    refuse(c.dtype != c.x_dtype, f"results {c.dtype}: wanted those of the rows, {c.x_dtype}")
    refuse(c.rows <= 0 or c.rows % c.tile_rows != 0, f"{c.rows} rows: wanted a multiple of {c.tile_rows}")
    refuse(c.inner <= 0 or c.inner % c.depth != 0, f"inner {c.inner}: wanted a multiple of {c.depth}")
    refuse(c.width <= 0 or c.width % c.strip != 0, f"width {c.width}: wanted a multiple of {c.strip}")
    is_swizzled = BITS[c.format] == 8
    refuse(is_swizzled and c.strip % PIECE != 0, f"{c.strip} columns of a CTA: wanted a multiple of {PIECE}")
    if not reasons:
        refuse_groups(c, "stage", c.depth, reasons)
    of_zeros = c.zero_rows * c.strip
    refuse(of_zeros % COPY_BYTES != 0, f"{of_zeros} zero points of a stage: wanted a multiple of {COPY_BYTES}")
    most = most_sums(c.scales_sums)[c.warpgroups]
    refuse(c.tile_rows * c.matrices > most, f"sums of {c.tile_rows} rows, {c.matrices} matrices: wanted {most}")
    is_mixed = c.scales_sums and c.span < 64 and c.depth > 64 and c.tile_rows * c.matrices > MOST_SUMS_OF_SMALL_GROUPS
    refuse(is_mixed, f"stages of {c.depth} inputs in groups of {c.group} with {c.tile_rows} rows: wanted 64")
    if not reasons:
        refuse(c.stages < 3, f"{c.stages} stages fit, wanted at least 3")
        need = c.stages * c.stage_bytes
        refuse(need > SHARED_BYTES, f"{c.stages} stages, {need} bytes of shared memory: too many")
    return reasons


def most_sums(scales_sums: bool) -> dict[int, int]:
    """Rows of a tile times matrices, by the number of warpgroups. scales_sums: of a config."""
    return MOST_SUMS if scales_sums else MOST_KEPT_SUMS


@functools.lru_cache(maxsize=4096)
def choose(
    processors: int, *, width: int, matrices: int = 1, chip: str = "sm_90", **fields
) -> ExpertPackedConfig | None:
    """The launch for padded rows that is the fastest by `cost`; None where the kernel cannot serve them."""
    base = ExpertPackedConfig(widths=(width,) * matrices, **fields)
    ways = (_divided(base, warpgroups, depth, processors) for warpgroups in (4, 2, 3, 1) for depth in (128, 64))
    return min((way for way in ways if not supports(way, chip=chip)), key=cost, default=None)


def _divided(base: ExpertPackedConfig, warpgroups: int, depth: int, processors: int) -> ExpertPackedConfig:
    """One division of the work, with as many stages as fit."""
    way = dataclasses.replace(base, warpgroups=warpgroups, depth=depth)
    if not way.has_whole_chunks:
        return way
    stages = min(SHARED_BYTES // way.stage_bytes, MOST_STAGES)
    return dataclasses.replace(way, stages=stages, ctas=max(min(processors, way.tiles * way.strips), 1))


@functools.lru_cache(maxsize=4096)
def tile_rows_of(rows: int, experts: int, width: int, format: str, scales_sums: bool) -> int:
    """Rows of a tile for so many rows of all experts, without padding.

    width: divides the columns of every matrix. scales_sums: of a config.
    """
    mean, most = rows / experts, most_sums(scales_sums)
    able = [n for n in most if width % (COLUMNS * n) == 0 and (BITS[format] == 4 or COLUMNS * n % PIECE == 0)] or [1]

    def cost(tile: int) -> float:
        each = min(unit(tile, n, format) for n in able if tile <= most[n])
        return sum(-(-mean * share // tile) for share in SHARES) * each

    return min((tile for tile in ROW_TILES if tile <= max(most[n] for n in able)), key=cost)


READ_RATE = 4.3e6  # bytes a microsecond
UNIT = {4: 0.08, 3: 0.085, 2: 0.105, 1: 0.2}
UNIT_OF_ROW = {4: 0.0009, 3: 0.0008, 2: 0.00105, 1: 0.0012}
UNIT_OF_FORMAT = {"int8": 0.01, "fp8": 0.01, "fp4": 0.02, "int4": 0.0}
UNIT_OF_SHORT_STAGE, UNIT_OF_SMALL_GROUP = 0.01, 0.02
"""Microseconds of an SM for 64 columns of 64 inputs: in any case and for each row, by the number of warpgroups; by the
format; with stages of 64 inputs; with sums of groups of 32. Fitted to 60 launches of fp8, int4 and fp4 on an H200
(2026-11-29), of which most are within 15 %; of int8 and one warpgroup they are guesses."""


def unit(tile_rows: int, warpgroups: int, format: str) -> float:
    """About the microseconds of an SM for 64 columns of 64 inputs of a tile, with stages of 128 and large groups."""
    return UNIT[warpgroups] + UNIT_OF_ROW[warpgroups] * tile_rows + UNIT_OF_FORMAT[format]


def cost(config: ExpertPackedConfig, used: float | None = None) -> float:
    """About the microseconds of a launch with so many used tiles (None: all), each of an expert of its own if few.

    The CTA with the most items decides, or the memory.
    """
    c, used = config, config.tiles if used is None else used
    each = unit(c.tile_rows, c.warpgroups, c.format)
    each += UNIT_OF_SHORT_STAGE * (c.depth == 64) + UNIT_OF_SMALL_GROUP * (c.scales_sums and c.group == 32)
    items = math.ceil(used * c.strips / c.ctas)
    read = min(used, c.experts) * c.inner * c.width * c.matrices * BITS[c.format] / 8
    return max(items * c.warpgroups * c.matrices * c.inner / 64 * each, read / READ_RATE)
