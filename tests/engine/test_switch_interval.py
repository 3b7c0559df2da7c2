"""The interpreter's switch interval while a step of an engine runs, and afterwards."""

import sys
import threading

import pytest

from jattn.engine import switch_interval
from jattn.serve.engine_loop import EngineLoop
from tests.serve.running import make_engine, wait_until


@pytest.fixture(autouse=True)
def five_milliseconds():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_inside_and_as_before_after_the_last_has_left():
    with switch_interval.short:
        assert sys.getswitchinterval() == pytest.approx(switch_interval.SECONDS, abs=5e-6)
        inside, leave = threading.Event(), threading.Event()

        def other():
            with switch_interval.short:
                inside.set()
                leave.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
    assert sys.getswitchinterval() == pytest.approx(switch_interval.SECONDS, abs=5e-6)
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(0.005, abs=5e-6)


def test_an_exception_and_a_shorter_interval_of_the_program_are_kept():
    sys.setswitchinterval(0.0001)
    with pytest.raises(KeyError), switch_interval.short:
        assert sys.getswitchinterval() == pytest.approx(0.0001, abs=5e-6)
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(0.0001, abs=5e-6)


def test_the_interval_is_longer_while_a_server_runs():
    with switch_interval.short.in_server():
        with switch_interval.short:
            assert sys.getswitchinterval() == pytest.approx(switch_interval.SERVER_SECONDS, abs=5e-6)
        assert sys.getswitchinterval() == pytest.approx(0.005, abs=5e-6)
    with switch_interval.short:
        assert sys.getswitchinterval() == pytest.approx(switch_interval.SECONDS, abs=5e-6)


def test_a_servers_thread_says_so_until_it_ends():
    loop = EngineLoop(make_engine())
    loop.start()
    wait_until(lambda: switch_interval.short._num_servers == 1)
    loop.stop()
    loop.join()
    assert switch_interval.short._num_servers == 0
