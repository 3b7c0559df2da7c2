"""QuantisedArray: a weight matrix kept in 4 or 8 bits with scales, the numbers it stands for, and how it is made.

A group is some consecutive inputs of one output:

    number = (number of the code - zero point of the group) * its scale * the factor of the output
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import device
from jattn.ops.partitioner import is_partitioned
from jattn.types import pytree, static


@dataclasses.dataclass(frozen=True)
class Format:
    """How one number is stored: its bits, and the numbers of the sixteen codes of 4 bits."""

    bits: int
    largest: float  # the largest number of a code
    numbers: tuple[float, ...] = ()


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = {
    "int8": Format(8, 127.0),
    "fp8": Format(8, 448.0),  # float8_e4m3fn, stored as its bits: XLA:CPU would convert the whole array to float32
    "int4": Format(4, 7.0, tuple(range(-8, 8))),
    "fp4": Format(4, 6.0, (*FP4, *(-x for x in FP4))),  # float4_e2m1fn
}
PACKED = 8
"""Codes of 4 bits in a word. They are consecutive inputs of one output, and the word is where those would be."""
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of these codes, from the lowest four bits. The halves of a word hold even and odd inputs."""
PARTS = 4
"""Arrays of a concatenation of which XLA:GPU computes an element each in one thread: four at most."""


@pytree
class QuantisedArray:
    """A weight [..., in, out], or [..., out, in] with axis -1, in the dtype that it stands for.

    A kernel reads `values` as they are; `dequantise` is the reference.
    """

    values: jax.Array  # int8 or, for fp8, uint8 [..., in, out]; of 4 bits uint32 [..., in / 8, out]
    scales: jax.Array  # float, or float8_e4m3fn, [..., groups, out]
    zero_points: jax.Array | None = None  # int8 [..., groups, out]
    factor: jax.Array | None = None  # float32 [..., 1, out], for scales with few bits; None: 1
    format: str = static()
    axis: int = static(default=-2)  # of the inputs, from the end
    dtype: Any = static()  # np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        shape = list(self.values.shape)
        shape[self.axis] *= PACKED if FORMATS[self.format].bits == 4 else 1
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Its number of axes, which all its arrays have."""
        return self.values.ndim

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """The arrays of the matrix, as kernels take them."""
        return self.values, self.scales, self.zero_points, self.factor

    @property
    def form(self) -> dict[str, Any]:
        """How it is stored: the fields of pallas_kernels/gpu/packed_product_config.py's PackedConfig that say so."""
        return dict(
            format=self.format, group=self.group_size, scale_dtype=jnp.dtype(self.scales.dtype).name,
            has_zeros=self.zero_points is not None, has_factor=self.factor is not None,
        )  # fmt: skip

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.shape[self.axis] // self.scales.shape[self.axis]

    def dequantise(self, dtype: Any = None) -> jax.Array:
        """The numbers, computed in float32 and rounded to a dtype; None: that of the weight."""
        axis = self.ndim + self.axis
        numbers = _numbers(self.values, self.format, axis)
        groups = (*numbers.shape[:axis], self.scales.shape[axis], -1, *numbers.shape[axis + 1 :])
        numbers = self._scaled(numbers.reshape(groups), axis + 1)
        return numbers.reshape(self.shape).astype(self.dtype if dtype is None else dtype)

    def dequantise_in_parts(self, dtype: Any = None) -> jax.Array:
        """The same bits for XLA:GPU. axis is -2, and PACKED divides the group size.

        XLA:GPU computes element i of up to four concatenated arrays in one thread, and four elements of each if four
        divides their width. Here each has a quarter of the rows of a word or of a group: a thread has 16 numbers
        instead of 4, and reads a scale once for four rows and a word of codes twice instead of eight times.
        """
        *lead, groups, out = self.scales.shape
        axis = self.ndim - 1
        if FORMATS[self.format].bits == 4:
            words = self.values.reshape(*lead, groups, -1, 1, out)
            is_even = np.array([True, False]).reshape(*[1] * self.ndim, 2, 1)  # row of a part: input 2i, or 2i + 1
            shifts = np.uint32(4) * np.array(PLACES, np.uint32).reshape(PARTS, 2)
            codes = [jnp.where(is_even, words >> even, words >> odd) & 15 for even, odd in shifts]
            parts = [self._scaled(_of_codes(x, self.format), axis, axis + 1) for x in codes]
        else:
            quarters = jnp.split(self.values.reshape(-1, self.group_size * out), PARTS, axis=1)
            numbers = [_numbers(x.reshape(*lead, groups, -1, out), self.format, axis) for x in quarters]
            parts = [self._scaled(x, axis) for x in numbers]
        dtype = self.dtype if dtype is None else dtype
        columns = [x.astype(dtype).reshape(-1, x.shape[-2] * out) for x in parts]
        return jnp.concatenate(columns, axis=1).reshape(self.shape)

    def _scaled(self, numbers: jax.Array, *new: int) -> jax.Array:
        """Numbers of codes minus the zero point, times scale and factor. new: their axes that scales lack."""
        of_group = lambda x: jnp.expand_dims(x.astype(jnp.float32), new)
        if self.zero_points is not None:
            numbers = numbers - of_group(self.zero_points)
        numbers = numbers * of_group(self.scales)
        return numbers if self.factor is None else numbers * of_group(self.factor)

    def with_groups_of(self, size: int) -> "QuantisedArray":
        """The same numbers in smaller groups. size divides the group size."""
        times = self.group_size // size
        repeated = lambda x: x if x is None or times == 1 else jnp.repeat(x, times, axis=self.axis)
        return dataclasses.replace(self, scales=repeated(self.scales), zero_points=repeated(self.zero_points))


def is_quantised(x: Any) -> bool:
    """The `is_leaf` of tree.map over params whose quantised weights count as one leaf."""
    return isinstance(x, QuantisedArray)


def plain(weight: "jax.Array | QuantisedArray", dtype: Any = None) -> jax.Array:
    """The weight as an array; a quantised one dequantised to a dtype."""
    if not isinstance(weight, QuantisedArray):
        return weight
    is_divisible = weight.axis == -2 and weight.group_size % PACKED == 0
    if is_divisible and device.detect().platform == "gpu" and not is_partitioned():
        return weight.dequantise_in_parts(dtype)
    return weight.dequantise(dtype)


def table_rows(table: jax.Array | QuantisedArray, ids: jax.Array) -> jax.Array:
    """table[ids], with ids clipped: a negative one is 0. Of a quantised table, whose axis is -1, only the rows are
    dequantised.

    The barrier keeps a conversion out of the loop over steps: XLA:CPU (JAX 0.10) would convert the whole bfloat16 table
    to float32 before each loop.
    """
    table, ids = jax.lax.optimization_barrier((table, ids))
    rows = lambda array: array.at[ids].get(mode="clip", wrap_negative_indices=False)
    return plain(jax.tree.map(rows, table))


def _numbers(values: jax.Array, format: str, axis: int) -> jax.Array:
    """The number of each code, float32."""
    if format == "int8":
        return values.astype(jnp.float32)
    if format == "fp8":
        return jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
    return _of_codes(unpacked(values, axis), format)


def _of_codes(codes: jax.Array, format: str) -> jax.Array:
    """The numbers of codes of 4 bits uint32, float32. Without a table, from which XLA would load each by itself.

    int4: the code as the last bits of 2**23. fp4: exponent and fraction as those of a float16, which has subnormal
    numbers on every chip, and whose bias differs by 14.
    """
    if format == "int4":
        return jax.lax.bitcast_convert_type(codes | 0x4B000000, jnp.float32) - (2.0**23 + 8)
    halves = ((codes & 7) << 9 | (codes & 8) << 12).astype(jnp.uint16)
    return (jax.lax.bitcast_convert_type(halves, jnp.float16) * np.float16(2**14)).astype(jnp.float32)


def unpacked(words: jax.Array, axis: int) -> jax.Array:
    """uint32 words -> the codes of 4 bits, eight times as many along the axis."""
    shape = [1] * (words.ndim + 1)
    shape[axis + 1] = PACKED
    shifts = 4 * np.reshape(np.array(PLACES, np.uint32), shape)
    codes = (jnp.expand_dims(words, axis + 1) >> shifts) & 15
    return codes.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])


def packed(codes: jax.Array, axis: int) -> jax.Array:
    """Codes 0 to 15 -> uint32 words, an eighth as many along the axis, which must be a multiple of 8 long."""
    axis %= codes.ndim
    parts = codes.astype(jnp.uint32).reshape(*codes.shape[:axis], -1, PACKED, *codes.shape[axis + 1 :])
    part = functools.partial(jax.lax.index_in_dim, parts, axis=axis + 1, keepdims=False)
    return functools.reduce(jnp.bitwise_or, (part(i) << np.uint32(4 * place) for i, place in enumerate(PLACES)))


def in_places(words: np.ndarray) -> np.ndarray:
    """uint32 words of eight codes from the lowest bits on -> the same with each code in its place."""
    found = np.zeros_like(words)
    for i, place in enumerate(PLACES):
        found |= (words >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * place)
    return found


@functools.partial(jax.jit, static_argnames=("format", "group_size", "axis"))
def quantise(x: jax.Array, format: str, group_size: int, axis: int = -2) -> QuantisedArray:
    """The nearest codes. group_size divides the inputs.

    int8, fp8: the largest magnitude of a group becomes the largest code; scales are float32. int4: it becomes -8, so
    that all sixteen codes are used (a scale may be negative); scales are bfloat16, a quarter bit for groups of 64.
    """
    if format not in ("int8", "fp8", "int4"):
        raise ValueError(f"{format=} must be int8, fp8 or int4: weights are not converted to other formats")
    at = x.ndim + axis
    groups = x.astype(jnp.float32).reshape(*x.shape[:at], -1, group_size, *x.shape[at + 1 :])
    low, high = groups.min(axis=at + 1, keepdims=True), groups.max(axis=at + 1, keepdims=True)
    if format == "int4":
        scales = (jnp.where(high > -low, high, low) / -8).astype(jnp.bfloat16)
    else:
        scales = jnp.maximum(high, -low) / FORMATS[format].largest
    wide = scales.astype(jnp.float32)
    numbers = jnp.where(wide == 0, 0, groups / jnp.where(wide == 0, 1, wide)).reshape(x.shape)
    if format == "fp8":
        values = jax.lax.bitcast_convert_type(jnp.clip(numbers, -448, 448).astype(jnp.float8_e4m3fn), jnp.uint8)
    elif format == "int8":
        values = jnp.clip(jnp.round(numbers), -127, 127).astype(jnp.int8)
    else:
        values = packed(jnp.clip(jnp.round(numbers), -8, 7) + 8, at)
    return QuantisedArray(values=values, scales=scales.squeeze(at + 1), format=format, axis=axis, dtype=x.dtype)
