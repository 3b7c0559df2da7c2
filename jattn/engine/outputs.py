"""The engine's results: a request's completions, finished or so far."""

import dataclasses
import enum


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's length
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """How likely a chosen token was, and the most likely ones, before temperature and penalties."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One of a request's n completions."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None  # None: not yet
    error: str | None = None
    stop: str | int | None = None  # the stop string or token that ended it


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request, finished or so far; `.text` and its neighbours are the first completion's."""

    id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved, of the first completion

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
