"""`jattn demo`: compares every backend with numpy, then serves a small model and checks every answer."""

import argparse

from jattn import demo
from jattn.cli import options
from jattn.cli.command import add_command
from jattn.embedded import show


def add(commands) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "demo",
        "compare every backend with numpy, then serve a small model and check its answers",
        ["jattn demo", "jattn demo --backends-only"],
        description="Compares every backend with numpy, then serves a small model and checks its answers. "
        "Exits with 0 if all agree. The first run on a machine compiles C++ kernels, which takes about 40 s more.",
    )
    parser.add_argument(
        "--backends-only", action="store_true", help="only the comparison with numpy, without the model"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if all agree."""
    if not args.backends_only:
        print("1 of 2: attention\n")
    wrong = demo.run()
    if not args.backends_only:
        print("\n2 of 2: a model served\n")
        wrong |= show.run(options.warm)
    return wrong
