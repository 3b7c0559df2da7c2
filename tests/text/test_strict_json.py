"""Strict JSON: equal to json where every parser agrees, an error that names the fault where parsers may differ."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from jattn import strict_json

SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(SCALARS | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


@hypothesis.given(VALUES, st.booleans())
def test_what_json_writes_is_read_again(value, ensure_ascii):
    found = strict_json.parse(json.dumps(value, ensure_ascii=ensure_ascii), max_depth=64)
    strict_json.check(found, max_depth=64)
    assert found == value and json.dumps(found) == json.dumps(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "'c' appears twice"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[1e400]", "1e400.* 64-bit float"),
        ("[123456]", "6 digits, at most 5"),
        ("[-12345]", "6 digits, at most 5"),
        ('["\\ud800"]', "unpaired surrogate '.ud800'"),
        ('{"\\udfff": 1}', "unpaired surrogate '.udfff'"),
        ("[[[[0]]]]", "more than 3 deep"),
        ('{"a": {"a": {"a": {}}}}', "more than 3 deep"),
        ("[" * 100_000, "more than 3 deep"),
        ("[" * 100_000 + "]" * 100_000, "more than 3 deep"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
)
def test_what_parsers_may_read_differently_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        strict_json.check(strict_json.parse(text, max_depth=3, max_digits=5), max_depth=3)


def test_values_at_the_limits_are_accepted():
    value = strict_json.parse('[[[12345, -1234, "\\ud83d\\ude00"]]]', max_depth=3, max_digits=5)
    assert value == [[[12345, -1234, "😀"]]]
    strict_json.check(value, max_depth=3, max_values=5)  # two lists, and the three items of the innermost


@pytest.mark.parametrize("value", [[[], [0] * 4], {"a": [1, 2], "b": {"c": 0, "d": 0}}, [[1, 2, 3], [4]]])
def test_keys_and_items_are_counted_at_every_depth(value):
    strict_json.check(value, max_depth=3, max_values=6)
    with pytest.raises(strict_json.TooManyValuesError):
        strict_json.check(value, max_depth=3, max_values=5)
