"""JAX's compilation cache on disk: programs that one process compiled are loaded by the next.

The programs are in `programs/<processor>` of the user's cache folder. A program is machine code, so nobody else may be
able to write to the folder. JAX's key of a program has the program itself, the versions of jaxlib and of the platform,
the kind of device and XLA's flags. The processor's features are in the folder's name, because several machines can have
one home folder, and code for one of them may not run on another. The engine keeps its programs there a second time,
whole, see jattn/engine/kept_programs.py.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import platform
import re
import shutil
import stat
import tempfile
import threading
import warnings
import zlib
from typing import Any

import jax

from pallas_kernels import folders, switches

MAX_MB = 2048
"""The default size limit. A program of a model of 1e9 parameters has some MB."""

SPARE_BYTES = 64 << 20
"""With less free space than this on the disk, nothing is kept."""

PROCESSOR = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
"""Fields of /proc/cpuinfo on which machine code depends."""

ENTRY = "-cache"
"""The end of the name of each of JAX's entries."""

ZSTD = bytes.fromhex("28b52ffd")
"""The first bytes of what zstandard compressed."""

_FAILURE = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.DOTALL
)  # of JAX's warnings
_lock = threading.Lock()

log = logging.getLogger("jattn.compile_cache")


@dataclasses.dataclass(frozen=True)
class Status:
    """Where compiled programs are kept and how large they are, or why none are kept."""

    folder: pathlib.Path | None = None
    programs: int = 0
    bytes: int = 0
    reason: str = ""
    """Empty if programs are kept in a folder of jattn's."""


def enable(max_mb: int = MAX_MB) -> pathlib.Path | None:
    """Keep compiled programs on disk from now on, in this process; returns the folder, or None if nothing is kept.

    This changes settings of JAX for the whole process, so no other function of jattn calls it; the commands `generate`,
    `serve` and `bench serving` do. The least recently used files above `max_mb` are removed now. JATTN_COMPILE_CACHE=0
    in the environment, or max_mb=0, switch it off. If JAX has a compilation cache already (JAX_COMPILATION_CACHE_DIR),
    that one stays as it is.

    A cache that cannot be used is a warning in the log, not an error. So is a damaged program, which is compiled again.
    """
    if not isinstance(max_mb, int) or isinstance(max_mb, bool) or max_mb < 0:
        raise ValueError(f"{max_mb=} must be an integer, 0 or more")
    if current := _setting("jax_compilation_cache_dir"):  # the user's, or that of an earlier call
        return pathlib.Path(current)
    if max_mb == 0 or switched_off():
        return None
    folder, why = _usable()
    if folder is None:
        log.warning("compiled programs are not kept on disk: %s", why)
        return None
    _remove_special(folder)
    trim(folder.parent, max_mb << 20)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones too: a start has many
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _watch(folder)
    return folder


def status() -> Status:
    """What `enable` would use. It makes the folder if there is none."""
    if users := users_folder():
        return Status(reason=f"JAX_COMPILATION_CACHE_DIR is set, jattn leaves that cache alone: {users}")
    if why := switched_off():
        return Status(reason=why)
    folder, why = _usable()
    if folder is None:
        return Status(reason=why)
    found = _files(folder.parent)
    entries = sum(path.name.endswith(ENTRY) for path, _ in found)
    return Status(folder.parent, entries, sum(seen.st_size for _, seen in found))


def users_folder() -> str | None:
    """The folder that the user set (JAX_COMPILATION_CACHE_DIR), or None; not that of `enable`."""
    folder = _setting("jax_compilation_cache_dir")
    return None if folder in _own_folders() else folder


def own_folder() -> pathlib.Path | None:
    """The folder of `enable`, if programs are kept there now."""
    folder = None if switched_off() else _setting("jax_compilation_cache_dir")
    return pathlib.Path(folder) if folder and folder in _own_folders() else None


def _own_folders() -> list[str]:
    """The folders that `enable` may use."""
    if _setting("jax_compilation_cache_dir") is None:
        return []
    return [os.path.join(place, "programs", processor()) for place in folders.places()]


def switched_off() -> str:
    """The setting that switches the cache off; "" if none does."""
    if not switches.is_on("JATTN_COMPILE_CACHE"):
        return "switched off by JATTN_COMPILE_CACHE=0"
    return "" if _setting("jax_enable_compilation_cache") else "switched off by JAX_ENABLE_COMPILATION_CACHE"


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # JAX makes these attributes at run time


def trim(folder: pathlib.Path, max_bytes: int) -> None:
    """Remove the least recently used files until the rest has at most `max_bytes`; and empty ones, always.

    Without a lock: a process that looks for a file that has just gone compiles its program. JAX's own limit
    (jax_compilation_cache_max_size) needs the package filelock, and fails from the first entry that a killed process
    left without its time of access.
    """
    found = sorted(_files(folder), key=lambda file: max(file[1].st_atime, file[1].st_mtime))
    total = sum(seen.st_size for _, seen in found)
    for path, seen in found:
        if total > max_bytes or seen.st_size == 0:
            total -= seen.st_size
            with contextlib.suppress(OSError):
                path.unlink()


def _usable() -> tuple[pathlib.Path | None, str]:
    """The folder for this processor, or None and the reason."""
    why = []
    for place in folders.places():
        try:
            with (
                folders.private(place),
                folders.private(os.path.join(place, "programs")),
                folders.private(os.path.join(place, "programs", processor())) as folder,
            ):
                with tempfile.TemporaryFile(dir=folder.path) as file:
                    file.write(b"x")
                if (free := shutil.disk_usage(folder.path).free) >= SPARE_BYTES:
                    return folder.path, ""
                why.append(f"{place}: {free >> 20} MB are free, less than {SPARE_BYTES >> 20}")
        except (folders.FolderError, OSError) as error:
            why.append(str(error))
    return None, "; ".join(why) or "no folder can be used; set JATTN_CACHE_DIR"


def processor() -> str:
    """The machine, and a hash of what its code depends on; where that is not known, of the machine's name."""
    try:
        first = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        first = ""
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    known = [f"{name.strip()}:{text.strip()}" for name, text in fields.items() if name.strip() in PROCESSOR]
    features = "\n".join(known) or f"{platform.node()} {platform.processor()}"
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:16]}"


def _remove_special(folder: pathlib.Path) -> None:
    """Remove pipes, sockets, devices and links to such among JAX's entries: JAX would open them and wait for ever."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            kind = path.stat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                path.unlink()


def _files(folder: pathlib.Path) -> list[tuple[pathlib.Path, os.stat_result]]:
    """The regular files below the folder, without those that symbolic links name."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = pathlib.Path(root, name)
            with contextlib.suppress(OSError):
                seen = path.lstat()
                if stat.S_ISREG(seen.st_mode):
                    found.append((path, seen))
    return found


# ---------------------------------------------------------------------- failures
def _watch(folder: pathlib.Path) -> None:
    """Log the first failure, and remove damaged entries before JAX writes them again.

    JAX reports a failure of its cache as a warning, then compiles. It does not replace an entry that is there, so a
    damaged one (a process was killed while it wrote it, or the disk was full) would stay for ever.
    """
    # Also under `python -W error`, where the warning would end the command.
    warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache")
    show_others, logged = warnings.showwarning, []

    def show(message, category, filename, lineno, file=None, line=None):
        failure = _FAILURE.match(str(message))
        if failure is None:
            return show_others(message, category, filename, lineno, file, line)
        what, name, why = failure.groups()
        with _lock:
            removed = _remove_damaged(folder, name, all_if_unknown=what == "reading")
            if not logged:
                logged.append(name)
                log.warning(
                    "%s the kept program %s in %s failed (%s)%s; later failures are not shown",
                    what, name, folder, why, _done_about(what, removed),
                )  # fmt: skip

    warnings.showwarning = show


def _done_about(what: str, removed: int) -> str:
    """What was done about a failure of `what`, for the log."""
    if what == "writing":
        return "; the part that was written is removed" if removed else ""
    files = "1 damaged file is removed" if removed == 1 else f"{removed} damaged files are removed"
    return f"; it is compiled again{f', {files}' if removed else ''}"


def _remove_damaged(folder: pathlib.Path, name: str, all_if_unknown: bool) -> int:
    """Remove the damaged entries of this program; all_if_unknown: all of them, if none is known to be damaged.

    Returns how many were removed.
    """
    entries = [path for path in folder.glob(f"*{ENTRY}") if path.name.startswith(f"{name}-")]
    damaged = [path for path in entries if _is_damaged(path)] or (entries if all_if_unknown else [])
    for path in damaged:
        with contextlib.suppress(OSError):
            path.unlink()
    return len(damaged)


def _is_damaged(path: pathlib.Path) -> bool:
    """Can zlib not decompress this entry? Always False for zstandard's form, which JAX writes if that is installed."""
    try:
        content = path.read_bytes()
        if not content.startswith(ZSTD):
            zlib.decompress(content)
    except (OSError, zlib.error):
        return True
    return False
