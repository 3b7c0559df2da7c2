"""What a request asks of the sampler."""

import dataclasses
import math
from collections.abc import Sequence

MAX_LOGPROBS = 20
"""The most alternatives that a request may ask for a token (the limit of the OpenAI interface)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; frozen, and whole: every mistake is named at once.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 are off. Penalties follow the OpenAI interface
    (presence, frequency: over the output) and its common extension (repetition: over prompt and output, 1 is off).
    The draw at a position depends on the seed, the position and the logits, not on who else is in the batch; without
    a seed the engine takes one of its own. `stop` strings end the text before themselves.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    seed: int | None = None
    max_tokens: int = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's, and the k most likely ones'

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", stop if stop is None else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        reasons = list(self._reasons())
        if reasons:
            raise ValueError("; ".join(reasons))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    @property
    def is_penalised(self) -> bool:
        """Does the choice of a token depend on those before it, beyond the logits?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_told(self) -> bool:
        """Does a step of this request take more than its logits, or tell more than its token?"""
        return self.is_penalised or self.logprobs is not None

    def _reasons(self):
        """One sentence for each mistake."""
        ranges = dict(
            temperature=(0, math.inf), top_p=(0, 1), min_p=(0, 1), repetition_penalty=(0, math.inf),
            presence_penalty=(-2, 2), frequency_penalty=(-2, 2),
        )  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            open_end = name in ("top_p", "repetition_penalty")
            if not _is_number(value) or not low <= value <= high or (open_end and value == 0) or math.isinf(value):
                yield f"{name}={value!r} must be a number {'above' if open_end else 'from'} {low} up to {high}"
        for name, low in (("top_k", -1), ("n", 1), ("max_tokens", 1)):
            if not _is_int(getattr(self, name)) or getattr(self, name) < low:
                yield f"{name}={getattr(self, name)!r} must be an integer of at least {low}"
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            yield f"seed={self.seed!r} must be None or an integer from 0 up to 2**63 - 1"
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            yield f"logprobs={self.logprobs!r} must be None or an integer from 0 up to {MAX_LOGPROBS}"
        if self.stop is None or not all(isinstance(text, str) and text for text in self.stop):
            yield f"stop={self.stop!r} must be non-empty strings"
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            yield f"stop_token_ids={self.stop_token_ids!r} must be token ids, 0 or more"
        if self.temperature == 0 and self.n != 1:
            yield f"n={self.n} with temperature=0 would give the same completion n times; use n=1 or a temperature"


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
