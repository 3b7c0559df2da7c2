"""The host's side of a completion: text, stop conditions, log-probabilities."""

import dataclasses
import logging
from collections.abc import Sequence as Many

from jattn.engine.detokenize import Detokenizer, find_stop, held_back
from jattn.engine.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from jattn.engine.sampling import BAD_TOKEN
from jattn.engine.sequence import Sequence
from jattn.engine.tokenizer import Tokenizer

log = logging.getLogger("jattn.engine")


def unforeseen(error: Exception) -> str:
    """What a client is told of an internal error."""
    return f"an internal error ({type(error).__name__}) ended this request; the engine's log has the details"


@dataclasses.dataclass(eq=False)
class Response:
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
    ) -> "Response":
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

    def fail_unforeseen(self, error: Exception) -> None:
        """End with an internal error. Its message may quote other requests, so only the log has it."""
        log.error("request %s failed", self.request_id, exc_info=error)
        self.fail(unforeseen(error))

    def completion(self) -> Completion:
        """The completion so far, less an end of the text that may become a stop string."""
        told = self.seq.params.logprobs is not None
        return Completion(
            index=self.index,
            text=self._visible(),
            token_ids=tuple(self.seq.output),
            logprobs=tuple(self.logprobs) if told else None,
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
    responses: list[Response]

    @classmethod
    def of(
        cls, id: str, prompt: tuple[int, ...], seqs: list[Sequence], stop_ids, longest: int, tokenizer: Tokenizer | None
    ) -> "Request":
        """A completion for each sequence; stop_ids: of each."""
        each = enumerate(zip(seqs, stop_ids, strict=True))
        return cls(id, prompt, [Response.of(id, seq, i, ids, longest, tokenizer) for i, (seq, ids) in each])

    def output(self) -> RequestOutput:
        """So far."""
        return RequestOutput(
            self.id, self.prompt, tuple(r.completion() for r in self.responses), self.responses[0].num_cached
        )
