"""Scheduler: which tokens of which sequences the next dispatch computes (continuous batching).

First come, first served. Every running sequence gets its next token (or the next chunk of its prompt) before a
waiting one is admitted. When no block is free, the youngest running sequence is preempted: it frees its blocks and
waits at the front of the queue. It keeps its tokens and is computed again, so its output does not change.

A dispatch is planned while the one before it runs. The scheduler then counts the tokens that the running one will
sample (Sequence.num_ahead) as if it had them: only their values are unknown, and the device knows those. A sequence
whose last token is being sampled gets no row and needs no place in the batch.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence as Many
from typing import NamedTuple

from jattn.engine.dispatch import MAX_STEPS
from jattn.engine.request import Sequence, final_length
from jattn.engine.tables import BlockTables


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a dispatch, and of a sequence's length."""

    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # new tokens in one step, of all sequences together
    max_model_len: int  # tokens of a sequence, prompt and output
    max_burst: int = 8  # decode steps of one dispatch
    waiting_burst: int = 1  # while a sequence waits, a burst may be so long although a running sequence ends earlier

    def __post_init__(self):
        reasons = [
            f"{name}={getattr(self, name)!r} must be a positive integer"
            for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_burst", "waiting_burst")
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


class Row(NamedTuple):
    """Tokens start .. start + num_new - 1 of a sequence."""

    id: str  # of the sequence
    start: int  # its first token to compute
    num_new: int  # tokens to compute
    max_samples: int  # the most tokens to sample after the last of them; 0: tokens of the prompt follow
    continues: bool = False  # its token is being sampled by the dispatch before this one


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one dispatch computes."""

    rows: tuple[Row, ...] = ()  # none: there is nothing to compute
    burst: int = 1  # the most tokens that it samples for each row
    preempted: tuple[str, ...] = ()  # ids of sequences that lost their blocks
    admitted: tuple[tuple[str, int], ...] = ()  # (sequence id, tokens found in the prefix cache)
    of_ranks: "tuple[StepPlan, ...]" = ()  # of each data rank, if there are several

    @property
    def parts(self) -> "tuple[StepPlan, ...]":
        """The plan of each data rank: at least one."""
        return self.of_ranks or (self,)

    @property
    def num_tokens(self) -> int:
        """Tokens of the first step."""
        return sum(row.num_new for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Does every row compute one token and sample the next?"""
        return all(row.num_new == 1 and row.max_samples for row in self.rows)


class Chosen(NamedTuple):
    """A sequence of the next dispatch."""

    seq: Sequence
    num_new: int  # tokens to compute
    num_missing: int  # of the sequence, before they are computed
    num_left: int  # likewise


@dataclasses.dataclass(eq=False)
class Draft:
    """A dispatch that is being planned."""

    budget: int  # tokens that it may still get
    chosen: list[Chosen] = dataclasses.field(default_factory=list)
    preempted: list[str] = dataclasses.field(default_factory=list)  # see StepPlan
    admitted: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # see StepPlan

    def add(self, row: Chosen) -> None:
        """Add a row."""
        self.chosen.append(row)
        self.budget -= row.num_new


class Scheduler:
    """The queues of waiting and running sequences. schedule() plans a dispatch; commit() updates a sequence."""

    def __init__(self, limits: Limits, tables: BlockTables, waiting: deque[Sequence] | None = None):
        """waiting: a queue that several schedulers share."""
        self.limits = limits
        self.tables = tables
        self.waiting = deque[Sequence]() if waiting is None else waiting
        self.running: list[Sequence] = []  # oldest first

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. At full length it must fit the empty pool; the engine's max_model_len ensures it."""
        seq.max_len = final_length(seq.prompt, seq.params, self.limits.max_model_len)
        self.waiting.append(seq)

    def remove(self, seq: Sequence, *, trusted: bool = True) -> None:
        """Remove a sequence, finished or aborted, and free its blocks.

        A dispatch in flight may still write to them. It runs before any dispatch that uses them for other tokens.
        """
        if seq in self.running:
            self.running.remove(seq)
            self.tables.release(seq, trusted=trusted)
        else:
            self.waiting.remove(seq)

    def schedule(self, in_flight: bool = False) -> StepPlan:
        """The next dispatch, with its blocks allocated. It has no rows if there is nothing to compute.

        in_flight: the dispatch before it is not read yet. If blocks are short, the plan is then empty, because reading
        that dispatch may free some.
        """
        draft = self.draft(in_flight)
        if draft is None:
            return StepPlan()
        while self.waiting and self.may_admit(draft) and self.admit(draft):
            pass
        return self.planned(draft, self.reserve(draft, self.wanted_burst(draft.chosen)))

    # ------------------------------------------------------------------ the parts of schedule(), for data_ranks.py
    def draft(self, in_flight: bool) -> Draft | None:
        """The rows of the running sequences; None if blocks are short and the dispatch before it may free some."""
        draft = Draft(self.limits.max_num_batched_tokens)
        extend, i = self.tables.extend, 0
        while i < len(self.running) and draft.budget:
            seq = self.running[i]
            i += 1
            length = len(seq.tokens) + seq.num_ahead
            left, missing = seq.max_len - length, length - seq.num_computed  # its properties, but faster
            if left < 1:
                continue
            count = min(missing, draft.budget)
            while not extend(seq, seq.num_computed + count):
                if in_flight:
                    return None
                draft.preempted.append(self._preempt_youngest())
                if i > len(self.running):  # it was the youngest itself
                    break
            else:
                draft.add(Chosen(seq, count, missing, left))
        if self.tables.prefix_caching:
            for row in draft.chosen:
                self._publish(row.seq, row.num_new)
        return draft

    def may_admit(self, draft: Draft) -> bool:
        """Is there room for the next waiting sequence? One that was preempted waits until its tokens were read."""
        has_place = len(draft.chosen) < self.limits.max_num_seqs and draft.budget > 0
        return has_place and not draft.preempted and not self.waiting[0].num_ahead

    def admit(self, draft: Draft) -> bool:
        """Add the next waiting sequence; False, and nothing is changed, if blocks are short."""
        seq = self.waiting[0]
        hit = self.tables.admit(seq)
        missing = seq.num_missing
        count = min(missing, draft.budget)
        if not self.tables.extend(seq, seq.num_computed + count):
            self.tables.release(seq)
            return False
        self._publish(seq, count)
        self.running.append(self.waiting.popleft())
        draft.admitted.append((seq.id, hit))
        draft.add(Chosen(seq, count, missing, seq.num_left))
        return True

    def wanted_burst(self, chosen: Many[Chosen]) -> int:
        """The decode steps of a dispatch of these rows, if there are blocks for all of them."""
        if not chosen or any([row.num_missing != 1 for row in chosen]):
            return 1
        left = [row.num_left for row in chosen]
        burst = min(self.limits.max_burst, max(left))
        return min(burst, max(min(left), self.limits.waiting_burst)) if self.waiting else burst

    def reserve(self, draft: Draft, burst: int) -> int:
        """Allocate blocks for a burst; returns how long it may be: half as long, and so on, if blocks are short."""
        while burst > 1:
            wanted = [(row.seq, row.seq.num_computed + min(burst, row.num_left)) for row in draft.chosen]
            if self.tables.extend_all(wanted):
                return burst
            burst //= 2
        return 1

    def planned(self, draft: Draft, burst: int) -> StepPlan:
        """The plan of a draft. Its sequences count the tokens as computed and sampled."""
        rows = tuple([_row(chosen, burst) for chosen in draft.chosen])
        return StepPlan(rows, burst=burst, preempted=tuple(draft.preempted), admitted=tuple(draft.admitted))

    def commit(self, seq: Sequence, row: Row, new_tokens: Many[int]) -> None:
        """Update a sequence whose row gave these tokens. The key of the last one is not in the cache yet."""
        seq.num_ahead -= row.max_samples
        seq.tokens += new_tokens
        if self.tables.settles and seq.tables:  # it was not preempted since
            self.tables.settle(seq, row.start + row.num_new + max(len(new_tokens) - 1, 0))

    def _publish(self, seq: Sequence, count: int) -> None:
        """Let others share the blocks that are full after `count` more tokens, as far as these are known.

        Also in the same step: a sequence that was chosen for it is not preempted.
        """
        self.tables.publish(seq, min(seq.num_computed + count, len(seq.tokens)))

    def _preempt_youngest(self) -> str:
        seq = self.running.pop()
        self.tables.release(seq)
        seq.num_preemptions += 1
        self.waiting.appendleft(seq)
        return seq.id


def _row(chosen: Chosen, burst: int) -> Row:
    """A row of the plan; counts its tokens as computed and sampled."""
    seq, count, missing, left = chosen
    if count < 1:
        raise AssertionError(f"sequence {seq.id} has {len(seq.tokens)} tokens, and all are computed")
    samples = min(burst, left) if count == missing else 0
    row = Row(seq.id, seq.num_computed, count, samples, seq.num_ahead > 0)
    seq.num_computed += count + max(samples - 1, 0)
    seq.num_ahead += samples
    return row
