"""Sizes of blocks and tiles of the TPU kernel that its caller left open: `default_config`.

benchmarks.tpu.sweep writes a table for each generation, pallas_kernels/tuning/tpu_*.json. Its figures are bundles of
the compiled kernel, for 32 query and 8 kv heads of 128 in bf16; no TPU has confirmed them. A layer for which a size of
the table is too large gets a smaller one.
"""

import dataclasses
import functools
from typing import Any

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, PACK, TpuKernelConfig
from pallas_kernels.tpu.supports import SPILL, VMEM, generation_of
from pallas_kernels.tuning import read_sizes, table_path

PAGE_BYTES = 24 << 20  # VMEM that a block's pages may take
MANY_BYTES = 40 << 20  # a part whose pages would take so many bytes of VMEM has 128 keys instead
ROW_BYTES = 16 << 20  # VMEM that a tile's rows may take
TABLE_SIZES = dict.fromkeys(("block_kv", "part_kv", "step_kv", "tile_rows", "chunk_rows"), PACK) | dict(
    short_heads=1, long_heads=1, values_behind=0, early_heads=0
)
"""Fields of TpuKernelConfig that a table may have, and the least of each."""


def default_config(*, longest: int | None = None, chip: str = "", **fields) -> TpuKernelConfig:
    """The config with these fields, and the largest sizes that fit for those not given. Not checked (see supports.py).

    longest: upper bound of every request's new tokens, if it is known. With 1 the kernel has no body of many rows.
    chip: the generation whose table is read, and whose VMEM the sizes fit; "": no table, and the smallest VMEM.
    """
    fields, fixed = tuned_sizes(generation_of(chip)) | fields, fields
    config = TpuKernelConfig(**fields)
    dims = sum(cdiv(dim, LANES) * LANES for dim in (config.head_dim, config.v_head_dim))
    heads, room = config.num_kv_heads, _room(chip)
    row_bytes = lambda rows: heads * rows * (2 * dims * 4 + (dims + 2 * LANES) * 4)
    blocks = config.block_kv, *_smaller_blocks(config)
    tiles = config.tile_rows, *(n for n in (512, 256, 128) if n < config.tile_rows)
    if "part_kv" not in fixed:  # of any batch, so that a decode's bits do not depend on the others
        if config.beside > 2:  # so that each group of lanes has whole registers of keys
            fields["part_kv"] = LANES * config.beside
        elif config.page_bytes(config.part_keys) >= MANY_BYTES or not _has_tiles(config, room, fixed):
            fields["part_kv"] = LANES
        config = TpuKernelConfig(**fields)
    found: dict[str, Any] = dict(
        block_kv=next((n for n in blocks if config.page_bytes(n) <= PAGE_BYTES), blocks[-1]),
        tile_rows=next((n for n in tiles if row_bytes(n) <= ROW_BYTES), tiles[-1]),
    )
    if longest is not None:
        found |= _rows_for(longest * config.group, config, found["tile_rows"])
    return _fewer_rows(TpuKernelConfig(**(fields | found | fixed)), room, fixed)


def for_packed_keys(config: TpuKernelConfig, dtype: str, chip: str = "") -> TpuKernelConfig:
    """The config with queries, keys and values of this dtype, and smaller blocks where its own do not fit beside its
    tiles, which a work list has fixed: keys that come with the queries, from no cache, have their dtype."""
    config, room = dataclasses.replace(config, dtype=dtype, kv_dtype=dtype), _room(chip)
    found = [config, *(dataclasses.replace(config, block_kv=n) for n in _smaller_blocks(config))]
    return next((c for c in found if c.vmem_bytes() <= room), found[-1])


def _room(chip: str) -> int:
    """Bytes of VMEM for one launch's scratch."""
    return VMEM.get(generation_of(chip), min(VMEM.values())) - SPILL


def _smaller_blocks(config: TpuKernelConfig) -> list[int]:
    return [n for n in (1536, 1024, 512, 256, 128) if n < config.block_kv]


def _fewer_rows(config: TpuKernelConfig, room: int, fixed: dict[str, Any]) -> TpuKernelConfig:
    """The config with smaller tiles, if it may take more VMEM than there is: with many kv heads, or wide ones.

    fixed: the fields that the caller of default_config gave.
    """
    while _most_vmem(config) > room and config.tile_rows > PACK and {"tile_rows", "chunk_rows"}.isdisjoint(fixed):
        rows = max(config.tile_rows // (2 * PACK), 1) * PACK  # config.rows are at least those of a token
        config = dataclasses.replace(config, tile_rows=rows, chunk_rows=min(config.chunk_rows, rows))
    return config


def _has_tiles(config: TpuKernelConfig, room: int, fixed: dict[str, Any]) -> bool:
    """Is there a size of tiles for blocks of one part?"""
    return _most_vmem(_fewer_rows(dataclasses.replace(config, block_kv=LANES), room, fixed)) <= room


def _most_vmem(config: TpuKernelConfig) -> int:
    """Bytes of VMEM of the widest launch: a work list fixes the tiles before dtypes and parameters are known."""
    rule = dataclasses.replace(config.mask, spans=True)
    return dataclasses.replace(
        config, dtype="float32", out_dtype="float32", per_head_q_scale=True, mask=rule
    ).vmem_bytes()


@functools.cache
def tuned_sizes(generation: str) -> dict[str, Any]:
    """Fields of TpuKernelConfig from the generation's table; none without a table. ValueError if it is none."""
    path = table_path(f"tpu_{generation}")
    sizes = read_sizes(path, TABLE_SIZES) if generation and path.is_file() else {}
    if sizes.get("chunk_rows", 0) % PACK or (sizes.get("early_heads") and sizes.get("values_behind") == 0):
        raise ValueError(f"{path}: chunk_rows must be whole packs of {PACK}, and early_heads 0 if values_behind is 0")
    return sizes


def _rows_for(rows: int, config: TpuKernelConfig, most: int) -> dict[str, int]:
    """tile_rows and chunk_rows where every request has at most `rows` rows."""
    if rows <= config.few_rows:
        return dict(tile_rows=config.group)
    chunk = min(config.chunk_rows, cdiv(rows, PACK) * PACK)
    return dict(tile_rows=max(min(most, cdiv(rows, chunk) * chunk), config.group), chunk_rows=chunk)
