"""A synthetic serving load: requests with random arrivals and lengths, some with a common beginning."""

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    seconds: float  # after the start
    prompt: tuple[int, ...]
    max_tokens: int


def make_trace(
    count: int, *, vocab_size: int, max_len: int, rate: float | None, mean_input: float, mean_output: float,
    shared: float, seed: int
) -> list[Arrival]:  # fmt: skip
    """Poisson arrivals at `rate` per second (None: all at once), and log-normal lengths as in ShareGPT's chats.

    `shared` is the share of requests that begin with one of four system prompts of half the mean input length.
    ValueError if the model cannot serve such prompts and outputs.
    """
    if max_len < 3:
        raise ValueError(f"a load needs sequences of at least 3 tokens, and {max_len} is this engine's limit")
    for option, mean in (("--mean-input", mean_input), ("--mean-output", mean_output)):
        if mean > max_len:
            raise ValueError(f"{option} {mean:g} must be at most {max_len}, the limit of prompt and output together")
    rng = random.Random(seed)
    token = lambda: rng.randrange(3, vocab_size)
    systems = [tuple(token() for _ in range(max(int(mean_input / 2), 1))) for _ in range(4)]
    now, trace = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) if rate else 0.0
        start = rng.choice(systems) if rng.random() < shared else ()
        output = _length(rng, mean_output, max(max_len // 2, 1))
        fresh = _length(rng, mean_input - len(start), max(max_len - output - len(start) - 1, 1))
        trace.append(Arrival(now, (*start, *(token() for _ in range(fresh))), output))
    return trace


def _length(rng: random.Random, mean: float, most: int) -> int:
    """A log-normal length with sigma 0.8, whose median is 0.73 of the mean."""
    return min(max(int(max(mean, 1) * rng.lognormvariate(-0.32, 0.8)), 1), most)
