"""`jattn COMMAND`: the parser, and errors in one sentence."""

import argparse
import sys
from collections.abc import Sequence

import jattn
from jattn.cli import bench, demo, doctor, explain, generate, serve
from jattn.errors import CacheFullError, UnsupportedError

EXPECTED = (ValueError, OSError, ImportError, UnsupportedError, CacheFullError)
"""What a user can cause: told in a sentence, without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 when it found nothing wrong."""
    parser = argparse.ArgumentParser(
        prog="jattn",
        description="Paged attention for JAX: look at it, try it, measure it, serve a model with it.",
        epilog="`jattn COMMAND --help` shows a command's options and an example.",
    )
    parser.add_argument("--version", action="version", version=f"jattn {jattn.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in (demo, generate, serve, bench, explain, doctor):
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except EXPECTED as error:
        print(f"jattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jattn: interrupted", file=sys.stderr)
        return 130
