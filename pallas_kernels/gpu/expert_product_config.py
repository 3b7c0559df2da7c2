"""ExpertProductConfig: a launch of expert_product_sm90.py, chosen from the shape. Needs no JAX."""

import dataclasses
import functools

from pallas_kernels.algebra.checks import Reasons

COLUMNS = 64  # of a warpgroup, of each matrix: the rows of wgmma
DEPTH = 64  # inputs of a stage
ROW_TILES = 8, 16, 32, 64, 96, 128, 192
STORED_ROWS = 16  # that a warpgroup stores at once, at most: larger buffers would leave room for one stage less
SHARED_BYTES = 222 * 1024  # of a CTA, without its barriers
MOST_STAGES = 12
MOST_SUMS = {1: 384, 2: 384, 3: 128}  # rows of a tile times matrices, by the number of warpgroups: they share registers
DTYPES = "bfloat16", "float16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertProductConfig:
    """A launch of expert_product_sm90.py. Hashable."""

    rows: int  # of the result, of all experts together
    inner: int
    width: int  # columns of each matrix
    experts: int
    matrices: int = 1  # of an expert; of two, a warpgroup has the same columns of both
    dtype: str = "bfloat16"
    tile_rows: int = 128  # the rows of each expert are a multiple of it
    tokens: int = 0  # rows of x, which every tile multiplies; 0: each tile has its own
    warpgroups: int = 2  # that multiply, side by side; one more loads
    ctas: int = 132

    @property
    def strip(self) -> int:
        """Columns of a CTA, of each matrix."""
        return COLUMNS * self.warpgroups

    @property
    def strips(self) -> int:
        return self.width // self.strip

    @property
    def x_rows(self) -> int:
        return self.tokens or self.rows

    @property
    def tiles(self) -> int:
        """Tiles of rows, used or not."""
        return self.rows // self.tile_rows

    @property
    def chunks(self) -> int:
        """Steps of the loop over the inner dimension."""
        return self.inner // DEPTH

    @property
    def stage_bytes(self) -> int:
        return 2 * DEPTH * (self.tile_rows + self.matrices * self.strip)

    @property
    def parts(self) -> int:
        """The number of parts in which a warpgroup stores a tile: one, or an even number, for two buffers in turn."""
        return -(-self.tile_rows // STORED_ROWS)

    @property
    def stored_rows(self) -> int:
        """Rows of a part."""
        return self.tile_rows // self.parts

    @property
    def buffers(self) -> int:
        """Buffers for the results of a warpgroup: each is used again after its copy to memory has been waited for."""
        return min(self.parts, 2)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the buffers of all warpgroups."""
        return 2 * self.warpgroups * self.buffers * self.stored_rows * COLUMNS

    @property
    def stages(self) -> int:
        """Stages of the ring in shared memory."""
        return min((SHARED_BYTES - self.stored_bytes) // self.stage_bytes, MOST_STAGES)


def supports(config: ExpertProductConfig, *, chip: str = "sm_90") -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, Reasons()
    refuse = reasons.refuse
    refuse(chip != "sm_90", f"chip {chip}: the kernel uses Hopper's wgmma, only sm_90 has it")
    refuse(c.dtype not in DTYPES, f"dtype {c.dtype}: wanted {' or '.join(DTYPES)}")
    refuse(c.tile_rows not in ROW_TILES, f"tiles of {c.tile_rows} rows: wanted one of {ROW_TILES}")
    refuse(c.inner <= 0 or c.inner % DEPTH != 0, f"inner {c.inner}: wanted a multiple of {DEPTH}")
    refuse(c.width <= 0 or c.width % max(c.strip, 1) != 0, f"width {c.width}: wanted a multiple of {c.strip}")
    refuse(c.rows <= 0 or c.rows % max(c.tile_rows, 1) != 0, f"{c.rows} rows: wanted a multiple of {c.tile_rows}")
    refuse(c.experts < 1, f"{c.experts} experts: wanted 1 or more")
    refuse(not 0 <= c.tokens <= c.tile_rows, f"{c.tokens} tokens: wanted at most {c.tile_rows}, or 0")
    refuse(c.ctas < 1, f"{c.ctas} CTAs: wanted 1 or more")
    refuse(c.matrices not in (1, 2), f"{c.matrices} matrices: wanted 1 or 2")
    refuse(not 1 <= c.warpgroups <= 3, f"{c.warpgroups} warpgroups: wanted 1 to 3")
    if not reasons:
        most = MOST_SUMS[c.warpgroups]
        refuse(c.tile_rows * c.matrices > most, f"sums of {c.tile_rows} rows, {c.matrices} matrices: wanted {most}")
        refuse(c.stages < 3, f"{c.stages} stages fit, wanted at least 3")
    return reasons


SHARES = 0.31, 0.56, 0.79, 0.94, 1.06, 1.19, 1.43, 1.72  # assumed: rows of an expert over their mean, of eight
COST_OF_A_TILE, COST_OF_A_LARGE_MATRIX, LARGE = 16, 40, 4 << 20
"""In rows: what a tile costs besides its rows; the second number where a matrix, which each tile reads, has more than
LARGE numbers. On an H200 tiles of 128 and 192 take the same time for 2048 and for 512 rows of an expert, tiles of 64
and 128 for 128 rows, and tiles of 8 to 32 for 16 rows (2026-11-28). Of gpt-oss 20B 256 tokens take 389 us in tiles of
64 and 455 in 32, 1024 505 in 128 and 542 in 64, of Mixtral 256 673 in 96 and 745 in 32; but of Granite 3B, whose
matrices are small, 512 take 83 in 128 and 74 in 64 (2026-12-01; as much or less where some experts are preferred)."""


@functools.lru_cache(maxsize=4096)
def tile_rows_of(rows: int, experts: int, width: int, numbers: int) -> int:
    """Rows of a tile for so many rows of all experts, without padding.

    width: divides the columns of every matrix; numbers: of a matrix.
    """
    mean, besides = rows / experts, COST_OF_A_LARGE_MATRIX if numbers > LARGE else COST_OF_A_TILE
    cost = lambda tile: sum(-(-mean * share // tile) for share in SHARES) * (tile + besides)
    return min((tile for tile in ROW_TILES if tile <= 128 or width % (2 * COLUMNS) == 0), key=cost)


SHORT_ROWS = 8
"""Rows of a tile up to which CTAs are as narrow as they can be, so that few tiles have work for all processors. One
token of Mixtral: gate and up 122 -> 113 us, down 77 -> 57. Where all experts have rows it makes no difference."""


@functools.lru_cache(maxsize=4096)
def choose(
    processors: int, *, rows: int, inner: int, width: int, experts: int, dtype: str, tile_rows: int, matrices: int = 1,
    tokens: int = 0, chip: str = "sm_90",
) -> ExpertProductConfig | None:  # fmt: skip
    """The launch for padded rows; None where the kernel cannot serve them."""
    base = ExpertProductConfig(
        rows=rows, inner=inner, width=width, experts=experts, matrices=matrices, dtype=dtype, tile_rows=tile_rows,
        tokens=tokens,
    )  # fmt: skip
    sizes = (1, 2, 3) if tile_rows <= SHORT_ROWS else (2, 3, 1)
    ways = [dataclasses.replace(base, warpgroups=warpgroups) for warpgroups in sizes]
    way = next((way for way in ways if not supports(way, chip=chip)), None)
    return way and dataclasses.replace(way, ctas=min(processors, way.tiles * way.strips))
