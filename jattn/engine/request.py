"""A request from its admission to its result: its sequences, their text so far, and what the caller gets."""

import dataclasses
import enum
import hashlib
import logging
from collections.abc import Sequence as Many

from jattn.engine.params import SamplingParams
from jattn.engine.sampling import BAD_TOKEN
from jattn.text.tokenizer import Detokenizer, Tokenizer, find_stop, held_back


@dataclasses.dataclass(eq=False)
class Sequence:
    """A prompt and its generated tokens; a request with n completions has n sequences."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    root_hash: bytes = b""  # of the salt and rope variant; in the name of each cached block
    tokens: list[int] = dataclasses.field(default_factory=list)  # the prompt, then the output
    num_computed: int = 0  # tokens whose keys and values are in the cache
    tables: list[list[int]] = dataclasses.field(
        default_factory=list
    )  # one per cache group; only BlockTables changes them
    kept_from: list[int] = dataclasses.field(default_factory=list)  # per group: blocks before this one were given back
    names: list[bytes] = dataclasses.field(default_factory=list)  # hashes of the first full blocks
    num_shared: int = 0  # blocks that came from the prefix cache
    num_published: int = 0  # blocks that others may share
    num_preemptions: int = 0

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    def restart(self) -> None:
        """Keep the tokens and forget what was computed; the caller has dropped the pools that held its blocks."""
        self.num_preemptions += bool(self.tables)
        self.tables, self.kept_from, self.names = [], [], []
        self.num_computed = self.num_shared = self.num_published = 0


def seed_of(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for 0, a hash of both for the others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}.{index}".encode(), digest_size=8).digest(), "little") >> 1


def final_length(prompt: tuple[int, ...], params: SamplingParams, max_model_len: int) -> int:
    """The most tokens that a request will ever have; known at its start, and the same after a preemption."""
    return min(len(prompt) + params.max_tokens, max_model_len)


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


log = logging.getLogger("jattn.engine")


def internal_error_message(error: Exception) -> str:
    """The message that a client gets of an internal error."""
    return f"an internal error ({type(error).__name__}) ended this request; the engine's log has the details"


@dataclasses.dataclass(eq=False)
class CompletionState:
    """The text and log-probabilities of one sequence so far, and why it ended."""

    request_id: str
    seq: Sequence
    index: int
    stop_ids: tuple[int, ...]
    max_model_len: int
    detokenizer: Detokenizer | None
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop: str | int | None = None
    _text: str = ""

    @classmethod
    def of(
        cls, request_id: str, seq: Sequence, index: int, stop_ids, max_model_len: int, tokenizer: Tokenizer | None
    ) -> "CompletionState":
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, seq.prompt)
        return cls(request_id, seq, index, stop_ids, max_model_len, detokenizer)

    def accept(self, tokens: Many[int]) -> list[int]:
        """Take new tokens; returns those up to the one that ends the sequence."""
        accepted, unread = [], []
        for token in map(int, tokens):
            if token == BAD_TOKEN:
                self.fail("the model's logits are NaN or infinite for this prompt")
                break
            accepted.append(token)
            reason = self._reason_to_end(token, self.seq.num_output + len(accepted))
            unread += [] if reason is FinishReason.STOP else [token]
            if reason is not None or self.seq.params.stop:  # with stop strings: token by token, to end at the right one
                self._read(unread)
                unread = []
            if reason is not None and self.finish_reason is None:
                self._end(reason, token if reason is FinishReason.STOP else None)
            if self.finish_reason is not None:
                break
        self._read(unread)
        return accepted

    def fail(self, why: str) -> None:
        """End with an error."""
        self.finish_reason, self.error = FinishReason.ERROR, why

    def fail_internally(self, error: Exception) -> None:
        """End with an internal error. Its message may quote other requests, so only the log has it."""
        log.error("request %s failed", self.request_id, exc_info=error)
        self.fail(internal_error_message(error))

    def snapshot(self) -> Completion:
        """The completion so far, less an end of the text that may become a stop string."""
        wanted = self.seq.params.logprobs is not None
        return Completion(
            index=self.index,
            text=self._visible(),
            token_ids=tuple(self.seq.output),
            logprobs=tuple(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            error=self.error,
            stop=self.stop,
        )

    def _reason_to_end(self, token: int, num_output: int) -> FinishReason | None:
        if token in self.stop_ids:
            return FinishReason.STOP
        is_long = num_output >= self.seq.params.max_tokens or len(self.seq.prompt) + num_output >= self.max_model_len
        return FinishReason.LENGTH if is_long else None

    def _read(self, tokens: Many[int], last: bool = False) -> None:
        """Append the tokens' text; end at a stop string."""
        if self.detokenizer is None or not (tokens or last):
            return
        before = len(self._text)
        self._text += self.detokenizer.finish() if last else self.detokenizer.add(tokens)
        params = self.seq.params
        found = find_stop(self._text, params.stop, before) if len(self._text) > before else None
        if found is not None:
            at, text = found
            self._text = self._text[: at + (len(text) if params.include_stop_str_in_output else 0)]
            self.finish_reason, self.stop = FinishReason.STOP, text

    def _end(self, reason: FinishReason, stop: int | None) -> None:
        self.finish_reason, self.stop = reason, stop
        self._read([], last=True)

    def _visible(self) -> str:
        if self.finish_reason is not None:
            return self._text
        return self._text[: len(self._text) - held_back(self._text, self.seq.params.stop)]


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and its unfinished completions."""

    id: str
    prompt: tuple[int, ...]
    completions: list[CompletionState]

    @classmethod
    def of(
        cls, id: str, prompt: tuple[int, ...], seqs: list[Sequence], stop_ids, longest: int, tokenizer: Tokenizer | None
    ) -> "Request":
        """A completion for each sequence; stop_ids: of each."""
        each = enumerate(zip(seqs, stop_ids, strict=True))
        return cls(id, prompt, [CompletionState.of(id, seq, i, ids, longest, tokenizer) for i, (seq, ids) in each])

    def output(self) -> RequestOutput:
        """So far."""
        return RequestOutput(
            self.id, self.prompt, tuple(r.snapshot() for r in self.completions), self.completions[0].num_cached
        )
