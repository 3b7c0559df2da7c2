"""RequestOutput: the result of a request, for the caller."""

import dataclasses
import enum
from typing import Any, NamedTuple


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # it has max_tokens tokens, or the longest sequence that the engine allows
    ABORT = "abort"  # the caller ended it
    ERROR = "error"  # see Completion.error


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a generated token and of the most likely ones, before temperature and penalties."""

    token_id: int  # the generated token
    logprob: float  # natural logarithm of its probability
    top: dict[int, float]  # token id -> log-probability of the most likely tokens, most likely first


class Part(NamedTuple):
    """values[begin:end] of a list that only grows."""

    values: list[Any]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """One of a request's n completions.

    In the outputs of a running request, token_ids and logprobs are copied when they are first read: every step makes
    an output, few are read, and a copy of 10,000 tokens or log-probabilities takes longer than the rest of it.
    """

    index: int  # 0 .. n-1
    text: str  # of the output; empty without a tokenizer
    token_ids: tuple[int, ...]  # of the output, with a stop token at its end
    # of each output token; None: not requested. No class attribute: it would hide __getattr__.
    logprobs: tuple[TokenLogprob, ...] | None = dataclasses.field(default_factory=lambda: None)
    finish_reason: FinishReason | None = None  # None: it has not ended
    error: str | None = None  # the message, with FinishReason.ERROR
    stop: str | int | None = None  # the stop string or token id that ended it

    @classmethod
    def of_parts(cls, fields: dict[str, Any], **parts: Part) -> "Completion":
        """A completion from all of its fields, of which `parts` are copied when they are first read."""
        return instance_of(cls, {**fields, "_parts": parts})

    def __getattr__(self, name: str) -> Any:
        """A field of _parts that was not read before; several threads may read it."""
        part = self.__dict__.get("_parts", {}).get(name)
        if part is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self.__dict__[name] = tuple(part.values[part.begin : part.end])
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the fields alone, not the lists of the engine."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The output of a request, final or so far. text, token_ids ... are those of the first completion."""

    id: str  # of the request
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]  # its n completions
    num_cached_tokens: int = 0  # prompt tokens of the first completion that were found in the prefix cache

    @property
    def finished(self) -> bool:
        """Have all completions ended?"""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.outputs[0].error


def instance_of(cls: type, fields: dict[str, Any]) -> Any:
    """An instance of a frozen dataclass, from all of its fields. Its own __init__ takes four times as long, because it
    calls object.__setattr__ for each; a step of 256 rows makes 512 instances."""
    instance = object.__new__(cls)
    object.__setattr__(instance, "__dict__", fields)
    return instance
