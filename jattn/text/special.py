"""The special tokens of a folder, by name and by id, as its settings files say them."""

import dataclasses
from pathlib import Path
from typing import Any

from jattn.errors.arguments import short
from jattn.models.files import is_there, read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """by_name: 'bos_token' -> its text, and so on; others: tokens without a name; added: AddedToken's fields by id."""

    by_name: dict[str, str]
    others: tuple[str, ...] = ()
    added: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """Every token's text, once; a vocabulary without them numbers them in this order."""
        usual = [self.by_name[name] for name in NAMES if name in self.by_name]
        return list(dict.fromkeys([*usual, *self.by_name.values(), *self.others]))


def read_special_tokens(directory: Path) -> SpecialTokens:
    """Of tokenizer_config.json and special_tokens_map.json.

    Where both name a token, the first file counts if it has `added_tokens_decoder` (newer folders do), else the second.
    """
    path, other = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    config = tokenizer_config(directory)
    by_name, others = _tokens(path, config)
    if is_there(other):
        more, extra = _tokens(other, read_json(other))
        by_name = more | by_name if "added_tokens_decoder" in config else by_name | more
        others += extra
    return SpecialTokens(by_name, tuple(others), _added(path, config.get("added_tokens_decoder")))


def tokenizer_config(directory: str | Path) -> dict[str, Any]:
    """tokenizer_config.json; {} where there is none."""
    path = Path(directory) / "tokenizer_config.json"
    return read_json(path) if is_there(path) else {}


def _tokens(path: Path, values: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(texts by name, texts without one) of a file."""
    by_name, others = {}, []
    for key, value in values.items():
        if value is None or (key.endswith("_token") and key not in NAMES and not isinstance(value, (str, dict))):
            continue  # add_bos_token and the like are flags, not tokens
        if key in LISTS and isinstance(value, dict):
            by_name |= {name: _text(path, f"{key}, {name}", token) for name, token in value.items()}
        elif key in LISTS:
            if not isinstance(value, list):
                raise ValueError(f"{path}: {key}={short(value)} must be a list of tokens")
            others += [_text(path, key, token) for token in value]
        elif key.endswith("_token"):
            by_name[key] = _text(path, key, value)
    return by_name, others


def _text(path: Path, key: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{path}: {key}={short(token)} must be a text, or an object with one as 'content'")
    return text


def _added(path: Path, values: Any) -> dict[int, dict[str, Any]]:
    """added_tokens_decoder, {"7": {"content": "<x>", "special": true, ...}}, checked."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: added_tokens_decoder={short(values)} must be an object of tokens by id")
    found = {}
    for id, token in values.items():
        text = _text(path, f"added_tokens_decoder, {short(id)}", token)
        flags = {name: token[name] for name in FLAGS if name in token} if isinstance(token, dict) else {}
        if not (id.isascii() and id.isdigit() and len(id) < 10) or not all(
            type(flag) is bool for flag in flags.values()
        ):
            raise ValueError(
                f"{path}: added_tokens_decoder, {short(id)}={short(token)}: the key must be a number, and "
                f"{', '.join(FLAGS)} true or false"
            )
        found[int(id)] = {"content": text} | flags
    return found
