"""Text to tokens and back: a folder's tokenizer.json, or bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with what the model expects before them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; an unfinished character reads as U+FFFD."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte, after a few special ones: ByT5's vocabulary, and nothing to install."""

    def __init__(self, num_special: int = 3):
        self.num_special = num_special

    def encode(self, text: str) -> list[int]:
        return [byte + self.num_special for byte in text.encode("utf-8")]

    def decode(self, token_ids: Sequence[int]) -> str:
        bytes_ = bytes(t - self.num_special for t in token_ids if 0 <= t - self.num_special < 256)
        return bytes_.decode("utf-8", errors="replace")


class FolderTokenizer:
    """The tokenizer.json of a Hugging Face folder, by the `tokenizers` library."""

    def __init__(self, path: Path):
        tokenizers = _library()
        self._inner = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inner.decode(list(token_ids), skip_special_tokens=True)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The folder's tokenizer: tokenizer.json, or bytes where tokenizer_config.json says ByT5Tokenizer."""
    directory = Path(directory)
    if (directory / "tokenizer.json").exists():
        return FolderTokenizer(directory / "tokenizer.json")
    config = tokenizer_config(directory)
    if config.get("tokenizer_class") == "ByT5Tokenizer":
        return ByteTokenizer()
    raise FileNotFoundError(
        f"{directory} has no tokenizer.json, and its tokenizer_config.json names "
        f"{config.get('tokenizer_class', 'no tokenizer_class')!r}, not ByT5Tokenizer; save the tokenizer in the fast "
        "format, or pass token ids to an Engine made without a tokenizer"
    )


def tokenizer_config(directory: str | Path) -> dict[str, Any]:
    """tokenizer_config.json; {} where there is none."""
    path = Path(directory) / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("reading tokenizer.json needs the tokenizers library: pip install 'jattn[models]'") from error
    return tokenizers
