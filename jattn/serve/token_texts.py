"""The texts of single tokens, and where each begins in the text of a completion."""

import os
from collections.abc import Sequence

from jattn.text import Tokenizer
from jattn.text.detokenizer import MAX_CONTEXT, MAX_TOKENS_PER_CHARACTER, REPLACEMENT, Detokenizer, is_garbled


class TokenTexts:
    """The texts of single tokens, of which log-probabilities name up to 21 for each token of an output.

    Each is decoded once in the life of the server; there are at most as many as the vocabulary has tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        self._following: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def alone(self, token: int) -> str:
        """decode([token]). Some decoders leave out the space before the first word of a text."""
        if (text := self._alone.get(token)) is None:
            text = self._alone[token] = self.decode([token])
        return text

    def following(self, token: int) -> str:
        """The text of a token that follows another; a part of a character gives U+FFFD.

        The token is decoded twice in a row, so that it has its space. Without a tokenizer its number is returned.
        """
        if (text := self._following.get(token)) is None:
            alone = str(token) if self.tokenizer is None else self.alone(token)
            is_final = self.tokenizer is None or REPLACEMENT in alone
            text = self._following[token] = alone if is_final else self.decode([token, token])[len(alone) :]
        return text


class TextOffsets:
    """Where the text of each token begins, in characters of the completion's text.

    A token that continues a character begins where that character does. bounds[i] is where the i-th token begins, and
    bounds[-1] where the last one ends; the tokens of an unfinished character are not included yet.

    prompt: as the Detokenizer's, whose text has the space before a first word after a prompt.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int] = ()):
        self._texts = texts
        self.bounds, self.num_tokens = [0], 0  # num_tokens: all that were added
        # tokens before _pending, on which its text may depend, and their text
        tokenizer = texts.tokenizer
        self._context = [] if tokenizer is None else list(Detokenizer(tokenizer, prompt).mark()[0].tokens)
        self._known = texts.decode(self._context)
        self._pending: list[int] = []  # the tokens of an unfinished character

    def add(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.num_tokens += 1
            self._pending.append(token)
            text = self._texts.decode(self._context + self._pending)
            if not text.endswith(REPLACEMENT) or len(self._pending) >= MAX_TOKENS_PER_CHARACTER:
                self._settle(text)

    def finish(self) -> None:
        """Call it after the last token."""
        if self._pending:
            self._settle(self._texts.decode(self._context + self._pending))

    def _settle(self, text: str) -> None:
        """Append the bounds of the pending tokens. text: of the context and these tokens."""
        begin, pending = self.bounds[-1], self._pending
        if is_garbled(self._known, text):  # the Detokenizer then decodes the new tokens alone, too
            self._context, self._known, text = [], "", self._texts.decode(pending)
        context_length = _common_length(self._known, text)  # a prompt may end within a character of the output
        for count in range(1, len(pending) + 1):
            so_far = text if count == len(pending) else self._texts.decode(self._context + pending[:count])
            self.bounds.append(max(begin + _common_length(so_far, text) - context_length, self.bounds[-1]))
        self._pending = []
        if text != self._known:
            self._context = pending
            self._known = self._texts.alone(pending[0]) if len(pending) == 1 else self._texts.decode(pending)
        elif len(self._context) < MAX_CONTEXT:  # after tokens without text alone, a word would lose its space
            self._context = self._context + pending


def _common_length(a: str, b: str) -> int:
    """The number of characters with which both texts begin."""
    return len(a) if b.startswith(a) else len(os.path.commonprefix([a, b]))
