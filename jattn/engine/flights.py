"""Flights: the queue of dispatches in flight, which were sent to the device and whose results were not read yet."""

import time
from collections import deque
from concurrent import futures

from jattn.engine.batch import batch_of, device_rows_of, empty_batch
from jattn.engine.dispatch import NOT_SAMPLED
from jattn.engine.live_requests import LiveRequests
from jattn.engine.runner import DispatchResult, InFlight, Runner
from jattn.engine.scheduler import StepPlan
from jattn.engine.shapes import StepShape
from jattn.engine.shared_prefix import SharedPrefixRule

MAX_IN_FLIGHT = 2
"""One dispatch runs; a second one is queued, so that the device does not wait for the host between the two."""
HANDOVER_SECONDS = 0.004
"""The longest wait until an idle device has a dispatch. On a GPU that takes 2 to 3 ms if no other thread needs Python's
interpreter."""


class Flights:
    """At most MAX_IN_FLIGHT dispatches, oldest first."""

    def __init__(self, runner: Runner, eos: tuple[int, ...], rule: SharedPrefixRule | None = None):
        """rule: when a dispatch reads a shared prefix once; None: never."""
        self._runner, self._eos, self._rule = runner, eos, rule
        self._unread: deque[InFlight] = deque()
        self._newest: InFlight | None = None  # also after it was read: rows of the next dispatch may continue its rows
        self._done_at = 0.0  # when the newest dispatch that was read had finished

    def __len__(self) -> int:
        return len(self._unread)

    @property
    def has_room(self) -> bool:
        """May another be sent before one is read?"""
        return len(self._unread) < MAX_IN_FLIGHT

    @property
    def is_next_short(self) -> bool:
        """Is the oldest a single step? Then it ends soon."""
        return bool(self._unread) and self._unread[0].plan.burst == 1

    def send(self, plan: StepPlan, requests: LiveRequests, number: int) -> StepShape:
        """Send the dispatch of a plan, and return its shape. number: the dispatch's number, for profiles.

        If the device is idle, wait until it has this dispatch: planning the next one would take the interpreter from
        the thread that sends it.
        """
        shapes, num_groups = self._runner.shapes, len(self._runner.model.config.cache_groups)
        prefixes = self._prefixes_of(plan, requests)
        shape = shapes.of(plan, any(prefixes))
        sources = self._newest.last_row if self._newest else {}
        device_rows = tuple(device_rows_of(part, shapes) for part in plan.parts)
        batches = [
            batch_of(part, rows, requests.sequences(rows), sources, shapes, shape, self._eos, prefix)
            if rows
            else empty_batch(shape, num_groups, shapes)
            for part, rows, prefix in zip(plan.parts, device_rows, prefixes, strict=True)
        ]
        self._newest = self._runner.send(plan, device_rows, batches, number)
        if not self._unread:
            futures.wait([self._newest.sent], timeout=HANDOVER_SECONDS)
        self._unread.append(self._newest)
        return shape

    def _prefixes_of(self, plan: StepPlan, requests: LiveRequests) -> list[int]:
        """The first tokens that the rows of each data rank share; all 0 unless it pays to read them once."""
        rule = self._rule
        if rule is None or not plan.is_decode:
            return [0] * len(plan.parts)
        prefixes = [rule.shared(part.rows, requests.sequences(part.rows)) for part in plan.parts]
        return prefixes if rule.pays([len(part.rows) for part in plan.parts], prefixes) else [0] * len(prefixes)

    def take_oldest(self) -> InFlight:
        """The oldest dispatch, which is no longer in flight; `wait` must follow."""
        return self._unread.popleft()

    def wait(self, flight: InFlight) -> tuple[DispatchResult, dict[str, float]]:
        """Wait until a dispatch has finished. Returns (its result, what it adds to the stats)."""
        begin = time.perf_counter()
        result = flight.result.result()
        waited = time.perf_counter() - begin
        busy = max(result.done_at - max(result.sent_at, self._done_at), 0.0)
        steps = int((result.tokens != NOT_SAMPLED).any(axis=1).sum()) or 1
        self._done_at = result.done_at
        return result, dict(steps=steps, device_seconds=busy, waiting_seconds=waited)

    def drop(self) -> None:
        """Wait until the device has finished all dispatches, and forget them and their errors."""
        for flight in self._unread:
            flight.result.exception()
        self._unread.clear()
        self._newest = None
