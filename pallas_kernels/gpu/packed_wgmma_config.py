"""PackedWgmmaConfig: a launch of packed_wgmma_sm90.py; StagedConfig: what it shares with expert_packed_config.py."""

import dataclasses
import functools

from pallas_kernels.algebra.checks import Reasons
from pallas_kernels.gpu.packed_product_config import (
    BITS,
    ITEM_BYTES,
    MAX_SPLITS,
    PackedConfig,
    refuse_groups,
    refuse_types,
)

COLUMNS = 64  # of a warpgroup: the rows of wgmma
PIECE = 128  # columns of 8 bits that TMA swizzles in shared memory
TILE_ROWS, WIDE_TILE_ROWS = 64, 128  # of a CTA, at most; wide ones have codes decoded for twice as many rows
FEWEST_ROWS, MAX_ROWS = 17, 256
"""Rows from which it is faster than packed_product_sm90.py, which takes 22.6 us for gate and up of 8B with 16 rows of
int4, and 37.4 of fp8, where this one takes 25.8 and 40.6 (an H200, 2026-11-29); and up to which it is faster than XLA's
product with the dequantised matrix: gate and up of 8B take 230 us. jattn/ops/product.py heeds the first."""
MOST_STAGES = 12
SHARED_BYTES, SHARED_BYTES_OF_TWO = 222 * 1024, 108 * 1024
"""Of a CTA, and of each of two on an SM, without the barriers and what Mosaic adds to each buffer: up to 1 KiB."""
WAYS = tuple((TILE_ROWS, warpgroups, depth) for warpgroups in (4, 2) for depth in (256, 128, 64))
WAYS += tuple((WIDE_TILE_ROWS, 2, depth) for depth in (128, 64))
"""(most rows and warpgroups of a CTA, inputs of a stage) that `choose` tries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedConfig(PackedConfig):
    """A launch in which TMA copies codes, scales and rows of x, a chunk of inputs at a time, to a ring of stages."""

    warpgroups: int = 4  # of a CTA that multiply, side by side
    depth: int = 128  # inputs of a chunk, which a stage holds
    stages: int = 3  # of the ring in shared memory

    stage_matrices = 1  # whose columns a stage has

    @property
    def strip(self) -> int:
        """Columns of a CTA, of each matrix of a stage."""
        return COLUMNS * self.warpgroups

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA: a multiple of 8."""
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        """Steps of the loop over the inner dimension; each takes `depth` inputs."""
        return self.inner // self.depth

    @property
    def has_whole_chunks(self) -> bool:
        """Do chunks divide the inner dimension, and is each a part of a group, or some groups?"""
        nested = self.is_whole or self.group % self.depth == 0 or self.depth % self.group == 0
        return self.inner % self.depth == 0 and nested

    @property
    def run(self) -> int:
        """Inputs of a stage whose sums have the same scales, or none."""
        return min(self.group, self.depth) if self.scales_sums else self.depth

    @property
    def span(self) -> int:
        """Inputs whose codes are decoded at a time, and the columns of a piece of x in shared memory."""
        return min(self.run, 64)

    @property
    def value_rows(self) -> int:
        """Rows of codes of a stage: of words of 4 bits, or of bytes."""
        return self.depth // 8 if BITS[self.format] == 4 else self.depth

    @property
    def value_bytes(self) -> int:
        """Of a stage."""
        return self.depth * self.strip * BITS[self.format] // 8

    @property
    def scale_rows(self) -> int:
        """Rows of scales of a stage."""
        return 0 if self.is_whole else self.depth // min(self.group, self.depth)

    @property
    def zero_rows(self) -> int:
        """Rows of zero points of a stage."""
        return self.depth // self.run if self.has_zeros else 0

    @property
    def token_bytes(self) -> int:
        """Of the rows of x of a stage."""
        return 2 * self.tile_rows * self.depth

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        own = self.scale_rows * ITEM_BYTES[self.scale_dtype] + self.zero_rows
        return self.stage_matrices * (self.value_bytes + own * self.strip) + self.token_bytes

    @property
    def copies(self) -> int:
        """TMA copies of a stage."""
        return 1 + self.stage_matrices * (1 + (self.scale_rows > 0) + (self.zero_rows > 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWgmmaConfig(StagedConfig):
    """A launch of packed_wgmma_sm90.py."""

    most_rows: int = TILE_ROWS  # the limit of tile_rows
    splits: int = 1  # CTAs of a cluster, that share the inner dimension

    along = 1  # parts of the inner dimension in a CTA

    @property
    def tiles(self) -> int:
        """Of rows."""
        return -(-self.rows // self.most_rows)

    @property
    def tile_rows(self) -> int:
        """Rows of a CTA: a multiple of 8."""
        return -(-self.rows // (8 * self.tiles)) * 8

    @property
    def sum_bytes(self) -> int:
        """Of the sums of a CTA, which replace the codes or the rows of x at the end, whichever have more memory."""
        return 4 * self.tile_rows * self.pitch


def supports(config: PackedWgmmaConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    refuse(c.format not in BITS, f"format {c.format}: wanted one of {', '.join(BITS)}")
    if reasons:
        return reasons
    refuse_types(c, reasons)
    refuse(c.inner % c.depth != 0, f"inner {c.inner}: wanted a multiple of {c.depth}")
    refuse_groups(c, "stage", c.depth, reasons)
    whole = all(w > 0 and w % c.strip == 0 for w in c.widths)  # parts of a strip have not been tried on a card
    refuse(not whole, f"widths {c.widths}: wanted multiples of the {c.strip} columns of a CTA")
    refuse(not 1 <= c.splits <= min(c.chunks, MAX_SPLITS), f"{c.splits} CTAs of a cluster for {c.chunks} stages")
    refuse(c.warpgroups not in (2, 4), f"{c.warpgroups} warpgroups: wanted 2 or 4")
    refuse(c.most_rows not in (TILE_ROWS, WIDE_TILE_ROWS), f"most_rows {c.most_rows}: wanted 64 or 128")
    is_wide, seen = c.most_rows == WIDE_TILE_ROWS, f"stages of {c.depth} inputs"
    refuse(is_wide and c.warpgroups == 4, "most_rows 128 with 4 warpgroups: wanted 2, for the registers of a thread")
    refuse(c.depth > 128 and c.tile_rows > 32, f"{seen} with {c.tile_rows} rows: wanted at most 128, or 32 rows")
    refuse(is_wide and c.span < 64 and c.depth > 64, f"{seen} in groups of {c.group} with most_rows 128: wanted 64")
    refuse(c.stages < 3, f"{c.stages} stages: wanted at least 3")
    if not reasons:
        need, largest = c.stages * c.stage_bytes, c.stages * max(c.value_bytes, c.token_bytes)
        refuse(need > SHARED_BYTES, f"{c.stages} stages, {need} bytes of shared memory: too many")
        refuse(largest < c.sum_bytes, f"{c.sum_bytes} bytes of sums, {largest} of what they replace")
    return reasons


@functools.lru_cache(maxsize=4096)
def choose(processors: int, *, chip: str = "sm_90", **fields) -> PackedWgmmaConfig | None:
    """The config of these sizes that is the fastest by `cost`; None where the kernel does not serve them."""
    base = PackedWgmmaConfig(**fields)
    if base.format not in BITS or base.rows > MAX_ROWS:
        return None
    return min(ways(base, chip), key=lambda way: cost(way, processors), default=None)


def ways(base: PackedWgmmaConfig, chip: str = "sm_90") -> list[PackedWgmmaConfig]:
    """Every division of the work that the kernel serves."""
    useful = [way for way in WAYS if way[0] == TILE_ROWS or base.rows > TILE_ROWS]
    every = (_divided(base, *way, splits) for way in useful for splits in range(1, MAX_SPLITS + 1))
    return [way for way in every if not supports(way, chip=chip)]


def _divided(base: PackedWgmmaConfig, most_rows: int, warpgroups: int, depth: int, splits: int) -> PackedWgmmaConfig:
    """One division of the work, with as many stages as fit, or as its steps and the sums need."""
    way = dataclasses.replace(base, most_rows=most_rows, warpgroups=warpgroups, depth=depth, splits=splits)
    if not way.has_whole_chunks:
        return way
    limit = SHARED_BYTES if warpgroups == 4 or most_rows == WIDE_TILE_ROWS else SHARED_BYTES_OF_TWO
    for_sums = -(-way.sum_bytes // max(way.value_bytes, way.token_bytes))
    stages = min(limit // way.stage_bytes, MOST_STAGES, max(-(-way.chunks // splits), for_sums))
    return dataclasses.replace(way, stages=max(stages, 3))


READ_RATE = 3.75e6  # bytes a microsecond
START, HIDDEN, PEER = 5.0, 0.6, 0.15
"""Microseconds: of the first copies of a CTA; of these, what is hidden by another CTA on the SM; of each CTA of a
cluster."""
PAIRS = 0.95  # part of the places for CTAs that clusters of two can take
USABLE = {1: 0.8, 2: 0.85}  # the same of larger clusters, by the CTAs that fit on an SM
LARGE_CLUSTERS = 1.6  # times the work of more than 4 CTAs in 3 rounds: down of 8B, 192 rows, 7 CTAs takes 102, not 67
UNIT = {TILE_ROWS: 0.052, WIDE_TILE_ROWS: 0.032}
UNIT_OF_ROW = {TILE_ROWS: 0.0011, WIDE_TILE_ROWS: 0.00157}
UNIT_OF_STAGE = 3.3
"""Microseconds of an SM for 64 columns of 64 inputs: in any case and for each row, by the most rows of a CTA, and
divided by the depth of a stage. Of wide tiles an SM has one CTA, with less to do meanwhile (an H100, 2026-11-28)."""
UNIT_OF_FORMAT = {"int8": -0.008, "fp8": 0.018, "fp4": 0.06, "int4": 0.0}
UNIT_OF_SMALL_GROUP = 0.023  # with sums of groups of 32
UNIT_OF_SCALED_CODES = 0.01
"""In place of that of fp4, where codes are multiplied by their scales. Not measured: a stage of 128 inputs and 64 rows
of NVFP4 has 377 instructions, of int4 364, of MXFP4 with scaled sums 626."""


def cost(config: PackedWgmmaConfig, processors: int) -> float:
    """About the microseconds of a launch; measured on an H200 with 16 to 128 rows, of wide tiles on an H100.

    CTAs of one SM share its time. Two fit on an SM if both have two warpgroups of at most 128 registers.
    """
    c = config
    few_registers = (c.span == 64 or c.tile_rows <= 16) and c.most_rows == TILE_ROWS
    slots = 2 if few_registers and c.warpgroups == 2 and c.stages * c.stage_bytes <= SHARED_BYTES_OF_TWO else 1
    alone, most = processors, processors * slots  # CTAs that have an SM for themselves; that run at the same time
    if c.splits > 1:  # clusters are not spread evenly
        pairs = c.splits == 2
        alone, most = int(alone * (PAIRS if pairs else USABLE[1])), int(most * (PAIRS if pairs else USABLE[slots]))
    ctas, most = c.strips * c.tiles * c.splits, most // c.splits * c.splits
    rounds = -(-ctas // most)
    busiest = slots * (rounds - 1) + min(-(-(ctas - most * (rounds - 1)) // alone), slots)
    unit = UNIT[c.most_rows] + UNIT_OF_ROW[c.most_rows] * c.tile_rows
    unit += UNIT_OF_STAGE / c.depth + (UNIT_OF_SCALED_CODES if c.scales_codes else UNIT_OF_FORMAT[c.format])
    unit += UNIT_OF_SMALL_GROUP if c.scales_sums and c.group == 32 else 0
    work = busiest * c.warpgroups * -(-c.chunks // c.splits) * c.depth / 64 * unit
    work *= LARGE_CLUSTERS if c.splits > 4 and rounds > 2 else 1
    read = c.inner * sum(c.widths) * BITS[c.format] / 8 / READ_RATE
    start = START * (1 + (rounds - 1) / slots) - (HIDDEN if slots > 1 and busiest > 1 and c.stages > 3 else 0)
    return max(work, read) + start + PEER * c.splits
