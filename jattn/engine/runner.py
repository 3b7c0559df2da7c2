"""The device's side of an engine: the weights, the caches, and the dispatches sent to the device."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jattn.engine import warming, weights
from jattn.engine.batch import tables_of
from jattn.engine.request import RequestOutput, Sequence, TokenLogprob
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, StepPlan
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Batch, Model, RowState, continued_batch, dispatch
from jattn.errors import EngineDeadError


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatch that was sent: its plan and batch, and the arrays of its result."""

    plan: StepPlan
    device_rows: tuple[Row, ...]  # the plan's rows as the device sees them
    batch: Batch
    needs_history_or_logprobs: bool  # batch.needs_history_or_logprobs, on the host
    sampled: Sampled
    row_state: RowState
    seconds: float  # spent in sending it


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a dispatch, on the host."""

    changed: list[str]  # requests with new tokens, or ended
    outputs: list[RequestOutput]  # theirs
    steps: int  # that the device computed
    seconds: float  # spent waiting for the device


def with_rules_on_device(batch: Batch) -> Batch:
    """The same, with the sampling rules on the device, where later dispatches of these rows use them again."""
    return dataclasses.replace(batch, **jax.device_put(dict(rows=batch.rows, penalties=batch.penalties)))


def next_batch(flight: InFlight, plan: StepPlan, running: list[Sequence], shapes: StepShapes) -> Batch:
    """The batch of `plan`, which continues the rows of `flight` from their state on the device."""
    tables = tables_of(running, flight.batch.metas[0].max_num_reqs, shapes)
    changed = {} if plan.burst == flight.plan.burst else {"steps": np.int32(plan.burst)}
    batch = continued_batch(flight.batch, flight.row_state, tables)
    # Scheduler.plan_next returns no plan for rows that need their history or log-probabilities.
    return dataclasses.replace(batch, needs_history_or_logprobs=np.bool_(False), **changed)


def logprob_of(sampled: Sampled, step: int, row: int, count: int) -> TokenLogprob:
    """Of the token sampled by a row in a step, with the `count` most likely ones."""
    at = step, row
    top = zip(sampled.top_tokens[at][:count].tolist(), sampled.top_logprobs[at][:count].tolist(), strict=True)
    return TokenLogprob(int(sampled.tokens[at]), float(sampled.logprobs[at]), dict(top))


class Runner:
    """Awake: weights and caches are on the device. Asleep: weights on the host. Dead: must_be_alive() raises."""

    def __init__(self, model: Model, params: Any, caches: Any, make_caches: Callable[[], Any], shapes: StepShapes):
        self.model, self.shapes = model, shapes
        self.params = weights.adopt(params)
        self.caches = weights.bound_like(self.params, caches)
        self._make_caches = make_caches
        self._stored: weights.StoredWeights | None = None  # while it sleeps
        self._dead: EngineDeadError | None = None

    def send(self, plan: StepPlan, device_rows: tuple[Row, ...], batch: Batch, number: int) -> InFlight:
        """Send a batch to the device; number: of the dispatch, shown in profiles."""
        begin, needed = time.perf_counter(), bool(batch.needs_history_or_logprobs)
        with jax.profiler.StepTraceAnnotation("jattn.step", step_num=number):
            self.caches, sampled, row_state = dispatch(self.model, self.params, self.caches, batch)
        return InFlight(plan, device_rows, batch, needed, sampled, row_state, time.perf_counter() - begin)

    def warm(self, progress: Callable[[int, int, str], None] | None) -> int:
        """Compile every program; returns how many there are."""
        self.caches, count = warming.warm(self.model, self.params, self.caches, self.shapes, progress)
        return count

    # ------------------------------------------------------------------ weights and memory
    def update(self, params: Any) -> Callable[[], None]:
        """Copy weights of the same form to the device; calling the returned function puts them in use."""
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
        """Bring the weights back, and make empty caches."""
        if self._stored is not None:
            self.params = self._stored.restored()
            self._stored = None
            self.renew_caches()

    # ------------------------------------------------------------------ whole or broken
    def renew_caches(self) -> None:
        """Replace the caches by empty ones and run a small program; EngineDeadError if that fails."""
        try:
            self._drop_caches()
            caches = weights.bound_like(self.params, self._make_caches())
            self.caches = warming.probe(self.model, self.params, caches, self.shapes)
        except Exception as error:
            self._dead = EngineDeadError(f"{self._cause(error)}; make a new engine, best in a new process")
            raise self._dead from error

    def _cause(self, error: Exception) -> str:
        if any(x.is_deleted() for x in jax.tree.leaves(self.params)):
            return "the weights were deleted or donated after the engine was given them"
        if not isinstance(error, RuntimeError):  # XLA's own errors are
            return f"the model's program cannot be made ({type(error).__name__}: {error})"
        return f"the device no longer computes ({type(error).__name__})"

    def must_be_alive(self) -> None:
        """EngineDeadError after renew_caches raised one."""
        if self._dead is not None:
            raise self._dead

    def must_be_awake(self, what: str) -> None:
        """RuntimeError while asleep: `what` needs the weights on the device."""
        self.must_be_alive()
        if self.is_asleep:
            raise RuntimeError(f"{what} while the engine sleeps: call wake() first")

    def _drop_caches(self) -> None:
        for leaf in jax.tree.leaves(self.caches):
            if not leaf.is_deleted():
                leaf.delete()
        self.caches = None
