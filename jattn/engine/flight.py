"""A dispatch on its way: sent to the device, its tokens not yet read."""

import dataclasses
import time

import jax
import numpy as np

from jattn.engine.batch import tables_of
from jattn.engine.outputs import RequestOutput, TokenLogprob
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, StepPlan
from jattn.engine.sequence import Sequence
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Ahead, Batch, Model, dispatch, following


@dataclasses.dataclass(frozen=True)
class Flight:
    """What was sent, and what will come of it."""

    plan: StepPlan
    lanes: tuple[Row, ...]  # the plan's rows as the device sees them
    batch: Batch
    is_told: bool  # the batch's
    said: Sampled
    ahead: Ahead
    seconds: float  # that sending it took


@dataclasses.dataclass(frozen=True)
class Landed:
    """What came of a flight."""

    moved: list[str]  # requests that have news
    outputs: list[RequestOutput]  # theirs
    steps: int  # that the device took
    seconds: float  # of waiting for the device


def send(model: Model, params, caches, plan: StepPlan, lanes: tuple[Row, ...], batch: Batch, number: int):
    """(caches, Flight), its tokens unread; number: of the dispatch, for a profile."""
    begin, is_told = time.perf_counter(), bool(batch.is_told)
    with jax.profiler.StepTraceAnnotation("jattn.step", step_num=number):
        caches, said, ahead = dispatch(model, params, caches, batch)
    return caches, Flight(plan, lanes, batch, is_told, said, ahead, time.perf_counter() - begin)


def kept_on_device(batch: Batch) -> Batch:
    """The same, its rows' rules on the device: the dispatches behind it take them from there."""
    return dataclasses.replace(batch, **jax.device_put(dict(rows=batch.rows, penalties=batch.penalties)))


def behind(flight: Flight, plan: StepPlan, running: list[Sequence], shapes: StepShapes) -> Batch:
    """The batch of `plan`, which follows a flight of the same rows; what it starts from is on the device already."""
    tables = tables_of(running, flight.batch.metas[0].max_num_reqs, shapes)
    news = {} if plan.burst == flight.plan.burst else {"steps": np.int32(plan.burst)}
    is_told = np.bool_(False)  # the scheduler lets no such plan follow; known to the host without asking the device
    return dataclasses.replace(following(flight.batch, flight.ahead, tables), is_told=is_told, **news)


def logprob_of(told: Sampled, step: int, row: int, count: int) -> TokenLogprob:
    """Of the token that a row said in a step, with its `count` likeliest."""
    at = step, row
    top = zip(told.top_tokens[at][:count].tolist(), told.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprob(int(told.tokens[at]), float(told.logprobs[at]), dict(top))
