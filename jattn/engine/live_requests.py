"""LiveRequests: the requests that are being served, by id, and their completions, by sequence id."""

import logging
from collections import Counter, deque
from collections.abc import Iterable

from jattn.engine.data_ranks import AnyScheduler
from jattn.engine.dispatch import NOT_SAMPLED
from jattn.engine.outputs import FinishReason, RequestOutput
from jattn.engine.request import CompletionState, Request, Sequence
from jattn.engine.runner import DispatchResult, InFlight, logprobs_of
from jattn.engine.sampling import Sampled
from jattn.engine.scheduler import Row, StepPlan

log = logging.getLogger("jattn.engine")


class LiveRequests:
    """The requests from their admission until their last output is returned."""

    def __init__(self):
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, CompletionState] = {}  # by sequence id; in order of arrival
        self._accepted = Accepted()  # of the last dispatch

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    def get(self, id: str) -> Request | None:
        return self._requests.get(id)

    def completion(self, seq_id: str) -> CompletionState:
        """The completion of this sequence."""
        return self._completions[seq_id]

    def sequences(self, rows: Iterable[Row]) -> list[Sequence]:
        """The sequence of each row."""
        return [self._completions[row.id].seq for row in rows]

    def sequence_ids(self) -> list[str]:
        """The ids of all sequences."""
        return list(self._completions)

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
        """Drop those of these requests whose completions have all ended."""
        for id in ids:
            if self._requests[id].finished:
                self.drop(self._requests[id])

    def drop_ended(self) -> None:
        """`drop_finished` of the requests that the last dispatch ended."""
        self.drop_finished(dict.fromkeys(self._accepted.ended))
        self._accepted.ended.clear()

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

    def accept(self, flight: InFlight, result: DispatchResult, scheduler: AnyScheduler) -> None:
        """Give each row's tokens to its sequence, and end those that have ended. `read_text` reads their text."""
        accepted = self._accepted = Accepted()
        tokens = result.tokens[: flight.plan.burst]
        columns, counts = tokens.T.tolist(), (tokens != NOT_SAMPLED).sum(axis=0).tolist()
        for row in flight.plan.rows:
            completion = self._completions.get(row.id)
            if completion is None or completion.finish_reason is not None:  # ended while the dispatch was in flight
                continue
            r = flight.column[row.id]
            new = _accept_row(completion, row, columns[r][: counts[r]], result.sampled, r)
            scheduler.commit(completion.seq, row, new)
            if new or completion.finish_reason is not None:
                accepted.unread.append((completion, new))
            if completion.finish_reason is not None:
                accepted.end(completion, scheduler)

    def read_text(self, scheduler: AnyScheduler) -> tuple[list[str], Counter[str]]:
        """Decode the text of the tokens that were accepted last, which may end at a stop string.

        Returns the ids of the changed requests and what the dispatch adds to the stats. An exception here, e.g. in a
        tokenizer, fails its row only.
        """
        accepted, changed, count = self._accepted, dict[str, None](), 0
        unread = accepted.unread
        while unread:
            completion, new = unread[0]  # removed once it is read: see take_back_unread
            before = completion.finish_reason
            try:
                count += completion.read_text(new)
            except Exception as error:
                completion.fail_internally(error)
            if before is not None:
                accepted.recount(before, completion)
            elif completion.finish_reason is not None:
                accepted.end(completion, scheduler)
            unread.popleft()
            changed[completion.request_id] = None
        accepted.counts["output_tokens"] += count
        return list(changed), accepted.counts

    @property
    def is_reading(self) -> bool:
        """Is text being decoded? Then a tokenizer calls, and requests must not be dropped."""
        return bool(self._accepted.unread)

    def take_back_unread(self) -> None:
        """After an exception: remove the accepted tokens whose text was not read. They are computed again."""
        for completion, new in self._accepted.unread:
            completion.take_back(len(new))
        self._accepted.unread.clear()


class Accepted:
    """The tokens of a dispatch whose text is not read yet, and what it adds to Stats."""

    def __init__(self):
        self.unread: deque[tuple[CompletionState, list[int]]] = deque()
        self.counts = Counter[str]()
        self.ended: list[str] = []  # the request of each completion that has ended

    def end(self, completion: CompletionState, scheduler: AnyScheduler) -> None:
        """Free the blocks of a completion that has ended, and count it."""
        scheduler.remove(completion.seq, trusted=completion.finish_reason is not FinishReason.ERROR)
        self.counts[_counter(completion.finish_reason)] += 1
        self.ended.append(completion.request_id)

    def recount(self, before: FinishReason, completion: CompletionState) -> None:
        """Count a completion that had ended as its text left it: reading it may fail."""
        self.counts[_counter(before)] -= 1
        self.counts[_counter(completion.finish_reason)] += 1


def _counter(reason: FinishReason | None) -> str:
    return "failed" if reason is FinishReason.ERROR else "finished"


def _accept_row(
    completion: CompletionState, row: Row, new: list[int], sampled: Sampled | None, column: int
) -> list[int]:
    """The tokens of one row up to its end."""
    if not row.max_samples:
        return []
    if not new:
        completion.fail("the dispatch gave no token for a sequence that needed one")
        return []
    accepted = completion.accept(new)
    if sampled is not None and completion.seq.params.logprobs is not None:
        completion.logprobs += logprobs_of(sampled, column, len(accepted), completion.seq.params.logprobs)
    return accepted
