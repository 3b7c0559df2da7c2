"""Compiling every program before the first request, and checking that one still runs."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from jattn.engine.batch import empty_batch
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Model, dispatch


def warm(model: Model, params, caches, shapes: StepShapes, progress: Callable[[int, int, str], None] | None = None):
    """(caches, number of programs): every bucket compiled, several at a time, and run once.

    The first bucket runs twice: over new caches, and over caches that a dispatch returned. On a GPU, JAX compiles for
    each of the two.
    """
    todo = shapes.all()
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jattn-compile") as pool:
        # Lowering holds the GIL, compiling does not: one program is lowered while others compile.
        # A later call of `dispatch` with arguments of these shapes finds the compiled program.
        lower = lambda shape: dispatch.lower(model, params, caches, _padding(model, shapes, shape))
        jobs = {pool.submit(lower(shape).compile): shape for shape in todo}
        for done, job in enumerate(as_completed(jobs)):
            job.result()
            if progress is not None:
                progress(done, len(todo), "{} tokens of {} requests".format(*jobs[job]))
    for shape in (*todo, todo[0]):
        caches = _run(model, params, caches, shapes, shape)
    return caches, len(todo)


def probe(model: Model, params, caches, shapes: StepShapes):
    """The caches that the smallest program returns, run over new ones; raises where device, weights or model are
    broken. (On a GPU, JAX would compile again for caches that no program has returned.)"""
    return _run(model, params, caches, shapes, shapes.all()[0])


def _run(model: Model, params, caches, shapes: StepShapes, shape: tuple[int, int, bool]):
    """Run a batch of padding and wait for it."""
    caches, said, _ = dispatch(model, params, caches, _padding(model, shapes, shape))
    jax.block_until_ready(said)
    return caches


def _padding(model: Model, shapes: StepShapes, shape: tuple[int, int, bool]):
    """A batch that writes to no slot."""
    return empty_batch(shape, len(model.config.cache_groups), shapes)
