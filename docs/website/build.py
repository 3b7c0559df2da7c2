"""Assemble the site's source under site/source and let Sphinx write site/html.

The source mirrors the checkout, so that a relative link works on the site as it does in the checkout. README.md is
the front page. The API reference is written here from the docstrings.
"""

import fnmatch
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"

NAVIGATION = {  # caption: pages, without suffix; `*` takes every page that there is, in order of names
    "Guide": (
        "docs/attention_state",
        "docs/kv_layout",
        "docs/architecture",
        "docs/decode_loop",
        "docs/bring_your_own_model",
        "docs/models",
        "docs/serving",
    ),
    "Notebooks": ("notebooks/*",),
    "Reference": ("docs/arguments", "docs/families", "docs/support_matrix", "reference/index"),
    "Project": (
        "docs/performance",
        "docs/performance/*",
        "docs/notebook/*",
        "docs/how_to_add",
        "docs/vllm",
        "docs/parity",
        "CONTRIBUTING",
    ),
}


def written_pages() -> dict[str, Path]:
    """Path inside the site's source to file: every document and notebook of the checkout."""
    files = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(files)}


def unlisted(pages: list[str]) -> list[str]:
    """Pages that the navigation does not name."""
    patterns = [pattern for group in NAVIGATION.values() for pattern in group]
    stems = [page.rsplit(".", 1)[0] for page in pages]
    return [stem for stem in stems if not any(fnmatch.fnmatch(stem, pattern) for pattern in patterns)]


def front_page(pages: list[str]) -> str:
    """README.md, followed by the navigation, which the theme shows at the side."""
    stems = [page.rsplit(".", 1)[0] for page in pages]
    lines = [(ROOT / "README.md").read_text()]
    for caption, patterns in NAVIGATION.items():
        lines += [":::{toctree}", ":hidden:", f":caption: {caption}", ""]
        for pattern in patterns:
            exact = "*" not in pattern  # a page that is missing is left in, so that Sphinx says so
            lines += [pattern] if exact else [stem for stem in stems if fnmatch.fnmatch(stem, pattern)]
        lines += [":::", ""]
    return "\n".join(lines)


def assemble(source: Path) -> None:
    """Write the site's source."""
    from website import reference

    files = {name: path.read_text() for name, path in written_pages().items()} | reference.pages()
    for name, text in (files | {"index.md": front_page(list(files))}).items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(ROOT / "docs" / "pictures", source / "docs" / "pictures", dirs_exist_ok=True)


def build() -> int:
    """Build the site anew; the exit code of Sphinx, for which every warning is an error."""
    from sphinx.cmd.build import main

    shutil.rmtree(SITE, ignore_errors=True)
    assemble(SITE / "source")
    options = ["-b", "html", "-c", str(Path(__file__).parent), "-d", str(SITE / "doctrees")]
    code = main([*options, "--fail-on-warning", "--quiet", str(SITE / "source"), str(SITE / "html")])
    if code == 0:
        print(f"written: {(SITE / 'html' / 'index.html').relative_to(ROOT)}")
    return code
