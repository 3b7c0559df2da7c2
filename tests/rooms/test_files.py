"""The house rules that a reader would check by eye: file sizes, who imports whom, what an import may do."""

import ast
import re
import subprocess
import sys

import pytest

from tests.rooms import tree

SOURCES = ("jattn/", "pallas_kernels/")


def ceiling(name: str) -> int:
    return 600 if name.startswith("pallas_kernels/") else 400


def test_no_file_outgrows_its_ceiling():
    """400 lines, a kernel 600, blank lines and comments included. Most files are half that long; a longer one usually
    holds a second noun."""
    lines = {tree.relative(p): len((tree.text(p) or "").splitlines()) for p in tree.files(".py", ".cc", ".h")}
    over = {name: count for name, count in lines.items() if count > ceiling(name)}
    assert not over


def test_no_tracked_file_names_a_machine_or_a_registry():
    """A path of one machine, or the host of a package registry, is wrong on every other machine."""
    places = r"/(?:wor[k]|tm[p]|roo[t]|far[m]|hom[e]|op[t]|User[s])/\w"
    hosts = r"py[p]i\.(?:org|python)|python[h]osted|registry\.np[m]|(?:deb|security)\.debia[n]\.org|files?:///\w"
    pattern = re.compile(rf"(?<![\w.~-])(?:{places})|{hosts}")
    found = []
    for path in tree.files():
        for number, line in enumerate((tree.text(path) or "").splitlines(), start=1):
            if match := pattern.search(line):
                found.append(f"{tree.relative(path)}:{number}: {match.group()}")
    assert not found


def test_the_kernels_import_nothing_of_the_house():
    """pallas_kernels stands alone: neither jattn nor flax, not even inside a function."""
    guilty = {}
    for path in tree.files(".py", under=("pallas_kernels/",)):
        names = tree.imported_modules(ast.parse(path.read_text()))
        if bad := {name for name in names if name.split(".")[0] in ("jattn", "flax")}:
            guilty[tree.relative(path)] = bad
    assert not guilty


def test_the_oracle_imports_numpy_only():
    """A witness that shares code with the accused proves nothing: numpy, the standard library, and itself."""
    allowed = {"numpy"} | set(sys.stdlib_module_names)
    guilty = {}
    for path in tree.files(".py", under=("tests/oracle/",)):
        tools = {"pytest", "hypothesis"} if path.name.startswith("test_") else set()
        names = tree.imported_modules(ast.parse(path.read_text()))
        own = {name for name in names if name.startswith("tests.oracle") or name.lstrip(".") != name}
        if bad := {name for name in names - own if name.split(".")[0] not in allowed | tools}:
            guilty[tree.relative(path)] = bad
    assert not guilty


def test_no_environment_variable_is_read_on_import():
    """What a library does must not depend on when it was imported."""
    found = []
    for path in tree.files(".py", under=SOURCES):
        for node in tree.run_on_import(ast.parse(path.read_text())):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            if names & {"environ", "getenv", "environb"}:
                found.append(f"{tree.relative(path)}:{node.lineno}")
    assert not found


def test_a_variable_read_in_a_default_argument_counts_as_on_import():
    """The checker itself bites: defaults, decorators, class bodies run on import; function bodies do not."""
    source = "import os\nclass A:\n  x = os.environ\ndef f(y=os.environ):\n  return os.environ\n"
    lines = [n.lineno for n in tree.run_on_import(ast.parse(source)) if getattr(n, "attr", "") == "environ"]
    assert lines == [3, 4]


@pytest.mark.parametrize("package", ["jattn", "pallas_kernels"])
def test_import_wakes_no_device(package):
    """JAX refuses to change its device count once a device is awake: after the import it must still agree."""
    program = f"import {package}, jax; jax.config.update('jax_num_cpu_devices', 2); print(jax.device_count())"
    clean = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr
