"""Rules for the arguments of public functions: one rule per argument, with its error messages.

A rule takes an argument's name and value and returns the value as the function uses it (a list becomes an array,
numpy.bool_ a bool), or raises. It checks types, shapes and dtypes; values only if they are on the host, never inside
jit. A call of a rule takes about a microsecond.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
Rule = Callable[[str, Any], Any]

INT32 = 2**31 - 1
_ARRAYS: dict[type, str] = {jax.Array: "jax.Array", np.ndarray: "numpy.ndarray"}
"""Classes -> their public names, which differ from __name__ or do not say whose they are."""
BYTES = bytes, bytearray, memoryview
"""Types of bytes. Iteration gives integers, but they are neither a list of numbers nor text."""

_INTEGERS, _NUMBERS, _BOOLS = "integers", "real numbers", "bools"
_TYPES = {_INTEGERS: "an integer type", _NUMBERS: "a type of real numbers", _BOOLS: "bool"}


def takes(**rules: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: each named argument is replaced by what its rule returns. Rules are not applied to defaults."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = tuple(inspect.signature(function).parameters)
        if unknown := set(rules) - set(names):
            raise TypeError(f"{function.__name__} has no argument {', '.join(sorted(unknown))}")
        by_place = tuple((name, rules.get(name)) for name in names)

        @functools.wraps(function)
        def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
            checked: list[Any] = list(args)
            for i, (value, (name, rule)) in enumerate(zip(args, by_place, strict=False)):
                if rule is not None:
                    checked[i] = rule(name, value)
            named: dict[str, Any] = {
                name: rules[name](name, value) if name in rules else value for name, value in kwargs.items()
            }
            return function(*checked, **named)  # pyright: ignore[reportCallIssue]

        return checked_call

    return decorate


def no_arguments(function: str, unknown: list[str], known: Iterable[str]) -> TypeError:
    """The error of a call with names that the function does not have."""
    known = [*known]
    alike = [name for each in unknown for name in difflib.get_close_matches(each, known, n=1, cutoff=0.7)]
    meant = f"; did you mean {', '.join(alike)}?" if alike else ""
    return TypeError(f"{function} has no argument {', '.join(unknown)}{meant}")


def check_fields(instance: Any, **rules: Rule) -> None:
    """Apply rules to the fields of a frozen dataclass, in its __post_init__."""
    for name, rule in rules.items():
        object.__setattr__(instance, name, rule(name, getattr(instance, name)))


def check_kind(name: str, value: Any, wanted: type[C] | tuple[type, ...], way_out: str = "") -> C:
    """Return the value; TypeError if it is of another class. way_out: advice at the end of the message."""
    if not isinstance(value, wanted):
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        names = " or ".join(_ARRAYS.get(w, w.__name__) for w in kinds)
        hint = f"; {way_out}" if way_out else ""
        raise TypeError(f"{name} must be {names}, got {type(value).__name__}{hint}")
    return value  # pyright: ignore[reportReturnType]


def kind(*wanted: type, way_out: str = "") -> Rule:
    """An object of one of these classes."""
    return lambda name, value: check_kind(name, value, wanted, way_out)


def optional(rule: Rule) -> Rule:
    """None, or a value that the rule accepts."""
    return lambda name, value: None if value is None else rule(name, value)


def sequence_of(rule: Rule) -> Rule:
    """A list, tuple or iterator, as a tuple; strings, mappings, sets and arrays are refused."""

    def check(name: str, value: Any) -> tuple:
        if isinstance(value, (str, *BYTES, dict, set, np.ndarray, jax.Array)) or not hasattr(value, "__iter__"):
            raise TypeError(f"{name} must be a list or tuple, got {type(value).__name__}")
        return tuple(rule(f"{name}[{i}]", member) for i, member in enumerate(value))

    return check


def integer(least: int | None = None, most: int = INT32) -> Rule:
    """An int in this range; numpy integers and 0-d integer arrays are accepted, bools are not."""

    words = "a positive integer" if least == 1 else "an integer" if least is None else f"an integer >= {least}"

    def check(name: str, value: Any) -> int:
        plain = value
        if type(plain) is not int:
            plain = _int_of(name, value, words)
        if least is not None and plain < least:
            raise ValueError(f"{name}={short(value)} must be {words}")
        if plain > most or plain < -most - 1:
            raise ValueError(f"{name}={short(value)} is outside int32, the type of all indices")
        return plain

    return check


def _int_of(name: str, value: Any, words: str) -> int:
    if isinstance(value, Tracer):
        raise ValueError(f"{name} is traced and must be a Python int: it decides a static shape; mark it static")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer, np.ndarray, jax.Array)):
        raise ValueError(f"{name}={short(value)} must be {words}, got {type(value).__name__}")
    if isinstance(value, (np.ndarray, jax.Array)) and (value.ndim or not _is_integer(value.dtype)):
        raise ValueError(f"{name} must be one integer, got {value.dtype}{list(value.shape)}")
    return int(_alive(name, value))


def boolean(name: str, value: Any) -> bool:
    """True or False, Python's or numpy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={short(value)} must be True or False")
    return bool(value)


def number(above: float | None = None, finite: bool = True, least: float | None = None, most: float = math.inf) -> Rule:
    """A real Python or numpy number of this range, as a float."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, Tracer):
            raise ValueError(f"{name} is traced and must be a Python float: it is static")
        if isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0 and _is_number(value.dtype):
            value = np.asarray(_alive(name, value), np.float64).item()
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating)):
            raise ValueError(f"{name}={short(value)} must be a number, got {type(value).__name__}")
        plain = _as_float(name, value)
        if finite and not math.isfinite(plain):
            raise ValueError(f"{name}={short(value)} must be finite")
        if (above is not None and not plain > above) or (least is not None and not plain >= least):
            raise ValueError(
                f"{name}={short(value)} must be {f'> {above:g}' if above is not None else f'>= {least:g}'}"
            )
        if finite and plain > most:
            raise ValueError(f"{name}={short(value)} must be at most {most:g}")
        return plain

    return check


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, ValueError):
        raise ValueError(f"{name}={short(value)} does not fit a float") from None


def choice(*known: str) -> Rule:
    """One of these names."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name}={short(value)} is not known; use one of {', '.join(known)}")
        return value

    return check


def text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={short(value)} must be a non-empty string")
    return value


def dtype_name(name: str, value: Any) -> str:
    """The name of a dtype, given as a name, a dtype or a scalar type."""
    code = isinstance(value, str) and len(value) < 4  # numpy's codes such as 'f8' and 'e' are refused: 'f8' is float64
    if isinstance(value, (str, type, np.dtype)) and not code:
        try:
            return jnp.dtype(value).name
        except (TypeError, ValueError, KeyError):
            pass
    raise ValueError(f"{name}={short(value)} is not a dtype; use a name such as 'bfloat16', or the dtype itself")


def function(name: str, value: Any) -> Callable:
    """Anything that can be called."""
    if not callable(value):
        raise ValueError(f"{name}={short(value)} must be callable")
    return value


def integers(*ndims: int, host: str = "") -> Rule:
    """An integer array of one of these ranks, as int32; lists become arrays.

    host: if given, traced arrays are refused with this hint, because the function reads values.
    """
    return lambda name, value: as_array(name, value, _INTEGERS, ndims, host)


def reals(*ndims: int) -> Rule:
    """An array of real numbers of one of these ranks (none given: any)."""
    return lambda name, value: as_array(name, value, _NUMBERS, ndims)


def booleans(*ndims: int) -> Rule:
    """A bool array of one of these ranks."""
    return lambda name, value: as_array(name, value, _BOOLS, ndims)


def as_array(name: str, value: Any, holds: str = _NUMBERS, ndims: tuple[int, ...] = (), host: str = "") -> Any:
    """An array unchanged, but integers become int32; a number or a list as a numpy array."""
    if isinstance(value, Tracer):
        array = value
    elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = _alive(name, value)
    else:
        array = _from_list(name, value, holds)
    if host and isinstance(array, Tracer):
        raise ValueError(f"{name} is traced, but its values are needed here: {host}")
    holds_it = {_INTEGERS: _is_integer, _NUMBERS: _is_number, _BOOLS: _is_bool}[holds]
    if not holds_it(array.dtype):
        raise ValueError(f"{name}.dtype={array.dtype} must be {_TYPES[holds]}{_shape_words(ndims)}")
    if ndims and array.ndim not in ndims:
        raise ValueError(f"{name}.shape={tuple(array.shape)} must have {_ranks(ndims)} axes of {holds}")
    is_index = holds == _INTEGERS or array.dtype.itemsize == 8  # 8-bit integers may be quantised values
    if is_index and _is_integer(array.dtype) and array.dtype != np.int32:
        array = _bounded(array) if isinstance(array, jax.Array) else _as_int32(name, array)
    return array


def _from_list(name: str, value: Any, holds: str) -> Any:
    if value is None or isinstance(value, (str, bytes, dict, set)):
        raise ValueError(f"{name}={short(value)} must be an array of {holds}, got {type(value).__name__}")
    try:
        array = np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name}={short(value)} is not an array of {holds}: {error}") from None
    if array.size == 0 and array.dtype == np.float64:  # numpy's type of []
        array = array.astype({_INTEGERS: np.int32, _BOOLS: bool}.get(holds, np.float32))
    if array.dtype == object:
        raise ValueError(f"{name}={short(value)} must be an array of {holds}, got {type(value).__name__}")
    return array


def _as_int32(name: str, array: Any) -> Any:
    if array.size and array.dtype.itemsize >= 4 and (array.max() > INT32 or array.min() < -INT32 - 1):
        raise ValueError(f"{name} holds {array.max() if array.max() > INT32 else array.min()}, which is outside int32")
    return array.astype(np.int32)


def _bounded(array: jax.Array) -> jax.Array:
    """int32. What is outside becomes the nearest int32: it must not become the index of something else.

    With jax_enable_x64, JAX's integers have 64 bits.
    """
    least, most = jnp.iinfo(array.dtype).min, jnp.iinfo(array.dtype).max
    return jnp.clip(array, max(least, -INT32 - 1), min(most, INT32)).astype(jnp.int32)


def _alive(name: str, array: Any) -> Any:
    if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
        raise ValueError(f"{name} was donated to an earlier call and is deleted; use the array it returned")
    return array


def is_float(dtype: Any) -> bool:
    """True for floating types, bfloat16 and float8 included."""
    return _kind_of(dtype) == "f" or (_kind_of(dtype) == "V" and jnp.issubdtype(dtype, jnp.floating))


def _is_integer(dtype: Any) -> bool:
    return _kind_of(dtype) in "iu"


def _is_number(dtype: Any) -> bool:
    return _kind_of(dtype) in "iu" or is_float(dtype)


def _is_bool(dtype: Any) -> bool:
    return _kind_of(dtype) == "b"


def _kind_of(dtype: Any) -> str:
    """numpy's letter for the kind; "?" for JAX's own types, such as random keys."""
    return getattr(dtype, "kind", "?")


def _ranks(ndims: tuple[int, ...]) -> str:
    return " or ".join(map(str, ndims))


def _shape_words(ndims: tuple[int, ...]) -> str:
    return f" with {_ranks(ndims)} axes" if ndims else ""


def short(value: Any, most: int = 60) -> str:
    """A value in an error message: an array as its dtype and shape, else its repr cut to `most` characters."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return f"{value.dtype}{list(value.shape)}"
    try:
        words = repr(value)
    except ValueError:  # an int of thousands of digits
        return type(value).__name__
    return words if len(words) <= most else f"{words[: most - 3]}..."


def asked(spec: Any) -> str:
    """A dataclass in an error message: the fields that differ from their defaults."""
    values = ((field, getattr(spec, field.name)) for field in dataclasses.fields(spec))
    words = (f"{field.name}={short(value)}" for field, value in values if value != field.default)
    return f"{type(spec).__name__}({', '.join(words)})"
