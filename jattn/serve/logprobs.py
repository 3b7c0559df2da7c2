"""Log-probabilities as the interface writes them, and where each token's text begins."""

from typing import Any

from jattn.engine import TokenLogprob, Tokenizer
from jattn.engine.detokenize import REPLACEMENT, Detokenizer

LOWEST = -9999.0
"""Written for a probability of nothing: JSON has no infinity (OpenAI's own number)."""


def text_of(token: int, tokenizer: Tokenizer | None) -> str:
    """A token alone; part of a character reads as U+FFFD."""
    return str(token) if tokenizer is None else tokenizer.decode([token])


class Offsets:
    """Where the text of each token begins, in characters of the completion's text; a token that ends a character
    begins where that character does."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._reader = None if tokenizer is None else Detokenizer(tokenizer)
        self.bounds = [0]  # one more than tokens

    def add(self, token_ids: tuple[int, ...]) -> None:
        for token in token_ids:
            grown = 0 if self._reader is None else len(self._reader.add([token]))
            self.bounds.append(self.bounds[-1] + grown)


def of_completion(told: list[TokenLogprob], offsets: list[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The logprobs of a text completion: parallel lists."""
    return dict(
        tokens=[text_of(t.token_id, tokenizer) for t in told],
        token_logprobs=[_finite(t.logprob) for t in told],
        top_logprobs=[_by_text(t, tokenizer) for t in told],
        text_offset=offsets,
    )


def of_chat(told: list[TokenLogprob], tokenizer: Tokenizer | None, count: int) -> dict[str, Any]:
    """The logprobs of a chat: an entry a token, with its `count` likeliest and, where it is not one, the token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token, tokenizer)
        known = None if REPLACEMENT in text else list(text.encode("utf-8"))
        return dict(token=text, logprob=_finite(logprob), bytes=known)

    def top(t: TokenLogprob) -> list[dict[str, Any]]:
        return [entry(*pair) for pair in (t.top | {t.token_id: t.logprob} if count else {}).items()]

    content = [entry(t.token_id, t.logprob) | {"top_logprobs": top(t)} for t in told]
    return {"content": content, "refusal": None}


def _by_text(t: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, float]:
    """By the tokens' texts, the chosen one first; a text that is taken gives way to the token's number."""
    found: dict[str, float] = {}
    for token, logprob in ({t.token_id: t.logprob} | t.top).items():
        text = text_of(token, tokenizer)
        found[text if text not in found else f"token_id:{token}"] = _finite(logprob)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
