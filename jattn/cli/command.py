"""A command's parser: every command says what it does and shows examples."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any


def value_name(action: argparse.Action) -> str:
    """What stands for the value of an option: its metavar, N for an integer, X for a number, else the option's name."""
    if isinstance(action.metavar, str):
        return action.metavar
    return {int: "N", float: "X"}.get(action.type, action.dest.upper())  # pyright: ignore[reportArgumentType]


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return value_name(action)


def add_command(
    commands: Any, name: str, help: str, examples: Sequence[str], *, description: str | None = None, notes: str = "",
    **options: Any,
) -> argparse.ArgumentParser:  # fmt: skip
    """Add a parser. help: for the list of commands; description: None for `help` as a sentence; notes: at the end.

    options: of ArgumentParser.
    """
    lines = [f"example{'s' * (len(examples) > 1)}:", *(f"  {example}" for example in examples)]
    return commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[:1].upper()}{help[1:]}.", 79),
        epilog="\n".join(lines) + (f"\n\n{notes}" if notes else ""),
        formatter_class=_HelpFormatter,
        **options,
    )
