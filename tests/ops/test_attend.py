"""The gradient of a call that nobody jitted, with a batch that the host made."""

import jax
import numpy as np

import jattn


def test_a_gradient_outside_jit_is_the_one_inside():
    """Constants of the trace, the batch's numpy arrays among them, come back to the backward pass as numpy."""
    spec = jattn.AttentionSpec(num_heads=2, head_dim=8)
    meta = jattn.CommonAttentionMetadata.from_lengths([5], [5], None, 1)
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 8), np.float32)

    def loss(q):
        return (jattn.attention(q, k, v, meta, spec).out * v).sum()

    np.testing.assert_allclose(jax.grad(loss)(q), jax.jit(jax.grad(loss))(q), rtol=1e-5, atol=1e-6)
