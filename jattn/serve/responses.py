"""Engine outputs as the JSON of the OpenAI interface: one response, or stream events; with log-probabilities."""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jattn.engine import Completion, RequestOutput, TokenLogprob
from jattn.serve.errors import FailedError
from jattn.serve.fields import ParsedBody
from jattn.text import Tokenizer
from jattn.text.detokenizer import MAX_TOKENS_PER_CHARACTER, REPLACEMENT, Detokenizer

MIN_LOGPROB = -9999.0
"""Written for a log-probability of -inf, which JSON does not have; OpenAI uses the same number."""


class TextOffsets:
    """Where the text of each token begins, in characters of the completion's text.

    A token that continues a character begins where that character does. bounds[i] is where the i-th token begins, and
    bounds[-1] where the last one ends; the tokens of an unfinished character are not included yet.

    prompt: as the Detokenizer's, whose text has the space before a first word after a prompt.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self.bounds, self.num_tokens = [0], 0  # num_tokens: all that were added
        # tokens before _pending, on which its text may depend
        self._context = [] if tokenizer is None else list(Detokenizer(tokenizer, prompt).mark()[0].tokens)
        self._pending: list[int] = []  # the tokens of an unfinished character

    def add(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.num_tokens += 1
            self._pending.append(token)
            text = self._decode(self._context + self._pending)
            if not text.endswith(REPLACEMENT) or len(self._pending) >= MAX_TOKENS_PER_CHARACTER:
                self._settle(text)

    def finish(self) -> None:
        """Call it after the last token."""
        self._settle(self._decode(self._context + self._pending))

    def _settle(self, text: str) -> None:
        """Append the bounds of the pending tokens. text: of the context and these tokens."""
        begin, known = self.bounds[-1], self._decode(self._context)
        # a prompt may end within a character, which then belongs to the output
        context_length = len(os.path.commonprefix([known, text]))
        for count in range(1, len(self._pending) + 1):
            so_far = self._decode(self._context + self._pending[:count])
            num_certain = len(os.path.commonprefix([so_far, text]))
            self.bounds.append(max(begin + num_certain - context_length, self.bounds[-1]))
        self._context, self._pending = self._pending or self._context, []

    def _decode(self, token_ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)


@dataclasses.dataclass
class _Choice:
    """One completion of one prompt: what of it was sent."""

    index: int  # in the response
    offsets: TextOffsets
    num_characters: int = 0
    num_logprobs: int = 0
    has_begun: bool = False
    has_ended: bool = False


class ResponseBuilder:
    """Builds the response to one body. The work for a stream event depends on what is new, not on the length so far."""

    def __init__(self, parsed: ParsedBody, id: str, model: str, tokenizer: Tokenizer | None):
        self._parsed, self._tokenizer = parsed, tokenizer
        self._choices: dict[int, _Choice] = {}
        self._outputs: dict[int, RequestOutput] = {}  # the newest of each prompt
        self._head = {"id": id, "created": int(time.time()), "model": model}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response, from finished requests; FailedError if a completion failed."""
        entries = []
        for prompt_index, output in enumerate(outputs):
            for completion in output.outputs:
                choice = self._choice(prompt_index, output, completion)
                entry = self._entry(choice, completion, self._new_logprobs(choice, completion))
                if self._parsed.is_chat:
                    entry["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
                else:
                    entry["text"] = completion.text
                entries.append(entry)
        return self._body("chat.completion", entries) | {"usage": _usage(outputs)}

    def events(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The stream events for a new output of this prompt; FailedError if a completion failed."""
        self._outputs[prompt_index] = output
        for completion in output.outputs:
            choice = self._choice(prompt_index, output, completion)
            text, logprobs = completion.text[choice.num_characters :], self._new_logprobs(choice, completion)
            ends = completion.finish_reason is not None and not choice.has_ended
            if not (text or logprobs or ends):
                continue
            entry = self._entry(choice, completion, logprobs)
            if self._parsed.is_chat:
                role = {} if choice.has_begun else {"role": "assistant"}
                entry["delta"] = role | ({"content": text} if text or role else {})
            else:
                entry["text"] = text
            choice.num_characters, choice.has_begun = len(completion.text), True
            choice.has_ended = choice.has_ended or ends
            usage = {"usage": None} if self._parsed.include_usage else {}
            yield self._body("chat.completion.chunk", [entry]) | usage

    def usage_event(self) -> dict[str, Any]:
        """The last event of a stream with include_usage: the token counts."""
        return self._body("chat.completion.chunk", []) | {"usage": _usage(list(self._outputs.values()))}

    def _choice(self, prompt_index: int, output: RequestOutput, completion: Completion) -> _Choice:
        if completion.error is not None:
            raise FailedError(completion.error)
        index = prompt_index * self._parsed.params.n + completion.index
        if index not in self._choices:
            self._choices[index] = _Choice(index, TextOffsets(self._tokenizer, output.prompt_token_ids))
        return self._choices[index]

    def _new_logprobs(self, choice: _Choice, completion: Completion) -> list[TokenLogprob]:
        """The log-probabilities to send now; they count as sent.

        They are sent with their token's text: a stop string may still cut text that the engine holds back.
        """
        if completion.logprobs is None:
            return []
        offsets, begin = choice.offsets, choice.num_logprobs
        offsets.add(completion.token_ids[offsets.num_tokens :])
        is_finished = completion.finish_reason is not None
        if is_finished:
            offsets.finish()
        while choice.num_logprobs < len(offsets.bounds) - 1 and (
            is_finished or offsets.bounds[choice.num_logprobs + 1] <= len(completion.text)
        ):
            choice.num_logprobs += 1
        return list(completion.logprobs[begin : choice.num_logprobs])

    def _entry(self, choice: _Choice, completion: Completion, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """The fields of a choice that a whole response and an event share. logprobs: the ones sent last."""
        reason = None if completion.finish_reason is None else str(completion.finish_reason)
        entry: dict[str, Any] = {"index": choice.index, "finish_reason": reason, "logprobs": None}
        if completion.logprobs is None:
            return entry
        if self._parsed.is_chat:
            entry["logprobs"] = _chat_logprobs(logprobs, self._tokenizer, self._parsed.params.logprobs or 0)
        else:
            bounds = choice.offsets.bounds[choice.num_logprobs - len(logprobs) : choice.num_logprobs]
            offsets = [min(bound, len(completion.text)) for bound in bounds]
            entry["logprobs"] = _completion_logprobs(logprobs, offsets, self._tokenizer)
        return entry

    def _body(self, chat_object: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
        object = chat_object if self._parsed.is_chat else "text_completion"
        return self._head | {"object": object, "choices": entries}


def _usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return dict(
        prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated,
        prompt_tokens_details=dict(cached_tokens=cached),
    )  # fmt: skip


# ---------------------------------------------------------------------- log-probabilities
def _completion_logprobs(
    logprobs: list[TokenLogprob], offsets: list[int], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The logprobs of /v1/completions: parallel lists."""
    return dict(
        tokens=[_text_of(each.token_id, tokenizer) for each in logprobs],
        token_logprobs=[_finite(each.logprob) for each in logprobs],
        top_logprobs=[_by_text(each, tokenizer) for each in logprobs],
        text_offset=offsets,
    )


def _chat_logprobs(logprobs: list[TokenLogprob], tokenizer: Tokenizer | None, num_top: int) -> dict[str, Any]:
    """The logprobs of /v1/chat/completions: for each token its num_top most likely tokens and the token itself."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _text_of(token, tokenizer)
        octets = None if REPLACEMENT in text else list(text.encode("utf-8"))
        return dict(token=text, logprob=_finite(logprob), bytes=octets)

    def top(each: TokenLogprob) -> list[dict[str, Any]]:
        return [entry(*pair) for pair in (each.top | {each.token_id: each.logprob} if num_top else {}).items()]

    content = [entry(each.token_id, each.logprob) | {"top_logprobs": top(each)} for each in logprobs]
    return {"content": content, "refusal": None}


def _text_of(token: int, tokenizer: Tokenizer | None) -> str:
    """The text of one token that follows another; a part of a character gives U+FFFD.

    Some decoders leave out the space before the first word of a text, so the token is decoded twice in a row.
    """
    if tokenizer is None:
        return str(token)
    once = tokenizer.decode([token])
    return once if REPLACEMENT in once else tokenizer.decode([token, token])[len(once) :]


def _by_text(logprob: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Text -> log-probability, the chosen token first; a second token of the same text is named token_id:N."""
    found: dict[str, float] = {}
    for token, value in ({logprob.token_id: logprob.logprob} | logprob.top).items():
        text = _text_of(token, tokenizer)
        found[text if text not in found else f"token_id:{token}"] = _finite(value)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
