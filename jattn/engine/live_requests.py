"""The requests that are being served, by id, and their completions, by sequence."""

import logging
from collections import Counter
from collections.abc import Iterable

import numpy as np

from jattn.engine.flight import Flight, logprob_of
from jattn.engine.request import FinishReason, Request, RequestOutput, Response, Sequence
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, Scheduler, StepPlan
from jattn.engine.step import NOT_SAMPLED

log = logging.getLogger("jattn.engine")


class LiveRequests:
    """Requests from their admission until their last output is returned."""

    def __init__(self):
        self._requests: dict[str, Request] = {}
        self._responses: dict[str, Response] = {}  # by sequence id; in order of arrival

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    def ids(self) -> list[str]:
        """Of all requests, oldest first."""
        return list(self._requests)

    def get(self, id: str) -> Request | None:
        return self._requests.get(id)

    def response(self, seq_id: str) -> Response:
        """The completion that this sequence becomes."""
        return self._responses[seq_id]

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._responses |= {response.seq.id: response for response in request.responses}

    def drop(self, request: Request) -> None:
        del self._requests[request.id]
        for response in request.responses:
            del self._responses[response.seq.id]

    def unfinished(self) -> list[Sequence]:
        """Sequences that have not ended, oldest first."""
        return [response.seq for response in self._responses.values() if response.finish_reason is None]

    def ids_of(self, seq_ids: Iterable[str]) -> list[str]:
        """The ids of these sequences' requests, each once; dropped requests are left out."""
        return list(dict.fromkeys(self._responses[s].request_id for s in seq_ids if s in self._responses))

    def outputs(self, ids: Iterable[str]) -> list[RequestOutput]:
        """What these requests have so far."""
        return [self._requests[id].output() for id in ids]

    def drop_finished(self, ids: Iterable[str]) -> None:
        for id in ids:
            if all(response.finish_reason is not None for response in self._requests[id].responses):
                self.drop(self._requests[id])

    def count_plan(self, plan: StepPlan) -> Counter[str]:
        """What a plan adds to the stats; tells each request what the prefix cache saved it."""
        counts = Counter(preemptions=len(plan.preempted))
        for seq_id, hit in plan.admitted:
            response = self._responses[seq_id]
            if response.seq.num_preemptions == 0:
                response.num_cached = hit
                counts.update(prompt_tokens=len(response.seq.prompt), cached_tokens=hit)
        if plan.preempted:
            log.info("preempted %s: the pool is full", ", ".join(self.ids_of(plan.preempted)))
        return counts

    def fail(self, seq_ids: Iterable[str], why: str) -> int:
        """End these completions with an error; returns how many had not ended before."""
        going_on = [r for r in map(self._responses.get, seq_ids) if r is not None and r.finish_reason is None]
        for response in going_on:
            response.fail(why)
        return len(going_on)

    def accept(
        self, flight: Flight, tokens: np.ndarray, told: Sampled | None, scheduler: Scheduler
    ) -> tuple[list[str], Counter[str]]:
        """Update the sequence and the completion of every row: (ids of requests that changed, counts for Stats).

        tokens: i32[steps R] as the dispatch gave them.
        """
        moved, counts = dict[str, None](), Counter[str]()
        last_lane = {lane.id: r for r, lane in enumerate(flight.lanes)}
        for row in flight.plan.rows:
            response = self._responses.get(row.id)
            if response is None or response.finish_reason is not None:  # ended while the dispatch was in flight
                continue
            accepted = _accept_row(response, row, tokens, told, last_lane[row.id])
            scheduler.commit(response.seq, row, accepted)
            counts["output_tokens"] += len(accepted)
            if response.finish_reason is not None:
                failed = response.finish_reason is FinishReason.ERROR
                scheduler.remove(response.seq, trusted=not failed)
                counts["failed" if failed else "finished"] += 1
            if accepted or response.finish_reason is not None:
                moved[response.request_id] = None
        return list(moved), counts


def _accept_row(response: Response, row: Row, tokens: np.ndarray, told: Sampled | None, column: int) -> list[int]:
    """The tokens of one row up to its end. An exception here (of a tokenizer, say) fails this row only."""
    new = [token for token in tokens[:, column].tolist() if token != NOT_SAMPLED] if row.samples else []
    if row.samples and not new:
        response.fail("the model was asked for a token and gave none")
        return []
    try:
        accepted = response.accept(new)
        if told is not None and response.seq.params.logprobs is not None:
            count = response.seq.params.logprobs
            response.logprobs += [logprob_of(told, i, column, count) for i in range(len(accepted))]
    except Exception as error:
        response.fail_unforeseen(error)
        return []
    return accepted
