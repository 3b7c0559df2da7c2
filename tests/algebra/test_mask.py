"""The mask predicate against literal matrices, and the key range against the predicate."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra.mask import MaskRule, key_range, most_keys, visible

X, o = True, False

LITERAL = {
    "causal": (MaskRule(), [[X, o, o, o], [X, X, o, o], [X, X, X, o], [X, X, X, X]]),
    "bidirectional": (MaskRule(causal=False), [[X] * 4] * 4),
    "window of self and one before": (
        MaskRule(left=1, right=0),
        [[X, o, o, o], [X, X, o, o], [o, X, X, o], [o, o, X, X]],
    ),
    "one to each side": (
        MaskRule(causal=False, left=1, right=1),
        [[X, X, o, o], [X, X, X, o], [o, X, X, X], [o, o, X, X]],
    ),
    "only to the right": (MaskRule(causal=False, left=0), [[X, X, X, X], [o, X, X, X], [o, o, X, X], [o, o, o, X]]),
    "chunks of two": (MaskRule(chunk=2), [[X, o, o, o], [X, X, o, o], [o, o, X, o], [o, o, X, X]]),
    "chunks of two, bidirectional": (
        MaskRule(causal=False, chunk=2),
        [[X, X, o, o], [X, X, o, o], [o, o, X, X], [o, o, X, X]],
    ),
    "chunks of two and the one before": (
        MaskRule(chunk=2, lookback=1),
        [[X, o, o, o], [X, X, o, o], [X, X, X, o], [X, X, X, X]],
    ),
    "single keys and the two before, bidirectional": (
        MaskRule(causal=False, chunk=1, lookback=2),
        [[X, o, o, o], [X, X, o, o], [X, X, X, o], [o, X, X, X]],
    ),
    "even keys only": (
        MaskRule(mask_fn=lambda head, q, k: k % 2 == 0),
        [[X, o, o, o], [X, o, o, o], [X, o, X, o], [X, o, X, o]],
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_the_mask_is_this_matrix(name):
    rule, expected = LITERAL[name]
    position = jnp.arange(4)
    seen = visible(rule, jnp.zeros((1, 1), int), position[:, None], position[None])
    np.testing.assert_array_equal(seen, np.array(expected))


@pytest.mark.parametrize(
    "rule",
    [MaskRule(causal=False, left=most, right=most) for most in (2**30, 2**31 - 2, 2**31 - 1)]
    + [MaskRule(causal=False, chunk=c, lookback=n) for c, n in ((2**31 - 1, 0), (2, 2**31 - 1), (10**6, 10**6))],
)
def test_limits_near_the_end_of_int32_hide_no_key_before(rule):
    position = jnp.arange(4) + 2**29
    start, stop = key_range(rule, position[0], position[-1], position[-1] + 9)
    earliest, latest = jnp.array([0, 2**29 - 9]) if rule.chunk == 0 else position[:2]
    assert int(start) <= int(earliest) and int(stop) > int(latest)
    keys = jnp.array([earliest, latest])
    assert visible(rule, jnp.zeros((1, 1), int), position[2:, None], keys[None]).all()


def test_a_traced_causal_flag_overrules_the_rule():
    position = jnp.arange(3)
    flags = jnp.array([True, False, True])[:, None]
    seen = visible(MaskRule(), jnp.zeros((1, 1), int), position[:, None], position[None], flags)
    np.testing.assert_array_equal(seen, [[X, o, o], [X, X, X], [X, X, X]])


REACH = {
    "R-SWA keeps the first two keys": (
        MaskRule(left=0, prefix=True),
        [[X, o, o, o, o], [X, X, o, o, o], [X, X, X, o, o], [X, X, o, X, o], [X, X, o, o, X]],
    ),
    "a span sees both ways": (
        MaskRule(spans=True),
        [[X, o, o, o, o], [X, X, X, X, o], [X, X, X, X, o], [X, X, X, X, o], [X, X, X, X, X]],
    ),
    "and past the window": (
        MaskRule(left=0, spans=True),
        [[X, o, o, o, o], [o, X, X, X, o], [o, X, X, X, o], [o, X, X, X, o], [o, o, o, o, X]],
    ),
    "unless it is clamped": (
        MaskRule(left=1, spans=True, clamp_spans=True),
        [[X, o, o, o, o], [X, X, X, X, o], [o, X, X, X, o], [o, o, X, X, o], [o, o, o, X, X]],
    ),
    "and past the chunk": (
        MaskRule(chunk=2, spans=True),
        [[X, o, o, o, o], [X, X, X, X, o], [o, X, X, X, o], [o, X, X, X, o], [o, o, o, o, X]],
    ),
    "a mask_fn hides even so": (
        MaskRule(spans=True, mask_fn=lambda head, q, k: k != 2),
        [[X, o, o, o, o], [X, X, o, X, o], [X, X, o, X, o], [X, X, o, X, o], [X, X, o, X, X]],
    ),
}


@pytest.mark.parametrize("name", REACH)
def test_prefixes_and_spans_are_these_matrices(name):
    """The first two keys are a prefix, tokens 1 to 3 a span."""
    rule, expected = REACH[name]
    position = np.arange(5)
    inside = (position >= 1) & (position <= 3)
    span = np.where(inside, 1, -1)[:, None], np.where(inside, 3, -1)[:, None]
    seen = visible(rule, jnp.zeros((1, 1), int), position[:, None], position[None], prefix=2, span=span)
    np.testing.assert_array_equal(seen, np.array(expected))


rules = st.builds(
    MaskRule,
    causal=st.booleans(),
    left=st.integers(-1, 5),
    right=st.integers(-1, 5),
    chunk=st.integers(0, 5),
    lookback=st.integers(0, 2),
    spans=st.booleans(),
    clamp_spans=st.booleans(),
)
lens = dict(first=st.integers(-3, 12), rows=st.integers(1, 6), seq_len=st.integers(0, 14))


@hypothesis.given(rule=rules, **lens, at=st.integers(0, 12), long=st.integers(1, 6))
def test_the_range_is_exactly_the_union_of_what_the_rows_see(rule, first, rows, seq_len, at, long):
    q = np.arange(first, first + rows)
    k = np.arange(seq_len)
    mine = (at <= q) & (q <= at + long)
    span = np.where(mine, at, -1)[:, None], np.where(mine, at + long, -1)[:, None]
    seen = np.asarray(visible(rule, jnp.zeros((1, 1), int), q[:, None], k[None], span=span)).any(0)
    hull = (at, at + long if mine.any() else -1)
    start, stop = key_range(rule, q[0], q[-1], jnp.int32(seq_len), span=hull)
    assert 0 <= start <= stop
    inside = (k >= start) & (k < stop)
    assert not (seen & ~inside).any(), "a key that is seen lies outside the range"
    one_chunk = rule.chunk == 0 or first // rule.chunk == (first + rows - 1) // rule.chunk
    if one_chunk and rule.right < 0:
        assert (seen == inside).all(), "the range is wider than the union"


@hypothesis.given(rule=rules, first=st.integers(0, 8), rows=st.integers(1, 5), seq_len=st.integers(0, 14))
def test_the_range_covers_a_traced_causal_flag(rule, first, rows, seq_len):
    rule = dataclasses.replace(rule, spans=False)
    for causal in (True, False):
        q, k = np.arange(first, first + rows), np.arange(seq_len)
        seen = np.asarray(visible(rule, jnp.zeros((1, 1), int), q[:, None], k[None], jnp.array(causal))).any(0)
        start, stop = key_range(rule, q[0], q[-1], jnp.int32(seq_len), jnp.array(causal))
        assert not seen[: int(start)].any() and not seen[int(stop) :].any()


@hypothesis.given(rule=rules, **lens, causal=st.sampled_from([None, True, False]))
def test_no_range_has_more_than_the_most_keys(rule, first, rows, seq_len, causal):
    rule = dataclasses.replace(rule, spans=False)
    flag = None if causal is None else jnp.array(causal)
    start, stop = key_range(rule, first, first + rows - 1, jnp.int32(seq_len), flag)
    most = most_keys(rule, rows, causal is not None)
    assert most is None or stop - start <= most


@pytest.mark.parametrize(
    ("rule", "most"),
    [
        (MaskRule(), None),
        (MaskRule(left=127), 127 + 8),
        (MaskRule(left=127, right=3), 127 + 8),
        (MaskRule(causal=False, left=127, right=3), 127 + 8 + 3),
        (MaskRule(causal=False, left=127), None),
        (MaskRule(chunk=64), 63 + 8),
        (MaskRule(causal=False, chunk=64, lookback=1), 127 + 8 + 63),
        (MaskRule(left=5, prefix=True), None),
        (MaskRule(left=5, spans=True), None),
    ],
)
def test_the_most_keys_of_eight_queries(rule, most):
    assert most_keys(rule, 8) == most


def test_a_traced_causal_flag_limits_no_keys():
    assert most_keys(MaskRule(left=5), 8, per_request_causal=True) is None
