"""The flags of BERT's tokenizers in tokenizer_config.json, which count more than the rules in tokenizer.json."""

from collections.abc import Mapping
from typing import Any

from jattn.errors.arguments import short

CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
"""Classes of transformers, also with Fast at the end, that make their rules from the flags."""
FLAGS = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),  # null: as lowercase
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
"""A flag -> the field of the normalizer, and its value where the flag is absent or null."""


def with_bert_flags(values: Any, config: Mapping[str, Any]) -> Any:
    """The contents of a tokenizer.json with the flags of tokenizer_config.json; the same object if nothing changes.

    Published folders say the same in both files. One that was edited in one of them is read as transformers reads it.
    """
    kind, normalizer = config.get("tokenizer_class"), values.get("normalizer") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind.removesuffix("Fast") not in CLASSES:
        return values
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return values
    flags = {field: _flag(config, name, default) for name, (field, default) in FLAGS.items()}
    return values if flags.items() <= normalizer.items() else {**values, "normalizer": {**normalizer, **flags}}


def _flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    if (value := config.get(name)) is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short(value)} of tokenizer_config.json must be true or false")
    return value
