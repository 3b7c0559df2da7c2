"""Builds the fuzz driver and runs it, if asked under sanitizers, or for another processor under an emulator.

    python -m pallas_kernels.cpu.native.fuzz --seconds 600 --sanitize address,undefined
    python -m pallas_kernels.cpu.native.fuzz --sanitize thread --callers 4
    python -m pallas_kernels.cpu.native.fuzz --cross aarch64         # needs aarch64-linux-gnu-g++ and qemu-aarch64

Where a processor with AVX-512 has no AMX, or no bfloat16 products in AVX-512, these instructions are emulated in C++:
the run then checks the layout of the data, not the instructions. Without AVX-512 only the AVX2 kernels are compiled.
Exit code 3: a compiler or an emulator is missing.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from pallas_kernels.cpu.native import toolchain

HERE = pathlib.Path(__file__).parent
MISSING = 3
CALLS = ("--param", "asan-instrumentation-with-call-threshold=0")
"""GCC's AddressSanitizer as calls: the compiler needs half of the time, and finds the same; the kernels are slower."""


def main(argv: list[str] | None = None) -> int:
    """Build and run the driver; return its exit code: 0, 1 if a batch is wrong, or MISSING."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.cpu.native.fuzz")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--callers", type=int, default=2, help="threads that call at the same time")
    parser.add_argument("--seed", type=int, default=0, help="number of the first batch")
    parser.add_argument("--sanitize", default="", help="address,undefined or thread; none by default")
    parser.add_argument("--cross", default="", metavar="MACHINE", help="compile for it and run under qemu")
    args = parser.parse_args(argv)
    try:
        cxx, run, machine = tools(args.cross)
    except toolchain.BuildError as error:
        print(f"not run: {error}", file=sys.stderr)
        return MISSING
    with tempfile.TemporaryDirectory() as work:
        isas = toolchain.accepted(cxx, toolchain.isas(machine))
        isas = isas if args.cross else runnable(isas, cpu_features())
        program = build(pathlib.Path(work), cxx, isas, args.sanitize)
        if args.cross:
            link_library(pathlib.Path(work), cxx, toolchain.isas(machine))
        return subprocess.run(
            [*run, str(program), str(args.seconds), str(args.callers), str(args.seed)], check=False
        ).returncode


def tools(cross: str) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """(compiler, command that runs its programs, machine)."""
    if not cross:
        return toolchain.compiler(), (), None
    cxx, qemu = shutil.which(f"{cross}-linux-gnu-g++"), shutil.which(f"qemu-{cross}")
    if not cxx or not qemu:
        packages = f"g++-{cross}-linux-gnu and qemu-user"
        raise toolchain.BuildError(f"no cross compiler or no emulator for {cross} here (Debian, Ubuntu: {packages})")
    return (cxx,), (qemu, "-cpu", "max", "-L", f"/usr/{cross}-linux-gnu"), cross


def build(work: pathlib.Path, cxx, isas: dict[str, tuple[str, ...]], sanitize: str) -> pathlib.Path:
    """Compile the driver with the kernels of all these ISAs."""
    flags = [*cxx, "-O1", "-g1", "-std=c++17", "-Wall", "-Wno-maybe-uninitialized", "-Wno-psabi", "-pthread"]
    flags += ["-I", str(toolchain.SOURCES)]
    emulate = {"avx512_bf16": "-DJATTN_EMULATE_AVX512_BF16", "amx_bf16": "-DJATTN_EMULATE_AMX"}
    here = cpu_features()
    flags += [flag for feature, flag in emulate.items() if feature not in here]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
        if "address" in sanitize and _accepts(cxx, CALLS):
            flags += CALLS
    have = tuple(f"-DJATTN_HAVE_{isa.upper()}" for isa in isas)
    units = {f"isa_{isa}": (toolchain.SOURCES / f"isa_{isa}.cc", own) for isa, own in isas.items()}
    units["fuzz"] = HERE / "fuzz.cc", have
    compile_one = lambda unit: subprocess.run(
        [*flags, *units[unit][1], "-c", str(units[unit][0]), "-o", str(work / f"{unit}.o")], check=True
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, units))
    program = work / "fuzz"
    subprocess.run([*flags, *(str(work / f"{unit}.o") for unit in units), "-o", str(program)], check=True)
    return program


def _accepts(cxx, flags: tuple[str, ...]) -> bool:
    """Does this compiler know the flags? Clang spells them otherwise."""
    command = [*cxx, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def runnable(isas: dict[str, tuple[str, ...]], here: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Those that a processor with these features runs: under sanitizers each takes a minute to compile."""
    has_avx512 = not here or "avx512bw" in here
    return {isa: flags for isa, flags in isas.items() if has_avx512 or not isa.startswith(("avx512", "amx"))}


def cpu_features() -> frozenset[str]:
    """The feature flags of this processor; empty where the system does not list them."""
    try:
        return frozenset(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def link_library(work: pathlib.Path, cxx, isas: dict[str, tuple[str, ...]]) -> None:
    """Compile and link the library itself for the other machine."""
    toolchain.make(work / "library.so", cxx, toolchain.accepted(cxx, isas))
    print(f"libjattn_cpu for {', '.join(isas)}: {(work / 'library.so').stat().st_size >> 10} KiB")


if __name__ == "__main__":
    sys.exit(main())
