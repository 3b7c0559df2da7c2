"""Fixtures: a home folder with a fake compiler, and a native library with deliberate faults."""

import sys

import jax
import pytest

from pallas_kernels.cpu.native import build, library, toolchain

FAKE_COMPILER = """#!/bin/sh
# says
# Writes "made" to the file after -o. Links take JATTN_TEST_LINK_SECONDS; JATTN_TEST_LOG counts them.
case "$*" in *-shared*) echo link >> "$JATTN_TEST_LOG"; sleep "${JATTN_TEST_LINK_SECONDS:-0}";; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
exit 0
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A home folder of its own, with a shell script as the compiler; returns the folder."""
    if sys.platform == "win32":
        pytest.skip("a shell script stands for the compiler")
    fake = tmp_path / "c++"
    fake.write_text(FAKE_COMPILER)
    fake.chmod(0o755)
    for name in ("JATTN_CACHE_DIR", "XDG_CACHE_HOME", "JATTN_NATIVE", "JATTN_NATIVE_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    for name, value in {"HOME": tmp_path, "CXX": fake, "JATTN_TEST_LOG": tmp_path / "log", "TMPDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory, request):
    """The native library with the faults of mutants.h, in which allocations above 2 MiB fail. Its calls are registered
    beside the real ones, under names that end in _faulty."""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # one for all workers of pytest-xdist
        shared = shared.parent
    one_isa = {isa: flags for isa, flags in toolchain.isas().items() if isa in ("avx2", "neon")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JATTN_CACHE_DIR", str(shared / "faulty"))
        patch.setenv("JATTN_NATIVE_FLAGS", '-O0 -DJATTN_MUTANTS "-DJATTN_ALLOCATION_FAILS(bytes)=((bytes) > 2097152)"')
        patch.setattr(toolchain, "isas", lambda machine=None: one_isa)
        handle = build.library(prebuilt=False).load()
    for target, symbol in library._SYMBOLS.items():
        jax.ffi.register_ffi_target(f"{target}_faulty", jax.ffi.pycapsule(getattr(handle, symbol)), platform="cpu")
    return handle


@pytest.fixture
def faulty(faulty_library, monkeypatch):
    """Steps that are compiled during the test call the faulty library instead of the real one."""
    for name in (
        "ATTEND",
        "WRITE",
        "PRODUCT",
        "HEAD_PRODUCT",
        "PACKED_PRODUCT",
        "EXPERT_PRODUCT",
        "PACKED_EXPERT_PRODUCT",
        "DRAW",
        "FILL",
    ):
        monkeypatch.setattr(library, name, f"{getattr(library, name)}_faulty")
