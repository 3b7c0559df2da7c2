"""Text to tokens and back: a folder's tokenizer.json, or bytes."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jattn.engine.growth import check_growth
from jattn.engine.special import SpecialTokens, read_special_tokens, tokenizer_config
from jattn.errors.arguments import short
from jattn.models.files import MAX_LISTED_BYTES, is_there, read_text

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
