"""The online softmax: tiles add up to the whole, and empty rows stay empty."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra import softmax


def run(logits, values, tile, sink=None):
    """The recurrence over tiles of the given width; logits [M, C], values [C, V]."""
    state = softmax.start((logits.shape[0],), values.shape[1])
    for first in range(0, logits.shape[1], tile):
        m, l, acc = state
        m, alpha, p = softmax.weights(m, logits[:, first : first + tile])
        state = m, l * alpha + p.sum(-1, keepdims=True), acc * alpha + p @ values[first : first + tile]
    return softmax.finish(*state, sink=sink)


def whole(logits, values, sink=None):
    """The same at once, in float64."""
    logits = np.asarray(logits, np.float64)
    columns = logits if sink is None else np.concatenate([logits, np.asarray(sink, np.float64)], 1)
    top = columns.max(1, keepdims=True)
    p = np.exp(columns - top)
    total = p.sum(1, keepdims=True)
    return (p / total)[:, : logits.shape[1]] @ np.asarray(values, np.float64), (top + np.log(total))[:, 0]


def data(rows=5, keys=24, dim=3, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((rows, keys), (keys, dim)))


@pytest.mark.parametrize("tile", [1, 5, 8, 24])
@pytest.mark.parametrize("with_sink", [False, True])
def test_tiles_of_any_width_add_up_to_the_whole(tile, with_sink):
    logits, values = data()
    sink = jnp.linspace(-3, 3, 5)[:, None] if with_sink else None
    for got, expected in zip(run(logits, values, tile, sink), whole(logits, values, sink), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_row_that_sees_nothing_is_zero_and_minus_infinity_even_with_a_sink():
    logits, values = data()
    hidden = jnp.full_like(logits, -jnp.inf)
    for sink in (None, jnp.zeros((5, 1))):
        out, lse = run(hidden, values, 8, sink)
        assert (out == 0).all() and jnp.isneginf(lse).all()


def test_a_masked_tile_before_very_negative_logits_does_not_win():
    logits, values = data()
    logits = jnp.concatenate([jnp.full((5, 8), -jnp.inf), logits[:, :8] - 2.45e5], 1)
    out, lse = run(logits, values[:16], 8)
    expected, expected_lse = whole(logits[:, 8:], values[8:16])
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    np.testing.assert_allclose(out, expected, atol=2e-2)  # float32 spacing at 2.45e5 is 1/64


@pytest.mark.parametrize(("sink", "share"), [(-np.inf, 1.0), (1e4, 0.0)])
def test_a_sink_of_minus_infinity_is_no_sink_and_a_huge_one_takes_all(sink, share):
    logits, values = data()
    out, _ = run(logits, values, 8, jnp.full((5, 1), sink))
    np.testing.assert_allclose(out, share * np.asarray(run(logits, values, 8)[0]), atol=1e-6)
