"""A home and a compiler for tests of how the native library comes about."""

import sys

import pytest

FAKE_COMPILER = """#!/bin/sh
# says
# Takes its time to link where it is told to; writes what it was asked to write.
case "$*" in *-shared*) echo link >> "$JATTN_TEST_LOG"; sleep "${JATTN_TEST_LINK_SECONDS:-0}";; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
exit 0
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A home of its own, where a script stands for the compiler."""
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
