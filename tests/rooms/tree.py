"""The checkout as data for the tests of this room: files, their text, and what a module does on import."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("jattn", "pallas_kernels", "tests", "notebooks", "benchmarks", "docs", ".ci")


def files(*suffixes: str, under: tuple[str, ...] = ("",)) -> list[Path]:
    """Files of the checkout, tracked or about to be, by suffix (none: all) and top-level folder."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listing.returncode == 0:
        names = sorted({name for name in listing.stdout.decode().split("\0") if name})
        found = [ROOT / name for name in names]
    else:  # an unpacked archive
        found = [path for top in TOP_LEVEL for path in sorted((ROOT / top).rglob("*"))]
        found += sorted(ROOT.iterdir())
    return [
        path
        for path in found
        if path.is_file()
        and (not suffixes or path.suffix in suffixes)
        and any(relative(path).startswith(prefix) for prefix in under)
        and "__pycache__" not in path.parts
    ]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text(path: Path) -> str | None:
    """The file's text; None for a binary file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that is evaluated when the module is imported: not the bodies of functions and lambdas."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (*node.decorator_list, node.args):
                yield part
                yield from run_on_import(part)
        elif not isinstance(node, ast.Lambda):
            yield node
            yield from run_on_import(node)


def imported_modules(tree: ast.AST) -> set[str]:
    """Dotted names of everything imported anywhere in the module; a relative import keeps its leading dots."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found
