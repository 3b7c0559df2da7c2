"""Text to tokens and back: a folder's tokenizer.json, or bytes; and a text that grows token by token."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jattn.errors.arguments import short
from jattn.models.files import MAX_LISTED_BYTES, is_there, read_text
from jattn.text.growth import check_growth
from jattn.text.special import SpecialTokens, read_special_tokens, tokenizer_config

MOST_TEXT = 1 << 24
"""Characters of a text that is encoded."""
MOST_GROWN = 1 << 28
"""Characters that the rules of a tokenizer.json may make of it."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer. The server calls it from several threads at once."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text, with the special tokens (BOS, say) that the model expects; False: of the text alone, e.g.
        of a rendered chat, which contains them. Special tokens written in the text are found either way."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; an unfinished character reads as U+FFFD."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte, after a few special ones: ByT5's vocabulary. Needs no library."""

    def __init__(self, num_special: int = 3):
        self.num_special = num_special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte + self.num_special for byte in text.encode("utf-8")]

    def decode(self, token_ids: Sequence[int]) -> str:
        bytes_ = bytes(t - self.num_special for t in token_ids if 0 <= t - self.num_special < 256)
        return bytes_.decode("utf-8", errors="replace")


class FolderTokenizer:
    """A tokenizer.json, read by the `tokenizers` library; special tokens named only in other files are added.

    Truncation and padding are switched off, whatever the file says: a prompt is encoded whole.
    """

    def __init__(self, path: Path, special: SpecialTokens | None = None):
        self._library = _library()
        self._name = path.name
        text = read_text(path, MAX_LISTED_BYTES)
        with _named(f"{path} is not a tokenizer that can be read"):
            growth = check_growth(json.loads(text))  # before the library sees it: it applies the rules to added tokens
            self._most = min(MOST_TEXT, int(MOST_GROWN / growth))
            self._inner = self._library.Tokenizer.from_str(text)
            self._inner.no_truncation()
            self._inner.no_padding()
        if special is not None:
            with _named(f"{path}: the special tokens of the files beside it cannot be added"):
                self._add(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > self._most:
            raise ValueError(f"{self._name} encodes up to {self._most} characters, and this text has {len(text)}")
        text.encode()  # UnicodeEncodeError for half of a surrogate pair
        with _named(f"{self._name} cannot encode this text"):
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        with _named(f"{self._name} cannot decode these tokens"):
            return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def _add(self, special: SpecialTokens) -> None:
        known = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        for id, flags in sorted(special.added.items()):
            if flags["content"] not in known:
                self._inner.add_tokens([self._library.AddedToken(**flags)])
                if (given := self._inner.token_to_id(flags["content"])) != id:
                    raise ValueError(f"{short(flags['content'])} has the id {id} there and {given} in tokenizer.json")
        known = {token.content for token in self._inner.get_added_tokens_decoder().values() if token.special}
        new = [text for text in special.texts if text not in known]
        self._inner.add_special_tokens([self._library.AddedToken(text, normalized=False) for text in new])


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The folder's tokenizer: tokenizer.json, or bytes where tokenizer_config.json says ByT5Tokenizer."""
    directory = Path(directory)
    if is_there(directory / "tokenizer.json"):
        return FolderTokenizer(directory / "tokenizer.json", read_special_tokens(directory))
    config = tokenizer_config(directory)
    if config.get("tokenizer_class") == "ByT5Tokenizer":
        return ByteTokenizer()
    own = "; code of its own, as auto_map names it, is never run here" if config.get("auto_map") else ""
    raise FileNotFoundError(
        f"{directory} has no tokenizer.json, and its tokenizer_config.json names "
        f"{short(config.get('tokenizer_class', 'no tokenizer_class'))}, not ByT5Tokenizer{own}; save the tokenizer in "
        "the fast format, or pass token ids to an Engine made without a tokenizer"
    )


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn the library's errors into ValueErrors that begin with `what`; its panics derive from BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {error}") from error
        raise


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("reading tokenizer.json needs the tokenizers library: pip install 'jattn[models]'") from error
    return tokenizers


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
