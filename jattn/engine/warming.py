"""Compiling every program before the first request."""

from collections.abc import Callable

import jax
import numpy as np

from jattn.engine import sampling
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
    rows_told = sorted({rows for _, rows, _ in todo})
    total = len(todo) + len(rows_told)
    logits = {}
    for done, shape in enumerate(todo):
        if progress is not None:
            progress(done, total, f"{shape[0]} tokens of {shape[1]} requests")
        batch = empty_batch(shape, num_groups, shapes)
        caches, tokens, logits[shape[1]] = dispatch(model, params, caches, batch)
        jax.block_until_ready(tokens)
    for done, rows in enumerate(rows_told, start=len(todo)):
        if progress is not None:
            progress(done, total, f"penalties and log-probabilities of {rows} requests")
        penalties = sampling.penalties_of([], [], [], rows, shapes.limits.max_model_len)
        told = sampling.sample_and_tell(logits[rows], sampling.sampling_rows([], [], [], [], [], rows), penalties)
        np.asarray(told.tokens)
    return caches, total
