"""Lists of names on command lines, such as --only a,b. A name that is not known is an error, not an empty run."""

import argparse
from collections.abc import Callable, Iterable


def listed(parser: argparse.ArgumentParser, option: str, text: str) -> list[str]:
    """The names in `text`, separated by commas, each once; none if the text is empty.

    Spaces around a name do not count, and several within one count as one.
    """
    found = names_in(text)
    if text and not found:
        parser.error(f"{option}: {text!r} has no name")
    return found


def names_in(text: str) -> list[str]:
    """`listed`, of which none is an answer, too."""
    return list(dict.fromkeys(name for part in text.split(",") if (name := " ".join(part.split()))))


def matching(
    parser: argparse.ArgumentParser, option: str, text: str, names: Iterable[str], what: str,
    fits: Callable[[str, str], bool] = lambda part, name: part in name,
) -> list[str]:  # fmt: skip
    """The names that a part in `text` fits, all if it is empty; a part that fits none is an error."""
    parts, names = listed(parser, option, text), list(names)
    if unknown := [part for part in parts if not any(fits(part, name) for name in names)]:
        parser.error(f"{option}: no {what} for {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if not parts or any(fits(part, name) for part in parts)]


def known(parser: argparse.ArgumentParser, option: str, text: str, names: Iterable[str], what: str) -> list[str]:
    """`listed`, all of which are in `names`. what: a word for one, for the error."""
    found, names = listed(parser, option, text), list(names)
    if unknown := [name for name in found if name not in names]:
        parser.error(f"{option}: no {what} {', '.join(unknown)}; there are {', '.join(names)}")
    return found
