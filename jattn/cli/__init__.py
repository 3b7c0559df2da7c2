"""The command line: one file a command."""

from jattn.cli.main import main

__all__ = ["main"]
