"""Log-probabilities in the interface's JSON, and where each token's text begins."""

import os
from collections.abc import Sequence
from typing import Any

from jattn.engine import TokenLogprob
from jattn.text import Tokenizer
from jattn.text.tokenizer import MOST_TOKENS_OF_A_CHARACTER, REPLACEMENT

LOWEST = -9999.0
"""Written for -inf, which JSON does not have; OpenAI uses the same number."""


def text_of(token: int, tokenizer: Tokenizer | None) -> str:
    """One token decoded alone; a part of a character gives U+FFFD."""
    return str(token) if tokenizer is None else tokenizer.decode([token])


class Offsets:
    """Where the text of each token begins, in characters of the completion's text.

    A token that continues a character begins where that character does. bounds[i] is where the i-th token begins, and
    bounds[-1] where the last one ends; the tokens of an unfinished character are not among them yet.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self.bounds, self.count = [0], 0  # count: tokens added
        self._context: list[int] = []  # tokens before _held: the text of _held may depend on them
        self._held: list[int] = []

    def add(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.count += 1
            self._held.append(token)
            text = self._decode(self._context + self._held)
            if not text.endswith(REPLACEMENT) or len(self._held) >= MOST_TOKENS_OF_A_CHARACTER:
                self._settle(text)

    def finish(self) -> None:
        """There will be no more tokens."""
        self._settle(self._decode(self._context + self._held))

    def _settle(self, text: str) -> None:
        begin, shown = self.bounds[-1], len(self._decode(self._context))
        for count in range(1, len(self._held) + 1):
            so_far = self._decode(self._context + self._held[:count])
            certain = len(os.path.commonprefix([so_far, text]))
            self.bounds.append(max(begin + certain - shown, self.bounds[-1]))
        self._context, self._held = self._held or self._context, []

    def _decode(self, token_ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)


def of_completion(told: list[TokenLogprob], offsets: list[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The logprobs of a text completion: parallel lists."""
    return dict(
        tokens=[text_of(t.token_id, tokenizer) for t in told],
        token_logprobs=[_finite(t.logprob) for t in told],
        top_logprobs=[_by_text(t, tokenizer) for t in told],
        text_offset=offsets,
    )


def of_chat(told: list[TokenLogprob], tokenizer: Tokenizer | None, count: int) -> dict[str, Any]:
    """The logprobs of a chat: an entry a token, with its `count` most likely tokens and the token itself."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token, tokenizer)
        known = None if REPLACEMENT in text else list(text.encode("utf-8"))
        return dict(token=text, logprob=_finite(logprob), bytes=known)

    def top(t: TokenLogprob) -> list[dict[str, Any]]:
        return [entry(*pair) for pair in (t.top | {t.token_id: t.logprob} if count else {}).items()]

    content = [entry(t.token_id, t.logprob) | {"top_logprobs": top(t)} for t in told]
    return {"content": content, "refusal": None}


def _by_text(t: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Text -> log-probability, the chosen token first; a second token of the same text is called token_id:N."""
    found: dict[str, float] = {}
    for token, logprob in ({t.token_id: t.logprob} | t.top).items():
        text = text_of(token, tokenizer)
        found[text if text not in found else f"token_id:{token}"] = _finite(logprob)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
