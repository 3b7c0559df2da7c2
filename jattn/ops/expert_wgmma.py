"""Rows times the matrices of their experts by expert_product_sm90.py, on a GPU for which the kernel has a launch."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops.expert_rows import experts_of_tiles, padded_count
from pallas_kernels.gpu import expert_product_sm90 as kernels
from pallas_kernels.gpu.expert_packed_config import ExpertPackedConfig
from pallas_kernels.gpu.expert_product_config import ExpertProductConfig, choose, tile_rows_of

Shape = tuple[int, ...]


def choose_tile_rows(choices: int, dtype: str, matrices: Sequence[Shape], share: float = 1.0) -> int:
    """Rows of a tile, to a multiple of which the rows of each expert are padded; 1: the kernel does not serve these
    matrices.

    choices: the rows of all experts together at most, without padding; share: the part of them that these experts may
    expect. matrices: their shapes [experts, inner, width].
    """
    if not choices or not matrices:
        return 1
    experts, width = matrices[0][0], math.gcd(*(shape[2] for shape in matrices))
    tile_rows = tile_rows_of(math.ceil(choices * share), experts, width, math.prod(matrices[0][1:]))
    rows = padded_count(choices, experts, tile_rows)
    is_served = all(_choose(rows, dtype, shape, tile_rows) is not None for shape in matrices)
    return tile_rows if is_served else 1


def config_of(x: jax.Array, matrices: Sequence[Any], tile_rows: int) -> ExpertProductConfig | None:
    """The launch for tiles of so many rows; None if there is none. matrices: plain, or to be dequantised."""
    shape = matrices[0].shape
    differ = any(m.shape != shape or isinstance(m, jax.Array) and m.dtype != x.dtype for m in matrices)
    if tile_rows == 1 or x.shape[0] % tile_rows or differ:
        return None
    return _choose(x.shape[0], x.dtype.name, shape, tile_rows, len(matrices))


def _choose(rows: int, dtype: str, shape: Shape, tile_rows: int, matrices: int = 1) -> ExpertProductConfig | None:
    processors, (experts, inner, width) = device.processors(), shape
    if device.detect().platform != "gpu" or processors is None:
        return None
    return choose(
        processors, rows=rows, inner=inner, width=width, experts=experts, dtype=dtype, tile_rows=tile_rows,
        matrices=matrices, chip=device.detect().generation,
    )  # fmt: skip


def tiles_of(sizes: jax.Array, config: ExpertProductConfig | ExpertPackedConfig) -> jax.Array:
    """The `tiles` of either kernel, for sizes that are multiples of config.tile_rows."""
    expert, first, counts = experts_of_tiles(sizes, config.tile_rows, config.tiles)
    each = jnp.stack([expert, first, counts[expert]], axis=1)
    return jnp.concatenate([jnp.full((1, 3), counts.sum(dtype=jnp.int32)), each])


def product(x: jax.Array, matrices: tuple[jax.Array, ...], tiles: jax.Array, config: ExpertProductConfig) -> jax.Array:
    """[rows, width]: each row times its expert's matrix; of two matrices, silu(x gate) * (x up).

    Under vmap it is called once per element.
    """

    @jax.custom_batching.sequential_vmap
    def each(x, matrices, tiles):
        return kernels.expert_product(x, matrices, tiles, config)

    return each(x, matrices, tiles)
