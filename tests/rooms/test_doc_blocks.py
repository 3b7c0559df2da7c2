"""The code in docs/ runs, and its generated documents are up to date."""

import os
import re
import runpy
import subprocess
import sys

import pytest

import jattn
from jattn.backends import registry
from tests.rooms import tree

DOCUMENTS = tree.files(".md", under=("docs/",))
_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document) -> list[tuple[str, str]]:
    return _FENCE.findall(tree.text(document) or "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=tree.relative)
def test_every_code_block_runs_after_those_before_it(document, monkeypatch):
    """A fence is python, which is executed in the document's own namespace, or text."""
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))  # a document may register a backend
    space = {"__name__": tree.relative(document)}
    for number, (language, body) in enumerate(blocks(document)):
        assert language in ("python", "text"), f"block {number} is {language!r}: it would never be executed"
        if language == "python":
            exec(compile(body, f"{tree.relative(document)}, block {number}", "exec"), space)


def test_generated_documents_are_what_would_be_generated():
    documents = runpy.run_path(str(tree.ROOT / "docs" / "generate.py"))["documents"]()
    stale = [tree.relative(path) for path, text in documents.items() if tree.text(path) != text]
    assert not stale, "run `python docs/generate.py`"


def test_the_support_matrix_names_every_backend_and_every_feature():
    matrix = tree.text(tree.ROOT / "docs" / "support_matrix.md") or ""
    wanted = [f"`{name}`" for name in jattn.list_backends()] + [f.value for f in jattn.backends.Feature]
    assert not [name for name in wanted if name not in matrix]


def test_documents_are_generated_from_this_checkout_whatever_jattn_is_installed(tmp_path):
    (tmp_path / "jattn.py").write_text("raise SystemExit('the installed one')")
    command = [sys.executable, str(tree.ROOT / "docs" / "generate.py"), "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
