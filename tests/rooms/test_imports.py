"""Modules import each other in one direction, imports inside functions included."""

import ast
import graphlib
from collections.abc import Iterator

import pytest

from tests.rooms import tree


def imports(module: ast.AST, known: dict) -> Iterator[str]:
    """The known modules that this one imports, anywhere in its text."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield from (name for name in (submodule if submodule in known else node.module,) if name in known)


def graph() -> dict[str, set[str]]:
    """Module -> what it imports, for both packages."""
    modules = {}
    for path in tree.files(".py", under=("jattn/", "pallas_kernels/")):
        name = ".".join(path.relative_to(tree.ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = ast.parse(path.read_text())
    return {name: set(imports(module, modules)) - {name} for name, module in modules.items()}


def test_no_module_imports_itself_in_a_circle():
    found = graph()
    assert "jattn.backends.base" in found["jattn.backends.sdpa"], "the graph is read"
    graphlib.TopologicalSorter(found).prepare()  # CycleError names the circle


def test_a_circle_through_a_function_is_found():
    known = dict.fromkeys(("a", "b"))
    circle = {
        "a": set(imports(ast.parse("import b"), known)),
        "b": set(imports(ast.parse("def f():\n    from a import g"), known)),
    }
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(circle).prepare()
