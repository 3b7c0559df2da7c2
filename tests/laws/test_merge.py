"""Attention over disjoint sets of keys merges to attention over their union: any partition, order and grouping."""

import dataclasses
import functools

import numpy as np
import pytest

import jattn
from tests.cases import CASES, FEATURES
from tests.problem import Problem
from tests.running import same_bits

PROBLEM = Problem(case=CASES["mixed"], feature=FEATURES["cap_sinks_window"])


def part_of(q_head, q_pos, kv_pos, *, part: int, parts: int):
    """Key kv_pos belongs to part kv_pos // 3 % parts: some rows see no key of some parts."""
    return kv_pos // 3 % parts == part


@functools.cache
def split(parts: int, sinks_in: int) -> tuple[jattn.AttentionState, ...]:
    """One state a part; only part `sinks_in` counts the sinks."""
    cache, made = PROBLEM.cache(), []
    for part in range(parts):
        mask = functools.partial(part_of, part=part, parts=parts)
        spec = dataclasses.replace(PROBLEM.spec, mask_fn=mask, has_sinks=part == sinks_in)
        params = dataclasses.replace(PROBLEM.params, sinks=PROBLEM.params.sinks if part == sinks_in else None)
        made.append(jattn.paged_attention(PROBLEM.q, cache, PROBLEM.meta, spec, params))
    return tuple(made)


@pytest.mark.parametrize("grouping", ["flat", "left", "right", "reversed"])
def test_r07_r21_a_partition_of_the_keys_merges_to_the_whole(grouping):
    """The last part holds each row's newest keys or not: the sinks are counted exactly once wherever they sit.

    A part that a row sees nothing of cannot carry that row's sinks (the row is empty, sink or not), so the
    sinks go where every row sees a key: here they are added by a part that all rows see.
    """
    spec = dataclasses.replace(PROBLEM.spec, has_sinks=False)
    params = dataclasses.replace(PROBLEM.params, sinks=None)
    whole = jattn.paged_attention(PROBLEM.q, PROBLEM.cache(), PROBLEM.meta, spec, params)
    a, b, c = split(3, sinks_in=-1)
    assert any(np.isneginf(np.asarray(x.lse)[: PROBLEM.case.num_tokens]).any() for x in (a, b, c))
    merged = {
        "flat": lambda: jattn.merge(a, b, c),
        "left": lambda: jattn.merge(jattn.merge(a, b), c),
        "right": lambda: jattn.merge(a, jattn.merge(b, c)),
        "reversed": lambda: jattn.merge(c, b, a),
    }[grouping]()
    np.testing.assert_allclose(merged.out, whole.out, atol=2e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=2e-6)


def test_r07_the_empty_state_is_an_identity_of_real_states_bit_for_bit():
    (a, *_) = split(3, sinks_in=-1)
    empty = jattn.AttentionState.empty(PROBLEM.num_tokens, PROBLEM.heads, PROBLEM.v_dim)
    assert same_bits(jattn.merge(a, empty), a)
    assert same_bits(jattn.merge(empty, a), a)
    assert same_bits(jattn.merge(empty, empty), empty)


def test_r21_sinks_in_two_parts_would_be_counted_twice():
    """Sinks must be counted in one part only: counting them in each changes the result."""
    even, odd = (functools.partial(part_of, part=part, parts=2) for part in range(2))
    cache, states = PROBLEM.cache(), []
    for mask in (even, odd):
        spec = dataclasses.replace(PROBLEM.spec, mask_fn=mask)
        states.append(jattn.paged_attention(PROBLEM.q, cache, PROBLEM.meta, spec, PROBLEM.params))
    with pytest.raises(AssertionError):
        PROBLEM.answer(cache).check(jattn.merge(*states))
