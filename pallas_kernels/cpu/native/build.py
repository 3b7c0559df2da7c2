"""Finds the library: beside this file (a wheel brings it), in the user's cache, or compiled now, once per machine.

One process compiles while others wait for it, and the file is renamed into place when it is complete; a cache folder
that cannot be written is replaced by a temporary one.
"""

import contextlib
import logging
import os
import pathlib
import tempfile
import time

from pallas_kernels.cpu.native import toolchain
from pallas_kernels.cpu.native.toolchain import BuildError

HERE = pathlib.Path(__file__).parent

log = logging.getLogger(__name__)


def library(prebuilt: bool = True) -> pathlib.Path:
    """Path of the library, made if there is none yet; BuildError says why it cannot be.

    `prebuilt=False` passes over the one that came with the package.
    """
    if prebuilt and (found := toolchain.find(HERE)):
        return found
    folder = _cache_folder()
    if found := toolchain.find(folder):
        return found
    cxx = toolchain.compiler()
    with _one_at_a_time(folder / f"{toolchain.stem()}.lock"):
        if found := toolchain.find(folder):  # another process was faster
            return found
        target, began = folder / toolchain.name(), time.perf_counter()
        try:
            toolchain.make(target, cxx)
        except OSError as error:
            raise BuildError(f"the native kernels could not be written to {folder}: {error}") from error
    log.warning("built the native CPU kernels in %.1f s: %s", time.perf_counter() - began, target)
    return target


def _cache_folder() -> pathlib.Path:
    """$JATTN_CACHE_DIR, else the user's cache, else a private temporary folder: the first that can be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    places = [os.environ.get("JATTN_CACHE_DIR"), os.path.join(home, "jattn")]
    for place in filter(None, places):
        with contextlib.suppress(OSError):
            os.makedirs(place, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                return pathlib.Path(place)
    user = os.getuid() if hasattr(os, "getuid") else 0
    try:
        place = pathlib.Path(tempfile.gettempdir()) / f"jattn-{user}"
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != user:  # somebody else's folder is nothing to load code from
            place = pathlib.Path(tempfile.mkdtemp(prefix="jattn-"))
    except OSError as error:
        raise BuildError(f"no folder to build in can be written ({error}); set JATTN_CACHE_DIR") from error
    return place


@contextlib.contextmanager
def _one_at_a_time(path: pathlib.Path):
    """Others wait here while one builds; without file locks everybody builds, which is slower and still right."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = stack.enter_context(open(path, "w"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
