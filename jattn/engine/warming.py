"""Compiling every program before the first request."""

from collections.abc import Callable

import jax

from jattn.engine.batch import empty_batch
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Model, dispatch


def warm(
    model: Model,
    params,
    caches,
    shapes: StepShapes,
    num_groups: int,
    progress: Callable[[int, int, str], None] | None = None,
):
    """(caches, number of programs): every bucket once, with a batch of padding that writes nowhere."""
    todo = shapes.all()
    for done, shape in enumerate(todo):
        if progress is not None:
            progress(done, len(todo), f"{shape[0]} tokens of {shape[1]} requests")
        caches, said, _ = dispatch(model, params, caches, empty_batch(shape, num_groups, shapes))
        jax.block_until_ready(said)
    return caches, len(todo)
