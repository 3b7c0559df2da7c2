"""Tensors of a folder of *.safetensors, memory-mapped, one at a time."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.models.files import MOST_LISTED_BYTES, is_there, read_json, regular_file, shown
from jattn.models.names import Source
from jattn.nn.weights import Weight, is_weight

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of weights in the params; packed weights are stored as integers, and a Source unpacks them."""


class Stored(NamedTuple):
    """Where a tensor is stored: the file, its open handle, and the tensor's name in it."""

    path: Path
    handle: Any
    name: str


class Checkpoint:
    """The tensors by name. The files are memory-mapped; a tensor is read when it is asked for.

    Nothing in a folder is executed: a *.safetensors file holds a table and numbers, and pickle files are never opened.
    """

    def __init__(self, directory: Path, stack: contextlib.ExitStack, prefix: str = ""):
        self.directory = directory
        self.where: dict[str, Stored] = {}
        index = read_index(directory)
        for path in files_of(directory, index):
            handle = _opened(path, stack)
            for name in handle.keys():
                if name in self.where:
                    raise ValueError(
                        f"tensor {plain(name)} is in {self.where[name].path} and in {path.name} too: leave only the "
                        "files of one checkpoint in the folder"
                    )
                self.where[name] = Stored(path, handle, name)
        if index is not None:
            _compare(directory / INDEX, index, self.where)
        if prefix and not any(name.startswith(prefix) for name in self.where):
            self.where = {prefix + name: place for name, place in self.where.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, as stored; ValueError if it holds NaN or infinity."""
        path, handle, stored = self.where[name]
        try:
            value = handle.get_tensor(stored)
        except Exception as error:  # SafetensorError, or whatever a dtype unknown to numpy raises
            raise ValueError(f"{path}: tensor {plain(stored)} cannot be read: {error}") from error
        if not is_finite(value):
            raise ValueError(f"{path}: tensor {plain(stored)} holds NaN or infinity: the file is damaged")
        return value


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor -> file name, as the folder's index says; None: it has no index.

    File names must be plain, so an index cannot name files outside the folder. (The file itself may be a link.)
    """
    path = directory / INDEX
    if not is_there(path):
        return None
    table = read_json(path, MOST_LISTED_BYTES).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path} must have a 'weight_map' of tensors' names to files' names, not {shown(table)}")
    for tensor, name in table.items():
        if not (isinstance(name, str) and _is_plain(name)):
            raise ValueError(
                f"{path} says that tensor {plain(tensor)} is in {shown(name)}: that must be the plain name of a "
                "*.safetensors file beside it"
            )
    return table


def _is_plain(name: str) -> bool:
    return Path(name).name == name and "\\" not in name and name.isprintable() and name.endswith(".safetensors")


def files_of(directory: Path, index: dict[str, str] | None) -> list[Path]:
    """The files that the index names, else model.safetensors, else all *.safetensors."""
    if index is not None:
        found = [directory / name for name in sorted(set(index.values()))]
        for path in found:
            if not is_there(path):
                raise FileNotFoundError(f"{path} is named by {INDEX} but missing: the download is not complete")
        return found
    if is_there(directory / SINGLE):
        return [directory / SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(
            f"{directory} holds no *.safetensors; a folder of *.bin or *.pth must be converted first "
            "(transformers: model.save_pretrained(directory))"
        )
    return found


def _opened(path: Path, stack: contextlib.ExitStack) -> Any:
    """The file, memory-mapped; the safetensors library checks its table."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ModuleNotFoundError("reading *.safetensors needs that library: pip install 'jattn[models]'") from None
    try:
        return stack.enter_context(safe_open(regular_file(path), framework="numpy"))
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a whole *.safetensors file ({error}): fetch it again") from error


def _compare(path: Path, index: dict[str, str], where: dict[str, Stored]) -> None:
    """ValueError unless the index and the files agree on every tensor's file."""
    for tensor, name in index.items():
        if tensor not in where or where[tensor].path.name != name:
            there = f"which has it not; {where[tensor].path.name} has" if tensor in where else "and no file has it"
            raise ValueError(f"{path} says that tensor {plain(tensor)} is in {name}, {there}: fetch the folder again")
    for tensor, stored in where.items():
        if tensor not in index:
            raise ValueError(f"{stored.path} has a tensor {plain(tensor)} of which {INDEX} says nothing")


def plain(name: str) -> str:
    """A tensor's name in an error message: quoted and cut only if it is long or not printable."""
    return name if name.isprintable() and len(name) <= 120 else shown(name, 120)


def is_finite(x: np.ndarray) -> bool:
    """True without NaN and infinity: two integer comparisons over the bits, at the speed of memory.

    The bits of floats of one sign, read as integers, are in the floats' order; infinity and NaN come last.
    """
    if not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        return True
    width = x.dtype.itemsize
    if width == 1:
        return bool(np.isfinite(x.astype(np.float32)).all())
    of = lambda infinity: np.array(infinity, x.dtype).view(f"u{width}")
    unsigned, signed = x.view(f"u{width}"), x.view(f"i{width}")
    return bool(unsigned.max() < of(-math.inf) and signed.max() < of(math.inf).view(f"i{width}"))


def read_params(
    checkpoint: Checkpoint,
    table: dict[str, Source],
    wanted: Any,
    *,
    unused: tuple[str, ...] = (),
    dtype: Any = None,
    sharding: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Any:
    """The tree `wanted` (of Weights) as arrays. A weight without a tensor or a tensor without a weight is an error.

    sharding: one for all arrays, or a function (path, Weight) -> sharding or None. unused: endings of the
    names of tensors that a forward pass does not need. progress(done, total, path) is called before each weight.
    """
    if dtype is not None and jnp.dtype(dtype).name not in FLOATS:
        raise ValueError(f"dtype={jnp.dtype(dtype).name} of weights must be None or one of {', '.join(FLOATS)}")
    leaves, structure = jax.tree.flatten_with_path(wanted, is_leaf=is_weight)
    weights = {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): w for path, w in leaves}
    table = {path: source.within(checkpoint.where) for path, source in table.items()}
    _account(checkpoint, table, weights, unused)
    arrays = []
    for done, (path, weight) in enumerate(weights.items()):
        if progress is not None:
            progress(done, len(weights), path)
        value = _made(checkpoint, table[path], path, weight, dtype)
        place = sharding(path, weight) if callable(sharding) else sharding
        arrays.append(jnp.array(value) if place is None else jax.device_put(value, place))
    return jax.tree.unflatten(structure, arrays)


def _made(checkpoint: Checkpoint, source: Source, path: str, weight: Weight, dtype: Any) -> np.ndarray:
    """One weight made of its tensors; ValueError unless its shape is right and its numbers are finite floats."""
    stored = [checkpoint.read(name) for name in source.names]
    file, _, first = checkpoint.where[source.names[0]]
    try:
        value = source.make(*stored)
    except (ValueError, TypeError, IndexError) as error:  # ranks, shapes or dtypes that do not fit
        kinds = ", ".join(sorted({f"{x.dtype}{list(x.shape)}" for x in stored})[:4])
        raise ValueError(f"{file}: tensor {plain(first)} ({kinds}) does not make {path}: {error}") from error
    if value.shape != weight.shape:
        raise ValueError(
            f"{file}: tensor {plain(first)} gives {path} the shape {value.shape} but config.json says {weight.shape}"
        )
    if value.dtype.name not in FLOATS:
        raise ValueError(
            f"{file}: tensor {plain(first)} gives {path} as {value.dtype}; weights must be one of {', '.join(FLOATS)}"
        )
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(value, value.dtype if dtype is None else jnp.dtype(dtype))
    is_new = made.dtype != value.dtype or any(x.dtype.name not in FLOATS for x in stored)
    if is_new and not is_finite(made):
        raise ValueError(f"{file}: tensor {plain(first)} does not fit in {made.dtype}: some numbers are too large")
    return made


def _account(checkpoint: Checkpoint, table: dict[str, Source], weights: dict[str, Weight], unused) -> None:
    """ValueError unless the checkpoint's tensors are exactly those that the model needs (and `unused`)."""
    problems = [f"the model needs {path} and its family's table has no row for it" for path in weights.keys() - table]
    names = {name for path in weights for name in table.get(path, Source((), lambda: None)).names}
    problems += [f"tensor {plain(name)} is missing" for name in sorted(names - checkpoint.where.keys())]
    left = sorted(n for n in checkpoint.where.keys() - names if not n.endswith(tuple(unused)))
    problems += [f"tensor {plain(name)} is there and nobody reads it" for name in left]
    if problems:
        told = "\n  ".join(problems[:12]) + (f"\n  and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ValueError(f"{checkpoint.directory}: the checkpoint does not fit its config.json:\n  {told}")
