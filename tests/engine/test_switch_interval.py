"""The interpreter's switch interval while a step of an engine runs, and afterwards."""

import sys
import threading

import pytest

from jattn.engine import switch_interval


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
