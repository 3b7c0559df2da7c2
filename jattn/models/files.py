"""Reading the files of an untrusted model folder, with limits on size and nesting. Errors name the file."""

import os
import stat
from pathlib import Path
from typing import Any

from jattn import strict_json

MAX_BYTES = 1 << 24
"""Largest settings file (16 MiB). Published ones have kilobytes, or a few megabytes if they list tokens."""
MAX_LISTED_BYTES = 1 << 28
"""Largest file that lists every tensor or token (256 MiB). The largest published one has about 35 MB."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects."""
LFS = b"version https://git-lfs"


def regular_file(path: Path) -> Path:
    """The path itself if it is a readable, non-empty regular file and not a Git LFS pointer; else raises.

    Symbolic links are followed, because download caches fill a folder with links.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is {_kind(found.st_mode)}; a model folder must hold regular files")
        if found.st_size == 0:
            raise ValueError(f"{path} is empty: the download is not complete; download it again")
        with path.open("rb") as file:
            start = file.read(len(LFS))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if start == LFS:
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")
    return path


def is_there(path: Path) -> bool:
    """True if the folder has an entry of this name. A broken link counts: reading it raises FileNotFoundError."""
    return os.path.lexists(path)


def read_text(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    if (size := regular_file(path).stat().st_size) > most_bytes:
        raise ValueError(f"{path} has {size} bytes, more than the limit of {most_bytes} for such a file")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it in UTF-8") from None


def read_json(path: Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file."""
    values = read_any_json(path, most_bytes)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def read_any_json(path: Path, most_bytes: int = MAX_BYTES) -> Any:
    """A JSON file: strict JSON, no duplicate keys, no lone surrogates, nested at most MAX_DEPTH deep."""
    text = read_text(path, most_bytes)
    try:
        value = strict_json.parse(text, MAX_DEPTH)
        strict_json.check(value, MAX_DEPTH)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    return value


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for test, name in kinds.items() if test(mode)), "a device")
