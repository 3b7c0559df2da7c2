"""What happens to a logit before the mask: the order, the extremes, the exactness of distances."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.algebra.logits import LogitRule, shape_logits


def test_the_order_is_scale_cap_alibi_score_fn():
    rule = LogitRule(scale=0.5, soft_cap=3.0, has_alibi=True, score_fn=lambda x, head, i, j: x * (1 + head) + (i - j))
    q_pos, kv_pos = np.arange(4, 7)[:, None], np.arange(5)[None]
    dots = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) * 9
    got = shape_logits(rule, jnp.asarray(dots), 2, q_pos, kv_pos, alibi_slopes=0.25)
    capped = 3 * np.tanh(np.float64(dots) * 0.5 / 3)
    biased = shape_logits(rule, jnp.asarray(dots), 2, q_pos, kv_pos, alibi_slopes=0.25, bias=jnp.full((3, 5), 2.0))
    np.testing.assert_allclose(biased, got + 6, rtol=1e-5, atol=1e-5)  # before score_fn, which takes it three times
    np.testing.assert_allclose(got, (capped + 0.25 * (kv_pos - q_pos)) * 3 + (q_pos - kv_pos), rtol=1e-5, atol=1e-5)


def test_square_root_alibi_falls_slowly_behind_and_not_at_all_ahead():
    rule = LogitRule(scale=1.0, has_alibi=True, alibi_sqrt=True)
    q_pos, kv_pos = np.asarray([[16]]), np.asarray([[0, 7, 12, 15, 16, 17, 25]])
    got = shape_logits(rule, jnp.zeros((1, 7)), 0, q_pos, kv_pos, alibi_slopes=2.0)
    np.testing.assert_array_equal(got, [[-8, -6, -4, -2, 0, 0, 0]])


def test_a_soft_cap_is_finite_and_monotone_however_large_the_logit():
    x = jnp.asarray([-3e38, -1e5, -1e4, -1.0, 0.0, 1.0, 1e4, 1e5, 3e38], jnp.float32)
    for cap in (0.5, 30.0, 1e-3):
        got = np.asarray(shape_logits(LogitRule(scale=1.0, soft_cap=cap), x, 0, 0, 0))
        assert np.isfinite(got).all() and (np.diff(got) >= 0).all()
        np.testing.assert_allclose(got, cap * np.tanh(np.asarray(x, np.float64) / cap), rtol=1e-6)


def test_alibi_distances_are_exact_where_bfloat16_would_round():
    """Integers above 256 are not bfloat16 numbers, those above 2048 not float16 numbers."""
    q_pos, kv_pos = jnp.asarray([[70001]]), jnp.asarray([[70000, 69744, 67950, 1]])
    got = shape_logits(LogitRule(scale=1.0, has_alibi=True), jnp.zeros((1, 4)), 0, q_pos, kv_pos, alibi_slopes=0.5)
    np.testing.assert_array_equal(got, [[-0.5, -128.5, -1025.5, -35000.0]])
