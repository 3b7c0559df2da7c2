"""The documentation site as far as it can be checked without Sphinx: pages, names, arguments. See `make docs`."""

import importlib
import inspect
import re

import pytest

import jattn
from tests.rooms import tree

DOCUMENTS = [tree.ROOT / "README.md", tree.ROOT / "CONTRIBUTING.md", *tree.files(".md", under=("docs/",))]


@pytest.fixture
def website(monkeypatch):
    """The modules of docs/website by name."""
    monkeypatch.syspath_prepend(str(tree.ROOT / "docs"))
    return lambda name: importlib.import_module(f"website.{name}")


def test_the_navigation_names_every_page(website):
    build = website("build")
    pages = [tree.relative(path) for path in build.written_pages().values()]
    assert {tree.relative(path) for path in tree.files(".ipynb")} < {*pages}
    assert not build.unlisted(pages)
    assert build.unlisted(["docs/gone.md"]) == ["docs/gone"]


def test_every_public_name_is_on_the_contents_page_in_order_and_described(website):
    reference = website("reference")
    contents = reference.pages()["reference/index.md"]
    for package in reference.PACKAGES:
        names = importlib.import_module(package).__all__
        section = contents.split(f"## {package}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| \{py:\w+\}`(\w+) ", section, re.MULTILINE) == list(names)
        assert all(name in (*reference.targets(), *reference.packages()) for name in (f"{package}.{n}" for n in names))


def test_groups_are_the_comments_of_the_contents_page(website):
    groups = website("source").groups(jattn)
    assert [name for _, names in groups for name in names] == jattn.__all__
    assert all(title and names for title, names in groups)


def test_every_argument_of_the_engine_and_of_sampling_is_on_the_page(website):
    page = website("arguments").arguments_page()
    for section in (jattn.Engine, jattn.SamplingParams):
        table = page.split(f"## {section.__name__}\n")[1].split("\n## ")[0].split("\n`from_pretrained`")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE))
        wanted = inspect.signature(section).parameters
        assert list(rows) == list(wanted)
        for name, parameter in wanted.items():
            told = "required" if parameter.default is inspect.Parameter.empty else f"`{parameter.default!r}`"
            assert rows[name] == told
    names = set(inspect.signature(jattn.Engine.from_pretrained).parameters) - {"options"}
    assert all(f"\n| `{name}` |" in page for name in names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=tree.relative)
def test_every_name_of_jattn_in_a_document_exists(document, website):
    names = re.findall(r"`(jattn(?:\.\w+)+)(?:\([^`]*\))?`", tree.text(document) or "")
    assert not [name for name in names if not website("reference").exists(name)]


def test_a_name_that_does_not_exist_is_seen(website):
    exists = website("reference").exists
    assert exists("jattn.AttentionSpec.num_heads") and exists("jattn.AttentionState.empty") and exists("jattn.cli.main")
    assert not exists("jattn.gone") and not exists("jattn.AttentionSpec.gone") and not exists("gone")
