"""Every path and link in the documents exists, and the README's code runs."""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.rooms import tree

DOCUMENTS = [
    path
    for path in tree.files(".md")
    if tree.relative(path) in ("README.md", "CONTRIBUTING.md") or tree.relative(path).startswith("docs/")
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([^`\s]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def missing(document: Path) -> list[str]:
    """Paths that the document names and the checkout lacks.

    Inline code that starts with a top-level folder is a path: `tests/x.py::test_y` names a test in it, a `*`
    must match something, and of `jattn/backends/<name>.py` the part before the placeholder must exist. A link
    is relative to the document.
    """
    prose = _FENCE.sub("", tree.text(document) or "")
    tracked = [tree.relative(path) for path in tree.files()]
    folders = {parent.as_posix() for name in tracked for parent in Path(name).parents}
    absent = []
    for name in _NAMED.findall(prose):
        path, _, test = name.partition("::")
        if path.split("/")[0] not in tree.TOP_LEVEL or "/" not in path:
            continue
        stem = path.split("<")[0]
        stem = stem.rsplit("/", 1)[0] if stem != path else path.rstrip("/")
        known = stem in folders or any(fnmatch.fnmatch(other, stem) for other in tracked)
        if not known or (test and test.split("[")[0] not in (tree.text(tree.ROOT / path) or "")):
            absent.append(name)
    for target in _LINK.findall(prose):
        if "://" not in target and not target.startswith("mailto:") and not (document.parent / target).exists():
            absent.append(target)
    return absent


def python_blocks(document: Path) -> list[str]:
    return [body for language, body in _FENCE.findall(tree.text(document) or "") if language == "python"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=tree.relative)
def test_every_path_that_a_document_names_exists(document):
    assert not missing(document)


@pytest.mark.parametrize("number", range(len(python_blocks(tree.ROOT / "README.md"))))
def test_every_python_block_of_the_readme_runs(number):
    block = python_blocks(tree.ROOT / "README.md")[number]
    exec(compile(block, f"README.md, block {number}", "exec"), {"__name__": "readme"})


def test_a_dead_path_in_a_document_is_seen(tmp_path):
    """The check finds a dead path, a dead link and a test that does not exist."""
    document = tmp_path / "x.md"
    document.write_text(
        "`jattn/__init__.py` `jattn/<name>.py` `tests/rooms/test_docs.py::test_every_path_that`"
        " `jattn/gone.py` `nowhere/<name>.py` `tests/gone/<name>.py` `tests/rooms/*.txt` [link](gone.md)"
        " `tests/rooms/tree.py::test_gone`"
    )
    dead = [
        "jattn/gone.py",
        "tests/gone/<name>.py",
        "tests/rooms/*.txt",
        "tests/rooms/tree.py::test_gone",
        "gone.md",
    ]
    assert missing(document) == dead
