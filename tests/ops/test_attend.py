"""Gradients: of a call that nobody jitted; and how many chunks of keys they compute."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.oracle.grad import attend_one_grad


def test_a_gradient_outside_jit_is_the_one_inside():
    """Constants of the trace, the batch's numpy arrays among them, come back to the backward pass as numpy."""
    spec = jattn.AttentionSpec(num_heads=2, head_dim=8)
    meta = jattn.CommonAttentionMetadata.from_lengths([5], [5], None, 1)
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 8), np.float32)

    def loss(q):
        return (jattn.attention(q, k, v, meta, spec).out * v).sum()

    np.testing.assert_allclose(jax.grad(loss)(q), jax.jit(jax.grad(loss))(q), rtol=1e-5, atol=1e-6)


CHUNKED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, True),
    "window": (dict(sliding_window=100), dict(window=(99, 0)), True),
    "both sides": (dict(sliding_window=(90, 40)), dict(window=(90, 40)), False),
    "chunks": (dict(chunk_size=64, chunk_lookback=1), dict(chunk_size=64, lookback=1), True),
}
"""Name -> (fields of the spec, the oracle's mask, causal)."""


@pytest.mark.parametrize("name", CHUNKED)
def test_gradients_of_several_chunks_are_the_oracles(name):
    """A tile of 128 queries begins at any chunk of 256 keys."""
    fields, mask, causal = CHUNKED[name]
    spec, lens = jattn.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, **fields), [40, 700, 3, 1, 300]
    meta = jattn.CommonAttentionMetadata.from_lengths(lens, lens, None, 1, causal=causal)
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((sum(lens), heads, 4), np.float32) for heads in (2, 1, 1, 2))
    loss = lambda q, k, v: (jattn.attention(q, k, v, meta, spec, backend="sdpa").out * dout).sum()
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    ends = np.cumsum(lens)
    for length, end in zip(lens, ends, strict=True):
        own = slice(end - length, end)
        wanted = attend_one_grad(
            q[own], k[own], v[own], dout[own], q_pos=np.arange(length), scale=0.5, causal=causal, **mask
        )
        for name, got in zip(("dq", "dk", "dv"), found, strict=True):
            np.testing.assert_allclose(got[own], wanted[name], rtol=2e-4, atol=2e-5, err_msg=name)


def _product_scans(jaxpr) -> list[int]:
    """The lengths of all scans with a product in a jaxpr, nested ones included."""
    found = []
    for eqn in jaxpr.eqns:
        has_product = eqn.primitive.name == "scan" and "dot_general" in str(eqn.params["jaxpr"])
        found += [eqn.params["length"]] if has_product else []
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += _product_scans(inner)
    return found


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
@pytest.mark.parametrize(
    ("lens", "window", "most"),
    [
        ([2048], None, 8),
        ([128] * 16, None, 1),  # of 2048 packed keys, a request has 128
        ([2048], 100, 2),  # 99 keys before 128 queries are in two chunks of 256
    ],
)
def test_a_gradient_computes_no_chunk_that_no_query_can_see(backend, lens, window, most):
    """Computing all packed keys for each tile took 600 times as long as the forward pass of 32 requests of 128."""
    spec = jattn.AttentionSpec(num_heads=1, head_dim=8, sliding_window=window)
    meta = jattn.CommonAttentionMetadata.from_lengths(lens, lens, None, 1)
    x = jax.ShapeDtypeStruct((sum(lens), 1, 8), jnp.float32)
    loss = lambda q, k, v: jattn.attention(q, k, v, meta, spec, backend=backend).out.sum()
    scans = _product_scans(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x).jaxpr)
    assert scans and max(scans) == most
