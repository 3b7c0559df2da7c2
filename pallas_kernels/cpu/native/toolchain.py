"""What is compiled and how: flags, compiler, headers, one command per instruction set. Needs only jaxlib's headers."""

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

SOURCES = pathlib.Path(__file__).parent / "src"
BASE_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-fno-math-errno")
SHORT_SECONDS, BUILD_SECONDS = 60.0, 900.0
"""Time limits of the compiler: for --version and a check of flags, and for the whole build; then it is killed."""
MAX_OUTPUT_BYTES = 1 << 20
"""Most bytes of a command's messages; a command that writes more is stopped before it fills the disk."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (  # -march=x86-64-v4, which some compilers spell otherwise
    *_AVX2, "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt", "-mcx16", "-msahf",
    "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl",
)  # fmt: skip
_X86 = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx_bf16": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
_ARM64 = {"neon": ("-march=armv8-a",), "neon_bf16": ("-march=armv8.2-a+bf16",)}
ISA_FLAGS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM64, "arm64": _ARM64}
"""Machine -> ISA -> its flags: one translation unit isa_<name>.cc each."""


class BuildError(RuntimeError):
    """Why there is no library; its message is shown to users."""


def isas(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """The ISAs to compile for this kind of machine, or for a named one."""
    machine = (machine or platform.machine()).lower()
    if machine not in ISA_FLAGS:
        raise BuildError(f"there are no native kernels for {machine}; known are {', '.join(ISA_FLAGS)}")
    return ISA_FLAGS[machine]


def accepted(cxx: tuple[str, ...], names: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The ISAs whose flags this compiler accepts; an old compiler does not accept the newest ones."""

    def accepts(own: tuple[str, ...]) -> bool:
        return _run_short([*cxx, *own, "-fsyntax-only", "-x", "c++", os.devnull])[0] == 0

    found = {isa: own for isa, own in names.items() if accepts(own)}
    if not found:
        raise BuildError(f"{cxx[0]} accepts the flags of none of {', '.join(names)}, or does not start")
    return found


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: $CXX, or the first of c++, g++, clang++ on the path."""
    variable = os.environ.get("CXX", "").strip()
    for program, *rest in (_words("CXX"),) if variable else (["c++"], ["g++"], ["clang++"]):
        if found := shutil.which(program):
            return (os.path.abspath(found), *rest)
    raise BuildError(
        (
            f"$CXX={variable} is not a program on this machine"
            if variable
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
    """(major, minor) of the installed XLA's FFI: it calls libraries of the same major and no newer minor."""
    text = (headers() / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if not major or not minor:
        raise BuildError(f"the headers in {headers()} do not name the version of XLA's FFI")
    return int(major[1]), int(minor[1])


def source_hash(system: str | None = None, machine: str | None = None) -> str:
    """A hash of our sources and of the flags of every instruction set: for this kind of machine, or for a named one."""
    system = system or platform.system()
    digest = hashlib.sha256(repr((BASE_FLAGS, extra_flags(), sorted(isas(machine).items()), system)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler_hash(cxx: tuple[str, ...]) -> str:
    """A hash of the compiler's path, arguments and --version."""
    code, output = _run_short([*cxx, "--version"])
    if code:
        raise BuildError(f"{cxx[0]} --version failed: {_shortened(output.splitlines()[-3:])}")
    return hashlib.sha256(repr((cxx, output)).encode()).hexdigest()[:8]


def extra_flags() -> tuple[str, ...]:
    """$JATTN_NATIVE_FLAGS, for compiling and for linking: sanitizers, debugging."""
    return _words("JATTN_NATIVE_FLAGS")


def make(target: pathlib.Path, cxx: tuple[str, ...], names: dict[str, tuple[str, ...]]) -> None:
    """Compile these ISAs, all translation units in parallel, in the folder of `target`, and link."""
    extra = extra_flags()
    flags = (*BASE_FLAGS, "-isystem", str(headers()), *extra)
    have = tuple(f"-DJATTN_HAVE_{isa.upper()}" for isa in names)
    units = {"ffi": have} | {f"isa_{isa}": own for isa, own in names.items()}
    objects = [str(target.parent / f"{unit}.o") for unit in units]
    commands = [
        [*cxx, *flags, *own, "-c", str(SOURCES / f"{unit}.cc"), "-o", made]
        for (unit, own), made in zip(units.items(), objects, strict=True)
    ]
    end = time.monotonic() + BUILD_SECONDS
    _run_all(commands, end)
    _run_all([[*cxx, "-shared", *extra, *objects, "-o", str(target), "-lm"]], end)
    if not target.is_file() or not target.stat().st_size:
        raise BuildError(f"{cxx[0]} ended without an error but made no library; set CXX to a C++ compiler")


def _words(variable: str) -> tuple[str, ...]:
    """An environment variable, split into words as a shell does."""
    text = os.environ.get(variable, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BuildError(f"${variable}={text!r} cannot be read as a command line: {error}") from error


def _run_short(command: list[str]) -> tuple[int, str]:
    """(exit status, output) of a short command of the compiler."""
    return _run_side_by_side([command], time.monotonic() + SHORT_SECONDS)[0]


def _run_all(commands: list[list[str]], end: float) -> None:
    """Run all commands in parallel; BuildError with the first lines of error, or the last lines, of one that failed."""
    for command, (code, output) in zip(commands, _run_side_by_side(commands, end), strict=True):
        if code:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()[-3:]
            raise BuildError(f"the build failed: {command[0]} printed: {_shortened(lines)}")


def _shortened(lines: list[str]) -> str:
    """At most three lines of a compiler's output, each cut to 300 characters."""
    return " | ".join(line[:300] for line in lines[:3]) or "nothing"


def _run_side_by_side(commands: list[list[str]], end: float) -> list[tuple[int, str]]:
    """(exit status, output) of each; commands that still run at `end`, or when this is interrupted, are killed."""
    environment = {**os.environ, "LC_ALL": "C"}  # English messages: _run_all searches them for "error"
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            output = stack.enter_context(tempfile.TemporaryFile())
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise BuildError(f"the compiler could not be started: {error}") from error
            stack.callback(_stop, process)
            running.append((process, output))
        stack.enter_context(_killed_with_us([process for process, _ in running]))
        pause = 0.001
        while any(process.poll() is None for process, _ in running):
            if any(os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES for _, output in running):
                raise BuildError(f"{commands[0][0]} wrote messages without end and was stopped; set CXX to another")
            if time.monotonic() > end:
                raise BuildError(f"{commands[0][0]} did not finish in time and was stopped; set CXX to another")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        for _, output in running:
            output.seek(0)
        texts = [output.read(MAX_OUTPUT_BYTES).decode(errors="replace") for _, output in running]
        return [(process.returncode, text) for (process, _), text in zip(running, texts, strict=True)]


@contextlib.contextmanager
def _killed_with_us(processes: list[subprocess.Popen]) -> Iterator[None]:
    """While this lasts, the processes and their children are killed if this process ends, by whatever signal.

    A shell waits for the end of a pipe whose other end is held here alone.
    """
    script = 'read -r _; for group; do kill -s KILL -- "-$group"; done'
    groups = [str(process.pid) for process in processes]  # each leads a session of its own
    try:
        watch = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *groups], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:  # no shell: then only time limits and the end of this block stop them
        yield
        return
    with watch:  # closes the pipe, once the shell is gone
        try:
            yield
        finally:
            watch.kill()
            watch.wait()


def _stop(process: subprocess.Popen) -> None:
    """Kill a process and its children: a compiler is often a script."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
