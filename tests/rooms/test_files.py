"""Files of the tree: their size, what the wheel's sources may name and import, and what an import may do."""

import ast
import re
import subprocess
import sys

import pytest

from tests.rooms import tree

SOURCES = ("jattn/", "pallas_kernels/")
CEILING = 600


def test_no_source_file_outgrows_one_subject():
    """Most files have 60 to 200 lines. The ceiling is generous: a split that only obeys a number is worse than a long
    file."""
    lines = {tree.relative(p): len((tree.text(p) or "").splitlines()) for p in tree.files(".py", ".cc", ".h")}
    over = {name: count for name, count in lines.items() if count > CEILING}
    assert not over, f"above {CEILING} lines: a file this long holds a second subject; give that one a file: {over}"


def test_no_shipped_source_names_a_folder_of_one_machine():
    """A home, temporary or root folder written into the package is wrong where the wheel is installed."""
    folders = re.compile(r"(?<![\w.~-])/(?:work|tmp|root|farm|home|opt|Users)/\w")
    found = []
    for path in tree.files(under=SOURCES):
        for number, line in enumerate((tree.text(path) or "").splitlines(), start=1):
            if match := folders.search(line):
                found.append(f"{tree.relative(path)}:{number}: {match.group()}")
    assert not found


def test_the_oracle_imports_numpy_only():
    """Expected values come from code that shares nothing with the library: numpy, the standard library, itself."""
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
    """What the library does must not depend on when it was imported."""
    found = []
    for path in tree.files(".py", under=SOURCES):
        for node in tree.run_on_import(ast.parse(path.read_text())):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            if names & {"environ", "getenv", "environb"}:
                found.append(f"{tree.relative(path)}:{node.lineno}")
    assert not found


def test_a_variable_read_in_a_default_argument_counts_as_on_import():
    """The check finds defaults, decorators and class bodies, which run on import, and not function bodies."""
    source = "import os\nclass A:\n  x = os.environ\ndef f(y=os.environ):\n  return os.environ\n"
    lines = [n.lineno for n in tree.run_on_import(ast.parse(source)) if getattr(n, "attr", "") == "environ"]
    assert lines == [3, 4]


@pytest.mark.parametrize("package", ["jattn", "pallas_kernels"])
def test_an_import_starts_no_device(package):
    """JAX refuses to change its number of devices once one is started; after the import it must still accept it."""
    program = f"import {package}, jax; jax.config.update('jax_num_cpu_devices', 2); print(jax.device_count())"
    clean = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr
