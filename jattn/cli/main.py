"""`jattn COMMAND`: parses the arguments, runs the command, and prints expected errors in one line."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import jattn
from jattn.cli import bench, demo, doctor, explain, generate, models, plan, screen, serve

CLOSED_PIPE = 128 + 13
"""The exit code of a program that SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 if there was no error.

    If the reader of the output closes the pipe (jattn ... | head), the command ends without a message.
    """
    try:
        try:
            return _run(argv)
        finally:  # --help raises SystemExit
            _flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        _discard(sys.stderr)
        return CLOSED_PIPE
    except OSError as error:  # a full disk
        _discard(sys.stdout)
        print(f"jattn: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard(stream: Any) -> None:
    """Discard the buffer of the stream. Python would otherwise print an error when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command and its options."""
    parser = argparse.ArgumentParser(
        prog="jattn",
        description="Paged attention for JAX: inspect it, try it, measure it, serve a model with it.",
        epilog="`jattn COMMAND --help` shows a command's options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"jattn {jattn.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in (demo, generate, serve, bench, plan, explain, models, doctor):
        command.add(commands)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except screen.EXPECTED as error:
        print(f"jattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jattn: interrupted", file=sys.stderr)
        return 130
