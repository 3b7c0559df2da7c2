"""ManyRowsConfig: the tiles of a launch of many_rows_sm90.py, chosen from the shape. Needs no JAX."""

import dataclasses
from collections.abc import Sequence

ROWS = 128  # of a CTA's tile
DEPTH = 64  # of the inner dimension in a stage
STAGES = 4
FEWEST_ROWS = 65  # wgmma multiplies 64 rows at once: with fewer, XLA's tiles of fewer rows are as good
_COLUMNS = 256, 128, 64  # of a CTA's tile, of all products whose sums it has together
_COST_OF_A_TILE = 32  # in columns: what a tile costs besides its columns


@dataclasses.dataclass(frozen=True)
class ManyRowsConfig:
    """The tiles of a launch. Hashable."""

    columns: int  # of a tile of each product
    ctas: int


def choose(
    rows: int, inner: int, widths: Sequence[int], processors: int, *, together: bool = False, waves: int = 1
) -> ManyRowsConfig | None:
    """The launch for x [rows, inner] and weights [inner, width]; None if the kernel cannot serve them.

    together: a CTA has the same tile of both products, for `gated_product`. Wide tiles read the rows less often, and
    narrow ones occupy more CTAs; the best has the least columns in the CTA with most tiles. Where fewer than half of
    the CTAs would have a tile, XLA divides the inner dimension: 256 rows of 8192 by 1280 take 38 us here, 31 there.

    waves: CTAs for each processor, one after the other. With several, a processor that another kernel occupies for a
    while, such as an all-reduce, takes fewer tiles.
    """
    products = len(widths) if together else 1
    all_columns = [c // products for c in _COLUMNS if c // products >= 64]
    fitting = [c for c in all_columns if not any(width % c for width in widths)]
    if rows < FEWEST_ROWS or inner % DEPTH or inner < DEPTH * STAGES or not fitting:
        return None
    tiles = lambda columns: -(-rows // ROWS) * (sum(widths) // products // columns)
    cost = lambda columns: -(-tiles(columns) // processors) * (columns * products + _COST_OF_A_TILE)
    columns = min(fitting, key=cost)
    if 2 * tiles(columns) < processors:
        return None
    return ManyRowsConfig(columns, min(tiles(columns), processors * waves))
