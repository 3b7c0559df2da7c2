"""`jattn models`: the families of models that load, with the options of config.json that each honours."""

import argparse

from jattn.cli import screen
from jattn.cli.command import add_command
from jattn.models.families import FAMILIES
from jattn.models.honoured import honoured_options


def add(commands) -> None:
    """Add the command to the parser."""
    help = "which families of models load, and the options that each honours"
    parser = add_command(commands, "models", help, ["jattn models", "jattn models | grep gemma"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one row per model_type."""
    rows = [(name, ", ".join(honoured_options(name))) for name in FAMILIES]
    plain = "\n".join(f"{name}: {options}" for name, options in rows)
    screen.table(("model_type", "options of config.json"), rows, plain=plain)
    return 0
