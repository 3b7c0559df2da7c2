"""Text that grows token by token, always by whole characters."""

import os
from collections.abc import Sequence

from jattn.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MOST_TOKENS_OF_A_CHARACTER = 6
"""If this many tokens give no whole character, the bytes are not UTF-8 and U+FFFD is shown."""
MOST_CONTEXT = 32
"""Most earlier tokens that are decoded again with new ones; known tokenizers need two or three."""


class Detokenizer:
    """Text of a growing list of output tokens: what they add to the text of the prompt.

    A token's text may depend on the ones before it (a leading space, a character over several tokens), so a few of
    the last tokens are decoded with and without the new ones, and the difference is the new text. At first those are
    the prompt's last ones: the text is what decode(prompt + output) has after decode(prompt), so the space before a
    first word stays, and a character that begins in the prompt is shown whole. The cost of adding a token does not
    depend on how many came before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._parts: list[str] = []
        self._window, self._shown, self._sure = _context(tokenizer, prompt)  # tokens, their text as shown so far
        self._context = len(self._window)  # how many leading tokens of the window are context only
        self._stalled = 0  # tokens at the window's end that brought no text
        self._is_whole = True  # does the window's text end with a whole character?

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def add(self, new: Sequence[int]) -> str:
        """What these tokens add to the text; held back while the last character is unfinished."""
        if len(new) > 1:  # all at once; one by one where the bytes are not whole text
            before = self._window, self._shown, self._sure, self._context, self._stalled
            news = self._advance(new)
            if news and self._is_whole and REPLACEMENT not in news:
                self._parts.append(news)
                return news
            self._window, self._shown, self._sure, self._context, self._stalled = before
        news = "".join([self._advance([token]) for token in new])
        self._parts.append(news)
        return news

    def finish(self) -> str:
        """The text held back, its unfinished character as U+FFFD."""
        news = self._advance([], waits=False)
        self._parts.append(news)
        return news

    def _advance(self, new: Sequence[int], waits: bool = True) -> str:
        """The text that `new` makes certain; with `waits`, an unfinished character at the end is left for later."""
        self._window = [*self._window, *new]
        self._stalled += len(new)
        waits = waits and (len(new) > 1 or self._stalled < MOST_TOKENS_OF_A_CHARACTER)
        whole = self.tokenizer.decode(self._window)
        certain = whole.rstrip(REPLACEMENT) if waits else whole
        news = _after(self._shown, self._sure, certain)
        self._is_whole = certain == whole
        if news:
            self._shown = self._sure = certain
            self._stalled = 0
            if self._is_whole or len(self._window) > MOST_CONTEXT:
                self._move()
        elif not waits:  # special tokens have no text and no influence on that of others
            self._window, self._stalled = self._window[: len(self._window) - self._stalled], 0
        return news

    def _move(self) -> None:
        """Make the newest tokens the context of the next ones; if their text is not whole, keep the earlier too."""
        last = self._window[self._context :]
        text = self.tokenizer.decode(last)
        if (text and not text.startswith(REPLACEMENT)) or len(self._window) > MOST_CONTEXT:
            self._window = last
            self._shown = self._sure = text if self._is_whole else text.rstrip(REPLACEMENT)
        self._context = len(self._window)


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], str, str]:
    """(the prompt's last tokens, from a character's beginning; their text; the text without an unfinished end)."""
    for size in (MOST_CONTEXT // 4, MOST_CONTEXT):
        tokens = list(prompt[-size:])
        is_all = len(tokens) == len(prompt)
        for start in range(min(MOST_TOKENS_OF_A_CHARACTER, len(tokens))):
            text = tokenizer.decode(tokens[start:])
            sure = _whole_part(tokenizer, tokens[start:], text)
            if sure and not sure.startswith(REPLACEMENT):
                return tokens[start:], text, sure
        if is_all:
            text = tokenizer.decode(tokens)
            return tokens, text, _whole_part(tokenizer, tokens, text)
    return [], "", ""


def _whole_part(tokenizer: Tokenizer, tokens: list[int], text: str) -> str:
    """The text of all but the last tokens, as few as make it end with a whole character; "" where none do."""
    for end in range(len(tokens), max(len(tokens) - MOST_TOKENS_OF_A_CHARACTER, -1), -1):
        part = text if end == len(tokens) else tokenizer.decode(tokens[:end])
        if not part.endswith(REPLACEMENT):
            return part
    return ""


def _after(shown: str, sure: str, text: str) -> str:
    """The text after `shown`; if new bytes turned the end of `shown` into another character, the text after `sure`."""
    if text.startswith(shown):
        return text[len(shown) :]
    return "" if shown.startswith(text) else text[len(os.path.commonprefix([sure, text])) :]


def find_stop(text: str, stop: Sequence[str], start: int) -> tuple[int, str] | None:
    """(where it begins, which) of the first stop string that ends after `start`; only the end of the text is read."""
    found = [(at, s) for s in stop if (at := text.find(s, max(start - len(s) + 1, 0))) >= 0]
    return min(found, default=None)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a stop string: not to be streamed yet."""
    return max((_overlap(text, s) for s in stop), default=0)


def _overlap(text: str, s: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `s`."""
    tail = text[max(len(text) - len(s) + 1, 0) :]
    at = tail.find(s[0])
    while at >= 0 and not s.startswith(tail[at:]):
        at = tail.find(s[0], at + 1)
    return len(tail) - at if at >= 0 else 0
