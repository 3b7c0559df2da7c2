"""What the embedded model was trained on: sums of two three-digit numbers, every number's lowest digit first.

    740+583=2340        (047 + 385 = 0432, read backwards: carries then run in writing order)

Problems are one line each; earlier lines are examples that a prompt may share with others. One problem in sixteen, by
a hash of its numbers, is never trained on.
"""

import dataclasses
import random
from collections.abc import Iterator

DIGITS = 3
END = "\n"
HELD_OUT = 16
"""One problem in so many is held out."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """a + b."""

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
        """Is it kept from training?"""
        return (self.a * 2654435761 ^ self.b * 40503) >> 4 & (HELD_OUT - 1) == 0


def problems(seed: int, held_out: bool) -> Iterator[Problem]:
    """Endless random problems, all held out or none."""
    rng = random.Random(seed)
    while True:
        problem = Problem(rng.randrange(10**DIGITS), rng.randrange(10**DIGITS))
        if problem.held_out == held_out:
            yield problem


def few_shot(examples: list[Problem], problem: Problem) -> str:
    """A prompt: solved examples, then a question."""
    return "".join(example.line for example in examples) + problem.question
