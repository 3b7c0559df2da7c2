"""`jattn COMMAND`: parses the arguments, runs the command, and prints expected errors in one line."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

import jattn
from jattn.cli import bench, demo, doctor, explain, generate, models, plan, screen, serve, signals
from jattn.cli.command import Parser
from jattn.errors import EngineDeadError

CLOSED_PIPE = 128 + 13
"""The exit code of a program that SIGPIPE ends."""

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)
"""What writing to a full disk gives, and to a stdout that is closed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 if there was no error. argv: None: of this process, which ends then.

    If the reader of the output closes the pipe (jattn ... | head), the command ends without a message.
    """
    signals.forget()
    code = _run_and_flush(argv)
    if argv is None and signals.is_said():
        signals.end()
    return code


def _run_and_flush(argv: Sequence[str] | None) -> int:
    try:
        signals.open_missing()
        with contextlib.nullcontext() if argv is not None else signals.watched():
            try:
                return _run(argv)
            finally:  # --help raises SystemExit
                _flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        _discard(sys.stderr)
        return CLOSED_PIPE
    except OSError as error:  # a full disk, or stdout is closed
        return _unwritten(error)
    except KeyboardInterrupt:  # the reader of the output is slow, so Ctrl-C came while it was flushed
        return signals.say(signal.SIGINT)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard(stream: Any) -> None:
    """Discard the buffer of the stream. Python would otherwise print an error when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def make_parser() -> Parser:
    """The parser of every command and its options."""
    parser = Parser(
        prog="jattn",
        description="Paged attention for JAX: inspect it, try it, measure it, serve a model with it.",
        epilog="`jattn COMMAND --help` shows a command's options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"jattn {jattn.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in (demo, generate, serve, bench, plan, explain, models, doctor):
        command.add(commands)
    parser.set_defaults(run=lambda args: _refuse_nothing(list(commands.choices)))
    return parser


def _refuse_nothing(names: list[str]) -> NoReturn:
    raise ValueError(f"there is no command: give one of {', '.join(names)}; see jattn --help")


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = make_parser().parse_args(argv)
        return args.run(args)
    except BrokenPipeError:
        raise
    except screen.EXPECTED as error:
        if isinstance(error, OSError) and error.errno in UNWRITTEN and error.filename is None:  # of print, mostly
            return _unwritten(error)
        print(f"jattn: {screen.told(error)}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if not screen.is_of_transfer_guard(error):
            raise
        names = [name for name in os.environ if name.startswith("JAX_TRANSFER_GUARD")]
        guards = ", ".join(f"{name}={os.environ[name]}" for name in names) or "jax_transfer_guard"
        print(
            f"jattn: {guards} forbids transfers between host and device, which this command needs: allow them",
            file=sys.stderr,
        )
        return 2
    except EngineDeadError as error:  # the log has its traceback
        print(f"jattn: the engine is broken: {screen.told(error)}", file=sys.stderr)
        return 1
    except SystemExit as ended:
        if not signals.is_said():  # of a parser
            raise
        return int(ended.code or 0)
    except KeyboardInterrupt:
        return signals.say(signal.SIGINT)


def _unwritten(error: OSError) -> int:
    _discard(sys.stdout)
    why = f"({error.strerror}): free space where it goes, or send it elsewhere"
    if error.errno == errno.EBADF:
        why = "(stdout is closed): send it somewhere"
    with contextlib.suppress(OSError):  # stderr may be the same file
        print(f"jattn: the output cannot be written {why}", file=sys.stderr)
    return 2
