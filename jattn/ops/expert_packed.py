"""Rows times the packed matrices of their experts by expert_packed_sm90.py, on a GPU for which it has a launch."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jattn import device
from jattn.ops.expert_rows import padded_count
from jattn.ops.quantised import QuantisedArray
from pallas_kernels.gpu import expert_packed_sm90 as kernels
from pallas_kernels.gpu.expert_packed_config import ExpertPackedConfig, choose, cost, tile_rows_of
from pallas_kernels.gpu.packed_product_config import BITS, EXPERT_ROWS, PackedConfig

MOST_MEAN_ROWS = {"int8": 1024, "fp8": 1024, "int4": 512}
"""Mean rows of an expert up to which a matrix is multiplied packed, where sums of groups are scaled: a tile of 128 rows
takes 1.3 times as long as one of 16 bits (of int4 1.5 times), and dequantising takes the same time for any number of
rows (163 us for 128 experts of 2048 x 768 of fp8; an H200, 2026-11-29). Where sums stay in the accumulator a tile takes
no longer than one of 16 bits, and there is no limit."""
READ_RATES = {"int8": 3.0e6, "fp8": 3.0e6, "int4": 2.6e6, "fp4": 2.0e6}
"""Bytes of a matrix that packed_product_sm90.py multiplies with 16 rows in a microsecond (an H200, 2026-11-29)."""
START = 3.0  # microseconds that a launch of expert_packed_sm90.py takes longer to begin than one of that kernel


def choose_tile_rows(choices: int, dtype: str, matrices: Sequence[QuantisedArray], share: float = 1.0) -> int:
    """Rows of a tile, to a multiple of which the rows of each expert are padded; 1: there is no such launch, or few
    rows by packed_product_sm90.py are faster.

    choices: the rows of all experts together at most, without padding; share: the part of them that these experts may
    expect.
    """
    if not choices or not matrices or len({matrix.format for matrix in matrices}) > 1:
        return 1
    experts, expected = matrices[0].shape[0], choices * share
    scales_sums = any(_scales_sums(matrix, dtype) for matrix in matrices)
    width = math.gcd(*(matrix.shape[2] for matrix in matrices))
    tile_rows = tile_rows_of(math.ceil(expected), experts, width, matrices[0].format, scales_sums)
    rows = padded_count(choices, experts, tile_rows)
    used = experts * (1 - (1 - 1 / experts) ** expected)  # experts that have rows
    configs = [_choose(rows, dtype, [matrix], tile_rows) for matrix in matrices]
    if None in configs:
        return 1
    tiles = lambda size: max(used, expected / size + used / 2)
    ours = sum(cost(config, tiles(tile_rows)) + START for config in configs if config is not None)
    numbers = sum(math.prod(matrix.shape[1:]) for matrix in matrices)
    format = matrices[0].format
    theirs = tiles(EXPERT_ROWS) * numbers * BITS[format] / 8 / READ_RATES[format]
    return tile_rows if ours < theirs else 1


def config_of(x: Any, matrices: Sequence[Any], tile_rows: int) -> ExpertPackedConfig | None:
    """The launch for tiles of so many rows and one matrix, or gate and up; None if there is none."""
    if tile_rows == 1 or x.shape[0] % tile_rows or not are_alike(matrices):
        return None
    return _choose(x.shape[0], x.dtype.name, matrices, tile_rows)


def are_alike(matrices: Sequence[Any]) -> bool:
    """Are all of them quantised, and of the same shape and form?"""
    if not all(isinstance(matrix, QuantisedArray) for matrix in matrices):
        return False
    return len({(matrix.shape, matrix.axis, *matrix.form.values()) for matrix in matrices}) == 1


def _choose(rows: int, dtype: str, matrices: Sequence[QuantisedArray], tile_rows: int) -> ExpertPackedConfig | None:
    first, processors = matrices[0], device.processors()
    experts, inner, width = first.shape
    if device.detect().platform != "gpu" or processors is None or first.axis != -2:
        return None
    most = MOST_MEAN_ROWS.get(first.format)
    if most is not None and _scales_sums(first, dtype) and rows > experts * (most + tile_rows - 1):
        return None
    return choose(
        processors, width=width, matrices=len(matrices), chip=device.detect().generation, rows=rows, inner=inner,
        experts=experts, tile_rows=tile_rows, dtype=dtype, x_dtype=dtype, **first.form,
    )  # fmt: skip


def _scales_sums(matrix: QuantisedArray, dtype: str) -> bool:
    """Is the sum of each group multiplied by its scale? It depends on the form of the matrix and the dtype of rows."""
    config = PackedConfig(rows=1, inner=matrix.shape[1], widths=matrix.shape[2:], x_dtype=dtype, **matrix.form)
    return config.scales_sums


def product(
    x: jax.Array, matrices: tuple[QuantisedArray, ...], tiles: jax.Array, config: ExpertPackedConfig
) -> jax.Array:
    """[rows, width]: each row times its expert's matrix; of two matrices, silu(x gate) * (x up).

    Under vmap it is called once per element.
    """

    @jax.custom_batching.sequential_vmap
    def each(x, matrices, tiles):
        return kernels.expert_packed_product(x, tuple(matrix.arrays for matrix in matrices), tiles, config)

    return each(x, matrices, tiles)
