"""Text to tokens and back: a folder's tokenizer.json, or bytes."""

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jattn.errors.arguments import short
from jattn.models.files import MAX_LISTED_BYTES, is_there, read_text
from jattn.text.bert_flags import with_bert_flags
from jattn.text.growth import check_growth
from jattn.text.special import SpecialTokens, read_special_tokens, tokenizer_config

MAX_CHARACTERS = 1 << 24
"""Characters of a text to encode."""
MAX_GROWN_CHARACTERS = 1 << 28
"""Characters that the rules of a tokenizer.json may make of such a text."""

SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files of tokenizers without a tokenizer.json."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine needs of a tokenizer. The server calls it from several threads at once."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        add_special_tokens: add those that the model expects, such as BOS. False for a rendered chat, which contains
        them. Special tokens that are written in the text are found in either case.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens; an unfinished character becomes U+FFFD."""
        ...


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text; ValueError if the tokenizer's table lacks one of its characters."""
    try:
        return tokenizer.encode(text)
    except LookupError as error:
        raise ValueError(f"the tokenizer cannot encode this text ({type(error).__name__}: {error})") from error


class ByteTokenizer:
    """One token per UTF-8 byte, after a few special ones: ByT5's vocabulary. It needs no library."""

    def __init__(self, num_special: int = 3):
        self.num_special = num_special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte + self.num_special for byte in text.encode("utf-8")]

    def decode(self, token_ids: Sequence[int]) -> str:
        first, end = self.num_special, self.num_special + 256
        return bytes([t - first for t in token_ids if first <= t < end]).decode("utf-8", errors="replace")


class FolderTokenizer:
    """A tokenizer.json, read by the `tokenizers` library. Special tokens that only other files name are added.

    Truncation and padding are switched off, also if the file enables them: a prompt is always encoded whole.
    config: the contents of the tokenizer_config.json beside it.
    """

    def __init__(self, path: Path, special: SpecialTokens | None = None, config: Mapping[str, Any] | None = None):
        self._library = _library()
        self._file_name = path.name
        text = read_text(path, MAX_LISTED_BYTES)
        with _as_value_errors(f"{path} is not a tokenizer that can be read"):
            stored = json.loads(text)
            values = with_bert_flags(stored, config or {})
            growth = check_growth(values)  # before the library applies the rules to the file's added tokens
            self._max_characters = min(MAX_CHARACTERS, int(MAX_GROWN_CHARACTERS / growth))
            self._inner = self._library.Tokenizer.from_str(text if values is stored else json.dumps(values))
            self._inner.no_truncation()
            self._inner.no_padding()
        if special is not None:
            with _as_value_errors(f"{path}: the special tokens of the other files in its folder cannot be added"):
                self._add_special_tokens(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > self._max_characters:
            raise ValueError(
                f"{self._file_name} encodes up to {self._max_characters} characters, and this text has {len(text)}"
            )
        text.encode()  # UnicodeEncodeError for an unpaired surrogate
        with _as_value_errors(f"{self._file_name} cannot encode this text"):
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        with _as_value_errors(f"{self._file_name} cannot decode these tokens"):
            return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def _add_special_tokens(self, special: SpecialTokens) -> None:
        known = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        for id, flags in sorted(special.added.items()):
            if flags["content"] not in known:
                self._inner.add_tokens([self._library.AddedToken(**flags)])
                if (given := self._inner.token_to_id(flags["content"])) != id:
                    text = short(flags["content"])
                    raise ValueError(f"{text} has the id {id} in tokenizer_config.json and {given} in tokenizer.json")
        added = {token.content: token for token in self._inner.get_added_tokens_decoder().values()}
        new = [self._library.AddedToken(text, normalized=False) for text in special.texts if text not in added]
        named = [added[text] for text in set(special.by_name.values()) & added.keys() if not added[text].special]
        for token in named:  # a list of tokens, other than a name, does not change those that are there
            token.special = True
        self._inner.add_special_tokens(new + named)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The folder's tokenizer: tokenizer.json, or ByteTokenizer if tokenizer_config.json says ByT5Tokenizer."""
    directory = Path(directory)
    config = tokenizer_config(directory)
    if is_there(directory / "tokenizer.json"):
        return FolderTokenizer(directory / "tokenizer.json", read_special_tokens(directory), config)
    if config.get("tokenizer_class") == "ByT5Tokenizer":
        return ByteTokenizer()
    own = "; the folder's own code, which auto_map names, is never executed" if config.get("auto_map") else ""
    slow = [name for name in SLOW if is_there(directory / name)]
    found = f" (it has {', '.join(slow)})" if slow else ""
    named = config.get("tokenizer_class")
    other = "" if named is None else f", and {short(named)} of its tokenizer_config.json is not ByT5Tokenizer"
    raise FileNotFoundError(
        f"{directory} has no tokenizer.json{found}{other}{own}; write one with transformers: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or pass token ids to an engine without a "
        "tokenizer: jattn.Engine(*jattn.models.load(folder))"
    )


def tokenizer_fingerprint(directory: str | Path) -> int:
    """A checksum of the files that `load_tokenizer` reads, equal for equal tokenizers."""
    checksum = 0
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = Path(directory) / name
        if is_there(path):
            checksum = zlib.crc32(f"{name} {read_text(path, MAX_LISTED_BYTES)}".encode(), checksum)
    return checksum


@contextlib.contextmanager
def _as_value_errors(message: str) -> Iterator[None]:
    """Turn the library's errors into ValueErrors that begin with `message`; its panics derive from BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{message}: {error}") from error
        raise


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("reading tokenizer.json needs the tokenizers library: pip install 'jattn[models]'") from error
    return tokenizers
