"""StepLoop: takes the requests of an engine from dispatch to dispatch, and goes on after a failure."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from jattn.engine import data_ranks
from jattn.engine.flights import Flights
from jattn.engine.live_requests import LiveRequests
from jattn.engine.outputs import FinishReason, RequestOutput
from jattn.engine.request import Request, internal_error_message
from jattn.engine.runner import Runner
from jattn.engine.scheduler import Limits, StepPlan
from jattn.engine.stats import Stats

log = logging.getLogger("jattn.engine")


class StepLoop:
    """The requests from their admission until their outputs are returned, and the dispatches that compute them.

    The next dispatch is planned and sent before the tokens of this one are read, so the device does not wait for the
    host. A row that ends meanwhile may be in dispatches that were sent before; their results are not used.

    An exception in a step fails the requests of that step only; all others are computed again.
    """

    def __init__(self, runner: Runner, limits: Limits, make_tables: Callable[..., data_ranks.Tables], flights: Flights):
        """make_tables(weights_version=): empty block tables."""
        self.runner, self.limits, self._make_tables = runner, limits, make_tables
        self.tables = make_tables()
        self.scheduler = data_ranks.scheduler_of(limits, self.tables)
        self.requests, self.counters = LiveRequests(), Stats()
        self.outputs: list[RequestOutput] = []  # not returned yet; it grows, or another list takes its place
        self._ids = _Ids(self.outputs)
        self._late_aborts: list[Request] = []  # a tokenizer aborted them while text was read
        self.flights = flights
        self._plan: StepPlan | None = None  # of the dispatch that is being sent or read

    @property
    def has_work(self) -> bool:
        """Is there a request to compute, or an output to return?"""
        return bool(self.requests or self.outputs)

    @property
    def stats(self) -> Stats:
        """The counters, with the lengths of the queues now."""
        return dataclasses.replace(
            self.counters,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_usage=self.tables.usage,
            group_usage=self.tables.group_usage,
            evictions=self.counters.evictions + self.tables.evictions,
        )

    def count(self, **more: float) -> None:
        """Add to the counters."""
        self.counters = self.counters.plus(**more)

    def knows(self, request_id: str) -> bool:
        """Is there a request with this id, or an output of it that was not returned yet?"""
        if self._ids.outputs is not self.outputs:
            self._ids = _Ids(self.outputs)
        return request_id in self.requests or request_id in self._ids.known()

    def refuse(self, output: RequestOutput) -> None:
        """End a request that cannot be served, with this output of the next step."""
        self.outputs.append(output)
        self.count(failed=1)

    def add(self, request: Request) -> None:
        """Queue the sequences of a request."""
        self.requests.add(request)
        for completion in request.completions:
            self.scheduler.add(completion.seq)

    def abort(self, request: Request) -> None:
        """End a request and free its blocks at once; while text is read, once the step is read."""
        if self.requests.is_reading:
            self._late_aborts.append(request)
            return
        for completion in request.completions:
            if completion.finish_reason is None:
                completion.finish_reason = FinishReason.ABORT
                self.scheduler.remove(completion.seq)
                self.count(aborted=1)
        self.outputs.append(request.output())
        self.requests.drop(request)

    def must_not_read(self, method: str) -> None:
        """RuntimeError while text is read: a tokenizer calls this method from its decode."""
        if self.requests.is_reading:
            raise RuntimeError(f"{method} was called from a tokenizer's decode, in the middle of a step: call it later")

    def step(self) -> None:
        """Take one step, and keep its outputs in `outputs`."""
        self._run_contained(self._advance)

    def finish_in_flight(self) -> None:
        """Read all dispatches that were sent."""
        while self.flights:
            self._run_contained(self._read_oldest)

    def restart(self, *, new_caches: bool = False, weights_version: int | None = None) -> None:
        """Compute all unfinished sequences again. weights_version: of the new block tables; None: the same."""
        self.outputs += self._restart_unfinished(new_caches=new_caches, weights_version=weights_version)

    def _advance(self) -> list[RequestOutput]:
        """Read a dispatch and return its outputs, while the next one runs."""
        begin = time.perf_counter()
        self._send_ahead()
        if not self.flights:
            if self.requests:
                raise AssertionError("requests wait, but the scheduler planned nothing")
            return []
        waited_before = self.counters.waiting_seconds
        outputs = self._read_oldest(send_ahead=True)
        waited = self.counters.waiting_seconds - waited_before
        self.count(host_seconds=time.perf_counter() - begin - waited)
        return outputs

    def _send_ahead(self) -> None:
        """Send dispatches until two are in flight, or no more can be planned before one is read."""
        while self.flights.has_room:
            self._plan = None  # schedule() may raise
            plan = self._plan = self.scheduler.schedule(in_flight=bool(self.flights))
            self.count(**self.requests.count_plan(plan))
            if not plan.rows:
                break
            shape = self.flights.send(plan, self.requests, self.counters.dispatches)
            self.count(dispatches=1, shared_prefix_dispatches=shape.shares_prefix)

    def _read_oldest(self, send_ahead: bool = False) -> list[RequestOutput]:
        """Wait for the oldest dispatch and update its requests; returns their outputs.

        send_ahead: if the next one in flight is a single step, which is short, send another before decoding text.
        """
        flight = self.flights.take_oldest()
        self._plan = flight.plan
        result, times = self.flights.wait(flight)
        self.count(**times)
        self.requests.accept(flight, result, self.scheduler)
        if send_ahead and self.flights.is_next_short:
            self._send_ahead()
            self._plan = flight.plan
        changed, counts = self.requests.read_text(self.scheduler)
        outputs = self.requests.outputs(changed)
        self.requests.drop_ended()
        self.count(**counts)
        return outputs

    # ------------------------------------------------------------------ after a failure
    def _run_contained(self, change: Callable[[], list[RequestOutput]]) -> None:
        """Make a change of the state and keep its outputs. If it raises, only the requests of its step fail."""
        try:
            self.outputs += change()
        except Exception as error:  # any error: the other requests continue
            self.outputs += self._contain(error)
        except BaseException:  # e.g. SystemExit of a callback: the rows of this step are computed again later
            self.outputs += self._restart_unfinished(new_caches=True)
            raise
        finally:
            late, self._late_aborts = self._late_aborts, []
            for request in late:
                if self.requests.get(request.id) is request:
                    self.abort(request)

    def _contain(self, error: Exception) -> list[RequestOutput]:
        """Fail the rows of the step that raised. All other sequences are computed again, in new caches."""
        self.requests.take_back_unread()
        plan, scheduler = self._plan, self.scheduler
        blamed = [row.id for row in plan.rows] if plan and plan.rows else None
        if blamed is None:  # schedule() itself raised, and would again: fail all sequences that it reads
            blamed = [seq.id for seq in (*scheduler.running, *list(scheduler.waiting)[:1])]
        blamed = blamed or self.requests.sequence_ids()  # requests that nobody schedules would wait forever
        log.error("a step failed, and with it the sequences %s", ", ".join(blamed), exc_info=error)
        self.count(failed=self.requests.fail(blamed, internal_error_message(error)))
        return self._restart_unfinished(blamed, new_caches=True)

    def _restart_unfinished(
        self, touched: Iterable[str] = (), *, new_caches: bool = False, weights_version: int | None = None
    ) -> list[RequestOutput]:
        """Empty the block pools and queue every unfinished sequence again, as if each had been preempted.

        Returns the outputs so far of the requests of the sequences `touched` and of the current plan.
        """
        self.requests.take_back_unread()
        ids = self.requests.ids_of([*touched, *(row.id for row in (self._plan.rows if self._plan else ()))])
        outputs = self.requests.outputs(ids)
        self.requests.drop_finished(ids)
        self.count(evictions=self.tables.evictions)
        version = self.tables.weights_version if weights_version is None else weights_version
        self.flights.drop()
        self._plan, self.tables = None, self._make_tables(weights_version=version)
        self.scheduler = data_ranks.scheduler_of(self.limits, self.tables)
        for seq in self.requests.unfinished():
            seq.restart()
            self.scheduler.add(seq)
        if new_caches:
            self.runner.renew_caches()
        return outputs


class _Ids:
    """The ids of a list of outputs that grows: each output is looked at once. There may be 100,000 refusals in it."""

    def __init__(self, outputs: list[RequestOutput]):
        self.outputs = outputs
        self._known: set[str] = set()
        self._num_seen = 0

    def known(self) -> set[str]:
        """The ids of all outputs in the list now."""
        self._known.update(output.id for output in self.outputs[self._num_seen :])
        self._num_seen = len(self.outputs)
        return self._known
