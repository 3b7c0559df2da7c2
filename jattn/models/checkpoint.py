"""Checkpoint: the tensors of a folder of *.safetensors by name, memory-mapped and read one at a time."""

import contextlib
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import short
from jattn.models.files import MAX_LISTED_BYTES, is_there, read_json, regular_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class TensorLocation(NamedTuple):
    """Where a tensor is stored: the file, its open handle, and the tensor's name in the file."""

    path: Path
    handle: Any
    name: str


class Checkpoint:
    """The tensors of a folder by name, each read from a memory-mapped file when it is asked for.

    Nothing in the folder is executed: *.safetensors files have a header and numbers; pickle files are never opened.

    prefix: put in front of all names if the checkpoint lacks it (one saved from the decoder without its head).
    renames: (old, new) beginnings of names; the first that fits is replaced.
    """

    def __init__(
        self,
        directory: Path,
        stack: contextlib.ExitStack,
        prefix: str = "",
        renames: tuple[tuple[str, str], ...] = (),
    ):
        self.directory = directory
        self.locations: dict[str, TensorLocation] = {}
        index = read_index(directory)
        for path in files_of(directory, index):
            handle = _opened(path, stack)
            for name in handle.keys():
                if name in self.locations:
                    raise ValueError(
                        f"tensor {tensor_text(name)} is in {self.locations[name].path} and in {path.name} too: keep "
                        "only the files of one checkpoint in the folder"
                    )
                self.locations[name] = TensorLocation(path, handle, name)
        if index is not None:
            _check_index(directory / INDEX, index, self.locations)
        self.locations = _renamed(self.locations, renames)
        if prefix and not any(name.startswith(prefix) for name in self.locations):
            self.locations = {prefix + name: location for name, location in self.locations.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as stored; ValueError if it has NaN or infinity."""
        path, handle, stored = self.locations[name]
        try:
            value = _float8(path, stored) if _is_float8(handle, stored) else handle.get_tensor(stored)
        except Exception as error:  # SafetensorError, or any error for a dtype that numpy lacks
            raise ValueError(f"{path}: tensor {tensor_text(stored)} cannot be read: {error}") from error
        if not is_finite(value):
            raise ValueError(f"{path}: tensor {tensor_text(stored)} has NaN or infinity: the file is damaged")
        return value


def _renamed(locations: dict[str, TensorLocation], renames: tuple[tuple[str, str], ...]) -> dict[str, TensorLocation]:
    """The locations under new names; ValueError if two tensors get the same."""
    found: dict[str, TensorLocation] = {}
    for name, location in locations.items():
        old, new = next(((old, new) for old, new in renames if name.startswith(old)), ("", ""))
        known = new + name.removeprefix(old)
        if known in found:
            raise ValueError(f"{location.path}: tensor {tensor_text(name)} is there twice, as {found[known].name}, too")
        found[known] = location
    return found


def _is_float8(handle: Any, name: str) -> bool:
    return handle.get_slice(name).get_dtype() == "F8_E4M3"


def _float8(path: Path, name: str) -> np.ndarray:
    """A tensor of float8_e4m3fn. The safetensors library (0.8) checked the header, but cannot read it into numpy."""
    header, begin = _header(path, path.stat().st_mtime_ns)
    found = header[name]
    offset = begin + found["data_offsets"][0]
    return np.memmap(path, jnp.float8_e4m3fn, "r", offset, tuple(found["shape"]))


@functools.lru_cache(maxsize=1)
def _header(path: Path, modified: int) -> tuple[dict[str, Any], int]:
    """The table of a file's tensors, and where their data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name, from the folder's index; None if it has no index.

    File names must have no path, so an index cannot name files outside the folder. (The file itself may be a link.)
    """
    path = directory / INDEX
    if not is_there(path):
        return None
    table = read_json(path, MAX_LISTED_BYTES).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path} must have a 'weight_map' from tensor names to file names, not {short(table)}")
    for tensor, name in table.items():
        if not (isinstance(name, str) and _is_file_name(name)):
            raise ValueError(
                f"{path} says that tensor {tensor_text(tensor)} is in {short(name)}: that must be the name of a "
                "*.safetensors file in the same folder, without a path"
            )
    return table


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and "\\" not in name and name.isprintable() and name.endswith(".safetensors")


def files_of(directory: Path, index: dict[str, str] | None) -> list[Path]:
    """The files that the index names; without an index model.safetensors; without that all *.safetensors."""
    if index is not None:
        found = [directory / name for name in sorted(set(index.values()))]
        for path in found:
            if not is_there(path):
                raise FileNotFoundError(f"{path} is listed in {INDEX} but missing: the download is not complete")
        return found
    if is_there(directory / SINGLE):
        return [directory / SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(
            f"{directory} has no *.safetensors; convert *.bin or *.pth files first "
            "(transformers: model.save_pretrained(directory))"
        )
    return found


def _opened(path: Path, stack: contextlib.ExitStack) -> Any:
    """The file, memory-mapped. The safetensors library checks its header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading *.safetensors needs the safetensors package: pip install 'jattn[models]'"
        ) from None
    try:
        return stack.enter_context(safe_open(regular_file(path), framework="numpy"))
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a complete *.safetensors file ({error}): download it again") from error


def _check_index(path: Path, index: dict[str, str], locations: dict[str, TensorLocation]) -> None:
    """ValueError unless the index and the files agree on the file of every tensor."""
    for tensor, name in index.items():
        if tensor not in locations or locations[tensor].path.name != name:
            found = f"but {locations[tensor].path.name} has it" if tensor in locations else "but no file has it"
            raise ValueError(
                f"{path} says that tensor {tensor_text(tensor)} is in {name}, {found}: download the folder again"
            )
    for tensor, stored in locations.items():
        if tensor not in index:
            raise ValueError(f"{stored.path} has a tensor {tensor_text(tensor)} that {INDEX} does not list")


def tensor_text(name: str) -> str:
    """A tensor's name in an error message; published names have up to about 100 characters."""
    return short(name, 120)


def is_finite(x: np.ndarray) -> bool:
    """True if x has no NaN and no infinity. Two integer comparisons over the bits: limited by memory bandwidth.

    Read as integers, floats of one sign keep their order, and infinity and NaN come last.
    """
    if not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        return True
    width = x.dtype.itemsize
    if width == 1:
        return bool(np.isfinite(x.astype(np.float32)).all())
    bits = lambda value: np.array(value, x.dtype).view(f"u{width}")
    unsigned, signed = x.view(f"u{width}"), x.view(f"i{width}")
    return bool(unsigned.max() < bits(-math.inf) and signed.max() < bits(math.inf).view(f"i{width}"))
