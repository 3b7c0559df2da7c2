"""The command line: one file a command."""

from jattn.cli.main import main, make_parser

__all__ = ["main", "make_parser"]
