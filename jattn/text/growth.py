"""By how much the rules of a tokenizer.json may lengthen a text: the library aborts the process when memory ends."""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

MOST_GROWTH = 4096
"""Largest factor of a tokenizer.json on the way to tokens; published ones have up to about 1,300 (ALBERT)."""
MOST_DECODED = 64
"""Largest factor of a decoder; published ones have 1 or 2."""
FIXED = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12, "ByteLevel": 5}
"""Rule -> most characters that it makes of one; those of Unicode's tables, UTF-8's bytes and a space before."""
SPACING = ("Metaspace", "WordPiece")
"""Rules that put one character before a piece of text."""
SAME = (
    *("Strip", "StripAccents", "Nmt", "Fuse", "ByteFallback", "BPEDecoder", "CTC", "BertPreTokenizer", "Digits"),
    *("CharDelimiterSplit", "FixedLength", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    *("BertProcessing", "RobertaProcessing", "Delimiter"),
)
"""Rules after which a text is as long as before, or shorter, or longer by a constant."""


def check_growth(values: Any) -> float:
    """Most characters or tokens that one character becomes; ValueError where a tokenizer.json makes it too many."""
    if not isinstance(values, dict):
        return 1.0  # the library says what is wrong
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    growth, decoded = product(values.get(part) for part in parts), product([values.get("decoder")])
    if growth > MOST_GROWTH or decoded > MOST_DECODED:
        raise ValueError(
            f"its {', '.join(parts)} may make {growth:g} characters of one and its decoder {decoded:g}, more than "
            f"{MOST_GROWTH} and {MOST_DECODED}: no published tokenizer does"
        )
    return growth


def product(rules: Any) -> float:
    """Growth by all these rules, one after another."""
    found = 1.0
    for rule in rules:
        for single in singles(rule):
            found *= growth_of(single)
    return found


def singles(rule: Any) -> Iterator[dict[str, Any]]:
    """The rules of a sequence, nested ones included."""
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
    """Most characters (or tokens) that this rule makes of one."""
    kind = rule.get("type")
    if kind == "Replace":
        pattern = rule.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else pattern
        made = len(str(rule.get("content", "")))
        # a regular expression, or an empty text, may match between any two characters
        return max(1.0, made / len(text)) if isinstance(text, str) and text else 1.0 + made
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
    """Characters of the longest text in SentencePiece's map: four bytes (its trie's size), the trie, the texts."""
    try:
        octets = base64.b64decode(blob or "")
    except (binascii.Error, TypeError, ValueError):
        return 1.0  # the library says what is wrong
    texts = octets[4 + int.from_bytes(octets[:4], "little") :]
    return float(max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))))
