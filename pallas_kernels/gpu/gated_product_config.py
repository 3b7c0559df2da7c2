"""GatedProductConfig: the tiles of a launch of gated_product_sm90.py, chosen from the shape. Needs no JAX."""

import dataclasses

ROWS = 128  # of a CTA's tile
DEPTH = 64  # of the inner dimension in a stage
COLUMNS = 128, 64  # of a CTA's tile of each product
STAGES = 4


@dataclasses.dataclass(frozen=True)
class GatedProductConfig:
    """The tiles of a launch. Hashable."""

    columns: int  # of a tile of each product
    cluster: int  # CTAs with the same columns and different rows: 1 or 2
    ctas: int  # multiples of cluster
    delay: int = 0  # steps of products that run while the next one is started
    stages: int = 4


def choose(rows: int, inner: int, width: int, processors: int) -> GatedProductConfig | None:
    """The launch for x [rows, inner] and weights [inner, width]; None if the kernel cannot serve them.

    Wide tiles read the tokens less often; narrow ones are chosen where wide ones would leave most CTAs without a tile.
    """
    if rows < ROWS or rows % ROWS or inner % DEPTH or inner < DEPTH * STAGES:
        return None
    row_tiles = rows // ROWS
    cluster = 2 if row_tiles % 2 == 0 else 1
    fitting = [c for c in COLUMNS if width % c == 0]
    if not fitting:
        return None
    tiles = lambda columns: row_tiles * (width // columns)
    columns = next((c for c in fitting if 2 * tiles(c) > processors), fitting[-1])
    ctas = min(tiles(columns), processors // cluster * cluster)
    return GatedProductConfig(columns, cluster, ctas)
