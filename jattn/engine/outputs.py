"""RequestOutput: the result of a request, for the caller."""

import dataclasses
import enum


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


@dataclasses.dataclass(frozen=True)
class Completion:
    """One of a request's n completions."""

    index: int  # 0 .. n-1
    text: str  # of the output; empty without a tokenizer
    token_ids: tuple[int, ...]  # of the output, with a stop token at its end
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each output token; None: not requested
    finish_reason: FinishReason | None = None  # None: it has not ended
    error: str | None = None  # the message, with FinishReason.ERROR
    stop: str | int | None = None  # the stop string or token id that ended it


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
