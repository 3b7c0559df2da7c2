"""Tile sizes of the warp-level kernel for a shape and a chip: `warp_config`. The choices were timed on an H200 only."""

import dataclasses
import functools
from typing import Any

from pallas_kernels.gpu import flat_list
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.config_sm80 import (
    CHIPS,
    MOST_COLUMNS_OF_TWO_HALVES,
    NARROW_ROWS,
    SMEM_OF_CUDA,
    WarpChip,
    WarpKernelConfig,
)
from pallas_kernels.gpu.supports_sm80 import supports
from pallas_kernels.tuning import read_rows, table_path

MOST_STAGES = 4  # even if shared memory has room for more
HALVES_AND_CTAS = ((2, 2), (1, 2), (1, 1))
"""(halves of a wide tile, CTAs that a multiprocessor holds at a time), the preferred first. While one CTA waits at the
start or the end of a piece, the other computes."""


def warp_config(
    *, chip: str, rows: int | None = None, requests: int = 0, processors: int | None = None, **fields
) -> WarpKernelConfig:
    """The config with these fields; the others are chosen here. Not checked (see supports_sm80.py).

    rows: upper bound of every request's packed rows (new tokens * group), if it is known. requests: of the batch, those
    of padding included; 0: unknown. processors: multiprocessors of the GPU; None: the number in config_sm80.CHIPS.
    """
    return _chosen(chip, rows, requests, processors, tuple(fields.items()))


@functools.lru_cache(maxsize=1024)  # a batch that is built outside jit asks at every step
def _chosen(
    chip: str, rows: int | None, requests: int, processors: int | None, given: tuple[tuple[str, Any], ...]
) -> WarpKernelConfig:
    known, fields = _chip_of(chip), dict(given)
    config = WarpKernelConfig(chip=chip, **_variants(rows, fields) | fields)
    if config.quantised and config.v_head_dim > known.lazy_columns:
        config = dataclasses.replace(config, lazy_rescale=fields.get("lazy_rescale", False))
    tiles = {} if {"stages", "tile_halves"} & fields.keys() else measured_tiles(config)
    tiles = dict(tiles or largest_tiles(config, fields.get("tile_halves")))
    ctas = tiles.pop("ctas")  # of a multiprocessor
    tiles["num_ctas"] = ctas * (processors or known.processors)
    config = dataclasses.replace(config, **tiles | fields)
    listed = dict(in_waves=flat_list.may_be_in_waves(config, requests))
    if config.flat_list:
        listed["unit_blocks"] = flat_list.blocks_of_a_unit(config, ctas)
    return dataclasses.replace(config, **listed | fields)


def _chip_of(name: str) -> WarpChip:
    """The chip of this name. Of one that is not listed, which supports_sm80.py refuses, one of the smallest."""
    return CHIPS.get(name, CHIPS["sm_86"])


def largest_tiles(config: WarpKernelConfig, halves: int | None = None) -> dict[str, int]:
    """The rule where nothing was measured: the first of HALVES_AND_CTAS that fits, in as many stages as fit.

    Returns tile_halves, stages, and ctas, the CTAs of a multiprocessor. halves: what the caller asked for, or None.
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
    """The widest output for which a tile of this config has two halves, by what the compilers spilled.

    Two halves of 128 columns leave no registers for scales of tokens together with positions or weights of two parts;
    two of 96 columns none for the addresses of a bias. Arithmetic on pairs takes more (docs/notebook/nvidia_h200.md).
    """
    pairs = _chip_of(config.chip).pairs
    by_position = config.logits.score_fn is not None or config.mask.mask_fn is not None
    crowded = config.qq_bias or (by_position and (config.token_scales or pairs))
    crowded = crowded or (config.token_scales and config.weight_parts > 1)
    most = 64 if pairs or config.qq_bias else 96
    return most if crowded else MOST_COLUMNS_OF_TWO_HALVES


def measured_tiles(config: WarpKernelConfig) -> dict[str, int]:
    """As largest_tiles, but measured by `python -m jattn bench --tune`; {} for a shape that the chip's table lacks.

    A row is not used if the kernel refuses it, or if it does not fit this config's options or another card of the chip.
    Tables of other names are those of other kernels.
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
    """Whether the kernel has wide tiles, up to how many rows a tile is narrow, and the kind of work list.

    rows: as in warp_config. Where requests may have more than a narrow tile's rows, decodes have a group of heads each.
    """
    short, most = NARROW_ROWS
    few = rows is not None and rows <= WARPGROUP_ROWS
    all_narrow = rows is not None and rows <= most
    narrow = rows if all_narrow else given["num_heads"] // given["num_kv_heads"]
    chosen = {"narrow_rows": short if narrow <= short else most, "wide_tiles": not all_narrow}
    return chosen | {"long_tiles": not few, "flat_list": few}


def stages_that_fit(config: WarpKernelConfig, ctas: int) -> int:
    """The most stages, up to MOST_STAGES, for which a multiprocessor has the memory with so many CTAs; 0: not one."""
    known = _chip_of(config.chip)
    limit = min(known.smem_cta, known.smem // ctas - SMEM_OF_CUDA)
    fits = lambda count: dataclasses.replace(config, stages=count).smem_bytes <= limit
    return max(filter(fits, range(1, MOST_STAGES + 1)), default=0)
