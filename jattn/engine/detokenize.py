"""Text that grows token by token, and never by half a character."""

import dataclasses
from collections.abc import Sequence

from jattn.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MOST_TOKENS_OF_A_CHARACTER = 6
"""After so many tokens without a whole character the bytes are not UTF-8, and are shown as they are."""


@dataclasses.dataclass
class Detokenizer:
    """Text of a growing list of output tokens.

    A token's text may depend on the one before it (a leading space, a character over several tokens), so the last
    tokens are decoded with and without the new ones, and the difference is the new text.
    """

    tokenizer: Tokenizer
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    _context: int = 0  # where the decoded window begins
    _shown: int = 0  # tokens whose text is out

    def add(self, new: Sequence[int]) -> str:
        """What these tokens add to the text; held back while the last character is unfinished."""
        before, count = len(self.text), len(self.token_ids)
        self.token_ids += new
        if not self._advance(len(self.token_ids), waits=True):  # all at once, or, where that ends inside a character,
            for end in range(count + 1, len(self.token_ids) + 1):  # as far as it goes
                self._advance(end, waits=end - self._shown < MOST_TOKENS_OF_A_CHARACTER)
        return self.text[before:]

    def finish(self) -> str:
        """What was held back, unfinished as it is."""
        before = len(self.text)
        if self._shown < len(self.token_ids):
            self._advance(len(self.token_ids), waits=False)
        return self.text[before:]

    def _advance(self, end: int, waits: bool) -> bool:
        """Show the text of the tokens before `end`; False: held back, with `waits` and an unfinished character."""
        shown = self.tokenizer.decode(self.token_ids[self._context : self._shown])
        whole = self.tokenizer.decode(self.token_ids[self._context : end])
        if waits and (whole.endswith(REPLACEMENT) or len(whole) <= len(shown)):
            return False
        self.text += whole[len(shown) :]
        self._context, self._shown = self._shown, end
        return True


def find_stop(text: str, stop: Sequence[str], start: int) -> tuple[int, str] | None:
    """(where it begins, which) of the first stop string that ends after `start`."""
    found = [(at, s) for s in stop if (at := text.find(s, max(start - len(s) + 1, 0))) >= 0]
    return min(found, default=None)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a stop string: not to be streamed yet."""
    longest = 0
    for s in stop:
        for n in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:n]):
                longest = n
                break
    return longest
