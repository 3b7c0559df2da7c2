"""Runner: the weights and caches of an engine on the device, and the dispatches sent to it."""

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jattn.engine import warming, weights
from jattn.engine.batch import packed_batch
from jattn.engine.dispatch import ROW_AXES, Batch, Model, RowState, empty_row_state
from jattn.engine.outputs import TokenLogprob, instance_of
from jattn.engine.packing import Packed
from jattn.engine.programs import BrokenProgramError, Programs
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, StepPlan
from jattn.engine.shapes import StepShapes
from jattn.engine.worker import Worker
from jattn.errors import EngineDeadError
from jattn.parallel import put_local

log = logging.getLogger("jattn.engine")


@dataclasses.dataclass(frozen=True)
class DispatchResult:
    """The result of a dispatch, on the host."""

    tokens: np.ndarray  # i32[MAX_STEPS R]
    sampled: Sampled | None  # with the log-probabilities, if they are needed
    sent_at: float  # time.perf_counter() when the host began to send the dispatch
    done_at: float  # the same when the device had finished it


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatch that was sent. A thread reads its result as soon as it is computed."""

    plan: StepPlan
    device_rows: tuple[tuple[Row, ...], ...]  # of each data rank; see batch.device_rows_of
    max_rows: int  # R of each rank's batch
    result: Future[DispatchResult]
    sent: Future  # done once the device has the dispatch

    @functools.cached_property
    def last_row(self) -> dict[str, int]:
        """Sequence id -> the last of its rows in its rank's batch."""
        return {row.id: r for rows in self.device_rows for r, row in enumerate(rows)}

    @functools.cached_property
    def column(self) -> dict[str, int]:
        """Sequence id -> the column of that row in the result, which has the rows of all ranks."""
        if len(self.device_rows) == 1:
            return self.last_row
        firsts = range(0, len(self.device_rows) * self.max_rows, self.max_rows)
        return {row.id: i + r for i, rows in zip(firsts, self.device_rows, strict=True) for r, row in enumerate(rows)}


def logprobs_of(sampled: Sampled, row: int, steps: int, count: int) -> list[TokenLogprob]:
    """The TokenLogprob of a row's token in each of the first steps of a dispatch, with the `count` likeliest tokens."""
    steps_of_row = [x[:steps, row].tolist() for x in (sampled.tokens, sampled.logprobs)]
    steps_of_row += [x[:steps, row, :count].tolist() for x in (sampled.top_tokens, sampled.top_logprobs)]
    return [
        instance_of(TokenLogprob, {"token_id": token, "logprob": logprob, "top": dict(zip(top, values, strict=True))})
        for token, logprob, top, values in zip(*steps_of_row, strict=True)
    ]


class Runner:
    """Awake: weights and caches are on the device. Asleep: the weights are on the host. Dead: all calls raise.

    A thread of its own sends the dispatches, because on a GPU the call takes milliseconds; if XLA could not record the
    loop over steps as a CUDA graph, it returns only when the last step begins. Context managers of JAX that hold for
    one thread, such as jax.default_device, do not reach this thread.
    """

    def __init__(self, model: Model, params: Any, caches: Any, make_caches: Callable[[], Any], shapes: StepShapes):
        self.model, self.shapes, self.programs = model, shapes, Programs(model)
        self.params = weights.adopt(params)
        self._caches, self._row_state = self._bound(caches)
        self._make_caches = make_caches
        self._sender, self._reader = Worker("jattn-sender"), Worker("jattn-reader")
        self._stored: weights.StoredWeights | None = None  # None while awake
        self._dead: EngineDeadError | None = None

    def _bound(self, caches: Any) -> tuple[Any, RowState]:
        """(caches, an empty RowState), placed as a dispatch returns them."""
        mesh = self.model.model_mesh
        if mesh is None:
            return weights.bound_like(self.params, (caches, empty_row_state(self.shapes.max_rows)))
        row_state = empty_row_state(self.shapes.max_rows * mesh.data_ranks)  # the weights and caches are placed
        return caches, jax.tree.map(put_local, row_state, jax.tree.map(mesh.over_data, ROW_AXES))

    @property
    def caches(self) -> Any:
        """The caches after all dispatches that were sent."""
        self.wait_until_sent()
        return self._caches

    def send(
        self, plan: StepPlan, device_rows: tuple[tuple[Row, ...], ...], batches: list[Batch], number: int
    ) -> InFlight:
        """Send the batches of all data ranks to the device. number: of the dispatch, for profiles."""
        sent = self._sender.submit(self._dispatch, packed_batch(batches, self.shapes), number)
        result = self._reader.submit(_read, sent, any([batch.needs_logprobs for batch in batches]))
        return InFlight(plan, device_rows, len(batches[0].source), result, sent)

    def _dispatch(self, batch: Packed, number: int) -> tuple[Sampled, float]:
        """In the sending thread: (what is sampled, when sending began)."""
        if self.is_lost:  # a program on several devices that is given deleted arrays may end the process (JAX 0.10.2)
            raise RuntimeError("the caches were lost, because the dispatch before this one failed")
        begin = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("jattn.step", step_num=number):
            self._caches, sampled, self._row_state = self.programs(self.params, self._caches, self._row_state, batch)
        return sampled, begin

    @property
    def is_lost(self) -> bool:
        """Did a program that failed take over the caches and the row state? Ask while nothing is being sent."""
        return self._row_state.last.is_deleted()

    def wait_until_sent(self) -> None:
        """Wait until no dispatch is waiting to be sent."""
        self._sender.wait()

    def warm(self, progress: Callable[[int, int, str], None] | None) -> int:
        """Load or compile every program; returns their number. After an interrupt (Ctrl-C) no other one is begun."""
        interrupted = threading.Event()

        def compile_all() -> int:
            self._caches, self._row_state, count = warming.compile_all(
                self.programs, self.params, self._caches, self._row_state, self.shapes, progress, interrupted
            )
            return count

        try:
            return self._sender.submit(compile_all).result()
        except BaseException:
            interrupted.set()
            raise

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
            try:
                self._make_and_probe()
            except BrokenProgramError as error:  # it was removed, so it is compiled this time
                log.warning("%s", error)
                self._make_and_probe()
        except Exception as error:
            self._dead = EngineDeadError(f"{self._cause(error)}; make a new engine, if possible in a new process")
            raise self._dead from error

    def _make_and_probe(self) -> None:
        """Make new caches, and run the smallest program with them."""
        self._drop_caches()
        caches, row_state = self._bound(self._make_caches())
        probe = self._sender.submit(warming.probe, self.programs, self.params, caches, row_state, self.shapes)
        self._caches, self._row_state = probe.result()

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
        self.wait_until_sent()
        for leaf in jax.tree.leaves(self._caches):
            if not leaf.is_deleted():
                leaf.delete()
        self._caches = None


def _read(sent: Future[tuple[Sampled, float]], needs_logprobs: bool) -> DispatchResult:
    """Wait until the dispatch has finished and copy its results to the host."""
    sampled, sent_at = sent.result()
    tokens = np.asarray(sampled.tokens)
    done_at = time.perf_counter()
    return DispatchResult(tokens, jax.device_get(sampled) if needs_logprobs else None, sent_at, done_at)
