"""Libraries kept in folders. One is loaded only if no other user can have written it and its name holds its hash.

    libjattn_cpu-<sources and flags>-ffi<version of XLA's FFI>-<compiler>-<content>.so

The folder is opened once and used through its descriptor, so it cannot be replaced between check and use; the file
that is loaded is the one whose bytes were hashed.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import pathlib
import re
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels import folders
from pallas_kernels.cpu.native import toolchain
from pallas_kernels.folders import Folder, open_to_others

log = logging.getLogger(__name__)

PREFIX = "libjattn_cpu-"
LOCK = "build.lock"
_NAME = re.compile(
    PREFIX
    + r"(?P<sources>[0-9a-f]+)-ffi(?P<major>\d+)\.(?P<minor>\d+)-(?P<compiler>[0-9a-f]+)-(?P<content>[0-9a-f]+)\.so"
)


class Library(NamedTuple):
    """A verified file. Once loaded, its descriptor stays open: dlopen compares paths, and would return the old library
    for a reused /proc/self/fd/N."""

    path: pathlib.Path
    fd: int

    def load(self) -> ctypes.CDLL:
        """Load the verified file, even if its path now names another; OSError if the system cannot load it."""
        by_descriptor = f"/proc/self/fd/{self.fd}"
        return ctypes.CDLL(by_descriptor if os.path.exists(by_descriptor) else str(self.path))


def find(folder: Folder, compiler: str | None = None, packaged: bool = False) -> Library | None:
    """The newest library of these sources that the installed XLA can call; compiler: its hash, None: of any.

    packaged: it came with the Python files beside it, so its owner is not checked, only its hash.
    """
    major, minor = toolchain.ffi_version()
    sources, found = toolchain.source_hash(), []
    for name in os.listdir(folder.fd):
        match = _NAME.fullmatch(name)
        if not match or match["sources"] != sources or compiler not in (None, match["compiler"]):
            continue
        if int(match["major"]) == major and int(match["minor"]) <= minor:
            found.append((int(match["minor"]), name, match["content"]))
    for _, name, content in sorted(found, reverse=True):
        if library := _verified(folder, name, content, packaged):
            return library
    return None


def _verified(folder: Folder, name: str, content: str, packaged: bool) -> Library | None:
    """The file of this name; None if its hash differs from the name's or another user may have written it."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
    except OSError as error:
        log.warning("%s is passed over: %s", folder.path / name, error)
        return None
    found = os.fstat(fd)
    why = "is no regular file" if not stat.S_ISREG(found.st_mode) else "" if packaged else open_to_others(found)
    if not why and _hash(_read(fd)) != content:
        why = "is not what its name says: cut off or changed"
    if not why:
        return Library(folder.path / name, fd)
    os.close(fd)
    log.warning("%s is passed over: it %s", folder.path / name, why)
    return None


def name_of(content: bytes, compiler: str, sources: str) -> str:
    """The file name of a library that was compiled with the installed XLA's headers."""
    ffi = ".".join(map(str, toolchain.ffi_version()))
    return f"{PREFIX}{sources}-ffi{ffi}-{compiler}-{_hash(content)}.so"


def store(folder: Folder, content: bytes, compiler: str) -> None:
    """Write a library under its name, atomically; remove unusable ones of the same sources and compiler."""
    name = name_of(content, compiler, toolchain.source_hash())
    stem = name.rpartition("-")[0]
    for old in os.listdir(folder.fd):
        if old.startswith((f"{stem}-", folders.UNFINISHED)):
            with contextlib.suppress(OSError):
                os.unlink(old, dir_fd=folder.fd)
    folders.write(folder, name, content, 0o700)


@contextlib.contextmanager
def one_at_a_time(folder: Folder, seconds: float) -> Iterator[None]:
    """A lock for building, waited for at most `seconds`; without it several may build, which is only slower."""
    handle = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder.fd)
    end = time.monotonic() + seconds
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            while time.monotonic() < end:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _read(fd: int) -> bytes:
    with open(os.dup(fd), "rb") as file:
        return file.read()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
