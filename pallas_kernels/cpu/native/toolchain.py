"""What is compiled and how: flags, compiler, headers, one command per instruction set. Needs jaxlib's headers alone.

A library's name carries a hash of the sources and flags, and the version of XLA's FFI that it was compiled against.
"""

import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile

SOURCES = pathlib.Path(__file__).parent / "src"
BASE_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-DNDEBUG", "-fno-math-errno")
_X86 = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "amx_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
_ARM64 = {"neon": ("-march=armv8-a",), "neon_bf16": ("-march=armv8.2-a+bf16",)}
ISA_FLAGS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM64, "arm64": _ARM64}
"""Machine -> ISA -> its flags: one translation unit isa_<name>.cc each."""


class BuildError(RuntimeError):
    """Why there is no library; the message is a sentence for users."""


def isas(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """The ISAs to compile for this kind of machine, or for a named one."""
    machine = (machine or platform.machine()).lower()
    if machine not in ISA_FLAGS:
        raise BuildError(f"there are no native kernels for {machine}; known are {', '.join(ISA_FLAGS)}")
    return ISA_FLAGS[machine]


def accepted(cxx: tuple[str, ...], names: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The ISAs whose flags this compiler knows: an old one leaves out the newest instruction sets."""

    def knows(own: tuple[str, ...]) -> bool:
        probe = [*cxx, *own, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    found = {isa: own for isa, own in names.items() if knows(own)}
    if not found:
        raise BuildError(f"{cxx[0]} knows the flags of none of {', '.join(names)}, or does not run at all")
    return found


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: $CXX, or the first of c++, g++, clang++ on the path."""
    asked = os.environ.get("CXX")
    for program, *rest in (shlex.split(asked),) if asked else (["c++"], ["g++"], ["clang++"]):
        if found := shutil.which(program):
            return (found, *rest)
    raise BuildError(
        (
            f"$CXX={asked} is no program of this machine"
            if asked
            else "no C++ compiler (c++, g++, clang++) on this machine"
        )
        + "; install one (Debian, Ubuntu: apt-get install g++) and the kernels are built at first use"
    )


def headers() -> pathlib.Path:
    """Where jaxlib keeps XLA's FFI headers."""
    spec = importlib.util.find_spec("jaxlib")
    for place in spec.submodule_search_locations or () if spec else ():
        if (path := pathlib.Path(place) / "include" / "xla" / "ffi" / "api" / "c_api.h").exists():
            return path.parents[3]
    raise BuildError("jaxlib with the headers of XLA's FFI is not installed")


def ffi_version() -> tuple[int, int]:
    """(major, minor) of the installed XLA's FFI: it serves what was compiled against its major and up to its minor."""
    text = (headers() / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if not major or not minor:
        raise BuildError(f"the headers in {headers()} do not name the version of XLA's FFI")
    return int(major[1]), int(minor[1])


def stem() -> str:
    """The first part of a library's name: a hash of everything of ours that decides its content."""
    digest = hashlib.sha256(repr((BASE_FLAGS, extra_flags(), sorted(isas().items()), platform.system())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return f"libjattn_cpu-{digest.hexdigest()[:16]}"


def name() -> str:
    """The file name of a library made here and now."""
    return f"{stem()}-ffi{'.'.join(map(str, ffi_version()))}.so"


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """A library in `folder` that was made from these sources and that the installed XLA serves."""
    major, minor = ffi_version()
    for number in range(minor, -1, -1):
        if (path := folder / f"{stem()}-ffi{major}.{number}.so").exists():
            return path
    return None


def extra_flags() -> tuple[str, ...]:
    """$JATTN_NATIVE_FLAGS, for compiling and for linking: sanitizers, debugging."""
    return tuple(shlex.split(os.environ.get("JATTN_NATIVE_FLAGS", "")))


def make(target: pathlib.Path, cxx: tuple[str, ...], names: dict[str, tuple[str, ...]] | None = None) -> None:
    """Compile every translation unit side by side, link, rename into place."""
    names, extra = accepted(cxx, names or isas()), extra_flags()
    flags = (*BASE_FLAGS, "-isystem", str(headers()), *extra)
    have = tuple(f"-DJATTN_HAVE_{isa.upper()}" for isa in names)
    units = {"ffi": have} | {f"isa_{isa}": own for isa, own in names.items()}
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = [os.path.join(work, f"{unit}.o") for unit in units]
        commands = [
            [*cxx, *flags, *own, "-c", str(SOURCES / f"{unit}.cc"), "-o", made]
            for (unit, own), made in zip(units.items(), objects, strict=True)
        ]
        _run_all(commands)
        finished = os.path.join(work, "library.so")
        _run_all([[*cxx, "-shared", *extra, *objects, "-o", finished, "-lm"]])
        os.replace(finished, target)


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
            raise BuildError(f"the build failed: {command[0]} said: {' | '.join(lines[:3])}")
