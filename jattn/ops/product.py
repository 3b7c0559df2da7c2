"""Rows times weight matrices, by the first implementation of this platform that supports the operands.

A new one is an `Implementation` in IMPLEMENTATIONS. The last one, XLA's dot, supports all: it dequantises quantised
matrices first. Before these, `products` and `gated_product` ask jattn.ops.many_rows for plain matrices on Hopper.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import device
from jattn.ops import many_rows
from jattn.ops.many_rows import GATES
from jattn.ops.partitioner import is_partitioned
from jattn.ops.quantised import FORMATS, QuantisedArray, is_quantised, plain
from pallas_kernels.cpu.native import library, ops
from pallas_kernels.gpu import packed_product_config, packed_product_sm90, packed_wgmma_config, packed_wgmma_sm90

Arrays = tuple[jax.Array, ...]
Kernel = jax.Array | QuantisedArray
Kernels = tuple[Kernel, ...]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute x [T, in] @ kernel for several kernels, summed in float32, rounded once to a dtype."""

    name: str
    supports: Callable[[str, jax.Array, Kernels, Any], bool]  # (platform of a jattn.device.Chip, x, kernels, dtype)
    compute: Callable[[jax.Array, Any, bool, Any], Arrays]  # (x, kernels, transposed, dtype)
    silu: Callable[[jax.Array, Any, Any, Any], jax.Array] | None = None  # gated_product of SiLU, if in one call
    is_partitionable: bool = False  # XLA's partitioner can divide it over the Auto axes of a mesh


def products(x: jax.Array, kernels: Sequence[Kernel], *, transposed: bool = False, dtype: Any = jnp.float32) -> Arrays:
    """x [T, in] @ kernel [in, out] for each kernel, summed in float32: dtype[T, out]. transposed: kernels [out, in].

    With weights that are sharded over several CPU devices, trace under jax.sharding.use_abstract_mesh or in shard_map:
    XLA cannot partition the C++ kernel, and would gather the weights in front of it.
    """
    dtype, axis = jnp.dtype(dtype), -1 if transposed else -2
    usable = lambda kernel: not isinstance(kernel, QuantisedArray) or kernel.axis == axis
    kernels = tuple(kernel if usable(kernel) else plain(kernel, x.dtype) for kernel in kernels)
    kernels = _packed_or_plain(x, kernels, dtype)
    if len({_form(kernel) for kernel in kernels}) > 1:
        return tuple(product(x, kernel, transposed=transposed, dtype=dtype) for kernel in kernels)
    in_one_launch = not transposed and dtype == x.dtype and not is_partitioned()
    if in_one_launch and many_rows.config_of(x, kernels) is not None:
        widths = np.cumsum([kernel.shape[1] for kernel in kernels])[:-1]
        return tuple(jnp.split(many_rows.joined(x, kernels), widths, axis=1))
    return _choose(x, kernels, dtype).compute(x, kernels, transposed, dtype)


def _form(kernel: Kernel) -> tuple:
    """Kernels of one form can be multiplied in one call."""
    return (kernel.axis, *kernel.form.values()) if isinstance(kernel, QuantisedArray) else ()


def _choose(x: jax.Array, kernels: Kernels, dtype: Any) -> Implementation:
    platform, divided = device.detect().platform, is_partitioned()
    able = (way for way in IMPLEMENTATIONS if way.is_partitionable or not divided)
    return next(way for way in able if way.supports(platform, x, kernels, dtype))


def _packed_or_plain(x: jax.Array, kernels: Kernels, dtype: Any) -> Kernels:
    """On a GPU, quantised matrices that no kernel takes packed are dequantised, so that launches for plain ones take
    them."""
    if device.detect().platform != "gpu":
        return kernels
    is_by_dot = lambda kernel: _choose(x, (kernel,), dtype).compute is _dots
    return tuple(plain(kernel, x.dtype) if is_by_dot(kernel) else kernel for kernel in kernels)


def varying_as(y: jax.Array, operands: Any) -> jax.Array:
    """y, which in shard_map varies over the axes of the mesh over which an operand does, as sums of no elements do.

    The results of custom calls, and constants, vary over none. shard_map refuses loops and derivatives of such values.
    """
    return y + sum(array[:0].sum().astype(y.dtype) for array in jax.tree.leaves(operands))


def product(x: jax.Array, kernel: Kernel, *, transposed: bool = False, dtype: Any = jnp.float32) -> jax.Array:
    """`products` with one kernel."""
    return products(x, (kernel,), transposed=transposed, dtype=dtype)[0]


def gated_product(x: jax.Array, gate: Kernel, up: Kernel, activation: str = "silu") -> jax.Array:
    """activation(x @ gate) * (x @ up) in the dtype of x, to which both products may be rounded first.

    activation: one of GATES.
    """
    gate, up = _packed_or_plain(x, (gate, up), x.dtype)
    if not is_partitioned() and many_rows.config_of(x, (gate, up), together=True) is not None:
        return many_rows.gated(x, gate, up, activation)
    compute = _choose(x, (gate, up), x.dtype).silu
    if compute is not None and activation == "silu":
        return compute(x, gate, up, x.dtype)
    of_gate, of_up = products(x, (gate, up), dtype=x.dtype)
    return GATES[activation](of_gate) * of_up


def _dots(x: jax.Array, kernels: Kernels, transposed: bool, dtype: Any) -> Arrays:
    """XLA's dot.

    On XLA:CPU (JAX 0.10), a bf16 product with a float32 result is up to five times faster than one with a bf16 result,
    and one bf16 row takes ten times as long as two. A single row is therefore duplicated.

    Under a mesh the devices' partial sums are rounded to `dtype` before they are added: an all-reduce of bf16 has half
    the bytes of one of float32.
    """
    duplicate = x.shape[0] == 1 and x.dtype == jnp.bfloat16
    rows = jnp.concatenate([x, x]) if duplicate else x
    dot = functools.partial(jnp.dot, preferred_element_type=dtype if is_partitioned() else jnp.float32)
    matrices = [plain(kernel, x.dtype) for kernel in kernels]
    if len(matrices) == 1 and not transposed and (parts := _parts_of_inner(x, matrices[0])) > 1:
        return (_dot_in_parts(x, matrices[0], parts).astype(dtype),)
    sums = (dot(rows, matrix.T if transposed else matrix) for matrix in matrices)
    return tuple((y[:1] if duplicate else y).astype(dtype) for y in sums)


FEW_ROWS = 64  # with more, XLA has work for all processors
FEW_COLUMNS = 8  # fewer, as those of a gate, are left to XLA, which computes them by a reduction
LEAST_DIVIDED, SHORT = 2**18, 1024
"""XLA:GPU does not divide the inner dimension of a product with fewer multiplications than LEAST_DIVIDED. It leaves the
router of Mixtral, 4096 x 8, to one processor: 12.7 us for one row on an H200 (docs/notebook/nvidia_h200.md). Up to
SHORT inputs that is little work."""
SPLITS = ((1024, 32), (2048, 16))
"""(widest matrix, parts) into which XLA:GPU may divide the inner dimension of few rows, so that all processors have
work."""


def _parts_of_inner(x: jax.Array, matrix: jax.Array) -> int:
    """Into how many parts to divide the inner dimension; 1: XLA decides.

    XLA:GPU leaves small products whole. Others it divides by a power of two, and if the parts are no multiples of 8, it
    pads the matrix first, in every step: 28 us for 10944 x 2048 on an H200 (the down of DeepSeek V2 Lite, 2026-11-29),
    as long as the product took. Other numbers of parts need no padding.
    """
    specs = [jax.typeof(array).sharding.spec for array in (x, matrix)]  # of Explicit axes
    is_sharded = any(axis is not None for spec in specs for axis in spec)
    if x.ndim != 2 or is_sharded:
        return 1
    (rows, inner), width = x.shape, matrix.shape[1]
    if device.detect().platform != "gpu" or is_partitioned() or rows > FEW_ROWS or x.dtype.itemsize != 2:
        return 1
    wanted = next((parts for widest, parts in SPLITS if FEW_COLUMNS <= width <= widest), 1)
    is_whole = max(rows, 2) * inner * width < LEAST_DIVIDED and inner > SHORT  # a single row is duplicated
    if wanted == 1 or not rows or (not is_whole and inner % (8 * wanted) == 0):
        return 1
    able = [parts for parts in range(wanted // 2, 2 * wanted + 1) if inner % (16 * parts) == 0]
    return min(able, key=lambda parts: max(parts / wanted, wanted / parts), default=1)


def _dot_in_parts(x: jax.Array, matrix: jax.Array, parts: int) -> jax.Array:
    """f32 x @ matrix. The parts of the inner dimension are a batch, whose sums are added up.

    A single row is duplicated: XLA:GPU multiplies a batch of vectors by a reduction, 26 us for 2880 x 32 on an H200.
    """
    rows = jnp.concatenate([x, x]) if x.shape[0] == 1 else x
    rows, matrix = rows.reshape(rows.shape[0], parts, -1), matrix.reshape(parts, -1, matrix.shape[1])
    y = jnp.einsum("tpi,pio->pto", rows, matrix, preferred_element_type=jnp.float32).sum(axis=0)
    return y[: x.shape[0]]


NATIVE_MAX_ROWS, NATIVE_MAX_ROWS_WITH_AMX = 1024, 32
"""Rows up to which the C++ kernel is used: on Zen 4 it is faster than XLA:CPU's dot up to 192 rows and level up to 1024
(docs/notebook/cpu.md). It does not use AMX tiles, which XLA may use for bfloat16; that was not measured."""
NATIVE_DTYPES = ("float32", "float16", "bfloat16")


def _supports_native(platform: str, x: jax.Array, kernels: Kernels, dtype: Any) -> bool:
    is_alike = all(kernel.ndim == 2 and kernel.dtype == x.dtype and not is_quantised(kernel) for kernel in kernels)
    if platform != "cpu" or x.ndim != 2 or not {x.dtype.name, dtype.name}.issubset(NATIVE_DTYPES) or not is_alike:
        return False
    isas = library.status().isas
    has_tiles = "amx_bf16" in isas and x.dtype == jnp.bfloat16
    return bool(isas) and x.shape[0] <= (NATIVE_MAX_ROWS_WITH_AMX if has_tiles else NATIVE_MAX_ROWS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _native(x: jax.Array, kernels: Arrays, transposed: bool, dtype: Any) -> Arrays:
    """The C++ kernel. Its derivatives are those of the dot. Under vmap it is called once per element."""
    return ops.product(x, kernels, transposed=transposed, out_dtype=dtype)


@_native.defjvp
def _native_jvp(transposed: bool, dtype: Any, primals, tangents):
    (x, kernels), (dx, dkernels) = primals, tangents
    of_rows, of_kernels = (_dots(*operands, transposed, jnp.float32) for operands in ((dx, kernels), (x, dkernels)))
    change = tuple((a + b).astype(dtype) for a, b in zip(of_rows, of_kernels, strict=True))
    return tuple(varying_as(y, primals) for y in _native(x, kernels, transposed, dtype)), change


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _native_silu(x: jax.Array, gate: jax.Array, up: jax.Array, dtype: Any) -> jax.Array:
    """`gated_product` of SiLU in C++."""
    return ops.silu_product(x, gate, up, out_dtype=dtype)


@_native_silu.defjvp
def _native_silu_jvp(dtype: Any, primals, tangents):
    def in_steps(x, gate, up):
        of_gate, of_up = _native(x, (gate, up), False, dtype)
        return jax.nn.silu(of_gate) * of_up

    return jax.jvp(in_steps, primals, tangents)


def _supports_packed(platform: str, x: jax.Array, kernels: Kernels, dtype: Any) -> bool:
    """True for quantised matrices of one form, whose groups the C++ kernel takes.

    With many rows, the time is that of the arithmetic, not of reading the weights; the limit is the same as above.
    """
    if platform != "cpu" or x.ndim != 2 or x.shape[0] > NATIVE_MAX_ROWS:
        return False
    if not {x.dtype.name, dtype.name}.issubset(NATIVE_DTYPES):
        return False
    is_alike = all(isinstance(k, QuantisedArray) and k.ndim == 2 and _form(k) == _form(kernels[0]) for k in kernels)
    return is_alike and has_native_groups(kernels[0]) and bool(library.status().isas)


def has_native_groups(kernel: Any) -> bool:
    """Does the C++ kernel take the groups of a quantised matrix? Leading axes are ignored."""
    inputs, size = kernel.shape[kernel.axis], kernel.group_size
    if kernel.axis == -1:
        return FORMATS[kernel.format].bits == 8 and size == inputs and kernel.zero_points is None
    return size == inputs or ((size < 64 or size % 32 == 0) and (FORMATS[kernel.format].bits == 8 or size % 8 == 0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _packed(x: jax.Array, kernels: tuple[QuantisedArray, ...], transposed: bool, dtype: Any) -> Arrays:
    """The C++ kernel for quantised matrices. Its derivatives are those of the dot of the dequantised ones."""
    matrices = [kernel.arrays for kernel in kernels]
    return ops.packed_product(x, matrices, kernels[0].format, transposed=transposed, out_dtype=dtype)


@_packed.defjvp
def _packed_jvp(transposed: bool, dtype: Any, primals, tangents):
    in_steps = lambda x, kernels: _dots(x, kernels, transposed, dtype)
    result = tuple(varying_as(y, primals) for y in _packed(*primals, transposed, dtype))
    return result, jax.jvp(in_steps, primals, tangents)[1]


GpuConfig = packed_product_config.PackedProductConfig | packed_wgmma_config.PackedWgmmaConfig


def _gpu_config(x: jax.Array, kernels: Kernels, dtype: Any) -> GpuConfig | None:
    """The launch on this GPU for quantised matrices of one form; None if no kernel serves them."""
    first, processors = kernels[0], device.processors()
    if processors is None or not isinstance(first, QuantisedArray) or first.axis != -2:
        return None
    if x.ndim != 2 or x.shape[0] < 1:
        return None
    if not all(kernel.ndim == 2 and _form(kernel) == _form(first) for kernel in kernels):
        return None
    rows, inner = x.shape
    fields: dict[str, Any] = dict(
        chip=device.detect().generation, rows=rows, inner=inner, widths=tuple(kernel.shape[-1] for kernel in kernels),
        dtype=jnp.dtype(dtype).name, x_dtype=x.dtype.name, **first.form,
    )  # fmt: skip
    by_wgmma, by_few_rows = packed_wgmma_config.choose, packed_product_config.choose
    order = (by_wgmma, by_few_rows) if rows >= packed_wgmma_config.FEWEST_ROWS else (by_few_rows, by_wgmma)
    if rows > packed_product_config.MAX_ROWS[packed_product_config.BITS[first.format]]:
        order = (by_wgmma,)
    return next((config for choose in order if (config := choose(processors, **fields)) is not None), None)


def _supports_gpu_packed(platform: str, x: jax.Array, kernels: Kernels, dtype: Any) -> bool:
    return platform == "gpu" and _gpu_config(x, kernels, dtype) is not None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _gpu_packed(x: jax.Array, kernels: tuple[QuantisedArray, ...], transposed: bool, dtype: Any) -> Arrays:
    """The Mosaic kernels for packed matrices. Their derivatives are those of the dot of the dequantised matrices.

    Under vmap they are called once per element.
    """
    config = _gpu_config(x, kernels, dtype)
    assert config is not None and not transposed
    matrices = tuple(kernel.arrays for kernel in kernels)
    is_wgmma = isinstance(config, packed_wgmma_config.PackedWgmmaConfig)
    multiply = packed_wgmma_sm90.packed_product_wgmma if is_wgmma else packed_product_sm90.packed_product
    return jax.custom_batching.sequential_vmap(lambda x, matrices: multiply(x, matrices, config))(x, matrices)


@_gpu_packed.defjvp
def _gpu_packed_jvp(transposed: bool, dtype: Any, primals, tangents):
    in_steps = lambda x, kernels: _dots(x, kernels, transposed, dtype)
    return _gpu_packed(*primals, transposed, dtype), jax.jvp(in_steps, primals, tangents)[1]


IMPLEMENTATIONS = (
    Implementation("cpu_native", _supports_native, _native, _native_silu),
    Implementation("cpu_packed", _supports_packed, _packed),
    Implementation("gpu_packed", _supports_gpu_packed, _gpu_packed),
    Implementation("dot", lambda platform, x, kernels, dtype: True, _dots, is_partitionable=True),
)
"""In order of preference."""
