"""Engine outputs as the JSON of the OpenAI interface: one response, or stream events."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from jattn.engine import Completion, RequestOutput, TokenLogprob
from jattn.serve import logprobs as json_logprobs
from jattn.serve.errors import FailedError
from jattn.serve.fields import ParsedBody
from jattn.serve.token_texts import TextOffsets, TokenTexts


@dataclasses.dataclass
class _Choice:
    """One completion of one prompt: what of it was sent."""

    index: int  # in the response
    offsets: TextOffsets | None  # None: log-probabilities are not requested
    num_characters: int = 0
    num_logprobs: int = 0
    has_begun: bool = False
    has_ended: bool = False


class ResponseBuilder:
    """Builds the response to one body. The work for a stream event depends on what is new, not on the length so far."""

    def __init__(self, parsed: ParsedBody, id: str, model: str, texts: TokenTexts):
        self._parsed, self._texts = parsed, texts
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

    def num_unsent_logprobs(self, prompt_index: int, output: RequestOutput) -> int:
        """How many numbers the next events of this prompt have at most, with those of the likeliest tokens."""
        if (num_top := self._parsed.params.logprobs) is None:
            return 0
        sent = [self._choices.get(self._index(prompt_index, completion)) for completion in output.outputs]
        num_sent = sum(choice.num_logprobs for choice in sent if choice is not None)
        return (1 + num_top) * (sum(len(completion.token_ids) for completion in output.outputs) - num_sent)

    def usage_event(self) -> dict[str, Any]:
        """The last event of a stream with include_usage: the token counts."""
        return self._body("chat.completion.chunk", []) | {"usage": _usage(list(self._outputs.values()))}

    def _choice(self, prompt_index: int, output: RequestOutput, completion: Completion) -> _Choice:
        if completion.error is not None:
            raise FailedError(completion.error)
        index = self._index(prompt_index, completion)
        if index not in self._choices:
            told = completion.logprobs is not None
            self._choices[index] = _Choice(index, TextOffsets(self._texts, output.prompt_token_ids) if told else None)
        return self._choices[index]

    def _index(self, prompt_index: int, completion: Completion) -> int:
        """Of a completion's choice in the response."""
        return prompt_index * self._parsed.params.n + completion.index

    def _new_logprobs(self, choice: _Choice, completion: Completion) -> list[TokenLogprob]:
        """The log-probabilities to send now; they count as sent.

        They are sent with their token's text: a stop string may still cut text that the engine holds back.
        """
        offsets, begin = choice.offsets, choice.num_logprobs
        if offsets is None or completion.logprobs is None:
            return []
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
        if choice.offsets is None:
            return entry
        if self._parsed.is_chat:
            entry["logprobs"] = json_logprobs.of_chat(logprobs, self._texts, self._parsed.params.logprobs or 0)
        else:
            bounds = choice.offsets.bounds[choice.num_logprobs - len(logprobs) : choice.num_logprobs]
            offsets = [min(bound, len(completion.text)) for bound in bounds]
            entry["logprobs"] = json_logprobs.of_completion(logprobs, offsets, self._texts)
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
