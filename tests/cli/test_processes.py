"""The end of one of several processes."""

import threading
import time
import types

from jattn.cli import processes


def test_one_thread_alone_says_why_a_process_ends(monkeypatch, capsys):
    """A process whose options are wrong hears at the same moment that another one has refused them, too."""
    ended = threading.Event()
    monkeypatch.setattr(processes, "_ending", threading.RLock())
    monkeypatch.setattr(processes.os, "_exit", lambda code: (ended.set(), time.sleep(60)))
    group = types.SimpleNamespace(id=1, count=2, fail=lambda why: None)
    for end, why in ((processes._end, "process 0 has ended"), (processes._fail, ValueError("wrong"))):
        threading.Thread(target=end, args=(group, why), daemon=True).start()
        assert ended.wait(10)
    time.sleep(0.1)
    assert capsys.readouterr().err == "jattn: process 0 has ended; process 1 of 2 ends: start all of them again\n"
