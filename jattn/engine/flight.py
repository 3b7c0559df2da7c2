"""A dispatch in flight: sent to the device, its tokens not yet read."""

import dataclasses
import time

import jax
import numpy as np

from jattn.engine.batch import tables_of
from jattn.engine.request import RequestOutput, Sequence, TokenLogprob
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, StepPlan
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Ahead, Batch, Model, dispatch, following


@dataclasses.dataclass(frozen=True)
class Flight:
    """A dispatch that was sent: its plan and batch, and the arrays of its result."""

    plan: StepPlan
    lanes: tuple[Row, ...]  # the plan's rows as the device sees them
    batch: Batch
    is_told: bool  # batch.is_told, on the host
    said: Sampled
    ahead: Ahead
    seconds: float  # spent in sending it


@dataclasses.dataclass(frozen=True)
class Landed:
    """The result of a dispatch, on the host."""

    moved: list[str]  # requests with new tokens, or ended
    outputs: list[RequestOutput]  # theirs
    steps: int  # that the device computed
    seconds: float  # spent waiting for the device


def send(model: Model, params, caches, plan: StepPlan, lanes: tuple[Row, ...], batch: Batch, number: int):
    """Send a batch: (caches, Flight). number: of the dispatch, shown in profiles."""
    begin, is_told = time.perf_counter(), bool(batch.is_told)
    with jax.profiler.StepTraceAnnotation("jattn.step", step_num=number):
        caches, said, ahead = dispatch(model, params, caches, batch)
    return caches, Flight(plan, lanes, batch, is_told, said, ahead, time.perf_counter() - begin)


def kept_on_device(batch: Batch) -> Batch:
    """The same, with the sampling rules on the device, where later dispatches of these rows use them again."""
    return dataclasses.replace(batch, **jax.device_put(dict(rows=batch.rows, penalties=batch.penalties)))


def behind(flight: Flight, plan: StepPlan, running: list[Sequence], shapes: StepShapes) -> Batch:
    """The batch of `plan`, which continues the rows of `flight` from their state on the device."""
    tables = tables_of(running, flight.batch.metas[0].max_num_reqs, shapes)
    news = {} if plan.burst == flight.plan.burst else {"steps": np.int32(plan.burst)}
    is_told = np.bool_(False)  # Scheduler.follow plans nothing for rows that need it
    return dataclasses.replace(following(flight.batch, flight.ahead, tables), is_told=is_told, **news)


def logprob_of(told: Sampled, step: int, row: int, count: int) -> TokenLogprob:
    """Of the token sampled by a row in a step, with the `count` most likely ones."""
    at = step, row
    top = zip(told.top_tokens[at][:count].tolist(), told.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprob(int(told.tokens[at]), float(told.logprobs[at]), dict(top))
