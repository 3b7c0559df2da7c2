"""A command's parser: every command says what it does and shows examples."""

import argparse
import difflib
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


class Parser(argparse.ArgumentParser):
    """Refuses an unknown option with the usage of the command that was asked for, not with that of jattn."""

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            likely = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            hint = f"; did you mean {likely[0]}?" if likely else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


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
