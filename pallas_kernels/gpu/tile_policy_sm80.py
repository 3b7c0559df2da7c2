"""Tile sizes of the warp-level kernel for a shape and a chip: `warp_config`. The choices were timed on an H200 only."""

import dataclasses
import functools
from typing import Any

from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.config_sm80 import CHIPS, SMEM_RESERVED, WarpKernelConfig

MOST_STAGES = 4
LAYOUTS = ((2, 2), (1, 2), (1, 1))
"""(halves of a tile at the same time, CTAs of a multiprocessor), the preferred first. While one CTA waits at the
start or the end of a piece, the other computes."""
MOST_COLUMNS_OF_TWO_HALVES = 128
"""The widest output for which a tile has two halves: the accumulators are half of a thread's registers. On an H200, the
prompt of 8192 tokens took three quarters of the time of one half, with one CTA of a multiprocessor instead of two."""


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
    wide = config.long_tiles and config.v_head_dim <= MOST_COLUMNS_OF_TWO_HALVES
    most = fields.get("tile_halves", 2 if wide else 1)
    for halves, ctas in [layout for layout in LAYOUTS if layout[0] <= most]:
        limit = min(known.smem_cta, known.smem // ctas - SMEM_RESERVED)
        config = dataclasses.replace(config, tile_halves=halves)
        stages = _stages_that_fit(config, limit)
        if stages >= config.least_stages:
            break
    chosen = {"stages": max(stages, 1), "num_ctas": ctas * (processors or known.processors)}
    return dataclasses.replace(config, **chosen | fields)


def _variants(rows: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """Which bodies the kernel has and which work list it walks, given the rows of a request."""
    few = rows is not None and rows <= WARPGROUP_ROWS
    narrow = rows if rows is not None and rows <= 16 else given["num_heads"] // given["num_kv_heads"]
    chosen = {"narrow_rows": 8 if narrow <= 8 else 16, "wide_tiles": rows is None or rows > 16}
    return chosen | {"long_tiles": not few, "flat_list": few}


def _stages_that_fit(config: WarpKernelConfig, limit: int) -> int:
    """Stages for which `limit` bytes of shared memory are enough; 0: not even one."""
    one, two = (dataclasses.replace(config, stages=n).smem_bytes for n in (1, 2))
    return max(0, min(1 + (limit - one) // (two - one), MOST_STAGES))
