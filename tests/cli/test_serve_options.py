"""`jattn serve` has the options of ServerOptions, and their defaults."""

import argparse

from jattn.cli import serve
from jattn.serve import ServerOptions


def test_the_commands_defaults_are_those_of_the_library():
    parser = argparse.ArgumentParser()
    serve.add(parser.add_subparsers())
    parsed = parser.parse_args(["serve"])
    args, options = vars(parsed), vars(ServerOptions())
    shared = set(args) & set(options) - {"model_name"}
    assert {name: args[name] for name in shared} == {name: options[name] for name in shared}
    own = {"model_name", "api_key", "allow_origins", "max_prompts", "max_inputs", "default_max_tokens"}
    assert set(options) - shared == own
