"""Compiles the C++ sources into one library, once per machine, and never in the way of anything else.

The library's name carries a hash of sources, flags, compiler and JAX's FFI headers; it is renamed into place when it
is complete. One process builds while others wait for it; a cache folder that cannot be written is replaced by a
temporary one.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time

import jax

SOURCES = pathlib.Path(__file__).parent / "src"
BASE_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-DNDEBUG", "-fno-math-errno")
_X86 = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
}
ISA_FLAGS = {"x86_64": _X86, "amd64": _X86}
"""Machine -> ISA -> its flags: one translation unit isa_<name>.cc each."""

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """Why there is no library; the message is a sentence for users."""


def isas() -> dict[str, tuple[str, ...]]:
    """The ISAs to compile on this kind of machine."""
    machine = platform.machine().lower()
    if machine not in ISA_FLAGS:
        raise BuildError(f"there are no native kernels for {machine}; known are {', '.join(ISA_FLAGS)}")
    return ISA_FLAGS[machine]


def compiler() -> str:
    """The C++ compiler: $CXX, or the first of c++, g++, clang++ on the path."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise BuildError(
        "no C++ compiler on this machine ($CXX, c++, g++, clang++); install one (Debian, Ubuntu: apt-get install g++) "
        "and the kernels are built at first use"
    )


def library() -> pathlib.Path:
    """Path of the library, built if it is not there yet; BuildError says why it cannot be."""
    names = isas()
    name = f"libjattn_cpu-{_fingerprint(names)}.so"
    cxx = compiler()
    folder = _cache_folder()
    target = folder / name
    with _one_at_a_time(folder / f"{name}.lock"):
        if not target.exists():
            build(target, cxx, names)
    return target


def build(target: pathlib.Path, cxx: str, names: dict[str, tuple[str, ...]], extra: tuple[str, ...] = ()) -> None:
    """Compile every translation unit side by side, link, rename into place."""
    began = time.perf_counter()
    flags = (*BASE_FLAGS, "-isystem", jax.ffi.include_dir(), *extra)
    have = tuple(f"-DJATTN_HAVE_{isa.upper()}" for isa in names)
    units = {"ffi": have} | {f"isa_{isa}": own for isa, own in names.items()}
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = [os.path.join(work, f"{unit}.o") for unit in units]
        commands = [
            [cxx, *flags, *own, "-c", str(SOURCES / f"{unit}.cc"), "-o", made]
            for (unit, own), made in zip(units.items(), objects, strict=True)
        ]
        _run_all(commands)
        finished = os.path.join(work, "library.so")
        _run_all([[cxx, "-shared", *extra, *objects, "-o", finished, "-lm"]])
        os.replace(finished, target)
    log.warning("built the native CPU kernels in %.1f s: %s", time.perf_counter() - began, target)


def _run_all(commands: list[list[str]]) -> None:
    """All at once; the first failure's last lines become the error."""
    try:
        running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    except OSError as error:
        raise BuildError(f"the compiler could not be started: {error}") from error
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()[-3:]
            raise BuildError(f"the build failed: {' '.join(command[:1])} said: {' | '.join(lines[:3])}")


def _fingerprint(names: dict[str, tuple[str, ...]]) -> str:
    digest = hashlib.sha256(repr((BASE_FLAGS, sorted(names.items()), jax.__version__, platform.machine())).encode())
    headers = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api"
    for path in (*sorted(SOURCES.iterdir()), *sorted(headers.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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
    place = pathlib.Path(tempfile.gettempdir()) / f"jattn-{user}"
    try:
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
