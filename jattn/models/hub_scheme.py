"""Scheme: how a folder stores each quantised Linear module.

It names the tensors that take the place of a module's `weight`, and decodes them.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.models.checkpoint import largest_magnitude
from jattn.models.placing import placed
from jattn.models.tensor_names import TensorSource, unchanged
from jattn.ops.quantised import FORMATS, PACKED, QuantisedArray, plain

SCALES = ("float16", "bfloat16", "float32")
"""Dtypes of scales that have no factor beside them."""

CACHE_SCALES = (
    ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point",
    ".q_proj.output_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".prob_output_scale", ".k_proj.k_bias",
    ".v_proj.v_bias",
)  # fmt: skip
"""Endings of tensors for queries, keys, values and probabilities in few bits. They are not read."""

WHOLE = -1
"""The group size of a config whose groups are all inputs of an output."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A weight [out, in] as torch orders it: its codes, scales [out, groups], zero points int8 [out, groups] and factor
    float32 [out, 1], which mean what they mean in a QuantisedArray."""

    codes: np.ndarray  # int8; uint8 of fp8; of 4 bits uint32 [out, in / 8], as in QuantisedArray
    scales: np.ndarray
    zero_points: np.ndarray | None = None
    factor: np.ndarray | None = None

    def check(self, group_size: int | None) -> None:
        """ValueError unless the shapes fit one another and the group size, and the scales are floats."""
        codes, scales, zeros = self.codes, self.scales, self.zero_points
        if codes.ndim != 2 or scales.ndim != 2 or len(codes) != len(scales):
            raise ValueError(f"codes {codes.shape} and scales {scales.shape} must have equal numbers of outputs")
        inputs = codes.shape[1] * (PACKED if codes.dtype == np.uint32 else 1)
        check_groups(scales.shape[1], inputs, scales.dtype, group_size, self.factor is not None)
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError(f"zero points {zeros.shape} and scales {scales.shape} must have equal shapes")

    def with_zero_points(self) -> "Decoded":
        """The same numbers with zero points, which are zeros if there are none."""
        zeros = np.zeros(self.scales.shape, np.int8) if self.zero_points is None else self.zero_points
        return dataclasses.replace(self, zero_points=zeros)


def check_groups(groups: int, inputs: int, dtype: np.dtype, size: int | None, has_factor: bool = False) -> None:
    """ValueError unless so many inputs can have so many groups of this size, with scales of this dtype.

    has_factor: scales are e4m3. size: None: unknown. A group of more inputs than there are has all of them; the last of
    several must be whole.
    """
    if groups < 1 or inputs < 1 or inputs % groups:
        raise ValueError(f"the number of its groups does not divide the number of its inputs: {groups}, {inputs}")
    if size is not None and inputs // groups != (inputs if size == WHOLE else min(size, inputs)):
        raise ValueError(f"its {inputs} inputs have {groups} groups, which do not have group_size={size} inputs each")
    if dtype.name not in (wanted := ("float8_e4m3fn",) if has_factor else SCALES):
        raise ValueError(f"scales have dtype {dtype}, which must be one of {', '.join(wanted)}")


class Groups(NamedTuple):
    """The groups of a stored module, without its codes."""

    number: int  # in each output
    dtype: np.dtype  # of the scales
    has_zero_points: bool = False
    has_factor: bool = False


class Zeros(NamedTuple):
    """The stored zero points of a module, which has none in a QuantisedArray if all of them are 0."""

    ending: str  # one of Scheme.needed
    has_others: Callable[[np.ndarray], bool]  # of the stored tensor: is a zero point other than 0?


Names = tuple[tuple[str | None, ...], ...]
"""The names of the tensors of each module; None: absent."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a folder stores each quantised Linear module."""

    format: str  # of QuantisedArray
    needed: tuple[str, ...]  # endings of the tensors of a module
    decode: Callable[..., Decoded]  # of the needed tensors and then the optional ones, None if absent
    groups: Callable[..., Groups]  # of the number of inputs and the same tensors but for the first, the codes
    optional: tuple[str, ...] = ()  # endings of tensors that a module may lack
    ignored_if_zero: tuple[str, ...] = ()  # endings of tensors that may be stored, but only with zeros
    group_size: int | None = None  # inputs of a group, as the config says; None: it does not
    renamed: tuple[tuple[str, str], ...] = ()  # (a needed ending, its name in other folders)
    zeros: Zeros | None = None  # None: all modules have zero points, or none has

    def sources(self, table: dict[str, TensorSource], stored: Container[str], dtype: Any) -> dict[str, TensorSource]:
        """The table, with the sources of weights that the folder has in this form replaced. Equal ones stay equal."""
        made: dict[Any, TensorSource] = {}
        first = lambda path, source: made.setdefault(
            (source, _stays_packed(path)), self._source(path, source, stored, dtype)
        )
        return {path: first(path, source) for path, source in table.items()}

    def form(
        self, path: str, source: TensorSource, shape: tuple[int, ...], stored: Container[str],
        read: Callable[[str], np.ndarray], dtype: Any,
    ) -> "QuantisedArray | jax.ShapeDtypeStruct | None":  # fmt: skip
        """The weight at a path of params as it is loaded, with shapes for arrays; None if the folder has none.

        read: reads a tensor by its name. The codes are not read.
        """
        names = self._names(source, stored)
        if names is None or not _stays_packed(path):
            return None if names is None else jax.ShapeDtypeStruct(shape, dtype)
        axis = _inputs_axis(source.make)
        groups = self.groups(shape[axis], *(read(name) if name in stored else None for name in names[0][1:]))
        has_zeros = groups.has_zero_points
        if self.zeros is not None and not has_zeros:  # their scales are not read: all are a tenth of a folder in 4 bits
            place = self.needed.index(self.zeros.ending)
            has_zeros = any(self.zeros.has_others(read(each[place])) for each in names[1:])
        check_groups(groups.number, shape[axis], groups.dtype, self.group_size, groups.has_factor)

        def array(inputs: int, dtype: Any) -> jax.ShapeDtypeStruct:
            sizes = list(shape)
            sizes[axis] = inputs
            return jax.ShapeDtypeStruct(tuple(sizes), dtype)

        is_packed, codes = FORMATS[self.format].bits == 4, {"int8": np.int8, "fp8": np.uint8}
        values = array(shape[axis] // PACKED, np.uint32) if is_packed else array(shape[axis], codes[self.format])
        zeros = array(groups.number, np.int8) if has_zeros else None
        factor = array(1, np.float32) if groups.has_factor else None
        parts: Any = dict(values=values, scales=array(groups.number, groups.dtype), zero_points=zeros, factor=factor)
        return QuantisedArray(**parts, format=self.format, axis=axis, dtype=jax.dtypes.canonicalize_dtype(dtype))

    def weight_of(self, name: str) -> str | None:
        """The name of the weight that a tensor of this name is a part of; None if it is no part of one."""
        ends = (*self.needed, *self.optional, *(other for _, other in self.renamed))
        end = next((end for end in ends if name.endswith(f".{end}")), None)
        return None if end is None else f"{name.removesuffix(end)}weight"

    def _names(self, source: TensorSource, stored: Container[str]) -> list[list[str]] | None:
        """The names of the tensors of each module of a weight; None if the folder has it in another form."""
        modules = [name.removesuffix(".weight") for name in source.names if name.endswith(".weight")]
        names = [[self._name(module, end, stored) for end in self.needed + self.optional] for module in modules]
        for module, each in zip(modules, names, strict=True):
            missing = [name for name in each[: len(self.needed)] if name not in stored]
            found = next((name for name in each if name in stored and name != f"{module}.weight"), None)
            if missing and found is not None:
                raise ValueError(f"tensor {found} is stored quantised, but {', '.join(missing)} is missing")
        is_stored = [all(name in stored for name in each[: len(self.needed)]) for each in names]
        if any(is_stored) and not all(is_stored):
            one, other = modules[is_stored.index(True)], modules[is_stored.index(False)]
            raise ValueError(
                f"{one} is stored quantised and {other} is not: modules that are one weight here must be alike"
            )
        return names if all(is_stored) and len(modules) == len(source.names) else None

    def _name(self, module: str, end: str, stored: Container[str]) -> str:
        """The name of a module's tensor."""
        others = (f"{module}.{other}" for usual, other in self.renamed if usual == end)
        return next((name for name in (f"{module}.{end}", *others) if name in stored), f"{module}.{end}")

    def _source(self, path: str, source: TensorSource, stored: Container[str], dtype: Any) -> TensorSource:
        names = self._names(source, stored)
        if names is None:
            return source
        present = tuple(tuple(name if name in stored else None for name in each) for each in names)
        found = tuple(name for each in present for name in each if name is not None)
        make = self._weight if _stays_packed(path) else self._plain_weight
        return TensorSource(found, functools.partial(make, source.make, present, dtype))

    def _plain_weight(self, make: Callable, names: Names, dtype: Any, *tensors) -> np.ndarray:
        """What `make` makes of the numbers of the modules' weights."""
        numbers = []
        for each, parts in _by_module(names, tensors):
            weight = self._weight(unchanged, (each,), dtype, *(part for part in parts if part is not None))
            numbers.append(np.asarray(plain(weight)))
        return make(*numbers)

    def _weight(self, make: Callable, names: Names, dtype: Any, *tensors) -> QuantisedArray:
        """What `make` makes of the modules' weights, made of each of their arrays."""
        own = lambda each: each[0] if len(names) > 1 else None
        modules = [self._decoded(own(each), parts, dtype) for each, parts in _by_module(names, tensors)]
        axis = _inputs_axis(make)
        made = lambda name: placed(make(*(getattr(module, name) for module in modules)), None)
        if has_zeros := any(module.zero_points is not None for module in modules):
            modules = [module.with_zero_points() for module in modules]
        codes, zeros = made("codes"), made("zero_points") if has_zeros else None
        factor = None if modules[0].factor is None else made("factor")
        return QuantisedArray(
            values=codes, scales=made("scales"), zero_points=zeros, factor=factor, format=self.format, axis=axis,
            dtype=jax.dtypes.canonicalize_dtype(dtype),
        )  # fmt: skip

    def _decoded(self, name: str | None, tensors: list[np.ndarray | None], dtype: Any) -> Decoded:
        """A module of these tensors, which fit one another. name: of one, for errors; None: they need none."""
        try:
            decoded = self.decode(*tensors)
            decoded.check(self.group_size)
            check_range(decoded, self.format, dtype)
        except ValueError as error:
            if name is None:
                raise
            raise ValueError(f"{name}: {error}") from error
        return decoded


def check_range(weight: Decoded | QuantisedArray, format: str, dtype: Any) -> None:
    """ValueError if the code farthest from 0, with the largest scale and factor, does not fit in the weight's dtype."""
    highest = FORMATS[format].largest
    largest = {"int4": 8, "int8": 128}.get(format, highest)  # the lowest integer is farther from 0 than the highest
    largest += 0 if weight.zero_points is None else highest
    scale, limit = largest_magnitude(np.asarray(weight.scales)), float(jnp.finfo(dtype).max)
    scale *= 1 if weight.factor is None else largest_magnitude(np.asarray(weight.factor))
    if scale * largest > limit:
        raise ValueError(f"a scale of {scale:g} gives weights that do not fit in {np.dtype(dtype).name}")


def _by_module(names: Names, tensors: Iterable[np.ndarray]) -> list[tuple[tuple, list[np.ndarray | None]]]:
    """The names of each module's tensors, and these; None where one is absent."""
    left = iter(tensors)
    return [(each, [None if name is None else next(left) for name in each]) for each in names]


def _stays_packed(path: str) -> bool:
    """Is the weight at this path of params multiplied by, or a table of embeddings? Others, such as tables of positions
    and what heads of latent attention read, are dequantised when they are read."""
    return path.rpartition(".")[2] in ("kernel", "embed")


def _inputs_axis(make: Callable) -> int:
    """The axis of the inputs of a weight; a table of embeddings stays [rows, inputs]."""
    return -1 if make is unchanged else -2
