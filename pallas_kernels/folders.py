"""Folders for compiled code that a later process loads: the user's own, to which nobody else can write."""

import contextlib
import errno
import logging
import os
import pathlib
import secrets
import stat
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
"""The beginning of the name of a file that is being written."""


class FolderError(RuntimeError):
    """Why code is not kept in a folder; its message is shown to users."""


class Folder(NamedTuple):
    """An opened folder."""

    path: pathlib.Path
    fd: int


@contextlib.contextmanager
def private(path: str | os.PathLike) -> Iterator[Folder]:
    """The folder at `path`, created if missing; FolderError if another user could write to it."""
    if not os.path.isabs(path):
        raise FolderError(f"the folder {os.fspath(path)!r} is not an absolute path")
    if not hasattr(os, "geteuid") or os.open not in os.supports_dir_fd:
        raise FolderError("this system does not show who may write to a folder: no code is stored or loaded here")
    place = pathlib.Path(path)
    for folder in (*reversed(place.parents), place):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise FolderError(f"{place} is a symbolic link or no folder; name the folder itself") from error
        raise
    try:
        if why := open_to_others(os.fstat(fd)):
            raise FolderError(f"{place} {why}: code is loaded from there; name a folder of your own with mode 0700")
        yield Folder(place, fd)
    finally:
        os.close(fd)


def open_to_others(found: os.stat_result) -> str:
    """Why another user may have written it; "" if none can."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def read(folder: Folder, name: str) -> bytes:
    """The content of a regular file; FolderError if another user may have written it, OSError if there is none."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if why := open_to_others(found) if stat.S_ISREG(found.st_mode) else "is no regular file":
            raise FolderError(f"{folder.path / name} {why}")
        return file.read()


def write(folder: Folder, name: str, content: bytes, mode: int) -> None:
    """Write a file atomically: another process sees all of it or nothing."""
    unfinished = f"{UNFINISHED}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(unfinished, flags, mode, dir_fd=folder.fd), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder.fd)
        raise


def places() -> Iterator[str]:
    """$JATTN_CACHE_DIR alone, if it is set; else the user's cache, and a temporary folder, if they are private."""
    if folder := os.environ.get("JATTN_CACHE_DIR"):
        yield folder
        return
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # unset, or to be ignored: XDG's rule
        home = os.path.join(os.path.expanduser("~"), ".cache")
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    for place in (os.path.join(home, "jattn"), os.path.join(tempfile.gettempdir(), f"jattn-{user}")):
        try:
            with private(place):
                pass
        except FolderError as error:
            log.warning("compiled code is not kept there: %s", error)
        except OSError as error:
            log.info("compiled code is not kept in %s: %s", place, error)
        else:
            yield place
