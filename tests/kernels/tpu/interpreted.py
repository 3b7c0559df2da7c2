"""Run problems on `pallas_tpu` in JAX's TPU interpreter: VMEM, semaphores and DMAs are simulated on CPU.

Memory that was not written is NaN there; reads out of bounds raise; races between DMAs and the kernel are detected.
Of a semaphore that is not zero at the end the interpreter only prints a line, which `judge` looks for.
"""

import contextlib
import io

import jax
from jax.experimental.pallas import tpu as pltpu

from jattn.device import Chip
from tests.problem import Problem
from tests.running import conform, run

V6E = Chip("tpu", "v6e")
SMALL = Problem(heads=4, kv_heads=2, head_dim=64, block_size=16, layout="HND", dtype="bfloat16")


def judge(problem: Problem, mode: str = "on_wait", check=conform) -> None:
    """Checks the output against the witness, the semaphores, and that no race is found."""
    with judged(mode):
        check(problem, "pallas_tpu")


@contextlib.contextmanager
def judged(mode: str = "on_wait"):
    """Interprets what runs inside; AssertionError on a race or a semaphore that is not zero at the end.

    mode: DMAs run when waited for, or at once.
    """
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), pltpu.force_tpu_interpret_mode(params):
            yield
        assert "has non-zero count" not in printed.getvalue(), f"semaphore: {printed.getvalue()}"
        assert not races().races_found, "race"
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def only_run(problem: Problem, backend: str) -> None:
    """A check that compares nothing."""
    jax.block_until_ready(run(problem, backend))


def races():
    """The interpreter's race detector, as of its last run."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    found = interpret_pallas_call.races
    assert found is not None, "the kernel was not interpreted"
    return found
