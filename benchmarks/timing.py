"""Timing on a shared machine: the candidates are timed in turn; each has a best and a median over the rounds."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of every round."""

    rounds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


SETTLE = 0.03
"""Seconds of untimed calls before each timed one. OpenMP's threads spin that long after vLLM's call, on a core that the
next candidate needs; a server calls one library again and again and never sees that."""


def in_turn(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, Times]:
    """Time each candidate once a round, after untimed calls of its own, so that a slow minute touches all of them.

    The first candidate of a round is the last of the next, so that none always follows the same one.
    """
    for call in candidates.values():
        jax.block_until_ready(call())
    seen: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates.items())
    for _ in range(rounds):
        for name, call in order:
            begin = time.perf_counter()
            while time.perf_counter() - begin < SETTLE:
                jax.block_until_ready(call())
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seen[name].append(time.perf_counter() - begin)
        order.append(order.pop(0))
    return {name: Times(tuple(values)) for name, values in seen.items()}


class Rounds:
    """The rounds of several sweeps, by name of the measurement."""

    def __init__(self):
        self._seen: dict[str, dict[str, Times]] = {}

    def add(self, name: str, times: dict[str, Times]) -> dict[str, Times]:
        """Add these rounds; returns all rounds of this name."""
        before = self._seen.get(name, {who: Times(()) for who in times})
        self._seen[name] = {who: Times((*before[who].rounds, *new.rounds)) for who, new in times.items()}
        return self._seen[name]


def ratio(times: dict[str, Times], slower: str, faster: str) -> float:
    """Median over the rounds of slower / faster."""
    pairs = zip(times[slower].rounds, times[faster].rounds, strict=True)
    return statistics.median(a / b for a, b in pairs)
