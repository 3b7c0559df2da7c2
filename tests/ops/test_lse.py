"""Log-sum-exps of other libraries become ours."""

import jax.numpy as jnp
import numpy as np

from jattn.ops.lse import head_major_to_token_major, log2_lse_to_ln


def test_base_two_becomes_natural_and_empty_rows_stay_empty():
    x = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    np.testing.assert_allclose(log2_lse_to_ln(jnp.asarray(np.log2(np.exp(x)))), x, rtol=1e-6)
    assert np.isneginf(log2_lse_to_ln(jnp.full((1, 1), -jnp.inf))).all()


def test_heads_first_becomes_tokens_first():
    assert head_major_to_token_major(jnp.zeros((2, 5))).shape == (5, 2)
