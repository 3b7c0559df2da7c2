"""Run problems on `pallas_tpu` in JAX's TPU interpreter: VMEM, semaphores and DMAs are simulated on CPU.

Memory that was not written is NaN there; reads out of bounds and a semaphore that is not zero at the end raise; races
between DMAs and the kernel are detected.
"""

from jax.experimental.pallas import tpu as pltpu

from jattn.device import Chip
from tests.problem import Problem
from tests.running import conform

V6E = Chip("tpu", "v6e")
SMALL = Problem(heads=4, kv_heads=2, head_dim=64, block_size=16, layout="HND", dtype="bfloat16")


def judge(problem: Problem, mode: str = "on_wait") -> None:
    """Checks the output against the witness, and that no race is found; mode: DMAs run when waited for, or at once."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    try:
        with pltpu.force_tpu_interpret_mode(params):
            conform(problem, "pallas_tpu")
        assert not races().races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def races():
    """The interpreter's race detector, as of its last run."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    found = interpret_pallas_call.races
    assert found is not None, "the kernel was not interpreted"
    return found
