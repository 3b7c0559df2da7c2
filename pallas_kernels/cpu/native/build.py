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

from pallas_kernels import folders
from pallas_kernels.cpu.native import kept, toolchain
from pallas_kernels.cpu.native.kept import Library
from pallas_kernels.cpu.native.toolchain import BuildError
from pallas_kernels.folders import Folder, FolderError

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
            with folders.private(place) as folder:
                if found := kept.find(folder, compiler):
                    return found
                if compiler is not None:
                    return _build(folder, cxx, compiler)
        except FolderError as error:
            raise BuildError(str(error)) from error
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
    log.warning("the native CPU kernels are not built yet: this process builds them once, or waits for one that does")
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
    """The user's folders; with may_build, at last a new one, unless the user named one."""
    yield from folders.places()
    if may_build and not os.environ.get("JATTN_CACHE_DIR"):  # new, so it holds no library yet
        yield tempfile.mkdtemp(prefix="jattn-")
