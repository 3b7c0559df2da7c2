"""Scheduler: which tokens of which sequences the next dispatch computes (continuous batching).

First come, first served. Every running sequence gets its next token (or the next chunk of its prompt) before a
waiting one is admitted. When no block is free, the youngest running sequence is preempted: it frees its blocks and
waits at the front of the queue. It keeps its tokens and is computed again, so its output does not change.
"""

import dataclasses
from collections import deque

from jattn.engine.dispatch import MAX_STEPS
from jattn.engine.request import Sequence
from jattn.engine.tables import BlockTables


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a dispatch, and of a sequence's length."""

    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # new tokens in one step, of all sequences together
    max_model_len: int  # tokens of a sequence, prompt and output
    max_burst: int = 8  # decode steps of one dispatch

    def __post_init__(self):
        reasons = [
            f"{name}={getattr(self, name)!r} must be a positive integer"
            for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_burst")
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        if not reasons and self.max_num_batched_tokens < self.max_num_seqs:
            reasons.append(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running sequence gets a token in every step"
            )
        if not reasons and self.max_burst > MAX_STEPS:
            reasons.append(f"max_burst={self.max_burst} must be at most {MAX_STEPS}")
        if reasons:
            raise ValueError("; ".join(reasons))


@dataclasses.dataclass(frozen=True)
class Row:
    """Tokens start .. start + num_new - 1 of a sequence."""

    id: str  # of the sequence
    start: int  # its first token to compute
    num_new: int  # tokens to compute
    samples: bool  # the next token is sampled from the logits of the last one


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one dispatch computes."""

    rows: tuple[Row, ...] = ()  # none: there is nothing to compute
    burst: int = 1  # the most tokens that it samples for each row
    until_any: bool = False  # stop as soon as one row ends
    preempted: tuple[str, ...] = ()  # ids of sequences that lost their blocks
    admitted: tuple[tuple[str, int], ...] = ()  # (sequence id, tokens found in the prefix cache)

    @property
    def num_tokens(self) -> int:
        """Tokens of the first step."""
        return sum(row.num_new for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Does every row compute one token and sample the next?"""
        return all(row.num_new == 1 and row.samples for row in self.rows)


class Scheduler:
    """The queues of waiting and running sequences. schedule() plans a dispatch; commit() updates a sequence."""

    def __init__(self, limits: Limits, tables: BlockTables):
        self.limits = limits
        self.tables = tables
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. At full length it must fit the empty pool; the engine's max_model_len ensures it."""
        self.waiting.append(seq)

    def remove(self, seq: Sequence, *, trusted: bool = True) -> None:
        """Remove a sequence, finished or aborted, and free its blocks."""
        if seq in self.running:
            self.running.remove(seq)
            self.tables.release(seq, trusted=trusted)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> StepPlan:
        """The next dispatch, with its blocks allocated. It has no rows if there is nothing to compute."""
        budget, rows, preempted = self.limits.max_num_batched_tokens, [], []
        i = 0
        while i < len(self.running):
            seq = self.running[i]
            count = min(len(seq.tokens) - seq.num_computed, budget)
            if not budget:
                break
            while seq in self.running and not self.tables.extend(seq, seq.num_computed + count):
                preempted.append(self._preempt_youngest())
            if seq not in self.running:
                break
            rows.append(self._row(seq, count))
            budget -= count
            i += 1
        admitted = []
        while self.waiting and budget and not preempted and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            hit = self.tables.admit(seq)
            count = min(len(seq.tokens) - seq.num_computed, budget)
            if not self.tables.extend(seq, seq.num_computed + count):
                self.tables.release(seq)
                break
            self.running.append(self.waiting.popleft())
            admitted.append((seq.id, hit))
            rows.append(self._row(seq, count))
            budget -= count
        plan = StepPlan(tuple(rows), preempted=tuple(preempted), admitted=tuple(admitted))
        return dataclasses.replace(plan, burst=self._burst(plan), until_any=bool(self.waiting))

    def plan_next(self, plan: StepPlan) -> StepPlan | None:
        """A dispatch that can be sent after `plan` before its tokens are read, with the blocks allocated.

        None if the tokens must be read first: because a sequence is waiting, has ended, will end in `plan`, needs its
        history or log-probabilities, or gets no blocks.
        """
        must_read = any(seq.params.needs_history_or_logprobs for seq in self.running)
        same_rows = [row.id for row in plan.rows] == [seq.id for seq in self.running]
        if self.waiting or must_read or not plan.is_decode or not same_rows:
            return None
        rows = tuple(dataclasses.replace(row, start=row.start + plan.burst) for row in plan.rows)
        left = [self._remaining(seq) - plan.burst for seq in self.running]
        burst = min(self.limits.max_burst, max(left))
        wanted = [
            (seq, row.start + min(burst, count)) for seq, row, count in zip(self.running, rows, left, strict=True)
        ]
        return StepPlan(rows, burst=burst) if min(left) >= 1 and self.tables.extend_all(wanted) else None

    def commit(self, seq: Sequence, row: Row, new_tokens: list[int]) -> None:
        """Update a sequence whose row gave these tokens. The key of the last one is not in the cache yet."""
        seq.num_computed = row.start + row.num_new + max(len(new_tokens) - 1, 0)
        seq.tokens += new_tokens
        self.tables.settle(seq)

    def _burst(self, plan: StepPlan) -> int:
        """The decode steps of a dispatch. Allocates blocks for all of them."""
        if not plan.rows or not plan.is_decode:
            return 1
        seqs = self.running[: len(plan.rows)]
        burst = min(self.limits.max_burst, max(self._remaining(seq) for seq in seqs))
        while burst > 1:
            wanted = [(seq, seq.num_computed + min(burst, self._remaining(seq))) for seq in seqs]
            if self.tables.extend_all(wanted):
                return burst
            burst //= 2
        return 1

    def _remaining(self, seq: Sequence) -> int:
        """The most tokens that a sequence may still generate."""
        return remaining_tokens(seq, self.limits.max_model_len)

    def _row(self, seq: Sequence, count: int) -> Row:
        """A row of the plan, whose blocks others may share in the same step: a sequence with a row is not preempted."""
        if count < 1:
            raise AssertionError(f"sequence {seq.id} has {len(seq.tokens)} tokens, and all are computed")
        self.tables.publish(seq, seq.num_computed + count)
        return Row(seq.id, seq.num_computed, count, seq.num_computed + count == len(seq.tokens))

    def _preempt_youngest(self) -> str:
        seq = self.running.pop()
        self.tables.release(seq)
        seq.num_preemptions += 1
        self.waiting.appendleft(seq)
        return seq.id


def remaining_tokens(seq: Sequence, max_model_len: int) -> int:
    """The most tokens that a sequence may still generate, by its max_tokens and max_model_len."""
    return min(seq.params.max_tokens - seq.num_output, max_model_len - len(seq.tokens))
