"""SamplingParams: how a request's tokens are chosen, and when it stops."""

import dataclasses
from collections.abc import Sequence

from jattn.errors.arguments import BYTES, short

MAX_LOGPROBS = 20
"""The most alternatives to each token in `logprobs` (the limit of the OpenAI interface)."""

MAX_COMPLETIONS = 128
"""The most completions of one prompt: each is a sequence with blocks of its own."""

MAX_STOPS = 64
"""The most stop strings, and the most stop tokens, of a request."""

MAX_STOP_CHARACTERS = 4096
"""The most characters of a request's stop strings together: every token is compared with all of them."""

MAX_INT32 = 2**31 - 1
"""The device counts in int32."""

MAX_TEMPERATURE, REPETITION_RANGE = 1e6, (1e-2, 1e2)
"""Within these limits every finite float32 logit stays finite."""


class SamplingParamsError(ValueError):
    """Every mistake of a SamplingParams in one message. `fields`: the names of its fields that have one."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()):
        super().__init__(message)
        self.fields = fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Frozen; one ValueError names every mistake.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 are off. Penalties follow the OpenAI interface
    (presence, frequency: over the output) and its common extension (repetition: over prompt and output, 1 is off).
    The draw at a position depends on the seed, the completion's index, the position and the logits, not on the other
    rows of the batch; without a seed the engine draws one. The text ends before a `stop` string.
    """

    temperature: float = 1.0  # divides the logits; 0: always the most likely token
    top_k: int = 0  # only the k most likely tokens; 0 or -1: off
    top_p: float = 1.0  # only the most likely tokens that together reach this probability; 1: off
    min_p: float = 0.0  # only tokens at least this likely, relative to the most likely one; 0: off
    repetition_penalty: float = 1.0  # a factor for tokens of the prompt and the output; 1: off
    presence_penalty: float = 0.0  # subtracted from the logit of each token that the output has; 0: off
    frequency_penalty: float = 0.0  # subtracted once for each time that the output has the token; 0: off
    n: int = 1  # completions of the prompt
    seed: int | None = None  # of the draws; None: the engine draws one
    max_tokens: int = 16  # of the output, at most
    stop: str | Sequence[str] = ()  # strings; the text ends before the first that appears
    stop_token_ids: Sequence[int] = ()  # the output ends at the first that is generated
    ignore_eos: bool = False  # go on after an end-of-sequence token
    include_stop_str_in_output: bool = False  # the text ends after the stop string, not before it
    logprobs: int | None = None  # None: off; k: of the chosen token and the k most likely ones

    def __post_init__(self):
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name in _FIELDS:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if reasons := list(self._reasons()):
            fields = tuple(dict.fromkeys(name for name, _ in reasons))
            raise SamplingParamsError("; ".join(reason for _, reason in reasons), fields)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def _reasons(self):
        """(field, a sentence) for each mistake."""
        ranges = dict(
            temperature=(0, MAX_TEMPERATURE), min_p=(0, 1), repetition_penalty=REPETITION_RANGE,
            presence_penalty=(-2, 2), frequency_penalty=(-2, 2),
        )  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                yield name, f"{name}={short(value)} must be a number from {low:g} up to {high:g}"
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            yield "top_p", f"top_p={short(self.top_p)} must be a number above 0 up to 1"
        integers = dict(top_k=(-1, MAX_INT32), n=(1, MAX_COMPLETIONS), max_tokens=(1, MAX_INT32))
        optional = dict(seed=(0, 2**63 - 1), logprobs=(0, MAX_LOGPROBS))
        for name, (low, high) in (integers | optional).items():
            value, may_be_none = getattr(self, name), name in optional
            if not (may_be_none and value is None) and not (_is_int(value) and low <= value <= high):
                kind = "None or an integer" if may_be_none else "an integer"
                yield name, f"{name}={short(value)} must be {kind} from {low} up to {high}"
        yield from self._stop_reasons()
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                yield name, f"{name}={short(getattr(self, name))} must be True or False"
        if self.temperature == 0 and _is_int(self.n) and self.n > 1:
            way_out = "gives the same completion n times; use n=1 or a temperature"
            yield "n", f"n={short(self.n)} with temperature=0 {way_out}"

    def _stop_reasons(self):
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            yield "stop", f"stop={short(self.stop)} must be non-empty strings"
        elif len(self.stop) > MAX_STOPS or sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            yield (
                "stop",
                (
                    f"stop has {len(self.stop)} strings of {sum(map(len, self.stop))} characters together; "
                    f"at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters together"
                ),
            )
        elif not all(is_encodable(text) for text in self.stop):
            why = "holds a surrogate, which is no character and never appears in text"
            yield "stop", f"stop={short(self.stop)} {why}"
        ids = self.stop_token_ids
        if not isinstance(ids, tuple) or not all(_is_int(token) and 0 <= token <= MAX_INT32 for token in ids):
            yield "stop_token_ids", f"stop_token_ids={short(ids)} must be token ids, integers from 0 up to {MAX_INT32}"
        elif len(ids) > MAX_STOPS:
            yield "stop_token_ids", f"stop_token_ids has {len(ids)} tokens, at most {MAX_STOPS}"


_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def is_encodable(text: str) -> bool:
    """Can the text be written as UTF-8? A string with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value, depth: int = 1):
    """numpy's and JAX's numbers as Python's, lists and arrays of them as tuples; anything else as it is."""
    if value is None or isinstance(value, (bool, int, float, str, *BYTES)):  # bytes are no token ids
        return value
    if getattr(value, "ndim", None) == 0:  # a number of numpy or JAX
        return value.item()
    if depth and hasattr(value, "__iter__"):
        return tuple(_plain(each, depth - 1) for each in value)
    return value


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # not NaN
