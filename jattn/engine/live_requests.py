"""LiveRequests: the requests that are being served, by id, and their completions, by sequence id."""

import logging
from collections import Counter
from collections.abc import Iterable

import numpy as np

from jattn.engine.dispatch import NOT_SAMPLED
from jattn.engine.request import CompletionState, FinishReason, Request, RequestOutput, Sequence
from jattn.engine.runner import InFlight, logprob_of
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, Scheduler, StepPlan

log = logging.getLogger("jattn.engine")


class LiveRequests:
    """The requests from their admission until their last output is returned."""

    def __init__(self):
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, CompletionState] = {}  # by sequence id; in order of arrival

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    def ids(self) -> list[str]:
        """The ids of all requests, oldest first."""
        return list(self._requests)

    def get(self, id: str) -> Request | None:
        return self._requests.get(id)

    def completion(self, seq_id: str) -> CompletionState:
        """The completion of this sequence."""
        return self._completions[seq_id]

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._completions |= {completion.seq.id: completion for completion in request.completions}

    def drop(self, request: Request) -> None:
        del self._requests[request.id]
        for completion in request.completions:
            del self._completions[completion.seq.id]

    def unfinished(self) -> list[Sequence]:
        """Sequences that have not ended, oldest first."""
        return [completion.seq for completion in self._completions.values() if completion.finish_reason is None]

    def ids_of(self, seq_ids: Iterable[str]) -> list[str]:
        """The ids of these sequences' requests, each once; dropped requests are left out."""
        return list(dict.fromkeys(self._completions[s].request_id for s in seq_ids if s in self._completions))

    def outputs(self, ids: Iterable[str]) -> list[RequestOutput]:
        """The outputs of these requests so far."""
        return [self._requests[id].output() for id in ids]

    def drop_finished(self, ids: Iterable[str]) -> None:
        for id in ids:
            if all(completion.finish_reason is not None for completion in self._requests[id].completions):
                self.drop(self._requests[id])

    def count_plan(self, plan: StepPlan) -> Counter[str]:
        """What a plan adds to the stats. Also sets num_cached of the completions that it starts."""
        counts = Counter(preemptions=len(plan.preempted))
        for seq_id, hit in plan.admitted:
            completion = self._completions[seq_id]
            if completion.seq.num_preemptions == 0:
                completion.num_cached = hit
                counts.update(prompt_tokens=len(completion.seq.prompt), cached_tokens=hit)
        if plan.preempted:
            log.info("preempted %s: the pool is full", ", ".join(self.ids_of(plan.preempted)))
        return counts

    def fail(self, seq_ids: Iterable[str], error: str) -> int:
        """End these completions with an error; returns how many had not ended before."""
        found = [self._completions[id] for id in seq_ids if id in self._completions]
        unfinished = [completion for completion in found if completion.finish_reason is None]
        for completion in unfinished:
            completion.fail(error)
        return len(unfinished)

    def accept(
        self, flight: InFlight, tokens: np.ndarray, sampled: Sampled | None, scheduler: Scheduler
    ) -> tuple[list[str], Counter[str]]:
        """Update the sequence and the completion of each row; returns (ids of changed requests, counts for Stats).

        tokens: i32[steps R], the dispatch's sampled tokens.
        """
        changed, counts = dict[str, None](), Counter[str]()
        last_device_row = {device_row.id: r for r, device_row in enumerate(flight.device_rows)}
        for row in flight.plan.rows:
            completion = self._completions.get(row.id)
            if completion is None or completion.finish_reason is not None:  # ended while the dispatch was in flight
                continue
            accepted = _accept_row(completion, row, tokens, sampled, last_device_row[row.id])
            scheduler.commit(completion.seq, row, accepted)
            counts["output_tokens"] += len(accepted)
            if completion.finish_reason is not None:
                failed = completion.finish_reason is FinishReason.ERROR
                scheduler.remove(completion.seq, trusted=not failed)
                counts["failed" if failed else "finished"] += 1
            if accepted or completion.finish_reason is not None:
                changed[completion.request_id] = None
        return list(changed), counts


def _accept_row(
    completion: CompletionState, row: Row, tokens: np.ndarray, sampled: Sampled | None, column: int
) -> list[int]:
    """The tokens of one row up to its end. An exception here, e.g. in a tokenizer, fails this row only."""
    new = [token for token in tokens[:, column].tolist() if token != NOT_SAMPLED] if row.samples else []
    if row.samples and not new:
        completion.fail("the dispatch gave no token for a sequence that needed one")
        return []
    try:
        accepted = completion.accept(new)
        if sampled is not None and completion.seq.params.logprobs is not None:
            count = completion.seq.params.logprobs
            completion.logprobs += [logprob_of(sampled, i, column, count) for i in range(len(accepted))]
    except Exception as error:
        completion.fail_internally(error)
        return []
    return accepted
