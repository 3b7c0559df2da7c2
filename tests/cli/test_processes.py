"""The end of one of several processes."""

import signal
import threading
import time
import types

import pytest

from jattn.cli import processes, signals
from jattn.engine import interrupts


@pytest.fixture
def ends(monkeypatch):
    """The exit codes of processes that end, each of which is another event; what the others were told."""
    codes, told = [], []
    monkeypatch.setattr(processes, "_ending", threading.RLock())
    monkeypatch.setattr(processes, "_is_terminated", threading.Event())
    monkeypatch.setattr(processes.os, "_exit", lambda code: (codes.append(code), time.sleep(60)))
    signals.forget()
    yield types.SimpleNamespace(id=1, count=2, fail=told.append), codes, told
    signals.forget()


def begin(end, *arguments):
    threading.Thread(target=end, args=arguments, daemon=True).start()
    time.sleep(0.1)


def test_one_thread_alone_says_why_a_process_ends(ends, capsys):
    """A process whose options are wrong hears at the same moment that another one has refused them, too."""
    group, codes, told = ends
    begin(processes._end, group, "process 0 has ended")
    begin(processes._fail, group, ValueError("wrong"))
    assert codes == [1] and told == ["process 0 has ended"]
    assert capsys.readouterr().err == "jattn: process 0 has ended; process 1 of 2 ends: start all of them again\n"


@pytest.mark.parametrize(
    ("error", "code", "said", "others"),
    [
        (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
        (SystemExit(0), 0, "", "ended by SIGTERM"),  # of a server that loads; its handler has printed it
        (FileNotFoundError(2, "No such file", "x.txt"), 2, "x.txt: No such file", "x.txt: No such file"),
        (ValueError("two\nlines"), 2, "two\nlines", "two lines"),
    ],
)
def test_an_end_is_one_sentence_here_and_for_the_others(ends, capsys, error, code, said, others):
    group, codes, told = ends
    begin(processes._fail, group, error)
    assert codes == [code] and told == [f"process 1 has ended ({others})"]
    assert capsys.readouterr().err == (f"jattn: {said}\n" if said else "")


@pytest.fixture
def handlers():
    """The handlers of both signals are as before after the test."""
    before = {number: signal.getsignal(number) for number in signals.SENTENCES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("begins_with", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_sigterm_ends_process_0_between_two_steps(ends, handlers, capsys, begins_with):
    """Until a server handles it. JAX's own handler would let the command go on to its end."""
    group, codes, told = ends
    steps = []
    signal.signal(signal.SIGINT, begins_with)
    processes._end_after_sigterm()
    if begins_with is signal.SIG_IGN:
        signal.raise_signal(signal.SIGINT)  # is ignored as before
    with pytest.raises(KeyboardInterrupt) as interrupt:
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            steps.append("is complete")
    begin(processes._fail, group, interrupt.value)
    assert steps and codes == [143] and told == ["process 1 has ended (ended by SIGTERM)"]
    assert capsys.readouterr().err == "jattn: ended by SIGTERM\n"


@pytest.mark.parametrize(("handler", "code"), [(signals.exit_0, 0), (processes._terminate, 143)])
def test_a_busy_command_that_sigterm_ends_has_the_code_of_its_handler(ends, monkeypatch, handler, code):
    """Only a server has done its work then."""
    monkeypatch.setattr(signals.signal, "getsignal", lambda number: handler)
    begin(signals._end, signal.SIGTERM)
    assert ends[1] == [code]
