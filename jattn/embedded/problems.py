"""The training data of the embedded model: sums of two three-digit numbers, each written with its lowest digit first.

    740+583=2340        means 047 + 385 = 0432; in this order a carry goes to the next digit

A problem is one line. A prompt may have solved examples in earlier lines, which other prompts may have too. One problem
in sixteen, chosen by a hash of its numbers, is held out from training.
"""

import dataclasses
import random
from collections.abc import Iterator

DIGITS = 3
END = "\n"
HELD_OUT = 16
"""One problem of this many is held out."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sum a + b, as text."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a:0{DIGITS}}"[::-1] + "+" + f"{self.b:0{DIGITS}}"[::-1] + "="

    @property
    def answer(self) -> str:
        return f"{self.a + self.b:0{DIGITS + 1}}"[::-1]

    @property
    def line(self) -> str:
        return self.question + self.answer + END

    @property
    def held_out(self) -> bool:
        """True if it is not in the training data."""
        return (self.a * 2654435761 ^ self.b * 40503) >> 4 & (HELD_OUT - 1) == 0


def problems(seed: int, held_out: bool) -> Iterator[Problem]:
    """An endless iterator over random problems, all held out or all not."""
    rng = random.Random(seed)
    while True:
        problem = Problem(rng.randrange(10**DIGITS), rng.randrange(10**DIGITS))
        if problem.held_out == held_out:
            yield problem


def few_shot(examples: list[Problem], problem: Problem) -> str:
    """A prompt of solved examples and a question."""
    return "".join(example.line for example in examples) + problem.question
