"""A dispatch on its way: sent to the device, its tokens not yet read."""

import dataclasses
import time

import jax

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
    begin = time.perf_counter()
    with jax.profiler.StepTraceAnnotation("jattn.step", step_num=number):
        caches, said, ahead = dispatch(model, params, caches, batch)
    return caches, Flight(plan, lanes, batch, said, ahead, time.perf_counter() - begin)


def behind(flight: Flight, plan: StepPlan, running: list[Sequence], shapes: StepShapes) -> Batch:
    """The batch of `plan`, which follows a flight of the same rows; what it starts from is on the device already."""
    tables = tables_of(running, flight.batch.metas[0].max_num_reqs, shapes)
    return following(flight.batch, flight.ahead, tables, plan.burst)


def logprob_of(told: Sampled, step: int, row: int, count: int) -> TokenLogprob:
    """Of the token that a row said in a step, with its `count` likeliest."""
    at = step, row
    top = zip(told.top_tokens[at][:count].tolist(), told.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprob(int(told.tokens[at]), float(told.logprobs[at]), dict(top))
