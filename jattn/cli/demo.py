"""`jattn demo`: every backend against numpy, then a model served and every answer checked."""

import argparse

from jattn import demo
from jattn.cli import options
from jattn.embedded import show


def add(commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo", help="every backend checked against numpy; the embedded model served and checked"
    )
    parser.add_argument("--backends-only", action="store_true", help="leave the model out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 where all agrees."""
    wrong = demo.run()
    if not args.backends_only:
        print()
        wrong |= show.run(options.warm)
    return wrong
