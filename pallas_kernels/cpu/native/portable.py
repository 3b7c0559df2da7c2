"""The native library of a manylinux wheel: compiled by zig, for this processor or another.

zig (PyPI: ziglang) brings clang, an old glibc to link against and a static C++ library. Only wheels are built with it.
"""

import importlib.util
import pathlib
import re
import sys
import tempfile

from pallas_kernels.cpu.native import kept, toolchain
from pallas_kernels.cpu.native.toolchain import BuildError

FLAGS = ("-g0", "-s", "-fomit-frame-pointer")
_ARM64 = {"neon": (), "neon_bf16": ("-mcpu=generic+v8_2a+bf16",)}
ISA_FLAGS = {"x86_64": toolchain.ISA_FLAGS["x86_64"], "aarch64": _ARM64}
"""toolchain.ISA_FLAGS as zig spells them."""
EXPORTS = "{ global: Jattn*; jattn_isas; local: *; };"
"""Everything else stays inside: the static C++ library would export its operator new and delete."""


def compile_into(folder: pathlib.Path, platform: str) -> pathlib.Path:
    """Write the library for the platform tag of a wheel, such as manylinux_2_28_aarch64; BuildError says why not."""
    machine, cxx = compiler(platform)
    sources = toolchain.source_hash("Linux", machine)
    with tempfile.TemporaryDirectory(prefix="jattn-build-") as work:
        # zig's cache, 200 MB, is of use to the same zig in the same folder only; pip has a new folder each time.
        cache = ("env", f"ZIG_GLOBAL_CACHE_DIR={work}")
        exports, made = pathlib.Path(work, "exports"), pathlib.Path(work, "library.so")
        exports.write_text(EXPORTS)
        toolchain.make(made, (*cache, *cxx, f"-Wl,--version-script={exports}"), ISA_FLAGS[machine])
        content = made.read_bytes()
    library = folder / kept.name_of(content, toolchain.compiler_hash(cxx), sources)
    library.write_bytes(content)
    return library


def compiler(platform: str) -> tuple[str, tuple[str, ...]]:
    """(machine, zig's command) for the platform tag of a wheel."""
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    if not tag or tag[3] not in ISA_FLAGS:
        wanted = " or ".join(f"manylinux_2_28_{machine}" for machine in ISA_FLAGS)
        raise BuildError(f"no native kernels are cross-compiled for the platform {platform}; wanted {wanted}")
    if not importlib.util.find_spec("ziglang"):
        raise BuildError("the compiler zig is missing: pip install ziglang")
    target = f"{tag[3]}-linux-gnu.{tag[1]}.{tag[2]}"
    return tag[3], (sys.executable, "-m", "ziglang", "c++", "-target", target, *FLAGS)
