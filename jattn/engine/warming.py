"""Loads or compiles all programs before the first request, and runs one to check the device."""

import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed

import jax

from jattn.backends import registry
from jattn.engine.batch import empty_batch, packed_batch
from jattn.engine.dispatch import Model, RowState
from jattn.engine.packing import Packed
from jattn.engine.programs import Programs
from jattn.engine.shapes import StepShape, StepShapes


def compile_all(
    programs: Programs, params, caches, row_state: RowState, shapes: StepShapes,
    progress: Callable[[int, int, str], None] | None = None, interrupted: threading.Event | None = None,
):  # fmt: skip
    """Load or compile the programs of all buckets in parallel, then run each once: (caches, row_state, number of
    programs). CancelledError soon after `interrupted` is set."""
    _import_backends()
    args = {shape: (params, caches, row_state, _padding(programs.model, shapes, shape)) for shape in shapes.all()}
    done = itertools.count()

    def go_on() -> None:
        if interrupted is not None and interrupted.is_set():
            raise CancelledError

    def lower(shape: StepShape) -> jax.stages.Lowered:
        go_on()
        return programs.lower(args[shape])

    def compile(shape: StepShape, lowered: jax.stages.Lowered) -> None:
        go_on()
        programs.compile(args[shape], lowered)

    def report(shape: StepShape) -> None:
        if progress is not None:
            progress(next(done), len(args), _name(shape))

    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jattn-compile") as pool:
        try:
            to_compile = []
            for shape, is_loaded in zip(args, pool.map(programs.load, args.values()), strict=True):
                if is_loaded:
                    report(shape)
                else:
                    to_compile.append(shape)
            # Lowering holds the GIL and compiling does not: one program is lowered while others compile. What
            # compiles longest comes first: the programs of prompts, and of each kind the largest.
            to_compile.sort(key=lambda shape: (shape.is_decode, -shape.num_tokens))
            with _garbage_collector_off():
                jobs = {pool.submit(compile, each, lower(each)): each for each in to_compile}
            for job in as_completed(jobs):
                job.result()
                report(jobs[job])
        except BaseException:  # an error or Ctrl-C: do not compile the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for shape in shapes.all():
        caches, row_state = _run(programs, params, caches, row_state, shapes, shape)
    return caches, row_state, len(args)


def _import_backends() -> None:
    """Import the modules of all backends, as the first trace of a model would.

    They import modules of JAX that register settings, and settings are part of the key by which JAX finds a compiled
    program. A program traced before such an import is not found afterwards. If a model's own `forward` imports such
    modules while it is traced, the first program is compiled twice.
    """
    for name in registry.list_backends():
        registry.load(name)


@contextlib.contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off.

    It took 12 % of the time to trace and lower: it visits all objects of the traces again and again, and frees few.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def probe(programs: Programs, params, caches, row_state: RowState, shapes: StepShapes):
    """Run the smallest program: (caches, row_state). It raises if the device, the weights or the model fail."""
    return _run(programs, params, caches, row_state, shapes, shapes.all()[0])


def _run(programs: Programs, params, caches, row_state: RowState, shapes: StepShapes, shape: StepShape):
    """Run a batch of padding and wait for it."""
    args = params, caches, row_state, _padding(programs.model, shapes, shape)
    caches, sampled, row_state = programs.of(args)(*args)
    jax.block_until_ready(sampled)
    return caches, row_state


def _name(shape: StepShape) -> str:
    """What a program computes, for a progress bar."""
    with_prefix = " with a shared prefix" if shape.shares_prefix else ""
    return f"{shape.num_tokens} tokens of {shape.num_rows} requests{with_prefix}"


def _padding(model: Model, shapes: StepShapes, shape: StepShape) -> Packed:
    """A batch that writes to no slot."""
    batch = empty_batch(shape, len(model.config.cache_groups), shapes)
    return packed_batch([batch] * model.data_ranks, shapes)
