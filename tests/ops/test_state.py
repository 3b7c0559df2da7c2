"""merge is a monoid over disjoint sets of keys; log-sum-exps of other libraries become ours."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.ops.state import log2_lse_to_ln, with_sinks

TOKENS, HEADS, DIM, KEYS = 3, 2, 4, 12


def states(cuts, seed=0):
    """Attention over consecutive ranges of keys that end at `cuts`, and the logits and values they came from."""
    rng = np.random.default_rng(seed)
    logits, values = rng.standard_normal((TOKENS, HEADS, KEYS)), rng.standard_normal((KEYS, DIM))
    edges = [0, *sorted(cuts), KEYS]
    return [over(logits, values, a, b) for a, b in zip(edges, edges[1:], strict=False)], logits, values


def over(logits, values, first, last):
    """The state of keys first .. last - 1, in float64."""
    if first == last:
        return jattn.AttentionState.empty(TOKENS, HEADS, DIM)
    p = np.exp(logits[..., first:last])
    total = p.sum(-1, keepdims=True)
    out = (p / total) @ values[first:last]
    return jattn.AttentionState(out=jnp.asarray(out, jnp.float32), lse=jnp.asarray(np.log(total[..., 0]), jnp.float32))


@hypothesis.given(cuts=st.lists(st.integers(0, KEYS), max_size=3), order=st.randoms(use_true_random=False))
def test_any_partition_in_any_order_merges_to_the_whole(cuts, order):
    parts, logits, values = states(cuts)
    order.shuffle(parts)
    got, expected = jattn.merge(*parts), over(logits, values, 0, KEYS)
    np.testing.assert_allclose(got.out, expected.out, atol=1e-6)
    np.testing.assert_allclose(got.lse, expected.lse, atol=1e-6)


def test_merge_is_associative():
    (a, b, c), *_ = states([3, 7])
    left, right = jattn.merge(jattn.merge(a, b), c), jattn.merge(a, jattn.merge(b, c))
    np.testing.assert_allclose(left.out, right.out, atol=1e-6)
    np.testing.assert_allclose(left.lse, right.lse, atol=1e-6)


def test_r07_the_empty_state_is_the_identity_bit_for_bit():
    (a, b), *_ = states([5])
    empty = jattn.AttentionState.empty(TOKENS, HEADS, DIM)
    for got in (jattn.merge(a, empty), jattn.merge(empty, a), jattn.merge(empty, a, empty)):
        np.testing.assert_array_equal(got.out, a.out)
        np.testing.assert_array_equal(got.lse, a.lse)


def test_r07_empty_with_empty_is_empty_and_garbage_in_an_empty_state_does_not_leak():
    (a, _), *_ = states([5])
    empty = jattn.AttentionState.empty(TOKENS, HEADS, DIM)
    both = jattn.merge(empty, empty)
    assert (both.out == 0).all() and jnp.isneginf(both.lse).all()
    for mark in (-jnp.inf, jnp.inf):  # some kernels mark an empty row by +inf
        garbage = jattn.AttentionState(out=jnp.full_like(a.out, jnp.nan), lse=jnp.full_like(a.lse, mark))
        np.testing.assert_array_equal(jattn.merge(garbage, a).out, a.out)


def test_merge_has_a_gradient_where_a_state_is_empty():
    (a, _), *_ = states([5])
    empty = jattn.AttentionState.empty(TOKENS, HEADS, DIM)

    def loss(out):
        merged = jattn.merge(jattn.AttentionState(out=out, lse=a.lse), empty)
        return merged.out.sum() + merged.lse.sum()

    np.testing.assert_allclose(jax.grad(loss)(a.out), jnp.ones_like(a.out))


def test_sinks_after_a_merge_are_one_more_column():
    parts, logits, values = states([4])
    sinks = np.array([0.3, -1.2])
    got = with_sinks(jattn.merge(*parts), jnp.asarray(sinks, jnp.float32))
    p = np.exp(logits)
    total = p.sum(-1) + np.exp(sinks)
    np.testing.assert_allclose(got.out, p @ values / total[..., None], atol=1e-6)
    np.testing.assert_allclose(got.lse, np.log(total), atol=1e-6)
    empty = with_sinks(jattn.AttentionState.empty(TOKENS, HEADS, DIM), jnp.asarray(sinks, jnp.float32))
    assert (empty.out == 0).all() and jnp.isneginf(empty.lse).all()


def test_states_of_different_shape_do_not_merge():
    a, b = jattn.AttentionState.empty(3, 2, 4), jattn.AttentionState.empty(4, 2, 4)
    with pytest.raises(ValueError, match="must have one shape"):
        jattn.merge(a, b)
    with pytest.raises(ValueError, match="at least one state"):
        jattn.merge()


def test_base_two_becomes_natural_and_empty_rows_stay_empty():
    x = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    np.testing.assert_allclose(log2_lse_to_ln(jnp.asarray(np.log2(np.exp(x)))), x, rtol=1e-6)
    assert np.isneginf(log2_lse_to_ln(jnp.full((1, 1), -jnp.inf))).all()
