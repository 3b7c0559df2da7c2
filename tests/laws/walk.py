"""Gives each argument of a public function, one after another, each value that must be refused.

The law: a call returns, or raises ValueError, TypeError or UnsupportedError from a line of this library, with a
message that names the argument. It must not raise another error from inside: AttributeError, KeyError, an assertion,
or an error of numpy or JAX.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn

HOME = str(Path(jattn.__file__).parent)
ALLOWED = (ValueError, TypeError, jattn.UnsupportedError)


class Thing:
    """An object that no function accepts."""


def deleted() -> jax.Array:
    array = jnp.arange(3) + 0
    array.delete()
    return array


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "text": lambda: "nonsense",
    "empty text": lambda: "",
    "bytes": lambda: b"\xff",
    "float": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "zero": lambda: 0,
    "negative": lambda: -1,
    "seven": lambda: 7,
    "past int32": lambda: 2**31,
    "huge": lambda: 10**400,
    "digits": lambda: 10**5000,
    "complex": lambda: 1j,
    "object": Thing,
    "class": lambda: int,
    "function": lambda: lambda: None,
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "[]": list,
    "[[]]": lambda: [[]],
    "floats": lambda: [1.5, 2.0],
    "strings": lambda: ["a", "b"],
    "bools": lambda: [True, False],
    "Nones": lambda: [None, None],
    "negatives": lambda: [-1, -2],
    "huge list": lambda: [2**40, 10**30],
    "nested": lambda: [[1, 2], [3, 4]],
    "ragged": lambda: [[1], [2, 3]],
    "five": lambda: (1, 2, 3, 4, 5),
    "np int": lambda: np.int64(2),
    "np nan": lambda: np.float32("nan"),
    "np huge": lambda: np.array([2**40]),
    "np 0-d": lambda: np.array(1),
    "np empty": lambda: np.zeros((0,)),
    "np text": lambda: np.array(["a"]),
    "np object": lambda: np.array([Thing()]),
    "np complex": lambda: np.zeros(3, np.complex64),
    "np bools": lambda: np.zeros(3, bool),
    "np date": lambda: np.datetime64("2026-01-01"),
    "np 5-d": lambda: np.zeros((2, 2, 2, 2, 2), np.float32),
    "jax int": lambda: jnp.int32(1),
    "jax floats": lambda: jnp.zeros(3),
    "jax complex": lambda: jnp.zeros(3, jnp.complex64),
    "jax 5-d ints": lambda: jnp.zeros((1, 1, 1, 1, 1), jnp.int32),
    "random key": lambda: jax.random.key(0),
    "deleted": deleted,
    "traced number": lambda: jax.ShapeDtypeStruct((), jnp.int32),
    "traced ints": lambda: jax.ShapeDtypeStruct((3,), jnp.int32),
    "traced floats": lambda: jax.ShapeDtypeStruct((2, 2), jnp.float32),
}


@dataclasses.dataclass(frozen=True)
class Door:
    """A public function, good arguments, and which of them get bad values (None: all)."""

    call: Callable
    good: Mapping[str, Any]
    walked: tuple[str, ...] | None = None
    also: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # other names of an argument
    staged: bool = True  # traced instead of run: nothing is compiled


def run(door: Door, **changes) -> None:
    """The call, traced only if an argument is a ShapeDtypeStruct or the function is staged."""
    traced = {name: x for name, x in changes.items() if isinstance(x, jax.ShapeDtypeStruct)}

    def body(traced):
        door.call(**{**door.good, **changes, **traced})
        return 0

    if traced or door.staged:
        jax.eval_shape(body, traced)
    else:
        body({})


def complaint(door: Door, argument: str, value: Any) -> str | None:
    """The fault in how this value is refused; None if there is none."""
    try:
        run(door, **{argument: value})
    except ALLOWED as error:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        where = frame.tb_frame.f_code.co_filename
        names = (argument, *door.also.get(argument, ()))
        if not where.startswith(HOME):
            return f"raw {type(error).__name__} from {where}:{frame.tb_lineno}: {str(error)[:100]}"
        if not any(name in str(error) for name in names):
            return f"{type(error).__name__} does not name {argument}: {str(error)[:140]}"
    except Exception as error:
        return f"raw {type(error).__name__}: {str(error)[:100]}"
    return None


def walk(door: Door) -> list[str]:
    """All faults of one public function. Its good arguments must be accepted."""
    run(door)
    found = []
    for argument in door.walked or tuple(door.good):
        for name, make in VALUES.items():
            if wrong := complaint(door, argument, make()):
                found.append(f"{argument}={name}: {wrong}")
    return found
