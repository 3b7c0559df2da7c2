"""Compiled programs on disk: what the next process loads, what switches it off, and that no broken cache stops it."""

import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import jax
import pytest

from jattn import cli, compile_cache
from jattn.engine import kept_programs
from pallas_kernels.cpu.native import library
from tests.kernels.cpu.native_setup import needs_library

SMALL = ["--num-blocks", "25", "--block-size", "4", "--max-num-seqs", "8", "--max-num-batched-tokens", "32"]
SMALL += ["--max-model-len", "64", "--deterministic"]
COMMAND = """
import json, os, pathlib, sys
from collections import Counter
import jax
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
def traced(event, duration, **tags):
    if event.endswith("jaxpr_trace_duration") and tags.get("fun_name") == "dispatch":
        events["traced"] += 1
jax.monitoring.register_event_duration_secs_listener(traced)
from jattn import cli
if os.environ.get("DISK_IS_FULL"):
    def write_some(path, data):
        with open(path, "wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")
    from jax._src import lru_cache
    lru_cache.pathlib.Path.write_bytes = write_some
code = cli.main(["generate", "740+583=", "--stop", "\\\\n", *sys.argv[1:]])
names = dict(asked="compile_requests_use_cache", loaded="cache_hits", stored="cache_misses", traced="traced")
print(json.dumps({name: events[event] for name, event in names.items()}))
sys.exit(code)
"""


def make_home(parent: pathlib.Path, patch: pytest.MonkeyPatch) -> pathlib.Path:
    for name in ("JATTN_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        patch.delenv(name, raising=False)
    folder = parent / "cache"
    folder.mkdir(mode=0o700)
    if library.status().available:
        pathlib.Path(shutil.copy(library.status().path, folder)).chmod(0o700)
    patch.setenv("JATTN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """JATTN_CACHE_DIR for one test, with the native library if there is one; the cache is on."""
    folder = make_home(tmp_path, monkeypatch)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)


def run(*arguments: str, backend: str = "sdpa", **variables: str) -> tuple[dict[str, int], str]:
    """(programs that JAX's cache was asked for, loaded and stored, and those traced; what it said on stderr) of a
    process that adds two numbers."""
    command = [sys.executable, "-c", COMMAND, *SMALL, "--backend", backend, *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    text, counts = done.stdout.splitlines()
    assert text == "2340"
    return json.loads(counts), done.stderr


def entries(folder: pathlib.Path, name: str = "") -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob(f"{name}*{compile_cache.ENTRY}"))


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of whole programs."""
    return sorted(folder.rglob(f"*{kept_programs.SUFFIX}"))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """(what a first process asked for and stored, its JATTN_CACHE_DIR, a copy of its programs)."""
    with pytest.MonkeyPatch.context() as patch:
        folder = make_home(tmp_path_factory.mktemp("first"), patch)
        seen, _ = run()
        return seen, folder, shutil.copytree(folder / "programs", folder.parent / "kept")


@pytest.fixture
def filled(home, first_run, monkeypatch):
    """(what a process before asked for and stored, its JATTN_CACHE_DIR): keys depend on the path."""
    seen, folder, kept = first_run
    shutil.rmtree(folder / "programs")
    shutil.copytree(kept, folder / "programs")
    monkeypatch.setenv("JATTN_CACHE_DIR", str(folder))
    return seen, folder


@needs_library
def test_the_second_process_compiles_nothing(home):
    """Also with custom calls of the native library in the programs."""
    before = os.umask(0)
    try:
        first, _ = run(backend="cpu_native")
    finally:
        os.umask(before)
    assert first["loaded"] == 0 and 0 < first["stored"] == first["asked"]
    (place,) = {path.parent for path in entries(home)}
    assert place == home / "programs" / compile_cache.processor()
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in (place, place.parent))
    second, said = run(backend="cpu_native")
    assert first["traced"] == len(kept(home)) > 0
    assert second == dict.fromkeys(("asked", "loaded"), first["asked"] - first["traced"]) | dict(stored=0, traced=0)
    assert said == ""


@pytest.mark.slow
def test_other_flags_of_xla_are_other_programs(filled):
    first, _ = filled
    other, _ = run(XLA_FLAGS="--xla_cpu_max_isa=SSE4_2")
    assert other["loaded"] == 0 and other["stored"] == first["stored"] > 0


def test_switched_off_nothing_is_stored(home):
    seen, said = run("--compile-cache-mb", "0")
    assert seen["loaded"] == seen["stored"] == 0 and said == "" and not (home / "programs").exists()


@pytest.mark.parametrize("switch", ["JATTN_COMPILE_CACHE", "JAX_ENABLE_COMPILATION_CACHE"])
def test_a_switch_turns_it_off(home, monkeypatch, caplog, switch):
    before = jax.config.jax_enable_compilation_cache
    if switch == "JATTN_COMPILE_CACHE":
        monkeypatch.setenv(switch, "0")
    else:  # JAX reads the variable when it is imported
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert compile_cache.enable() is None and switch in compile_cache.status().reason
        assert compile_cache.own_folder() is None and not (home / "programs").exists() and not caplog.text
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_a_switch_that_is_neither_0_nor_1_is_refused(home, monkeypatch):
    monkeypatch.setenv("JATTN_COMPILE_CACHE", "2")
    for use in (compile_cache.enable, compile_cache.status, compile_cache.own_folder):
        with pytest.raises(
            ValueError, match=r"JATTN_COMPILE_CACHE='2' in the environment must be 0 \(off\) or 1 \(on\)"
        ):
            use()
    for on in ("1", ""):
        monkeypatch.setenv("JATTN_COMPILE_CACHE", on)
        assert not compile_cache.switched_off()


def test_entries_that_jax_could_read_for_ever_are_removed(home):
    folder = compile_cache.enable()
    jax.config.update("jax_compilation_cache_dir", None)
    os.mkfifo(folder / "pipe-cache")
    (folder / "zeros-cache").symlink_to("/dev/zero")
    (folder / "program-cache").write_bytes(b"x")
    assert compile_cache.enable() == folder and [path.name for path in entries(folder)] == ["program-cache"]


@pytest.mark.slow
def test_a_cache_of_the_users_own_stays_and_is_not_limited(home, tmp_path, monkeypatch, capsys):
    own = tmp_path / "own"
    seen, _ = run(JAX_COMPILATION_CACHE_DIR=str(own), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert seen["stored"] > 0 and len(entries(own)) == seen["stored"] and not (home / "programs").exists()
    jax.config.update("jax_compilation_cache_dir", str(own))
    assert compile_cache.enable() == own and str(own) in compile_cache.status().reason
    assert cli.main(["generate", "x", *SMALL, "--compile-cache-mb", "5"]) == 2
    assert "give one of the two" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["", "programs", "programs/PROCESSOR"])
@pytest.mark.parametrize("how", ["linked", "writable by others", "a file", "of another user"])
def test_a_folder_that_others_could_write_is_not_used(home, tmp_path, monkeypatch, caplog, level, how):
    place = home / level.replace("PROCESSOR", compile_cache.processor())
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    match how:
        case "linked":
            place.rename(tmp_path / "elsewhere")
            place.symlink_to(tmp_path / "elsewhere")
        case "writable by others":
            place.chmod(0o770)
        case "a file":
            shutil.rmtree(place)
            place.write_text("")
        case "of another user":
            monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with caplog.at_level(logging.WARNING):
        assert compile_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None and "compiled programs are not kept on disk: " in caplog.text
    assert compile_cache.status().reason in caplog.text and not entries(tmp_path)


def test_a_full_disk_is_one_warning(home):
    counts, said = run(DISK_IS_FULL="1")
    assert said.count("writing the kept program") == 1 and "No space left" in said
    assert "No space left on device); the part that was written is removed; later failures are not shown\n" in said
    assert not entries(home), "what was cut off is removed"
    assert counts["loaded"] == 0 and "Traceback" not in said


def test_a_folder_that_cannot_be_made_is_one_warning(home, monkeypatch, caplog):
    (home / "file").write_text("")
    monkeypatch.setenv("JATTN_CACHE_DIR", str(home / "file" / "below"))
    assert compile_cache.enable() is None and compile_cache.own_folder() is None
    assert caplog.text.count("compiled programs are not kept on disk") == 1 and "Traceback" not in caplog.text


def test_a_disk_that_is_nearly_full_is_left_alone(home, monkeypatch, caplog):
    free = compile_cache.SPARE_BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, free))
    assert compile_cache.enable() is None and "63 MB are free, less than 64" in caplog.text


def test_damaged_programs_are_compiled_and_stored_again(filled):
    """Three programs, each damaged in another way."""
    first, home = filled
    shutil.rmtree(kept(home)[0].parent)  # else JAX's cache is not asked for the dispatch
    cut, changed, emptied = entries(home, "jit_dispatch") + entries(home, "jit_convert_element_type")[:2]
    cut.write_bytes(cut.read_bytes()[:-9])
    changed.write_bytes(b"MADE" + changed.read_bytes()[4:])
    emptied.write_bytes(b"")
    second, said = run(PYTHONWARNINGS="error::UserWarning")
    assert second["stored"] == 3 and second["loaded"] == first["asked"] - 3
    assert "; it is compiled again, 1 damaged file is removed; later failures are not shown\n" in said
    assert said.count("\n") == 1, "the first failure is one line; an empty entry is removed before it is read"
    third, said = run()
    assert third["loaded"] == first["asked"] - first["traced"] and third["traced"] == 0 and said == ""


def test_a_damaged_whole_program_is_not_loaded_but_compiled_and_kept_again(filled):
    first, home = filled
    for path in kept(home):
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    second, said = run()
    assert second["traced"] == second["stored"] == first["traced"] and said == ""
    third, said = run()
    assert third["traced"] == third["stored"] == 0 and said == ""


def test_once_it_is_on_the_status_tells_jattns_own_folder_from_a_users(home, tmp_path):
    before = jax.config.jax_persistent_cache_min_compile_time_secs, warnings.showwarning
    try:
        folder = compile_cache.enable()
        assert folder == home / "programs" / compile_cache.processor() == compile_cache.enable()
        found = compile_cache.status()
        assert compile_cache.users_folder() is None and (found.folder, found.reason) == (folder.parent, "")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        assert str(tmp_path / "own") in compile_cache.status().reason
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[0])
        warnings.showwarning = before[1]


def test_the_least_recently_used_go_first(tmp_path):
    for number, size in enumerate((300, 400, 500, 0)):
        path = tmp_path / f"{number}{compile_cache.ENTRY}"
        path.write_bytes(b"x" * size)
        os.utime(path, (1000 + number, 1000 - number))
    os.utime(tmp_path / f"0{compile_cache.ENTRY}", (2000, 900))
    (tmp_path / "link").symlink_to(tmp_path / f"1{compile_cache.ENTRY}")
    compile_cache.trim(tmp_path, 850)
    assert [path.name[0] for path in entries(tmp_path)] == ["0", "2"]


def test_the_folder_is_named_by_what_code_depends_on(monkeypatch):
    text = "processor\t: 0\nvendor_id\t: A\nflags\t\t: avx avx2\ncpu MHz\t\t: {}\n\nprocessor\t: 1\nflags\t\t: none\n"
    names = []
    for cpuinfo in (text.format(1), text.format(2), text.replace("avx2", "avx512f").format(1), ""):
        monkeypatch.setattr(pathlib.Path, "read_text", lambda self, cpuinfo=cpuinfo, **how: cpuinfo)
        names.append(compile_cache.processor())
    assert names[0] == names[1] and len(set(names)) == 3


def test_the_doctor_says_where_programs_are_and_how_many(home, monkeypatch, capsys):
    monkeypatch.setattr("jattn.demo.run", lambda: 0)
    assert cli.main(["doctor"]) == 0
    assert f"compiled programs: 0 of 0.0 MB in {home / 'programs'}" in capsys.readouterr().out
    (home / "programs" / compile_cache.processor() / "jit_f-1-cache").write_bytes(b"x" * (3 << 19))
    cli.main(["doctor"])
    assert "compiled programs: 1 of 1.5 MB" in capsys.readouterr().out
    monkeypatch.setenv("JATTN_COMPILE_CACHE", "0")
    cli.main(["doctor"])
    assert "compiled programs: not kept by jattn: switched off by JATTN_COMPILE_CACHE=0" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "5"])
def test_a_limit_is_a_number_of_megabytes(home, wrong):
    with pytest.raises(ValueError, match="max_mb=.* must be an integer, 0 or more"):
        compile_cache.enable(wrong)
    if wrong == -1:
        assert cli.main(["generate", "x", "--compile-cache-mb", "-1"]) == 2
