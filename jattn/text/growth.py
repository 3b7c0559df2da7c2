"""Limits how much the rules of a tokenizer.json may lengthen a text: the library aborts if memory runs out."""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 4096
"""Characters or tokens that one character may become in encoding; published files: up to about 1,300 (ALBERT)."""
MAX_DECODER_GROWTH = 64
"""Characters that a decoder makes of one; published files: 1 or 2."""
FIXED = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12, "ByteLevel": 5}
"""Rule -> the most characters that it makes of one, from Unicode's tables and UTF-8; ByteLevel may add a space."""
SPACING = ("Metaspace", "WordPiece")
"""Rules that add one character before a piece of text."""
SAME = (
    *("Strip", "StripAccents", "Nmt", "Fuse", "ByteFallback", "BPEDecoder", "CTC", "BertPreTokenizer", "Digits"),
    *("CharDelimiterSplit", "FixedLength", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    *("BertProcessing", "RobertaProcessing", "Delimiter"),
)
"""Rules that never lengthen a text by more than a constant."""


def check_growth(values: Any) -> float:
    """The most characters or tokens that one character may become; ValueError if that is more than the limits."""
    if not isinstance(values, dict):
        return 1.0  # malformed: the library raises an error for it
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    growth, decoder = product(values.get(part) for part in parts), product([values.get("decoder")])
    if growth > MAX_GROWTH or decoder > MAX_DECODER_GROWTH:
        raise ValueError(
            f"its {', '.join(parts)} may make {growth:g} characters of one and its decoder {decoder:g}, more than "
            f"{MAX_GROWTH} and {MAX_DECODER_GROWTH}: no published tokenizer does"
        )
    return growth


def product(rules: Any) -> float:
    """The growth by all these rules, applied one after another."""
    found = 1.0
    for rule in rules:
        for single in singles(rule):
            found *= growth_of(single)
    return found


def singles(rule: Any) -> Iterator[dict[str, Any]]:
    """The single rules of a rule that may be a (nested) Sequence."""
    left = [rule]
    while left:
        rule = left.pop()
        if isinstance(rule, dict):
            inner = [values for values in rule.values() if isinstance(values, list)]
            if rule.get("type") == "Sequence":
                left += [each for values in inner for each in values]
            else:
                yield rule


def growth_of(rule: dict[str, Any]) -> float:
    """The most characters or tokens that this rule makes of one."""
    kind = rule.get("type")
    if kind == "Replace":
        pattern = rule.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else pattern
        length = len(str(rule.get("content", "")))
        # a regular expression, or an empty text, may match between any two characters
        return max(1.0, length / len(text)) if isinstance(text, str) and text else 1.0 + length
    if kind == "Prepend":
        return 1.0 + len(str(rule.get("prepend", "")))
    if kind == "Precompiled":
        return longest_mapped(rule.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        pieces = rule.get("single")
        copies = [p for p in pieces if isinstance(p, dict) and "Sequence" in p] if isinstance(pieces, list) else []
        return max(1.0, float(len(copies)))
    if kind in SPACING:
        return 2.0
    return 1.0 if kind in SAME else float(FIXED.get(str(kind), 4))


def longest_mapped(blob: Any) -> float:
    """Characters of the longest text in SentencePiece's map: the trie's size (4 bytes), the trie, the texts."""
    try:
        octets = base64.b64decode(blob or "")
    except (binascii.Error, TypeError, ValueError):
        return 1.0  # malformed: the library raises an error for it
    texts = octets[4 + int.from_bytes(octets[:4], "little") :]
    return float(max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))))
