"""Tile sizes of the warp-level kernel for a shape and a chip: `warp_config`. The choices were timed on an H200 only."""

import dataclasses
import functools
from typing import Any

from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.config_sm80 import CHIPS, SMEM_RESERVED, WarpKernelConfig
from pallas_kernels.gpu.supports_sm80 import supports
from pallas_kernels.tuning import read_rows, table_path

MOST_STAGES = 4
HALVES_AND_CTAS = ((2, 2), (1, 2), (1, 1))
"""(halves of a wide tile, CTAs that a multiprocessor holds at a time), the preferred first. While one CTA waits at the
start or the end of a piece, the other computes."""
MOST_COLUMNS_OF_TWO_HALVES = 128
"""The widest output for which a tile has two halves, which share each load of a key. On an H200 a prompt of 8192 tokens
took 1567 us with two and 2232 with one; over an 8-bit cache 2256 and 3307, though a thread then spills 148 bytes."""


def warp_config(*, chip: str, rows: int | None = None, processors: int | None = None, **fields) -> WarpKernelConfig:
    """The config with these fields; the others are chosen here. Not checked (see supports_sm80.py).

    rows: upper bound of every request's packed rows (new tokens * group), if it is known. processors: multiprocessors
    of the GPU; None: those of the chip's largest product.
    """
    return _chosen(chip, rows, processors, tuple(fields.items()))


@functools.lru_cache(maxsize=1024)  # a batch that is built outside jit asks at every step
def _chosen(chip: str, rows: int | None, processors: int | None, given: tuple[tuple[str, Any], ...]):
    known = CHIPS.get(chip, CHIPS["sm_86"])  # supports_sm80.py refuses another chip
    fields = dict(given)
    config = WarpKernelConfig(chip=chip, **_variants(rows, fields) | fields)
    if config.quantised and config.v_head_dim > known.lazy_columns:
        config = dataclasses.replace(config, lazy_rescale=fields.get("lazy_rescale", False))
    tiles = {} if {"stages", "tile_halves"} & fields.keys() else measured_tiles(config)
    tiles = dict(tiles or largest_tiles(config, fields.get("tile_halves")))
    tiles["num_ctas"] = tiles.pop("ctas") * (processors or known.processors)
    return dataclasses.replace(config, **tiles | fields)


def largest_tiles(config: WarpKernelConfig, halves: int | None = None) -> dict[str, int]:
    """The rule where nothing was measured: the first of HALVES_AND_CTAS that fits, in as many stages as fit.

    tile_halves, stages, and ctas: CTAs of a multiprocessor. halves: a given number of halves, or None.
    """
    two = config.long_tiles and config.v_head_dim <= most_columns_of_two_halves(config)
    most, tiles = halves or (2 if two else 1), {}
    for count, ctas in [pair for pair in HALVES_AND_CTAS if pair[0] <= most]:
        config = dataclasses.replace(config, tile_halves=count)
        stages = stages_that_fit(config, ctas)
        tiles = dict(tile_halves=count, stages=max(stages, 1), ctas=ctas)  # supports_sm80.py refuses what does not fit
        if stages >= config.least_stages:
            break
    return tiles


def most_columns_of_two_halves(config: WarpKernelConfig) -> int:
    """The widest output for which a tile has two halves. Two of 128 columns leave no registers for scales of tokens
    beside positions or weights of two parts, two of 96 none for the addresses of a bias; pairs of numbers take more."""
    pairs = CHIPS.get(config.chip, CHIPS["sm_86"]).pairs
    by_position = config.logits.score_fn is not None or config.mask.mask_fn is not None
    crowded = config.qq_bias or (by_position and (config.token_scales or pairs))
    crowded = crowded or (config.token_scales and config.weight_parts > 1)
    most = 64 if pairs or config.qq_bias else 96
    return most if crowded else MOST_COLUMNS_OF_TWO_HALVES


def measured_tiles(config: WarpKernelConfig) -> dict[str, int]:
    """The same as measured on this chip by `python -m jattn bench --tune`; {} for a shape that its table lacks.

    A row that the kernel refuses, of an older version of it or of another chip, is not used. Tables of other names are
    those of other kernels.
    """
    kind = "long" if config.long_tiles else "few"
    if config.chip not in CHIPS or config.token_scales or config.wide_tiles != config.long_tiles:  # not measured
        return {}
    tiles = measured_table(config.chip).get((config.head_dim, config.v_head_dim, config.kv_dtype, kind), {})
    if not tiles:
        return {}
    own = dataclasses.replace(config, tile_halves=tiles["tile_halves"], stages=tiles["stages"])
    fits = own.tile_halves == 1 or own.v_head_dim <= most_columns_of_two_halves(own)
    fits = fits and not supports(own) and own.stages <= stages_that_fit(own, tiles["ctas"])
    return tiles if fits else {}


@functools.cache
def measured_table(chip: str) -> dict[tuple[int, int, str, str], dict[str, int]]:
    """(head_dim, v_head_dim, kv_dtype, "long" or "few") -> tiles; empty for a chip that nobody has tuned."""
    path, tiles = table_path(chip), ("tile_halves", "stages", "ctas")
    counts = ("head_dim", "v_head_dim", *tiles)
    rows = read_rows(path, texts=("kv_dtype", "kind"), counts=counts) if path.is_file() else []
    shape = lambda row: (row["head_dim"], row["v_head_dim"], row["kv_dtype"], row["kind"])
    return {shape(row): {name: row[name] for name in tiles} for row in rows}


def _variants(rows: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """Which bodies the kernel has and which work list it walks, given the rows of a request."""
    few = rows is not None and rows <= WARPGROUP_ROWS
    narrow = rows if rows is not None and rows <= 16 else given["num_heads"] // given["num_kv_heads"]
    chosen = {"narrow_rows": 8 if narrow <= 8 else 16, "wide_tiles": rows is None or rows > 16}
    return chosen | {"long_tiles": not few, "flat_list": few}


def stages_that_fit(config: WarpKernelConfig, ctas: int) -> int:
    """Stages for which a multiprocessor with so many CTAs has the shared memory; 0: not even one."""
    known = CHIPS.get(config.chip, CHIPS["sm_86"])
    limit = min(known.smem_cta, known.smem // ctas - SMEM_RESERVED)
    fits = lambda count: dataclasses.replace(config, stages=count).smem_bytes <= limit
    return max(filter(fits, range(1, MOST_STAGES + 1)), default=0)
