"""The prefetch distance of the decode kernel: on a simulated clock, the tuner finds the faster of two distances."""

import pathlib
import subprocess

import pytest

from pallas_kernels.cpu.native import toolchain

DRIVER = pathlib.Path(__file__).with_name("prefetch_tuner_driver.cc")


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """(cost of the worse distance over the better, noise, bytes of a unit) -> share of units at the better."""
    try:
        compiler = toolchain.compiler()
    except toolchain.BuildError as error:
        pytest.skip(str(error))
    program = tmp_path_factory.mktemp("prefetch_tuner") / "driver"
    build = [*compiler, *toolchain.BASE_FLAGS, f"-I{toolchain.SOURCES}", str(DRIVER), "-o", str(program)]
    subprocess.run(build, check=True)

    def run(*arguments) -> list[float]:
        found = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True)
        return [float(share) for share in found.stdout.split()]

    return run


@pytest.mark.parametrize(("worse", "noise"), [(1.3, 0.0), (1.2, 0.5), (1.08, 0.0)])
def test_the_faster_distance_is_found_and_found_again_when_it_changes(shares, worse, noise):
    """All units but the trials, one of sixteen, are read at the better distance."""
    assert shares(worse, noise, 1 << 20) == pytest.approx([15 / 16] * 4, abs=0.01)


def test_equal_distances_and_small_units_change_nothing(shares):
    """A difference of 2 % is below the threshold, and small units are not timed: the far distance stays."""
    assert shares(1.02, 0.0, 1 << 20) == pytest.approx([1 / 16, 15 / 16] * 2, abs=0.01)
    assert shares(2.0, 0.0, 1 << 10) == [0, 1, 0, 1]
