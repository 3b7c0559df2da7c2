"""Rows times the matrices of their experts by expert_product_sm90.py, on a GPU for which the kernel has a launch."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops.expert_rows import padded_count
from pallas_kernels.gpu import expert_product_sm90 as kernels
from pallas_kernels.gpu.expert_product_config import ExpertProductConfig, choose, tile_rows_of

Shape = tuple[int, ...]


def row_multiple(choices: int, dtype: str, matrices: Sequence[Shape]) -> int:
    """A multiple to which the rows of each expert are padded for these matrices; 1: the kernel does not serve them.

    choices: rows of all experts together, without padding. matrices: their shapes [experts, inner, width].
    """
    if not choices or not matrices:
        return 1
    experts, width = matrices[0][0], math.gcd(*(shape[2] for shape in matrices))
    tile_rows = tile_rows_of(choices, experts, width)
    rows = padded_count(choices, experts, tile_rows)
    is_served = all(_choose(rows, dtype, shape, tile_rows) is not None for shape in matrices)
    return tile_rows if is_served else 1


def config_of(x: jax.Array, matrices: Sequence[jax.Array], multiple: int) -> ExpertProductConfig | None:
    """The launch for rows padded to `multiple`; None if there is none. Two matrices: for `silu`."""
    shapes = {matrix.shape for matrix in matrices}
    if multiple == 1 or x.shape[0] % multiple or len(shapes) > 1 or any(m.dtype != x.dtype for m in matrices):
        return None
    return _choose(x.shape[0], x.dtype.name, *shapes, multiple, len(matrices))


def _choose(rows: int, dtype: str, shape: Shape, tile_rows: int, matrices: int = 1) -> ExpertProductConfig | None:
    processors, (experts, inner, width) = device.processors(), shape
    if device.detect().platform != "gpu" or processors is None:
        return None
    return choose(
        processors, rows=rows, inner=inner, width=width, experts=experts, dtype=dtype, tile_rows=tile_rows,
        matrices=matrices, chip=device.detect().generation,
    )  # fmt: skip


def tiles_of(sizes: jax.Array, config: ExpertProductConfig) -> jax.Array:
    """The kernel's `tiles`, for sizes that are multiples of config.tile_rows."""
    counts = (sizes // config.tile_rows).astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    expert = jnp.sum(ends[None, :] <= jnp.arange(config.tiles)[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, config.experts - 1)
    each = jnp.stack([expert, (ends - counts)[expert], counts[expert]], axis=1)
    return jnp.concatenate([jnp.full((1, 3), ends[-1]), each])


def product(x: jax.Array, matrix: jax.Array, sizes: jax.Array, config: ExpertProductConfig) -> jax.Array:
    """[rows, width]: each row times its expert's matrix. Under vmap it is called once per element."""
    return _each(x, (matrix,), sizes, config)


def silu(x: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array, config: ExpertProductConfig) -> jax.Array:
    """silu(x gate) * (x up), likewise, in one launch."""
    return _each(x, (gate, up), sizes, config)


def _each(x, matrices: tuple[jax.Array, ...], sizes, config: ExpertProductConfig) -> jax.Array:
    run = kernels.gated_expert_product if len(matrices) == 2 else kernels.expert_product

    @jax.custom_batching.sequential_vmap
    def each(x, matrices, sizes):
        return run(x, *matrices, tiles_of(sizes, config), config)

    return each(x, matrices, sizes)
