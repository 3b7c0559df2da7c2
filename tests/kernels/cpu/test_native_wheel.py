"""The library that a wheel brings: its name is what the other machine looks for, and no compiler is asked."""

import importlib.util
import pathlib
import platform
import sys

import pytest

from pallas_kernels.cpu.native import build, kept, library, portable, toolchain
from tests.kernels.cpu.native_setup import needs_library

ROOT = pathlib.Path(__file__).parents[3]
MACHINES = tuple(portable.ISA_FLAGS)


@pytest.fixture
def cross(pretended, monkeypatch):
    """The shell script stands for zig as well."""
    command = lambda tag: (tag.split("_", 3)[3], (str(pretended / "c++"), "-target", tag))
    monkeypatch.setattr(portable, "compiler", command)
    monkeypatch.setattr(build, "HERE", pretended / "package")
    (pretended / "package").mkdir()
    return pretended


@pytest.mark.parametrize("machine", MACHINES)
def test_a_cross_compiled_library_is_found_on_its_machine_without_a_compiler(cross, monkeypatch, machine):
    made = portable.compile_into(build.HERE, f"manylinux_2_28_{machine}")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setenv("CXX", "/nonexistent")
    for here in MACHINES:
        monkeypatch.setattr(platform, "machine", lambda here=here: here)
        if here == machine:
            assert build.library().path == made
        else:
            with pytest.raises(toolchain.BuildError, match="is not a program on this machine"):
                build.library()


def test_a_compiler_of_this_machine_does_not_replace_a_prebuilt_library(cross, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    made = portable.compile_into(build.HERE, "manylinux_2_28_x86_64")
    (cross / "log").unlink()
    assert build.library().path == made and not (cross / "log").exists()
    assert build.library(prebuilt=False).path != made


@pytest.mark.parametrize("machine", MACHINES)
def test_every_instruction_set_is_in_a_wheel(machine):
    assert list(portable.ISA_FLAGS[machine]) == list(toolchain.isas(machine))


@pytest.mark.parametrize("tag", ["manylinux_2_28_riscv64", "manylinux2014_x86_64", "win_amd64", "macosx_14_0_arm64"])
def test_a_platform_without_kernels_is_refused_with_those_that_have_them(tag):
    with pytest.raises(toolchain.BuildError, match=f"platform {tag}; wanted manylinux_2_28_x86_64 or manylinux"):
        portable.compiler(tag)


def test_zig_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(toolchain.BuildError, match="pip install ziglang"):
        portable.compiler("manylinux_2_28_aarch64")


def test_a_manylinux_wheel_is_built_with_the_oldest_headers_and_zig(pretended, monkeypatch):
    """XLA refuses a library that was compiled with newer headers than its own."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    spec = importlib.util.spec_from_file_location("jattn_build_backend", ROOT / "setup.py")
    backend = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])  # it puts the checkout in front
    monkeypatch.chdir(ROOT)
    spec.loader.exec_module(backend)
    monkeypatch.setattr(backend.build_meta, "get_requires_for_build_wheel", lambda settings: [])
    portable_wheel = {"--build-option": "--plat-name=manylinux_2_28_aarch64"}
    headers, zig = backend.get_requires_for_build_wheel(portable_wheel)
    assert headers.startswith("jaxlib==") and zig.startswith("ziglang==")
    assert backend.get_requires_for_build_wheel() == [headers.replace("==", ">=")]
    monkeypatch.setenv("CXX", "/nonexistent")
    assert backend.get_requires_for_build_wheel() == []


@needs_library
def test_the_instruction_sets_are_those_that_the_system_reports():
    """By CPUID itself: a compiler's runtime library may know none (zig's does)."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("needs the processor's flags as Linux lists them")
    flags = set(cpuinfo.read_text().split())
    avx512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    needed = {"avx512_bf16": avx512 | {"avx512_bf16"}, "avx512": avx512, "avx2": {"avx2", "fma", "f16c"}}
    needed = {"amx_bf16": needed["avx512_bf16"] | {"amx_tile", "amx_bf16"}} | needed
    assert list(library.status().isas) == [isa for isa, wanted in needed.items() if wanted <= flags]


@needs_library
def test_the_status_says_where_the_library_is_from(monkeypatch):
    status = library.status()
    assert status.prebuilt == (pathlib.Path(status.path).parent == build.HERE)
    assert pathlib.Path(status.path).name.startswith(kept.PREFIX)
