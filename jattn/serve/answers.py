"""Engine outputs as the JSON of the OpenAI interface: one whole answer, or stream events."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from jattn.engine import Completion, RequestOutput, TokenLogprob
from jattn.serve import logprobs
from jattn.serve.errors import FailedError
from jattn.serve.fields import Asked
from jattn.text import Tokenizer


@dataclasses.dataclass
class _Choice:
    """How much of a completion has been sent."""

    offsets: logprobs.Offsets
    characters: int = 0
    tokens: int = 0
    has_begun: bool = False
    has_ended: bool = False


class Answer:
    """Builds the answer to one body. The work for an event depends on what is new, not on the length so far."""

    def __init__(self, asked: Asked, id: str, model: str, tokenizer: Tokenizer | None):
        self._asked, self._tokenizer = asked, tokenizer
        self._choices: dict[int, _Choice] = {}
        self._last: dict[int, RequestOutput] = {}
        self._head = {"id": id, "created": int(time.time()), "model": model}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer, from finished requests; FailedError where a completion failed."""
        choices = []
        for p, output in enumerate(outputs):
            for done in output.outputs:
                index, choice, told, start = self._news(p, done)
                body = self._choice(index, choice, done, told, start)
                if self._asked.chat:
                    body["message"] = {"role": "assistant", "content": done.text, "refusal": None}
                else:
                    body["text"] = done.text
                choices.append(body)
        return self._body("chat.completion", choices) | {"usage": _usage(outputs)}

    def events(self, p: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The stream events that a new output of the p-th prompt gives; FailedError where a completion failed."""
        self._last[p] = output
        for done in output.outputs:
            index, choice, told, start = self._news(p, done)
            text, ends = done.text[choice.characters :], done.finish_reason is not None and not choice.has_ended
            if not (text or told or ends):
                continue
            body = self._choice(index, choice, done, told, start)
            if self._asked.chat:
                role = {} if choice.has_begun else {"role": "assistant"}
                body["delta"] = role | ({"content": text} if text or role else {})
            else:
                body["text"] = text
            choice.characters, choice.has_begun, choice.has_ended = len(done.text), True, choice.has_ended or ends
            usage = {"usage": None} if self._asked.include_usage else {}
            yield self._body("chat.completion.chunk", [body]) | usage

    def last_event(self) -> dict[str, Any]:
        """The last event of a stream with include_usage: the token counts."""
        return self._body("chat.completion.chunk", []) | {"usage": _usage(list(self._last.values()))}

    def _news(self, p: int, done: Completion) -> tuple[int, _Choice, list[TokenLogprob], int]:
        """(the choice's index, its state, log-probabilities to send, the position of the first of them).

        A token's log-probabilities are sent with its text: a stop string may still cut text that is held back.
        """
        if done.error is not None:
            raise FailedError(done.error)
        index = p * self._asked.params.n + done.index
        choice = self._choices.setdefault(index, _Choice(logprobs.Offsets(self._tokenizer)))
        if done.logprobs is None:
            return index, choice, [], 0
        bounds, start = choice.offsets.bounds, choice.tokens
        choice.offsets.add(done.token_ids[choice.offsets.count :])
        is_over = done.finish_reason is not None
        if is_over:
            choice.offsets.finish()
        while choice.tokens < len(bounds) - 1 and (is_over or bounds[choice.tokens + 1] <= len(done.text)):
            choice.tokens += 1
        return index, choice, list(done.logprobs[start : choice.tokens]), start

    def _choice(self, index: int, choice: _Choice, done: Completion, told: list[TokenLogprob], start: int) -> dict:
        reason = None if done.finish_reason is None else str(done.finish_reason)
        body: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if done.logprobs is None:
            return body
        if self._asked.chat:
            body["logprobs"] = logprobs.of_chat(told, self._tokenizer, self._asked.params.logprobs or 0)
        else:
            offsets = [min(at, len(done.text)) for at in choice.offsets.bounds[start : choice.tokens]]
            body["logprobs"] = logprobs.of_completion(told, offsets, self._tokenizer)
        return body

    def _body(self, chat_object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": chat_object if self._asked.chat else "text_completion", "choices": choices}


def _usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(done.token_ids) for output in outputs for done in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return dict(
        prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made,
        prompt_tokens_details=dict(cached_tokens=cached),
    )  # fmt: skip
