"""Finds the native library: beside this file (from a wheel) or in the user's cache; else compiles it into that cache.

One process compiles while others wait for it. The compiler works in a temporary folder of its own; only the finished
library enters the cache.
"""

import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

from pallas_kernels.cpu.native import kept, toolchain
from pallas_kernels.cpu.native.kept import Folder, Library
from pallas_kernels.cpu.native.toolchain import BuildError

HERE = pathlib.Path(__file__).resolve().parent

log = logging.getLogger(__name__)


def library(prebuilt: bool = True) -> Library:
    """The library, compiled if there is none yet; BuildError says why that is not possible.

    prebuilt=False: not the one that came with the package.
    """
    if prebuilt and (found := _packaged()):
        return found
    cxx, compiler, absent = (), None, None
    try:
        cxx = toolchain.compiler()
        compiler = toolchain.compiler_hash(cxx)
    except BuildError as error:  # no compiler here: take a kept library of any compiler
        absent = error
    why = []
    for place in _places(may_build=compiler is not None):
        try:
            with kept.private(place) as folder:
                if found := kept.find(folder, compiler):
                    return found
                if compiler is not None:
                    return _build(folder, cxx, compiler)
        except OSError as error:
            why.append(f"{place}: {error}")
    if absent:
        raise absent
    raise BuildError(f"no folder to keep it in can be used ({'; '.join(why)}); set JATTN_CACHE_DIR")


def _packaged() -> Library | None:
    if os.open not in os.supports_dir_fd:
        return None
    fd = os.open(HERE, os.O_RDONLY)
    try:
        return kept.find(Folder(HERE, fd), packaged=True)
    finally:
        os.close(fd)


def _build(folder: Folder, cxx: tuple[str, ...], compiler: str) -> Library:
    """Compile, unless another process was faster; OSError where the folder cannot be written."""
    with kept.one_at_a_time(folder, toolchain.BUILD_SECONDS):
        if found := kept.find(folder, compiler):
            return found
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="jattn-build-") as work:
            made = pathlib.Path(work, "library.so")
            toolchain.make(made, cxx, toolchain.accepted(cxx, toolchain.isas()))
            kept.store(folder, made.read_bytes(), compiler)
        found = kept.find(folder, compiler)
    if not found:
        raise BuildError(f"the library that was built into {folder.path} cannot be found there again")
    log.warning("built the native CPU kernels in %.1f s: %s", time.perf_counter() - began, found.path)
    return found


def _places(may_build: bool) -> Iterator[str]:
    """$JATTN_CACHE_DIR alone, if it is set; else the user's cache and a temporary folder to which other users cannot
    write; with may_build, at last a new folder."""
    if folder := os.environ.get("JATTN_CACHE_DIR"):
        yield folder
        return
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # unset, or to be ignored: XDG's rule
        home = os.path.join(os.path.expanduser("~"), ".cache")
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    for place in (os.path.join(home, "jattn"), os.path.join(tempfile.gettempdir(), f"jattn-{user}")):
        try:
            with kept.private(place):
                pass
        except BuildError as error:
            log.warning("the native kernels are not kept there: %s", error)
        except OSError as error:
            log.info("the native kernels are not kept in %s: %s", place, error)
        else:
            yield place
    if may_build:  # new, so it holds no library yet
        yield tempfile.mkdtemp(prefix="jattn-")
