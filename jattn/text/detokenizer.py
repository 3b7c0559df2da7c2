"""Detokenizer: text that grows token by token, and the stop strings in it."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from jattn.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not a whole character."""
MAX_TOKENS_PER_CHARACTER = 6
"""If this many tokens give no whole character, their bytes are not UTF-8, and U+FFFD is returned."""
MAX_CONTEXT = 32
"""Earlier tokens that are decoded again with new ones; known tokenizers need two or three."""
KEPT_CONTEXT = 8
"""With fewer tokens, old context is not dropped: finding out whether it can be costs a second decoding."""


class _Window(NamedTuple):
    """The last tokens of a stream. They are decoded together, because a token's text may depend on those before it."""

    tokens: list[int]
    num_context: int  # of these tokens from the left: their text was returned in an earlier window, or is the prompt's
    returned: str  # the text of `tokens` that was returned so far, or is the prompt's
    whole: str  # `returned` without the unfinished character that a prompt may end with
    num_silent: int  # of these tokens from the right: they have added no text yet
    num_unfinished: int = 0  # of the silent ones from the right: they came since the text ended with a whole character


class Detokenizer:
    """The text of a growing list of output tokens: what they add to the text of the prompt.

    The text is what decode(prompt + output) has after decode(prompt): the space before a first word stays, and a
    character that begins in the prompt is returned whole. New tokens are decoded with a few tokens before them; what
    the result has after the text that was returned already is new. The cost of a token does not depend on how many
    came before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._parts: list[str] = []
        self._window = _window_of_prompt(tokenizer, prompt)

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def add(self, new: Sequence[int]) -> str:
        """The text that these tokens add. An unfinished character is held back until later tokens complete it."""
        text = self._add_together(new) if len(new) > 1 else None
        if text is None:  # one by one
            text = ""
            for token in new:
                self._window, added, _ = self._extended((token,))
                text += added
        if text:
            self._parts.append(text)
        return text

    def _add_together(self, new: Sequence[int]) -> str | None:
        """The text that these tokens add, decoded once.

        None, and nothing changes, if one by one they might give another text: it has an unfinished or invalid
        character, they change the text before them, the first of them follows silent tokens, or the last is silent.
        """
        window, text, is_whole = self._extended(new)
        if not is_whole or REPLACEMENT in text:
            return None
        if text:
            before = self._window
            has_plain_context = before.returned and not before.num_silent and REPLACEMENT not in before.returned
            if not has_plain_context or not self.tokenizer.decode(new[-1:]):
                return None
        else:
            if self.tokenizer.decode(window.tokens) != window.returned:
                return None
            window = _with_late_silent(window)
        self._window = window
        return text

    def mark(self) -> tuple[_Window, int]:
        """The state now, for `reset`."""
        return self._window, len(self._parts)

    def reset(self, mark: tuple[_Window, int]) -> None:
        """Forget the tokens that were added since. `text` must not have been read since."""
        self._window, count = mark
        del self._parts[count:]

    def finish(self) -> str:
        """The text held back, with its unfinished character as U+FFFD."""
        self._window, text, _ = self._extended([], may_wait=False)
        if text:
            self._parts.append(text)
        return text

    def _extended(self, new: Sequence[int], may_wait: bool = True) -> tuple[_Window, str, bool]:
        """(the window after these tokens, the text that they add, whether the window ends with a whole character).

        may_wait: leave an unfinished character at the end for later, unless too many tokens wait for it already.
        """
        tokens, num_context, returned, whole, num_silent, num_unfinished = self._window
        tokens, num_silent, num_unfinished = [*tokens, *new], num_silent + len(new), num_unfinished + len(new)
        decoded = self.tokenizer.decode(tokens)
        num_waiting = num_unfinished if decoded.endswith(REPLACEMENT) else num_silent
        may_wait = may_wait and (len(new) > 1 or num_waiting < MAX_TOKENS_PER_CHARACTER)
        text = decoded.rstrip(REPLACEMENT) if may_wait else decoded
        is_whole = text == decoded
        added = _after(returned, whole, text)
        if added and is_garbled(returned, text):
            tokens = tokens[len(tokens) - num_silent :]
            added = text = self.tokenizer.decode(tokens)
            window = _Window(tokens, len(tokens), text, text, 0)
        elif added and len(tokens) > (KEPT_CONTEXT if is_whole else MAX_CONTEXT):
            window = self._shortened(tokens, num_context, text, is_whole)
        elif added:
            window = _Window(tokens, num_context, text, text, 0)
        elif may_wait:
            window = _Window(tokens, num_context, returned, whole, num_silent, 0 if is_whole else num_unfinished)
        else:  # these tokens are special ones, which have no text and do not change that of others
            window = _Window(tokens[: len(tokens) - num_silent], num_context, returned, whole, 0)
        return window, added, is_whole

    def _shortened(self, tokens: list[int], num_context: int, text: str, is_whole: bool) -> _Window:
        """The window after these tokens, whose text has been returned: they are the context of the next ones.

        The old context is dropped if the tokens after it decode to whole characters alone, or if there are too many.
        """
        last = tokens[num_context:]
        last_text = self.tokenizer.decode(last)
        if (last_text and not last_text.startswith(REPLACEMENT)) or len(tokens) > MAX_CONTEXT:
            text = last_text if is_whole else last_text.rstrip(REPLACEMENT)
            return _Window(last, len(last), text, text, 0)
        return _Window(tokens, len(tokens), text, text, 0)


def _with_late_silent(window: _Window) -> _Window:
    """The window that the same silent tokens leave one by one, where every MAX_TOKENS_PER_CHARACTER of them are dropped
    together: the ones since then stay."""
    tokens, kept = window.tokens, window.num_silent % MAX_TOKENS_PER_CHARACTER
    first_silent = len(tokens) - window.num_silent
    return window._replace(tokens=tokens[:first_silent] + tokens[len(tokens) - kept :], num_silent=kept)


def _window_of_prompt(tokenizer: Tokenizer, prompt: Sequence[int]) -> _Window:
    """The prompt's last tokens, from the beginning of a character, all of them context."""
    for size in (MAX_CONTEXT // 4, MAX_CONTEXT):
        tokens = list(prompt[-size:])
        for start in range(min(MAX_TOKENS_PER_CHARACTER, len(tokens))):
            text = tokenizer.decode(tokens[start:])
            whole = _whole_part(tokenizer, tokens[start:], text)
            if whole and not whole.startswith(REPLACEMENT):
                return _Window(tokens[start:], len(tokens) - start, text, whole, 0)
        if len(tokens) == len(prompt):
            text = tokenizer.decode(tokens)
            return _Window(tokens, len(tokens), text, _whole_part(tokenizer, tokens, text), 0)
    return _Window([], 0, "", "", 0)


def _whole_part(tokenizer: Tokenizer, tokens: list[int], text: str) -> str:
    """The text of the tokens, less as few of the last ones as make it end with a whole character; "" if none do."""
    for end in range(len(tokens), max(len(tokens) - MAX_TOKENS_PER_CHARACTER, -1), -1):
        part = text if end == len(tokens) else tokenizer.decode(tokens[:end])
        if not part.endswith(REPLACEMENT):
            return part
    return ""


def _after(returned: str, whole: str, text: str) -> str:
    """The text after `returned`; if new bytes turned its end into another character, the text after `whole`."""
    if text.startswith(returned):
        return text[len(returned) :]
    return "" if returned.startswith(text) else text[len(os.path.commonprefix([whole, text])) :]


def is_garbled(returned: str, text: str) -> bool:
    """Did text that was returned become U+FFFD? A decoder with byte fallback does that to a run of bytes that has one
    invalid byte; how long the run is depends on where the window begins."""
    if text.startswith(returned):  # nearly always; the common prefix takes longer than all else in this file
        return False
    return text[len(os.path.commonprefix([returned, text])) :].startswith(REPLACEMENT)


def find_stop(text: str, stop: Sequence[str], start: int) -> tuple[int, str] | None:
    """(begin, string) of the first stop string that ends after `start`, or None; only the end of the text is read."""
    found = [(at, s) for s in stop if (at := text.find(s, max(start - len(s) + 1, 0))) >= 0]
    return min(found, default=None)


def held_back(text: str, stop: Sequence[str]) -> int:
    """The number of characters at the end of the text that may begin a stop string, and must not be streamed yet."""
    return max((_overlap(text, s) for s in stop), default=0)


def _overlap(text: str, s: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `s`."""
    tail = text[max(len(text) - len(s) + 1, 0) :]
    at = tail.find(s[0])
    while at >= 0 and not s.startswith(tail[at:]):
        at = tail.find(s[0], at + 1)
    return len(tail) - at if at >= 0 else 0
