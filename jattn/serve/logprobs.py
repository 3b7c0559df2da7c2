"""Log-probabilities as the JSON of the OpenAI interface, in its two forms."""

from typing import Any

from jattn.engine import TokenLogprob
from jattn.serve.token_texts import TokenTexts
from jattn.text.detokenizer import REPLACEMENT

MIN_LOGPROB = -9999.0
"""Written for a log-probability of -inf, which JSON does not have; OpenAI uses the same number."""


def of_completion(logprobs: list[TokenLogprob], offsets: list[int], texts: TokenTexts) -> dict[str, Any]:
    """The logprobs of /v1/completions: parallel lists. offsets: where the text of each token begins."""
    return dict(
        tokens=[texts.following(each.token_id) for each in logprobs],
        token_logprobs=[_finite(each.logprob) for each in logprobs],
        top_logprobs=[_by_text(each, texts) for each in logprobs],
        text_offset=offsets,
    )


def of_chat(logprobs: list[TokenLogprob], texts: TokenTexts, num_top: int) -> dict[str, Any]:
    """The logprobs of /v1/chat/completions: for each token its num_top most likely tokens and the token itself."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = texts.following(token)
        octets = None if REPLACEMENT in text else list(text.encode("utf-8"))
        return dict(token=text, logprob=_finite(logprob), bytes=octets)

    def top(each: TokenLogprob) -> list[dict[str, Any]]:
        return [entry(*pair) for pair in (each.top | {each.token_id: each.logprob} if num_top else {}).items()]

    content = [entry(each.token_id, each.logprob) | {"top_logprobs": top(each)} for each in logprobs]
    return {"content": content, "refusal": None}


def _by_text(logprob: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """Text -> log-probability, the chosen token first; a second token of the same text is named token_id:N."""
    found: dict[str, float] = {}
    for token, value in ({logprob.token_id: logprob.logprob} | logprob.top).items():
        text = texts.following(token)
        found[text if text not in found else f"token_id:{token}"] = _finite(value)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
