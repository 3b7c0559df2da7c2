"""Compiling every program before the first request, and trying whether one still runs."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from jattn.engine.batch import empty_batch
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Batch, Model, dispatch, following


def warm(model: Model, params, caches, shapes: StepShapes, progress: Callable[[int, int, str], None] | None = None):
    """(caches, number of programs): every bucket compiled, several at a time, and run once."""
    todo = shapes.all()
    # The first trace of a kernel imports parts of JAX that register settings. Settings are part of a program's name, so
    # what was traced before that would not be found again: the first program would be compiled anew in mid-serving.
    dispatch.lower(model, params, caches, _padding(model, shapes, todo[0]))
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jattn-compile") as pool:
        # Lowering is Python's work, one program after the other; compiling one leaves Python to lower the next.
        # A call of `dispatch` with arguments like these finds what was compiled here.
        lower = lambda shape: dispatch.lower(model, params, caches, _padding(model, shapes, shape))
        jobs = {pool.submit(lower(shape).compile): shape for shape in todo}
        for done, job in enumerate(as_completed(jobs)):
            job.result()
            if progress is not None:
                progress(done, len(todo), "{} tokens of {} requests".format(*jobs[job]))
    for shape in todo:
        caches = _run(model, params, caches, shapes, shape)
    return caches, len(todo)


def probe(model: Model, params, caches, shapes: StepShapes):
    """The caches after the smallest program has run; raises where the device, the weights or the model are broken."""
    return _run(model, params, caches, shapes, shapes.all()[0])


def _run(model: Model, params, caches, shapes: StepShapes, shape: tuple[int, int, bool]):
    """A batch of padding computed to its end, from arrays of the host and, decoding, from those that a dispatch leaves:
    where weights are bound to a device, so are the latter, and JAX compiles for them too."""
    batch = _padding(model, shapes, shape)
    caches, said, ahead = dispatch(model, params, caches, batch)
    if shape[2]:
        tables = [meta.block_table for meta in batch.metas]
        caches, said, _ = dispatch(model, params, caches, following(batch, ahead, tables))
    jax.block_until_ready(said)
    return caches


def _padding(model: Model, shapes: StepShapes, shape: tuple[int, int, bool]) -> Batch:
    """A batch that writes nowhere."""
    return empty_batch(shape, len(model.config.cache_groups), shapes)
