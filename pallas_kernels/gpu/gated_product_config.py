"""GatedProductConfig: the tiles of a launch of gated_product_sm90.py, chosen from the shape. Needs no JAX."""

import dataclasses

ROWS = 128  # of a CTA's tile
DEPTH = 64  # of the inner dimension in a stage
COLUMNS = 128, 64  # of a CTA's tile of each product
STAGES = 4
FEWEST_ROWS = 65  # wgmma multiplies 64 rows at once: with fewer, XLA's tiles with fewer rows are as good


@dataclasses.dataclass(frozen=True)
class GatedProductConfig:
    """The tiles of a launch. Hashable."""

    columns: int  # of a tile of each product
    ctas: int


def choose(rows: int, inner: int, width: int, processors: int) -> GatedProductConfig | None:
    """The launch for x [rows, inner] and weights [inner, width]; None if the kernel cannot serve them.

    Wide tiles read the rows less often. Narrow ones are chosen where wide ones would leave half of the CTAs without a
    tile: 128 rows of 2048 by 8192 took 22 us with narrow tiles and 26 with wide ones, 256 rows 32 and 28.
    """
    fitting = [columns for columns in COLUMNS if width % columns == 0]
    if rows < FEWEST_ROWS or inner % DEPTH or inner < DEPTH * STAGES or not fitting:
        return None
    tiles = lambda columns: -(-rows // ROWS) * (width // columns)
    columns = next((c for c in fitting if 2 * tiles(c) > processors), fitting[-1])
    return GatedProductConfig(columns, min(tiles(columns), processors))
