"""The page docs/arguments.md: every argument of Engine, SamplingParams and the command line, with its default."""

import argparse
import re
from collections.abc import Iterator

import jattn
from jattn.cli import make_parser
from jattn.cli.command import value_name
from website import reference, source

HEAD = """# Every argument and its default

Written by `docs/generate.py` from the signatures and from the command line's own parser.

## Engine

`jattn.Engine(config, params, ...)` takes the arguments below. `jattn.Engine.from_pretrained(directory, ...)` reads
`config`, `params`, `tokenizer` and `chat_template` from a folder and takes all the others.
"""
FOLDER = """
`from_pretrained` alone takes:
"""
SAMPLING = """
## SamplingParams

`jattn.SamplingParams(...)` takes keyword arguments only. [Serving](serving.md) gives the limits of each.
"""
COMMANDS = """
## The command line

`jattn COMMAND` and `python -m jattn COMMAND` are the same.
"""
_DEFAULT = re.compile(r"\(default: ([^);]*)(?:; ([^)]*))?\)|^default: ([^;]*)(?:; )?")
"""A help text's own words about the default, and what it says behind them."""


def arguments_page() -> str:
    """The page as Markdown. Raises where an argument of the engine or of sampling has no description."""
    of_engine = source.arguments(jattn.Engine)
    others = {"cls", "**options", *(field.name for field in of_engine)}
    of_folder = [field for field in source.arguments(jattn.Engine.from_pretrained) if field.name not in others]
    engine, folder = _described("Engine", of_engine), _described("Engine.from_pretrained", of_folder)
    sampling = _described("SamplingParams", source.arguments(jattn.SamplingParams))
    parts = [HEAD, *engine, FOLDER, *folder, SAMPLING, *sampling, COMMANDS]
    seen: dict[str, str] = {}  # table: the first command that has it
    for name, parser in _commands(make_parser()):
        parts += [f"### {name}", "", f"{_sentence(parser)}", ""]
        for title, rows in _tables(parser):
            table = "\n".join(reference.table(["option", "default", "meaning"], rows))
            same = seen.setdefault(table, name)
            if same == name:
                parts += [*([f"**{title}**", ""] if title else []), table, ""]
            else:
                parts += [f"**{title}**: as for `{same}`.", ""]
    return "\n".join(parts).rstrip() + "\n"


def _described(name: str, fields: list[source.Argument]) -> list[str]:
    if bare := [field.name for field in fields if not field.comment]:
        raise ValueError(f"{name}: write a comment beside {', '.join(bare)}, for docs/arguments.md")
    return reference.argument_table(fields)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of every command, those of a command's own commands behind it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, command in action.choices.items():
                command.description = command.description or helps.get(name)
                yield command.prog, command
                yield from _commands(command)


def _sentence(parser: argparse.ArgumentParser) -> str:
    text = reference.escaped(" ".join((parser.description or "").split()))
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _tables(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, rows) of each group of options; the groups that argparse makes by itself are one without a title."""
    found: dict[str, list[list[str]]] = {}
    for group in parser._action_groups:
        title = "" if group.title in ("options", "positional arguments") else _capital(group.title)
        found.setdefault(title, []).extend(_row(action) for action in group._group_actions if _is_shown(action))
    return ((title, rows) for title, rows in found.items() if rows)


def _is_shown(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction)


def _row(action: argparse.Action) -> list[str]:
    """The option with its value, its default (as the help text spells it, if it does), and its meaning."""
    help = action.help or ""
    told = _DEFAULT.search(help)
    if told:
        default = told[1] or told[3]
        help = _DEFAULT.sub(lambda match: f"({match[2]})" if match[2] else "", help)
    elif action.required and action.nargs != "*":
        default = "required"
    elif action.nargs == 0:
        default = "off"
    else:
        default = "" if action.default in (None, [], argparse.SUPPRESS) else str(action.default)
    value = value_name(action)
    takes_value = action.option_strings and action.nargs != 0
    names = ", ".join(f"{name} {value}" if takes_value else name for name in action.option_strings) or value
    return [reference.code(names), reference.escaped(default), reference.escaped(help.strip())]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
