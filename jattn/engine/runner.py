"""Runner: the weights and caches of an engine on the device, and the dispatches sent to it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jattn.engine import warming, weights
from jattn.engine.batch import tables_of
from jattn.engine.dispatch import Batch, Model, RowState, continued_batch, dispatch
from jattn.engine.request import RequestOutput, Sequence, TokenLogprob
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, StepPlan
from jattn.engine.shapes import StepShapes
from jattn.errors import EngineDeadError


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatch that was sent. The arrays of its result may not be computed yet."""

    plan: StepPlan
    device_rows: tuple[Row, ...]  # the rows of the batch: see batch.device_rows_of
    batch: Batch  # its input
    needs_history_or_logprobs: bool  # batch.needs_history_or_logprobs, on the host
    sampled: Sampled  # its tokens, and log-probabilities
    row_state: RowState  # the state of its rows after it
    seconds: float  # that sending it took


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a dispatch, on the host."""

    changed: list[str]  # ids of requests that have new tokens or have ended
    outputs: list[RequestOutput]  # of these requests, so far
    steps: int  # model steps of the dispatch
    seconds: float  # that the host waited for the device


def with_rules_on_device(batch: Batch) -> Batch:
    """The same batch with its sampling rules on the device, where later dispatches of these rows use them again."""
    return dataclasses.replace(batch, **jax.device_put(dict(rows=batch.rows, penalties=batch.penalties)))


def next_batch(flight: InFlight, plan: StepPlan, running: list[Sequence], shapes: StepShapes) -> Batch:
    """The batch of `plan`, whose rows are those of `flight` after its dispatch, from their state on the device."""
    tables = tables_of(running, flight.batch.metas[0].max_num_reqs, shapes)
    changed = {} if plan.burst == flight.plan.burst else {"steps": np.int32(plan.burst)}
    batch = continued_batch(flight.batch, flight.row_state, tables)
    # Scheduler.plan_next returns no plan for rows that need their history or log-probabilities.
    return dataclasses.replace(batch, needs_history_or_logprobs=np.bool_(False), **changed)


def logprob_of(sampled: Sampled, step: int, row: int, count: int) -> TokenLogprob:
    """The TokenLogprob of a row's token in a step of a dispatch, with the `count` most likely tokens."""
    at = step, row
    top = zip(sampled.top_tokens[at][:count].tolist(), sampled.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprob(int(sampled.tokens[at]), float(sampled.logprobs[at]), dict(top))


class Runner:
    """Awake: weights and caches are on the device. Asleep: the weights are on the host. Dead: all calls raise."""

    def __init__(self, model: Model, params: Any, caches: Any, make_caches: Callable[[], Any], shapes: StepShapes):
        self.model, self.shapes = model, shapes
        self.params = weights.adopt(params)
        self.caches = weights.bound_like(self.params, caches)
        self._make_caches = make_caches
        self._stored: weights.StoredWeights | None = None  # None while awake
        self._dead: EngineDeadError | None = None

    def send(self, plan: StepPlan, device_rows: tuple[Row, ...], batch: Batch, number: int) -> InFlight:
        """Send a batch to the device. number: of the dispatch, for profiles."""
        begin, needed = time.perf_counter(), bool(batch.needs_history_or_logprobs)
        with jax.profiler.StepTraceAnnotation("jattn.step", step_num=number):
            self.caches, sampled, row_state = dispatch(self.model, self.params, self.caches, batch)
        return InFlight(plan, device_rows, batch, needed, sampled, row_state, time.perf_counter() - begin)

    def warm(self, progress: Callable[[int, int, str], None] | None) -> int:
        """Compile every program; returns their number."""
        self.caches, count = warming.compile_all(self.model, self.params, self.caches, self.shapes, progress)
        return count

    # ------------------------------------------------------------------ weights and memory
    def update(self, params: Any) -> Callable[[], None]:
        """Copy weights of the same form to the device. The returned function replaces the current ones by them."""
        fresh = weights.copied_like(self.params, params)
        return lambda: setattr(self, "params", fresh)

    @property
    def is_asleep(self) -> bool:
        return self._stored is not None

    def sleep(self) -> None:
        """Move the weights to the host and drop the caches."""
        self._stored = weights.StoredWeights(self.params)
        self.params = None
        self._drop_caches()

    def wake(self) -> None:
        """Move the weights to the device, and make empty caches."""
        if self._stored is not None:
            self.params = self._stored.restored()
            self._stored = None
            self.renew_caches()

    # ------------------------------------------------------------------ failures
    def renew_caches(self) -> None:
        """Replace the caches by empty ones and run the smallest program; EngineDeadError if that fails."""
        try:
            self._drop_caches()
            caches = weights.bound_like(self.params, self._make_caches())
            self.caches = warming.probe(self.model, self.params, caches, self.shapes)
        except Exception as error:
            self._dead = EngineDeadError(f"{self._cause(error)}; make a new engine, if possible in a new process")
            raise self._dead from error

    def _cause(self, error: Exception) -> str:
        if any(x.is_deleted() for x in jax.tree.leaves(self.params)):
            return "the weights were deleted or donated after the engine was given them"
        if not isinstance(error, RuntimeError):  # errors of XLA are RuntimeErrors
            return f"the model's program cannot be compiled ({type(error).__name__}: {error})"
        return f"the device no longer computes ({type(error).__name__})"

    def must_be_alive(self) -> None:
        """Raise the EngineDeadError of renew_caches, if it failed."""
        if self._dead is not None:
            raise self._dead

    def must_be_awake(self, method: str) -> None:
        """RuntimeError while asleep: `method` needs the weights on the device."""
        self.must_be_alive()
        if self.is_asleep:
            raise RuntimeError(f"{method} while the engine sleeps: call wake() first")

    def _drop_caches(self) -> None:
        for leaf in jax.tree.leaves(self.caches):
            if not leaf.is_deleted():
                leaf.delete()
        self.caches = None
