"""Rows times the matrices of their experts: packed ones are read as they are, or dequantised for many rows.

The rows of an expert lie together, and the experts follow one another.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.ops import expert_dots, expert_tiles
from jattn.ops.product import NATIVE_DTYPES, has_native_groups, is_partitioned
from jattn.ops.quantised import QuantisedArray, plain
from pallas_kernels.cpu.native import library, ops
from pallas_kernels.gpu import packed_product_config, packed_product_sm90

GPU_ROWS_OF_EXPERT = 128
"""Mean rows of an expert up to which the GPU kernel is used: each tile of 16 reads the expert's weights once more.

An H200 takes 337 us for 64 rows of each of 32 experts of MXFP4, 524 for 128 and 961 for 256; dequantised 508, 532, 612.
"""

RAGGED_BYTES = 2**30
"""What jax.lax.ragged_dot may copy on a GPU that has no kernel. It is one product, and reads all experts; a loop over
tiles has some launches for each of them."""

Kernel = jax.Array | QuantisedArray


def row_multiple(rows: int, dtype: Any, kernels: Sequence[Kernel], share: float = 1.0) -> int:
    """Products are fast if the rows of each expert are padded to a multiple of this; 1: they need not be.

    rows: of all experts together, without padding; share: of them, that these experts may expect.
    """
    x = jax.ShapeDtypeStruct((rows, kernels[0].shape[1]), dtype)
    if is_partitioned() or all(isinstance(k, QuantisedArray) and _gpu_config(x, k) is not None for k in kernels):
        return 1
    return expert_tiles.row_multiple(rows, jnp.dtype(dtype).name, [kernel.shape for kernel in kernels], share)


def expert_product(x: jax.Array, kernel: Kernel, sizes: jax.Array, multiple: int = 1) -> jax.Array:
    """[N, out]: x [N, in], in the order of its rows' experts, times kernel [experts, in, out]; in the dtype of x.

    sizes i32[experts]: rows of each expert, all of them multiples of `multiple`. Rows beyond their sum are undefined.
    """
    _check_sizes(sizes, kernel)
    if not x.shape[0]:
        return _ragged_dot(x, kernel, sizes)
    if _is_native(x, kernel):
        return _native(x, kernel, sizes)
    if isinstance(kernel, QuantisedArray) and (config := _gpu_config(x, kernel)) is not None:
        return _gpu(x, kernel, sizes, config)
    if device.detect().platform == "cpu":
        return _dots(x, kernel, sizes)
    matrix = plain(kernel, x.dtype)
    if (tiles := expert_tiles.config_of(x, [matrix], multiple)) is not None:
        return _tiled(x, (matrix,), sizes, tiles)
    return _dots(x, matrix, sizes)


def silu_expert_product(x: jax.Array, gate: Kernel, up: Kernel, sizes: jax.Array, multiple: int = 1) -> jax.Array:
    """silu(x gate) * (x up), as by two calls of `expert_product`, which may be rounded first."""
    _check_sizes(sizes, gate)
    if not isinstance(gate, QuantisedArray) and not isinstance(up, QuantisedArray):
        if (tiles := expert_tiles.config_of(x, [gate, up], multiple)) is not None:
            return _tiled(x, (gate, up), sizes, tiles)
    of_gate, of_up = (expert_product(x, kernel, sizes, multiple) for kernel in (gate, up))
    return jax.nn.silu(of_gate) * of_up


def _check_sizes(sizes: jax.Array, kernel: Kernel) -> None:
    if sizes.shape != kernel.shape[:1]:
        raise ValueError(f"{sizes.shape=} must be {kernel.shape[:1]}: the rows of each expert")


def _ragged_dot(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, plain(kernel, x.dtype), sizes)


def _dots(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    return _looped(x, kernel, sizes) if _is_looped(x, kernel) else _ragged_dot(x, kernel, sizes)


def _is_looped(x: jax.Array, kernel: Kernel) -> bool:
    """Are the dots those of tiles? Not where XLA's partitioner divides them: it would gather all matrices."""
    platform, copied = device.detect().platform, x.size * x.dtype.itemsize * kernel.shape[0]  # x for each expert
    return not is_partitioned() and (platform == "cpu" or platform == "gpu" and copied > RAGGED_BYTES)


@jax.custom_jvp
def _looped(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """Only the tiles that there are. A loop has no reverse derivative: `_batched` has."""
    return jax.custom_batching.sequential_vmap(expert_dots.looped)(x, kernel, sizes)


def _batched(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """In float32 at least, in which the derivative of a matrix is summed over its tiles."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return expert_dots.batched(x.astype(wide), plain(kernel, wide).astype(wide), sizes).astype(x.dtype)


def _is_native(x: jax.Array, kernel: Kernel) -> bool:
    """On a CPU the C++ kernel is used for any number of rows: it decodes an expert's tile once for all of its rows."""
    if device.detect().platform != "cpu" or is_partitioned() or x.dtype.name not in NATIVE_DTYPES:
        return False
    is_packed = isinstance(kernel, QuantisedArray)
    is_form = kernel.axis == -2 and has_native_groups(kernel) if is_packed else kernel.dtype == x.dtype
    return is_form and bool(library.status().isas)


def _gpu_config(
    x: jax.Array | jax.ShapeDtypeStruct, kernel: QuantisedArray
) -> packed_product_config.PackedProductConfig | None:
    """The launch on this GPU; None if the kernel does not serve it."""
    processors, (experts, inner, width), rows = device.processors(), kernel.shape, x.shape[0]
    if device.detect().platform != "gpu" or processors is None or is_partitioned() or kernel.axis != -2:
        return None
    if rows > experts * GPU_ROWS_OF_EXPERT:
        return None
    return packed_product_config.choose(
        processors, chip=device.detect().generation, rows=rows, inner=inner, widths=(width,), format=kernel.format,
        group=kernel.group_size, scale_dtype=jnp.dtype(kernel.scales.dtype).name, dtype=x.dtype.name,
        x_dtype=x.dtype.name, has_zeros=kernel.zero_points is not None, experts=experts,
    )  # fmt: skip


@jax.custom_jvp
def _native(x: jax.Array, kernel: Kernel, sizes: jax.Array) -> jax.Array:
    """The C++ kernel. Its derivatives are those of `_batched`. Under vmap it is called once per element."""
    if not isinstance(kernel, QuantisedArray):
        return ops.expert_product(x, kernel, sizes, out_dtype=x.dtype)
    arrays = (kernel.values, kernel.scales, kernel.zero_points)
    return ops.packed_expert_product(x, arrays, sizes, kernel.format, out_dtype=x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _gpu(x: jax.Array, kernel: QuantisedArray, sizes: jax.Array, config: Any) -> jax.Array:
    """The Mosaic kernel, likewise. Under vmap it is called once per element."""

    @jax.custom_batching.sequential_vmap
    def each(x, matrix, tiles):
        return packed_product_sm90.packed_product(x, (matrix,), config, tiles)[0]

    return each(x, (kernel.values, kernel.scales, kernel.zero_points), packed_tiles(sizes, config))


@_looped.defjvp
def _looped_jvp(primals, tangents):
    return _looped(*primals), jax.jvp(_batched, primals, tangents)[1]


@_native.defjvp
def _native_jvp(primals, tangents):
    return _native(*primals), jax.jvp(_batched, primals, tangents)[1]


@_gpu.defjvp
def _gpu_jvp(config: Any, primals, tangents):
    return _gpu(*primals, config), jax.jvp(_dots, primals, tangents)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _tiled(x: jax.Array, matrices: tuple[jax.Array, ...], sizes: jax.Array, config: Any) -> jax.Array:
    """The kernel for matrices of 16 bits, likewise; of two, `silu_expert_product`."""
    return expert_tiles.product(x, matrices, sizes, config)


@_tiled.defjvp
def _tiled_jvp(config: Any, primals, tangents):
    def in_steps(x, matrices, sizes):
        products = [_dots(x, matrix, sizes) for matrix in matrices]
        return jax.nn.silu(products[0]) * products[1] if len(products) == 2 else products[0]

    return _tiled(*primals, config), jax.jvp(in_steps, primals, tangents)[1]


def packed_tiles(sizes: jax.Array, config: packed_product_config.PackedProductConfig) -> jax.Array:
    """i32[config.tiles, 3]: (expert, first row, rows) of each tile, of at most config.tile_rows rows; 0 at the end."""
    return expert_dots.row_tiles(sizes, config.tile_rows, config.tiles)
