"""Sequence, CompletionState and Request: the state of a request."""

import dataclasses
import functools
import hashlib
import logging
from array import array

from jattn.engine.outputs import Completion, FinishReason, Part, RequestOutput, TokenLogprob, instance_of
from jattn.engine.params import SamplingParams
from jattn.engine.sampling import BAD_TOKEN
from jattn.text.detokenizer import Detokenizer, find_stop, held_back
from jattn.text.tokenizer import Tokenizer

log = logging.getLogger("jattn.engine")


@dataclasses.dataclass(eq=False)
class Sequence:
    """A prompt and its generated tokens. A request with n completions has n sequences."""

    id: str  # of the sequence
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams
    seed: int = 0  # of this sequence's draws
    root_hash: bytes = b""  # of the salt and the rope variant; part of the hash of each cached block
    tokens: list[int] = dataclasses.field(default_factory=list)  # the prompt, then the output
    num_computed: int = 0  # tokens whose keys and values are in the cache after all dispatches that were sent
    num_ahead: int = 0  # tokens that a dispatch in flight samples: the most there can be
    tables: list[array] = dataclasses.field(default_factory=list)  # blocks by group; only BlockTables changes them
    kept_from: list[int] = dataclasses.field(default_factory=list)  # by group: the first block that was not freed
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)  # of its first full blocks
    num_shared: int = 0  # blocks at the beginning that came from the prefix cache
    num_published: int = 0  # blocks at the beginning that other sequences may share
    num_preemptions: int = 0  # how often it lost its blocks
    max_len: int = 0  # tokens of prompt and output at most; set when it is queued
    data_rank: int = 0  # of the devices that have its blocks, see data_ranks.py
    rules: bytes = b""  # its sampling rules for the device, see rules.py; empty until it is computed first
    prompt_words: array = dataclasses.field(default_factory=lambda: array("i"))  # the prompt as int32
    _history: array = dataclasses.field(default_factory=lambda: array("i"))  # the first tokens as int32

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.prompt_words = self.prompt_words or array("i", self.prompt)

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.num_ahead - self.num_computed

    @property
    def num_left(self) -> int:
        """The most tokens that it may still generate, without those that are being sampled."""
        return self.max_len - len(self.tokens) - self.num_ahead

    def words(self, start: int, end: int) -> array:
        """tokens[start:end] as int32."""
        if end <= len(self.prompt):
            return self.prompt_words[start:end]
        return array("i", self.tokens[start:end])

    def history(self) -> array:
        """All tokens as int32; do not change it. Only those since the last call are converted.

        There may be 100,000, and a sequence with penalties needs them in every dispatch.
        """
        self._history += self.words(len(self._history), len(self.tokens))
        return self._history

    def drop_last(self, count: int) -> None:
        """Remove the last tokens, count > 0."""
        del self.tokens[-count:], self._history[len(self.tokens) :]

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    def restart(self) -> None:
        """Keep the tokens, and compute all keys again. The caller must drop the pools that have its blocks, and all
        dispatches in flight."""
        self.num_preemptions += bool(self.tables)
        self.tables, self.kept_from, self.block_hashes = [], [], []
        self.num_computed = self.num_ahead = self.num_shared = self.num_published = 0


def seed_of(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's seed for index 0, else a hash of both."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}.{index}".encode(), digest_size=8).digest(), "little") >> 1


def final_length(prompt: tuple[int, ...], params: SamplingParams, max_model_len: int) -> int:
    """The most tokens that a request will have. It is known from the start and does not change."""
    return min(len(prompt) + params.max_tokens, max_model_len)


def internal_error_message(error: Exception) -> str:
    """The message of an internal error, for the client."""
    return f"an internal error ({type(error).__name__}) ended this request; the engine's log has the details"


@dataclasses.dataclass(eq=False)
class CompletionState:
    """The text and log-probabilities of one sequence so far, and why it ended."""

    request_id: str
    seq: Sequence
    index: int  # of the completion, 0 .. n-1
    stop_ids: tuple[int, ...]  # token ids that end it
    detokenizer: Detokenizer | None  # None: without text
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    num_cached: int = 0  # prompt tokens that were found in the prefix cache
    finish_reason: FinishReason | None = None  # None: it has not ended
    error: str | None = None
    stop: str | int | None = None  # the stop string or token id that ended it
    _text: str = ""  # includes an end that may be the beginning of a stop string

    @classmethod
    def of(cls, request_id: str, seq: Sequence, index: int, stop_ids, tokenizer: Tokenizer | None) -> "CompletionState":
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, seq.prompt)
        return cls(request_id, seq, index, stop_ids, detokenizer)

    def accept(self, tokens: list[int]) -> list[int]:
        """The new tokens up to the one that ends the sequence. `read_text` decodes them later."""
        limit = self.seq.max_len - len(self.seq.tokens)
        reason = FinishReason.LENGTH if len(tokens) >= limit else None
        tokens = tokens[:limit]
        if not self._ends.isdisjoint(tokens):
            end = next(i for i, token in enumerate(tokens) if token in self._ends)
            if tokens[end] == BAD_TOKEN:
                self.fail("the model's logits are NaN or infinite for this prompt")
                return tokens[:end]
            tokens, reason, self.stop = tokens[: end + 1], FinishReason.STOP, tokens[end]
        self.finish_reason = reason
        return tokens

    def read_text(self, tokens: list[int]) -> int:
        """Append the text of the sequence's last tokens, which were accepted; returns how many of them remain.

        A stop string ends the completion at the token that completes it, and the sequence loses the tokens after it.
        """
        if self.detokenizer is None:
            return len(tokens)
        ended = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        shown = tokens[:-1] if self.finish_reason is FinishReason.STOP else tokens
        before = self._text, self.detokenizer.mark()
        try:
            if (count := self._read_to_stop(self.detokenizer, shown)) is not None:
                self._drop_tokens(len(tokens) - count)
                return count
            if ended:
                self._read(self.detokenizer.finish())
        except BaseException:  # e.g. SystemExit: the tokens may be taken back
            self._text = before[0]
            self.detokenizer.reset(before[1])
            raise
        return len(tokens)

    def take_back(self, count: int) -> None:
        """Undo `accept`: remove the last tokens, whose text was not read."""
        self._drop_tokens(count)
        self.finish_reason = self.error = self.stop = None

    def fail(self, error: str) -> None:
        """End with an error."""
        self.finish_reason, self.error = FinishReason.ERROR, error

    def fail_internally(self, error: Exception) -> None:
        """End with an internal error. Only the log gets its message, which may quote other requests."""
        log.error("request %s failed", self.request_id, exc_info=error)
        self.fail(internal_error_message(error))

    def snapshot(self) -> Completion:
        """The completion so far, without an end of the text that may be the beginning of a stop string."""
        parts = {"token_ids": Part(self.seq.tokens, len(self.seq.prompt), len(self.seq.tokens))}
        fields = {
            "index": self.index,
            "text": self._visible() if self.seq.params.stop else self._text,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "stop": self.stop,
        }
        if self.seq.params.logprobs is None:
            fields["logprobs"] = None
        else:
            parts["logprobs"] = Part(self.logprobs, 0, len(self.logprobs))
        return Completion.of_parts(fields, **parts)

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        """The tokens that end the sequence."""
        return frozenset((BAD_TOKEN, *self.stop_ids))

    def _read_to_stop(self, detokenizer: Detokenizer, tokens: list[int]) -> int | None:
        """Append the text of these tokens. If a stop string ends in it, it ends there, and the number of tokens is
        returned that complete the string; else None.

        Only a text with a stop string is decoded token by token: of 256 rows of 16 tokens that takes 20 ms, not 3.
        """
        mark = detokenizer.mark()
        text = detokenizer.add(tokens)
        if not self.seq.params.stop or self._find_stop(text) is None:
            self._text += text
            return None
        detokenizer.reset(mark)
        return next((count for count, token in enumerate(tokens, 1) if self._read(detokenizer.add([token]))), None)

    def _read(self, text: str) -> bool:
        """Append text; returns True if it completes a stop string, where the text ends."""
        found = self._find_stop(text)
        self._text += text
        if found is None:
            return False
        at, stop = found
        self._text = self._text[: at + (len(stop) if self.seq.params.include_stop_str_in_output else 0)]
        self.finish_reason, self.stop, self.error = FinishReason.STOP, stop, None
        return True

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """(begin, string) of the first stop string that this text completes, which follows the text so far."""
        stop = self.seq.params.stop
        return find_stop(self._text + text, stop, len(self._text)) if stop and text else None

    def _drop_tokens(self, count: int) -> None:
        """Remove the last tokens, which are in no snapshot yet."""
        if count:
            self.seq.drop_last(count)
            del self.logprobs[-count:]

    def _visible(self) -> str:
        """The text without an end that may be the beginning of a stop string."""
        if self.finish_reason is not None:
            return self._text
        return self._text[: len(self._text) - held_back(self._text, self.seq.params.stop)]


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and its completions, until its last output is returned."""

    id: str
    prompt: tuple[int, ...]  # token ids
    completions: list[CompletionState]

    @classmethod
    def of(
        cls, id: str, prompt: tuple[int, ...], seqs: list[Sequence], stop_ids, tokenizer: Tokenizer | None
    ) -> "Request":
        """A request with a completion for each sequence. stop_ids: of each sequence."""
        each = enumerate(zip(seqs, stop_ids, strict=True))
        return cls(id, prompt, [CompletionState.of(id, seq, i, ids, tokenizer) for i, (seq, ids) in each])

    def output(self) -> RequestOutput:
        """The output so far."""
        fields = {
            "id": self.id,
            "prompt_token_ids": self.prompt,
            "outputs": tuple([completion.snapshot() for completion in self.completions]),
            "num_cached_tokens": self.completions[0].num_cached,
        }
        return instance_of(RequestOutput, fields)

    @property
    def finished(self) -> bool:
        """Have all completions ended?"""
        return all([completion.finish_reason is not None for completion in self.completions])
