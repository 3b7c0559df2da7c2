"""Ctrl-C and SIGTERM end a command wherever its main thread is; descriptors may be closed."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jattn.engine import warming
from jattn.engine.shapes import StepShape

ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}

LOADS = """
import ctypes, os, signal, sys, time
from jattn import cli
from jattn.cli import options, signals

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background begins with it ignored

class Dropping:
    def __del__(self):  # as in the garbage collector's callbacks: what is raised here is dropped
        os.kill(os.getpid(), {number})
        time.sleep(0.01)

def dropped():
    Dropping()
    time.sleep(3600)

def busy():
    signals.PATIENCE = 0.1
    signal.pthread_sigmask(signal.SIG_BLOCK, [{number}])  # another thread gets it, and no call is interrupted
    os.kill(os.getpid(), {number})
    ctypes.CDLL(None).sleep(3600)

options.make_engine = lambda args, **_: {where}()
sys.argv = ["jattn", *{command}]
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("number", "where", "command", "code", "sentence"),
    [
        (signal.SIGINT, "dropped", ["generate", "1+1="], 130, "jattn: interrupted\n"),
        (signal.SIGTERM, "dropped", ["serve", "--port", "0"], 0, "jattn: ended by SIGTERM\n"),
        (signal.SIGTERM, "busy", ["serve", "--port", "0"], 0, "jattn: ended by SIGTERM\n"),
    ],
)
def test_a_signal_ends_a_command_that_loads(number, where, command, code, sentence):
    script = LOADS.format(number=int(number), where=where, command=command)
    ended = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stderr, ended.stdout) == (code, sentence, "")


COMPILES = """
import os, signal, sys, threading
import jax, jax.numpy as jnp
from jattn import cli
from jattn.cli import options

signal.signal(signal.SIGINT, signal.default_int_handler)

def long_program(x):
    for i in range(300):
        x = jnp.sin(x @ x * i) + jnp.sort(x, 0)
    return x

def compiling(*_, **__):
    sys.stdout.write("part of a line")
    lowered = jax.jit(long_program).lower(jnp.ones((8, 8)))
    threading.Timer(0.3, os.kill, (os.getpid(), {number})).start()
    lowered.compile()

options.make_engine = compiling
sys.argv = ["jattn", *{command}]
sys.exit(cli.main())
"""


COMMANDS = [
    (signal.SIGINT, ["generate", "1+1="], 130, "jattn: interrupted\n"),
    (signal.SIGTERM, ["serve", "--port", "0"], 0, "jattn: ended by SIGTERM\n"),
]


@pytest.mark.parametrize(("number", "command", "code", "sentence"), COMMANDS)
def test_a_signal_ends_a_command_while_xla_compiles(number, command, code, sentence):
    """JAX raises at once and lets the compiler run on; Python's end took away what it used: exit code 139."""
    script = COMPILES.format(number=int(number), command=command)
    ended = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stderr, ended.stdout) == (code, sentence, "part of a line")


@pytest.mark.parametrize(("number", "command", "code", "sentence"), COMMANDS)
@pytest.mark.parametrize("closed", [["stdout"], ["stderr"], ["stdout", "stderr"]])
def test_a_signal_has_its_code_also_if_nobody_reads_the_output(number, command, code, sentence, closed):
    """Ctrl-C in `jattn ... | head`, SIGTERM when the reader of a log has ended. A broken pipe led to Python's end."""
    reader, writer = os.pipe()
    os.close(reader)
    script = COMPILES.format(number=int(number), command=command)
    out, err = (writer if name in closed else subprocess.PIPE for name in ("stdout", "stderr"))
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=ENVIRONMENT, text=True, timeout=250, stdout=out, stderr=err)
    os.close(writer)
    assert ended.returncode == code and ended.stderr == (None if "stderr" in closed else sentence)


def test_ctrl_c_ends_a_command_whose_output_nobody_reads_yet():
    """As in `jattn ... | less`: the main thread waits in flush()."""
    script = """
import os, signal, sys, threading
from jattn import cli
from jattn.cli import options

signal.signal(signal.SIGINT, signal.default_int_handler)

def talking(*_, **__):
    os.set_blocking(1, False)
    try:
        while True:
            os.write(1, bytes(4096))
    except BlockingIOError:
        os.set_blocking(1, True)
    sys.stdout.write("more")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    raise ValueError("it ends")

options.make_engine = talking
sys.argv = ["jattn", "generate", "1+1="]
sys.exit(cli.main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr and process.wait(250) == 130
        assert process.stderr.read() == "jattn: it ends\njattn: interrupted\n"


def test_closed_descriptors_give_an_error_that_does_not_go_to_stdout():
    """Of a service manager: stdin and stderr are closed. print(file=None) would write to stdout."""
    command = f"exec {sys.executable} -m jattn generate <&- 2>&-"
    ended = subprocess.run(["sh", "-c", command], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=250)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize("command", ["models", "--help", "generate x --max-tokens 2"])
def test_a_result_for_a_closed_stdout_is_an_error(command):
    """The shell's >&-. It was exit code 0, although nobody got the result."""
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m jattn {command} >&-"], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "jattn: the output cannot be written (stdout is closed): send it somewhere\n"


@pytest.mark.parametrize("command", ["generate x --model no-such-folder"])
def test_another_error_is_told_also_if_stdout_is_closed(command):
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m jattn {command} >&-"], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    assert ended.returncode == 2 and "no-such-" in ended.stderr and "closed" not in ended.stderr


def test_an_error_while_programs_compile_does_not_wait_for_the_others(monkeypatch):
    compiled, ended = [], threading.Event()

    class Pool(ThreadPoolExecutor):
        def __init__(self, *_, **__):
            super().__init__(1)

        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait=wait)

    class Programs:
        model = None

        def load(self, args):
            return False

        def lower(self, args):
            return args

        def compile(self, args, lowered):
            if compiled:
                ended.wait(60)
            compiled.append(lowered)

    class Shapes:
        def all(self):
            return [StepShape(n, n, True) for n in range(6)]

    def interrupt(done, total, what):
        raise KeyboardInterrupt

    monkeypatch.setattr(warming, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(warming, "_padding", lambda model, shapes, shape: shape)
    monkeypatch.setattr(warming, "_name", str)
    with pytest.raises(KeyboardInterrupt):
        warming.compile_all(Programs(), None, None, None, Shapes(), interrupt)  # type: ignore[arg-type]
    assert len(compiled) <= 2
