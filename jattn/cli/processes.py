"""--coordinator, --num-processes, --process-id: a command that several processes run together."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from jattn.cli import options, screen, signals
from jattn.engine import LockStepEngine, Processes, keep_freed_memory
from jattn.errors import EngineDeadError

TIMEOUT = 30.0
"""The default of --process-timeout."""

_ending = threading.RLock()
"""Held by the thread that ends this process, so that its sentence is the only one."""

_is_terminated = threading.Event()
"""Set by SIGTERM in process 0: the KeyboardInterrupt that follows is not Ctrl-C."""

Command = Callable[[argparse.Namespace, Processes | None], int]


def add(parser: argparse.ArgumentParser) -> None:
    """The options. All processes get the same ones but for --process-id."""
    group = parser.add_argument_group(
        "several processes, each with its own devices; the product of the --*-parallel options counts them all"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="an address of process 0; any free port")
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="0 to N - 1; process 0 alone has results")
    group.add_argument(
        "--process-timeout", type=float, metavar="SECONDS",
        help=f"all processes end if one gives no sign of life for so long (default: {TIMEOUT:g})",
    )  # fmt: skip


def run(args: argparse.Namespace, command: Command) -> int:
    """Run the command alone, or as one of several processes: process 0 runs it, the others help until it ends."""
    given = [args.coordinator is not None, args.num_processes is not None, args.process_id is not None]
    if not any(given) and args.process_timeout is None:
        return command(args, None)
    if not all(given):
        raise ValueError(
            "--coordinator, --num-processes and --process-id belong together, and --process-timeout to them: give all "
            "three"
        )
    if "pooling" in args and options.serves_embeddings(args):
        raise ValueError(f"{args.model} is an embedding model, which one process serves; leave out --coordinator")
    keep_freed_memory()  # before JAX starts its threads
    processes = _join(args)
    try:
        if processes.leads:
            _end_after_sigterm()
            code = command(args, processes)
        else:
            code = _follow(args, processes)
        processes.leave()
    except BaseException as error:
        _fail(processes, error)
    return code


def _join(args: argparse.Namespace) -> Processes:
    seconds = TIMEOUT if args.process_timeout is None else args.process_timeout
    try:
        return Processes.join(args.coordinator, args.num_processes, args.process_id, seconds=seconds, on_end=_end)
    except OSError as error:
        print(f"jattn: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # a thread may wait in JAX, which would abort the process


def _follow(args: argparse.Namespace, processes: Processes) -> int:
    """What the other processes do. SIGTERM and Ctrl-C reach process 0, which ends all of them; a server lets requests
    finish. A second Ctrl-C ends this process."""

    def ask(number: int, frame: object) -> None:
        processes.ask_leader_to_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, ask)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in a shell's background
        signal.signal(signal.SIGINT, ask)
    with signals.left_to_others():
        engine = options.make_engine(args, processes=processes)
        assert isinstance(engine, LockStepEngine)
        engine.follow()
    return 0


def _fail(processes: Processes, error: BaseException) -> NoReturn:
    """Print the error, tell the others, and end at once: threads may wait for other processes for ever."""
    _ending.acquire()
    with contextlib.suppress(ValueError):  # not the main thread, which alone has signals
        for number in signals.SENTENCES:
            signal.signal(number, signal.SIG_IGN)  # another one would leave the lines below
    dead = next((each for each in (error, error.__cause__) if isinstance(each, EngineDeadError)), None)
    if dead is not None:
        _end(processes, str(dead))
    code, why = 1, " ".join(screen.told(error).split()) or type(error).__name__
    if isinstance(error, SystemExit):  # SIGTERM, which has printed its sentence
        code, why = int(error.code or 0), signals.SENTENCES[signal.SIGTERM]
    elif isinstance(error, KeyboardInterrupt):
        number = signal.SIGTERM if _is_terminated.is_set() else signal.SIGINT
        code, why = signals.say(number), signals.SENTENCES[number]
    elif isinstance(error, screen.EXPECTED):
        print(f"jattn: {screen.told(error)}", file=sys.stderr, flush=True)
        code = 2
    else:
        traceback.print_exception(error)
    processes.fail(f"process {processes.id} has ended ({why})")
    os._exit(code)


def _end_after_sigterm() -> None:
    """In process 0, until a server has its own handler: JAX has taken SIGTERM, and ignores it."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background, where Ctrl-C stays without effect
        signal.signal(signal.SIGINT, _interrupt_if_terminated)


def _terminate(number: int, frame: object) -> None:
    """Ends as after Ctrl-C, which waits for the end of a step."""
    _is_terminated.set()
    signal.raise_signal(signal.SIGINT)


def _interrupt_if_terminated(number: int, frame: object) -> None:
    if _is_terminated.is_set():
        raise KeyboardInterrupt


def _end(processes: Processes, why: str) -> NoReturn:
    """End this process, because it or another one failed."""
    _ending.acquire()
    ends = f"process {processes.id} of {processes.count} ends: start all of them again"
    print(f"jattn: {why}; {ends}", file=sys.stderr, flush=True)
    processes.fail(why)
    os._exit(1)
