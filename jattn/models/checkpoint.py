"""Checkpoint: the tensors of a folder of *.safetensors by name, memory-mapped and read one at a time."""

import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jattn import strict_json
from jattn.errors.arguments import short
from jattn.models.files import MAX_DEPTH, MAX_LISTED_BYTES, is_there, read_json, regular_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Parts of a file that a fingerprint reads, and the bytes of each."""

OLD_ENDINGS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Endings of names in checkpoints that were converted from TensorFlow, as the first BERTs -> the usual ones."""

DTYPES = dict(
    F64=np.float64, F32=np.float32, F16=np.float16, BF16=ml_dtypes.bfloat16, F8_E4M3=ml_dtypes.float8_e4m3fn,
    I64=np.int64, I32=np.int32, I16=np.int16, I8=np.int8, U64=np.uint64, U32=np.uint32, U16=np.uint16, U8=np.uint8,
    BOOL=np.bool_, C64=np.complex64,
)  # fmt: skip
"""The dtypes of tensors, by their names in the files."""


class TensorLocation(NamedTuple):
    """Where a tensor is stored: the file, the tensor's name in the file, its bytes, and what they are."""

    path: Path
    name: str
    data: np.ndarray  # uint8, memory-mapped
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder by name. The files are memory-mapped, and the tensors are views of them.

    Nothing in the folder is executed: *.safetensors files have a header and numbers; pickle files are never opened.

    prefix: put in front of all names if the checkpoint lacks it (one saved from the decoder without its head).
    renames: (old, new) beginnings of names; the first that fits is replaced.
    """

    def __init__(
        self,
        directory: Path,
        prefix: str = "",
        renames: tuple[tuple[str, str], ...] = (),
    ):
        self.directory = directory
        self.locations: dict[str, TensorLocation] = {}
        index = read_index(directory)
        for path in files_of(directory, index):
            for location in _tensors(path):
                if (name := location.name) in self.locations:
                    raise ValueError(
                        f"tensor {tensor_text(name)} is in {self.locations[name].path} and in {path.name} too: keep "
                        "only the files of one checkpoint in the folder"
                    )
                self.locations[name] = location
        if index is not None:
            _check_index(directory / INDEX, index, self.locations)
        self.locations = _renamed(self.locations, renames)
        if prefix and not any(name.startswith(prefix) for name in self.locations):
            self.locations = {prefix + name: location for name, location in self.locations.items()}

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor; ValueError if there is no such tensor, or its dtype is not supported."""
        if name not in self.locations:
            raise ValueError(f"{self.directory}: tensor {tensor_text(name)} is missing")
        path, stored, _, dtype, _ = self.locations[name]
        if dtype not in DTYPES:
            raise ValueError(f"{path}: tensor {tensor_text(stored)} cannot be read: {dtype=} is not supported")
        return np.dtype(DTYPES[dtype])

    def read(self, name: str) -> np.ndarray:
        """One tensor as stored, a view of the file that cannot be written to; ValueError if it has NaN or infinity."""
        dtype, (path, stored, data, _, shape) = self.dtype_of(name), self.locations[name]
        value = data.view(dtype).reshape(shape)
        if not is_finite(value):
            raise ValueError(f"{path}: tensor {tensor_text(stored)} has NaN or infinity: the file is damaged")
        return value


def _renamed(locations: dict[str, TensorLocation], renames: tuple[tuple[str, str], ...]) -> dict[str, TensorLocation]:
    """The locations under new names; ValueError if two tensors get the same."""
    found: dict[str, TensorLocation] = {}
    for name, location in locations.items():
        old, new = next(((old, new) for old, new in renames if name.startswith(old)), ("", ""))
        renamed = new + name.removeprefix(old)
        old = next((old for old in OLD_ENDINGS if name.endswith(old)), "")
        renamed = renamed.removesuffix(old) + OLD_ENDINGS.get(old, "")
        if renamed in found:
            other = found[renamed].name
            raise ValueError(f"{location.path}: tensor {tensor_text(name)} is there twice, as {other}, too")
        found[renamed] = location
    return found


def fingerprint(directory: str | Path) -> int:
    """A checksum of a folder's weights: of each file's name, size and header, and of SAMPLES parts of its data.

    Two folders with different weights have different checksums, unless only few numbers differ.
    """
    checksum, folder = 0, Path(directory)
    for path in sorted(files_of(folder, read_index(folder))):
        data = np.memmap(regular_file(path), np.uint8, "r")
        header = min(8 + int.from_bytes(data[:8].tobytes(), "little"), len(data))  # a damaged file may tell any length
        begins = np.linspace(header, max(len(data) - SAMPLE_BYTES, header), SAMPLES).astype(np.int64)
        parts = [data[:header], *(data[begin : begin + SAMPLE_BYTES] for begin in begins)]
        checksum = zlib.crc32(f"{path.name} {len(data)}".encode(), checksum)
        for part in parts:
            checksum = zlib.crc32(part.tobytes(), checksum)
    return checksum


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


def _tensors(path: Path) -> list[TensorLocation]:
    """The tensors of a file, which is memory-mapped. The safetensors library checks its header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading *.safetensors needs the safetensors package: pip install 'jattn[models]'"
        ) from None
    try:
        with safe_open(regular_file(path), framework="numpy") as file:
            names = file.keys()
        data = np.asarray(np.memmap(path, np.uint8, "r"))
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a complete *.safetensors file ({error}): download it again") from error
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    table, data = _table(path, data[8:begin].tobytes()), data[begin:]

    def location(name: str) -> TensorLocation:
        row = table[name]
        return TensorLocation(path, name, data[slice(*row["data_offsets"])], row["dtype"], tuple(row["shape"]))

    return [location(name) for name in names]


def _table(path: Path, header: bytes) -> dict[str, Any]:
    """The header of a file; the library has checked it, but takes the last of two tensors of one name."""
    try:
        return strict_json.parse(header.decode(), MAX_DEPTH)
    except ValueError as error:
        raise ValueError(f"{path}: its table of tensors cannot be read: {error}") from None


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
    bits = lambda value: np.array(value, x.dtype).view(f"u{width}")
    unsigned, signed = x.view(f"u{width}"), x.view(f"i{width}")
    return bool(unsigned.max() < bits(-math.inf) and signed.max() < bits(math.inf).view(f"i{width}"))


def as_floats(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x in this dtype, or the one that JAX has for it; infinite where it does not fit. A transposed view stays one."""
    with np.errstate(over="ignore"):
        return x.astype(jax.dtypes.canonicalize_dtype(dtype), order="K", copy=False)


def largest_magnitude(x: np.ndarray) -> float:
    """The largest absolute value of finite floats; 0 if there are none. Over the bits, as `is_finite`."""
    width = x.dtype.itemsize
    bits = x.view(f"u{width}") & np.array(2 ** (8 * width - 1) - 1, f"u{width}")  # without the signs
    return float(bits.max(initial=0, keepdims=True).view(x.dtype).item())
