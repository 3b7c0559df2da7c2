"""The flags of BERT's tokenizers in tokenizer_config.json, which count more than the rules in tokenizer.json."""

from collections.abc import Mapping
from typing import Any

CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
"""Classes of transformers, also with Fast at the end, that make their rules from the flags."""
FLAGS = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip
"""A flag -> the field of the normalizer. strip_accents may be null: as lowercase."""


def with_bert_flags(values: Any, config: Mapping[str, Any]) -> Any:
    """The contents of a tokenizer.json with the flags that tokenizer_config.json gives; the same object without any.

    Published folders say the same in both files. One that was edited in one of them is read as transformers reads it.
    """
    kind, normalizer = config.get("tokenizer_class"), values.get("normalizer") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind.removesuffix("Fast") not in CLASSES:
        return values
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return values
    given = {ours: config[name] for name, ours in FLAGS.items() if name in config and _is_flag(name, config[name])}
    if given.items() <= normalizer.items():
        return values
    return {**values, "normalizer": {**normalizer, **given}}


def _is_flag(name: str, value: Any) -> bool:
    return isinstance(value, bool) or (value is None and name == "strip_accents")
