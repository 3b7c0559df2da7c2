"""Rows times the matrices of their experts, by the first of these that serves the operands:

    _native       C++ on a CPU, matrices packed or plain
    _wgmma        Hopper's wgmma kernel for padded rows and packed matrices (expert_packed.py)
    _packed       Hopper's mma.sync kernel, few rows of each expert with its packed matrix
    _wgmma        Hopper's wgmma kernel for padded rows and matrices of 16 bits (expert_wgmma.py), perhaps dequantised
    _looped       XLA's dots of tiles, one after the other
    _ragged_dot   jax.lax.ragged_dot, which XLA:CPU and XLA:GPU expand to all rows times every expert

The rows of an expert lie together, and the experts follow one another.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops import expert_dots, expert_packed, expert_wgmma
from jattn.ops.partitioner import is_partitioned
from jattn.ops.product import NATIVE_DTYPES, has_native_groups, varying_as
from jattn.ops.quantised import QuantisedArray, plain
from pallas_kernels.cpu.native import library, ops
from pallas_kernels.gpu import packed_product_config, packed_product_sm90
from pallas_kernels.gpu.expert_packed_config import ExpertPackedConfig
from pallas_kernels.gpu.expert_product_config import ExpertProductConfig

PACKED_ROWS_OF_EXPERT = 128
"""Mean rows of an expert up to which `_packed` is used: each tile of 16 rows reads the expert's weights once more.

One product with 32 experts of MXFP4 on an H200, 2026-11-28: 337 us for 64 rows of each, 524 for 128 and 961 for 256;
dequantised and then by `_wgmma` 508, 532, 612 (docs/notebook/nvidia_h200.md).
"""

RAGGED_COPY_BYTES = 2**30
"""What jax.lax.ragged_dot may copy on a GPU where no kernel serves the operands: x once for each expert. It is one
product, and reads all experts; a loop over tiles has some launches for each tile. Chosen for memory, not by times."""

DEQUANTISED_BYTES = 2**31
"""What gate and up of all experts, dequantised, may take for one launch of both; one after the other they take half.
Chosen for memory, not by times."""

Kernel = jax.Array | QuantisedArray


def choose_tile_rows(choices: int, dtype: Any, kernels: Sequence[Kernel], share: float = 1.0) -> int:
    """Rows of a tile: products are fast if the rows of each expert are padded to a multiple of it; 1: without padding.

    choices: the rows of all experts together, without padding; share: the part of them that these experts may expect.
    """
    x = jax.ShapeDtypeStruct((choices, kernels[0].shape[1]), dtype)
    if is_partitioned():
        return 1
    packed, name = [kernel for kernel in kernels if isinstance(kernel, QuantisedArray)], x.dtype.name
    if len(packed) == len(kernels):
        if (tile_rows := expert_packed.choose_tile_rows(choices, name, packed, share)) > 1:
            return tile_rows
        if all(_packed_config(x, (kernel,)) is not None for kernel in packed):
            return 1
    return expert_wgmma.choose_tile_rows(choices, name, [kernel.shape for kernel in kernels], share)


def expert_product(
    x: jax.Array, kernel: Kernel, sizes: jax.Array, tile_rows: int = 1, tiles: jax.Array | None = None,
    most_rows: int | None = None,
) -> jax.Array:  # fmt: skip
    """[N, out]: x [N, in], in the order of its rows' experts, times kernel [experts, in, out]; in the dtype of x.

    sizes i32[experts]: rows of each expert, all of them multiples of `tile_rows`. Rows beyond their sum are undefined.
    tiles: those of ExpertRows; None: made from the sizes where they are needed.
    most_rows: bound of these sizes; None: not known.
    """
    _check_sizes(sizes, kernel)
    if not x.shape[0]:  # the others have no tile then
        return _ragged_dot(x, kernel, sizes)
    if _is_native(x, kernel):
        return _native(x, kernel, sizes)
    if (packed := expert_packed.config_of(x, [kernel], tile_rows)) is not None:
        return _wgmma(x, (kernel,), sizes, tiles, packed)
    if (few := _packed_config(x, (kernel,), most_rows)) is not None:
        return _packed(x, (kernel,), sizes, few)[0]
    if (config := expert_wgmma.config_of(x, [kernel], tile_rows)) is not None:
        return _wgmma(x, (plain(kernel, x.dtype),), sizes, tiles, config)
    return _dots(x, kernel, sizes)


def expert_products(
    x: jax.Array, kernels: tuple[Kernel, ...], sizes: jax.Array, tile_rows: int = 1, tiles: jax.Array | None = None,
    most_rows: int | None = None,
) -> list[jax.Array]:  # fmt: skip
    """`expert_product` of each of these matrices; packed ones of few rows in one launch."""
    for kernel in kernels:
        _check_sizes(sizes, kernel)
    each = [expert_packed.config_of(x, [kernel], tile_rows) for kernel in kernels]
    if each == [None] * len(kernels) and (few := _packed_config(x, kernels, most_rows)) is not None:
        return _packed(x, kernels, sizes, few)
    return [expert_product(x, kernel, sizes, tile_rows, tiles, most_rows) for kernel in kernels]


def silu_expert_product(
    x: jax.Array, gate: Kernel, up: Kernel, sizes: jax.Array, tile_rows: int = 1, tiles: jax.Array | None = None,
    most_rows: int | None = None,
) -> jax.Array:  # fmt: skip
    """silu(x gate) * (x up). In one launch both products stay float32; else each is rounded to the dtype of x first."""
    _check_sizes(sizes, gate)
    if not isinstance(gate, QuantisedArray) and not isinstance(up, QuantisedArray):
        if (config := expert_wgmma.config_of(x, [gate, up], tile_rows)) is not None:
            return _wgmma(x, (gate, up), sizes, tiles, config)
    if (packed := expert_packed.config_of(x, [gate, up], tile_rows)) is not None:
        return _wgmma(x, (gate, up), sizes, tiles, packed)
    if (config := _dequantised_config(x, (gate, up), tile_rows)) is not None:
        return _wgmma(x, (plain(gate, x.dtype), plain(up, x.dtype)), sizes, tiles, config)
    of_gate, of_up = expert_products(x, (gate, up), sizes, tile_rows, tiles, most_rows)
    return jax.nn.silu(of_gate) * of_up


def _dequantised_config(x: jax.Array, kernels: tuple[Kernel, Kernel], tile_rows: int) -> ExpertProductConfig | None:
    """The launch of `_wgmma` for gate and up, of which quantised ones are dequantised; None if one is multiplied packed
    or both are large."""
    if any(isinstance(kernel, QuantisedArray) and _is_packed(x, kernel, tile_rows) for kernel in kernels):
        return None
    held = sum(math.prod(kernel.shape) for kernel in kernels) * x.dtype.itemsize
    return expert_wgmma.config_of(x, kernels, tile_rows) if held <= DEQUANTISED_BYTES else None


def _is_packed(x: jax.Array, kernel: QuantisedArray, tile_rows: int) -> bool:
    """Is the matrix multiplied as it is by a GPU kernel?"""
    return expert_packed.config_of(x, [kernel], tile_rows) is not None or _packed_config(x, (kernel,)) is not None


def _check_sizes(sizes: jax.Array, kernel: Kernel) -> None:
    if sizes.shape != kernel.shape[:1]:
        raise ValueError(f"{sizes.shape=} must be {kernel.shape[:1]}: the rows of each expert")


def _ragged_dot(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, plain(kernel, x.dtype), sizes)


def _dots(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    return _looped(x, kernel, sizes) if _is_looped(x, kernel) else _ragged_dot(x, kernel, sizes)


def _is_looped(x: jax.Array, kernel: Kernel) -> bool:
    """Are the dots those of tiles? Not where XLA's partitioner divides them: it would gather all matrices."""
    platform, copied = device.detect().platform, x.size * x.dtype.itemsize * kernel.shape[0]  # ragged_dot: x per expert
    return not is_partitioned() and (platform == "cpu" or platform == "gpu" and copied > RAGGED_COPY_BYTES)


@jax.custom_jvp
def _looped(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """XLA's dots of the tiles that have rows. Such a loop has no reverse derivative: its derivatives are those of
    `_batched`. Under vmap it is called once per element."""
    return jax.custom_batching.sequential_vmap(expert_dots.looped)(x, kernel, sizes)


def _batched(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """The formula by which `_looped` and `_native` are differentiated, in float32 or wider: the derivative of a matrix
    is a sum over its tiles, which would otherwise be rounded after each."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return expert_dots.batched(x.astype(wide), plain(kernel, wide).astype(wide), sizes).astype(x.dtype)


def _is_native(x: jax.Array, kernel: Kernel) -> bool:
    """On a CPU the C++ kernel is used for any number of rows: it decodes a packed tile once for up to 192 rows of its
    expert."""
    if device.detect().platform != "cpu" or is_partitioned() or x.dtype.name not in NATIVE_DTYPES:
        return False
    is_packed = isinstance(kernel, QuantisedArray)
    is_form = kernel.axis == -2 and has_native_groups(kernel) if is_packed else kernel.dtype == x.dtype
    return is_form and bool(library.status().isas)


def _packed_config(
    x: jax.Array | jax.ShapeDtypeStruct, kernels: tuple[Kernel, ...], most_rows: int | None = None
) -> packed_product_config.PackedProductConfig | None:
    """The launch of `_packed` on this GPU; None if the kernel does not serve the operands."""
    processors, first, rows = device.processors(), kernels[0], x.shape[0]
    if device.detect().platform != "gpu" or processors is None or is_partitioned() or not rows:
        return None
    if not isinstance(first, QuantisedArray) or first.axis != -2 or not expert_packed.are_alike(kernels):
        return None
    if rows > first.shape[0] * PACKED_ROWS_OF_EXPERT:
        return None
    return packed_product_config.choose(
        processors, chip=device.detect().generation, rows=rows, inner=first.shape[1],
        widths=(first.shape[2],) * len(kernels), experts=first.shape[0], most_rows=most_rows, dtype=x.dtype.name,
        x_dtype=x.dtype.name, **first.form,
    )  # fmt: skip


@jax.custom_jvp
def _native(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """The C++ kernel. Its derivatives are those of `_batched`. Under vmap it is called once per element."""
    if not isinstance(kernel, QuantisedArray):
        return ops.expert_product(x, kernel, sizes, out_dtype=x.dtype)
    return ops.packed_expert_product(x, kernel.arrays, sizes, kernel.format, out_dtype=x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _packed(x: jax.Array, kernels: tuple[QuantisedArray, ...], sizes: jax.Array, config: Any) -> list[jax.Array]:
    """The GPU kernel for packed matrices. Its derivatives are those of `_dots`. Under vmap it is called once per
    element."""
    tiles = expert_dots.row_tiles(sizes, config.tile_rows, config.tiles)

    @jax.custom_batching.sequential_vmap
    def each(x, matrices, tiles):
        return list(packed_product_sm90.packed_product(x, matrices, config, tiles))

    return each(x, tuple(kernel.arrays for kernel in kernels), tiles)


@_looped.defjvp
def _looped_jvp(primals, tangents):
    return _looped(*primals), jax.jvp(_batched, primals, tangents)[1]


@_native.defjvp
def _native_jvp(primals, tangents):
    return varying_as(_native(*primals), primals), jax.jvp(_batched, primals, tangents)[1]


@_packed.defjvp
def _packed_jvp(config: Any, primals, tangents):
    products = lambda x, kernels, sizes: [_dots(x, kernel, sizes) for kernel in kernels]
    return _packed(*primals, config), jax.jvp(products, primals, tangents)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _wgmma(
    x: jax.Array, matrices: tuple[Kernel, ...], sizes: jax.Array, tiles: jax.Array | None,
    config: ExpertProductConfig | ExpertPackedConfig,
) -> jax.Array:  # fmt: skip
    """The GPU kernel for padded rows, matrices of 16 bits or packed by its config; of two, `silu_expert_product`.

    tiles: None: made from the sizes. Its derivatives are those of `_dots`. Under vmap it is called once per element.
    """
    compute: Any = expert_packed.product if isinstance(config, ExpertPackedConfig) else expert_wgmma.product
    return compute(x, matrices, expert_wgmma.tiles_of(sizes, config) if tiles is None else tiles, config)


@_wgmma.defjvp
def _wgmma_jvp(config: Any, primals, tangents):
    return _wgmma(*primals, config), jax.jvp(_products_of_dots, primals, tangents)[1]


def _products_of_dots(x: jax.Array, matrices: tuple[Kernel, ...], sizes: jax.Array, _) -> jax.Array:
    """The formula by which `_wgmma` is differentiated."""
    products = [_dots(x, matrix, sizes) for matrix in matrices]
    return jax.nn.silu(products[0]) * products[1] if len(products) == 2 else products[0]
