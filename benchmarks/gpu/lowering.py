"""Lowers programs for CUDA in processes without a GPU, and compiles them in threads.

Python lowers one program at a time, half a second each, so a benchmark of a hundred programs lowers them in processes
and compiles, which needs no Python, in threads of its own process. A function that is lowered takes and returns tuples
of arrays.
"""

import dataclasses
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import jax
from jax import export

PALLAS_CALL = "mosaic_gpu_v2"  # the custom call of a Mosaic kernel, which export does not promise to keep


def lowered(function: Callable, *shapes: jax.ShapeDtypeStruct) -> bytes:
    """The function, lowered for CUDA; what `compiled` takes."""
    checks = [export.DisabledSafetyCheck.custom_call(PALLAS_CALL)]
    exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*shapes)
    return pickle.dumps(dataclasses.replace(exported, _get_vjp=None))  # flatbuffers, its own format, is optional


def compiled(program: bytes, **options: Any) -> jax.stages.Compiled:
    """A lowered function, compiled for this process's device with these options of XLA."""
    exported = pickle.loads(program)
    return jax.jit(exported.call).lower(*exported.in_avals).compile(compiler_options=options or None)


def compiled_each(programs: dict[str, bytes]) -> dict[str, jax.stages.Compiled]:
    """Lowered functions by name, compiled."""
    return {name: compiled(program) for name, program in programs.items()}


class Compiler:
    """Lowers in processes, at once, and compiles in threads, on demand."""

    def __init__(self, processes: int, threads: int):
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes; this one has imported JAX already
        self.processes = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        self.threads = ThreadPoolExecutor(threads)

    def lower(self, make: Callable[..., dict[str, bytes]], *args) -> Future:
        """A future of make(*args), which gives lowered functions by name."""
        return self.processes.submit(make, *args)

    def compile(self, made: Future, how: Callable = compiled_each) -> Future:
        """A future of the same functions compiled."""
        return self.threads.submit(lambda: how(made.result()))

    def close(self) -> None:
        """Ends without what is not done yet."""
        self.processes.shutdown(wait=False, cancel_futures=True)
        self.threads.shutdown(wait=False, cancel_futures=True)
