"""Compiling every program before the first request, and trying whether one still runs."""

from collections.abc import Callable

import jax

from jattn.engine.batch import empty_batch
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Model, dispatch


def warm(model: Model, params, caches, shapes: StepShapes, progress: Callable[[int, int, str], None] | None = None):
    """(caches, number of programs): every bucket once.

    The first bucket twice: over new caches, and over such as a dispatch leaves. JAX tells the two apart on a GPU, and
    compiles for each.
    """
    todo = shapes.all()
    for done, shape in enumerate((*todo, todo[0])):
        if progress is not None and done < len(todo):
            progress(done, len(todo), f"{shape[0]} tokens of {shape[1]} requests")
        caches = _run(model, params, caches, shapes, shape)
    return caches, len(todo)


def probe(model: Model, params, caches, shapes: StepShapes):
    """New caches after the smallest program has run over them, as every other program knows caches; raises where the
    device, the weights or the model are broken."""
    return _run(model, params, caches, shapes, shapes.all()[0])


def _run(model: Model, params, caches, shapes: StepShapes, shape: tuple[int, int, bool]):
    """A batch of padding, which writes nowhere, computed to its end."""
    num_groups = len(model.config.cache_groups)
    caches, said, _ = dispatch(model, params, caches, empty_batch(shape, num_groups, shapes))
    jax.block_until_ready(said)
    return caches
