"""Which files are loaded as the native library: none that another user can write, none that is truncated or changed."""

import logging
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from pallas_kernels import folders
from pallas_kernels.cpu.native import build, kept, library, toolchain
from tests.kernels.cpu.native_setup import needs_library

NOBODY = 65534


def found_in(place: pathlib.Path, **how) -> str | None:
    with folders.private(str(place)) as folder:
        found = kept.find(folder, **how)
    return found and found.path.name


def refused(monkeypatch, place: pathlib.Path, why: str) -> None:
    """Asserts that `private` refuses the folder, and that it is the library's reason as JATTN_CACHE_DIR."""
    with pytest.raises(folders.FolderError, match=why), folders.private(str(place)):
        pass
    monkeypatch.setenv("JATTN_CACHE_DIR", str(place))
    assert str(place) in library._load().reason


def test_a_switch_that_is_neither_0_nor_1_is_refused(monkeypatch):
    monkeypatch.setenv("JATTN_NATIVE", "off")
    with pytest.raises(ValueError, match=r"JATTN_NATIVE='off' in the environment must be 0 \(off\) or 1 \(on\)"):
        library._load()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(monkeypatch, pretended, mode):
    place = pretended / "shared"
    place.mkdir()
    place.chmod(mode)
    refused(
        monkeypatch,
        place,
        rf"can be written by others \(mode {mode:04o}\): .* name a folder of your own with mode 0700",
    )


def test_a_symbolic_link_is_refused_even_to_a_folder_of_ones_own(pretended, monkeypatch):
    (pretended / "own").mkdir(mode=0o700)
    (pretended / "link").symlink_to(pretended / "own")
    refused(monkeypatch, pretended / "link", "is a symbolic link or no folder")
    refused(monkeypatch, pretended / "c++", "is a symbolic link or no folder")


def test_a_folder_of_somebody_else_is_refused(pretended, monkeypatch):
    place = pretended / "theirs"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    refused(monkeypatch, place, rf"belongs to user {place.stat().st_uid}, not to {NOBODY}")


def test_a_folder_is_made_for_its_owner_alone_whatever_the_umask(pretended):
    before = os.umask(0)
    try:
        made = build.library().path
    finally:
        os.umask(before)
    for path in (made, made.parent, made.parent.parent):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("asked", ["cache", "./cache", "~/cache"])
def test_a_relative_folder_is_refused(pretended, monkeypatch, asked):
    monkeypatch.setenv("JATTN_CACHE_DIR", asked)
    monkeypatch.chdir(pretended)
    with pytest.raises(toolchain.BuildError, match="is not an absolute path"):
        build.library()
    assert not (pretended / "cache").exists()


def test_a_relative_cache_home_is_ignored_as_its_standard_says(pretended, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.chdir(pretended)
    assert build.library().path.parent == pretended / ".cache" / "jattn" and not (pretended / "cache").exists()


def temporary(pretended, made: pathlib.Path) -> bool:
    return made.exists() and made.parent.parent == pretended and made.parent.name.startswith("jattn-")


def test_a_user_without_a_home_gets_a_private_temporary_folder(pretended, monkeypatch):
    """As in a container whose user id is in no passwd file: '~' is then not expanded."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(pretended)
    assert temporary(pretended, build.library().path) and not (pretended / "~").exists()


def test_a_home_that_cannot_be_written_is_no_error(pretended, monkeypatch):
    monkeypatch.setenv("HOME", str(pretended / "c++"))  # a file: not even root can make a folder below it
    made = build.library().path
    assert temporary(pretended, made) and made.parent.stat().st_mode & 0o077 == 0, "others can write there"


def test_a_full_cache_gives_way_to_a_temporary_folder(pretended, monkeypatch):
    real, full = os.rename, pretended / ".cache"

    def rename(*args, src_dir_fd, dst_dir_fd):
        if os.path.samestat(os.fstat(dst_dir_fd), os.stat(full / "jattn")):
            raise OSError(28, "No space left on device")
        return real(*args, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", rename)
    assert temporary(pretended, build.library().path)


def test_a_planted_temporary_folder_is_passed_over_for_a_fresh_one(pretended, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(pretended / "c++"))
    planted = pretended / f"jattn-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        made = build.library().path
    assert made.parent != planted and temporary(pretended, made) and not os.listdir(planted)
    assert f"{planted} can be written by others" in caplog.text


@pytest.mark.parametrize("damage", ["cut off", "emptied", "changed", "of others", "linked"])
def test_a_damaged_library_is_built_anew_and_never_taken(pretended, damage, monkeypatch, caplog):
    made = build.library().path
    match damage:
        case "cut off":
            made.write_bytes(made.read_bytes()[:-1])
        case "emptied":
            made.write_bytes(b"")
        case "changed":
            made.write_bytes(b"MADE\n")
        case "of others":
            made.chmod(0o770)
        case "linked":
            made.rename(pretended / "elsewhere.so")
            made.symlink_to(pretended / "elsewhere.so")
    with caplog.at_level(logging.WARNING):
        again = build.library()
    assert again.path == made and made.read_text() == "made\n" and not made.is_symlink()
    assert made.stat().st_mode & 0o077 == 0 and (pretended / "log").read_text() == "link\n" * 2
    assert f"{made} is passed over" in caplog.text
    made.write_bytes(b"")
    monkeypatch.setenv("CXX", str(pretended / "nothing"))
    with pytest.raises(toolchain.BuildError, match="is not a program on this machine"):
        build.library()


def test_a_build_that_is_killed_leaves_nothing_that_is_loaded(pretended):
    """A build killed while it stores the library leaves a temporary file; the next build removes it."""
    code = (
        "import os, signal\n"
        "from pallas_kernels.cpu.native import build\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "build.library()"
    )
    root = pathlib.Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=250, check=False)
    place = pretended / ".cache" / "jattn"
    assert killed.returncode == -9 and [n for n in os.listdir(place) if n.startswith(".unfinished-")]
    assert found_in(place) is None
    made = build.library().path
    assert sorted(os.listdir(place)) == sorted([made.name, kept.LOCK]) and made.read_text() == "made\n"


def test_only_a_library_of_these_sources_that_xla_serves_is_taken(pretended, monkeypatch):
    """XLA calls libraries that were compiled against its major version and at most its minor version."""
    made, content = build.library().path, b"made\n"
    digest = made.stem.split("-")[-1]
    place = pretended / "place"
    place.mkdir(mode=0o700)

    def put(sources: str, ffi: str) -> str:
        path = place / f"{kept.PREFIX}{sources}-ffi{ffi}-0123abcd-{digest}.so"
        path.write_bytes(content)
        path.chmod(0o700)
        return path.name

    sources = toolchain.source_hash()
    monkeypatch.setattr(toolchain, "ffi_version", lambda: (0, 3))
    put(sources, "0.4"), put(sources, "1.3"), put("0123456789abcdef", "0.3")
    shutil.copy(made, place / "libjattn_cpu-own.so")
    assert found_in(place) is None
    for ffi in ("0.1", "0.3"):
        assert found_in(place) != put(sources, ffi) == found_in(place)
    assert found_in(place, compiler="0123abcd") and found_in(place, compiler="another0") is None
    monkeypatch.setenv("JATTN_NATIVE_FLAGS", "-fsanitize=undefined")
    assert found_in(place) is None, "other flags need another library"


@needs_library
def test_what_is_loaded_is_the_file_that_was_verified(tmp_path):
    """Replacing the file between the check and the load has no effect."""
    real = pathlib.Path(library.status().path)
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    copy = pathlib.Path(shutil.copy(real, place))
    copy.chmod(0o700)
    with folders.private(str(place)) as folder:
        found = kept.find(folder)
    assert found and found.path == copy
    copy.unlink()
    copy.write_bytes(b"something else")
    assert found.load().jattn_isas
