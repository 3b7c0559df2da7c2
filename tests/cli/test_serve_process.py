"""`jattn serve` before it serves: it binds its address before it loads the model, and SIGTERM ends it with code 0."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest

from jattn import cli
from jattn.cli import options
from jattn.serve.server import BACKLOG, SPARE_FILES, backlog_of, bind, listen


@pytest.fixture
def loads_nothing(monkeypatch):
    monkeypatch.setattr(options, "make_engine", lambda args, **_: pytest.fail("the model was loaded"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "99999"], "port=99999 must be from 0 to 65535"),
        (["--port", "-1"], "port=-1 must be from 0 to 65535"),
        (["--host", ""], "every interface"),
        (["--host", "no such host"], "is not an address"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1, port 8000: Cannot assign requested address"),  # RFC 5737
    ],
)
def test_a_wrong_address_is_a_sentence_before_anything_loads(arguments, words, capsys, loads_nothing):
    assert cli.main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jattn: ") and words in said and said.count("\n") == 1


def test_a_port_that_is_taken_is_a_sentence_before_anything_loads(capsys, loads_nothing):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--port", port]) == 2
    said = capsys.readouterr().err
    wanted = f"jattn: cannot listen on 127.0.0.1, port {port}: Address already in use"
    assert said == f"{wanted}; take another port (0: any free one)\n"


@pytest.fixture
def limits(monkeypatch):
    """The limits of open files (soft, hard) of a process that has nothing but them."""
    found = dict(limits=(100, 100))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found["limits"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.update(limits=limits))
    return found


@pytest.mark.parametrize(
    ("before", "after", "backlog"),
    [
        ((1024, 10**6), (512 + SPARE_FILES + BACKLOG, 10**6), BACKLOG),
        ((1024, 1024), (1024, 1024), 1024 - 512 - SPARE_FILES),
        ((256, -1), (512 + SPARE_FILES + BACKLOG, -1), BACKLOG),
        ((10**5, 10**5), (10**5, 10**5), BACKLOG),
        ((-1, -1), (-1, -1), BACKLOG),
    ],
)
def test_a_server_may_open_a_file_for_each_connection_and_each_that_waits(limits, before, after, backlog):
    limits["limits"] = before
    assert (backlog_of(512), limits["limits"]) == (backlog, after)


def test_more_connections_than_files_are_a_sentence_before_anything_loads(limits, capsys, loads_nothing):
    assert cli.main(["serve", "--port", "0", "--max-connections", "4"]) == 2
    assert "ulimit -n), or take max_connections=3" in capsys.readouterr().err
    assert backlog_of(3) == 1


def test_a_port_belongs_to_the_first_of_two_servers_that_still_load(capsys, loads_nothing):
    with contextlib.ExitStack() as stack:
        (first,) = [stack.enter_context(each) for each in bind("127.0.0.1", 0)]
        assert cli.main(["serve", "--port", str(first.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_connections_that_have_ended_do_not_keep_a_port_from_the_next_server():
    with contextlib.ExitStack() as stack:
        (first,) = [stack.enter_context(each) for each in bind("127.0.0.1", 0)]
        listen([first])
        address = first.getsockname()
        with socket.create_connection(address, 5) as client:
            first.accept()[0].close()  # the server's end waits for late packets
            client.recv(1)
        first.close()
        second, third = (stack.enter_context(*bind(*address)) for _ in range(2))
        listen([second])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {address[1]}"):
            listen([third])


def test_every_address_of_a_host_is_bound_at_one_port_and_does_not_listen_yet():
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in bind("localhost", 0)]
        (port,) = {each.getsockname()[1] for each in sockets}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


COMPILES_FOR_EVER = """
import sys, time
from jattn import cli
from jattn.cli import options

def warm(engine):
    print("compiling", flush=True)
    time.sleep(3600)

options.make_engine, options.warm = lambda args, **_: None, warm
sys.exit(cli.main(["serve", "--port", "0"]))
"""


LOGS = """
import logging, sys
from jattn import cli
from jattn.cli import options

def make_engine(args, **_):
    for name in ("jax._src.xla_bridge", "jattn.serve"):
        logging.getLogger(name).info("an event")
    raise ValueError("the end")

options.make_engine = make_engine
sys.exit(cli.main(["serve", "--port", "0"]))
"""


def test_the_servers_log_has_its_own_events_and_of_other_packages_warnings():
    """JAX tells each platform that it does not find, such as a TPU, as an event that reads like an error."""
    command = [sys.executable, "-c", LOGS]
    said = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True).stderr
    event, end = said.splitlines()
    assert event.endswith("jattn.serve INFO an event") and end == "jattn: the end"


def test_sigterm_before_it_serves_ends_it_with_a_sentence_and_code_0():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command, pipe = [sys.executable, "-c", COMPILES_FOR_EVER], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "compiling\n"
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=250)
    assert child.returncode == 0
    assert said == "jattn: ended by SIGTERM\n"
