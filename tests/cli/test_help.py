"""What the commands say about themselves is true."""

import argparse
import shlex
import sys

import pytest

from jattn import cli
from jattn.cli import bench
from jattn.cli.main import make_parser


def commands(parser, name="jattn"):
    """(name, parser) of every command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield f"{name} {word}", command
                yield from commands(command, f"{name} {word}")


COMMANDS = dict(commands(make_parser()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_and_shows_examples_that_parse(name):
    command = COMMANDS[name]
    assert command.description and command.description.endswith(".")
    examples = [line.strip() for line in command.epilog.splitlines() if line.startswith(f"  {name.split()[0]} ")]
    assert any(example.startswith(name) for example in examples)
    for example in examples:
        words = shlex.split(example.partition("|")[0])
        assert callable(make_parser().parse_args(words[1:]).run)


def shows_its_default(action):
    """Whether the help of an option with a value says what is taken without it."""
    return action.nargs == 0 or action.default in (None, [], argparse.SUPPRESS) or "default: " in (action.help or "")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_says_its_default(name):
    assert not [each.dest for each in COMMANDS[name]._actions if not shows_its_default(each)]


def test_no_command_is_a_sentence_that_lists_them(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jattn: there is no command: give one of demo, generate, serve, ") and "--help" in said


def test_a_program_outside_the_checkout_says_how_to_run_the_kernels_benchmarks(monkeypatch, capsys):
    """A console script does not see the packages of the working directory; python -m does."""
    for name in ("benchmarks", "benchmarks.run"):
        monkeypatch.setitem(sys.modules, name, None)
    for argv in (["kernels"], ["kernels", "--help"]):
        assert cli.main(["bench", *argv]) == 2
        assert "in the root of a checkout, run `python -m jattn bench" in capsys.readouterr().err


def test_bench_kernels_passes_every_option_on(monkeypatch):
    """The first one too, and --help: argparse would take them for options of jattn."""
    passed = []
    monkeypatch.setattr(bench, "_checkout", lambda module: argparse.Namespace(main=lambda rest: passed.append(rest)))
    for rest in (["--backend", "sdpa", "--write"], ["--help"], []):
        cli.main(["bench", "kernels", *rest])
        assert passed.pop() == rest


@pytest.mark.parametrize(
    ("argv", "usage", "said"),
    [
        (["generate", "--modl", "x"], "usage: jattn generate", "unrecognized arguments: --modl; did you mean --model?"),
        (["bench", "serving", "--mdel", "x"], "usage: jattn bench serving", "--mdel x; did you mean --model?"),
        (["doctor", "--xyzzy"], "usage: jattn doctor", "unrecognized arguments: --xyzzy\n"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(argv, usage, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    seen = capsys.readouterr().err
    assert end.value.code == 2 and usage in seen and said in seen


def test_a_file_that_is_not_there_is_named_without_a_number(tmp_path, capsys):
    assert cli.main(["generate", "--file", str(tmp_path / "none.txt")]) == 2
    assert capsys.readouterr().err == f"jattn: {tmp_path / 'none.txt'}: No such file or directory\n"
