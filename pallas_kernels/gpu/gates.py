"""The gate of an MLP in a kernel: activation(gate) * up, in float32."""

import jax.numpy as jnp

ACTIVATIONS = "silu", "gelu_tanh"
GELU_TANH = -2.302208198144325, -0.1029432395800235
"""A, B: the tanh form of GELU is g / (1 + 2^(g (A + B g^2))), since (1 + tanh y) / 2 = 1 / (1 + exp(-2 y))."""


def gated(activation: str, gate, up):
    """activation(gate) * up"""
    if activation == "silu":
        return gate / (1.0 + jnp.exp(-gate)) * up
    assert activation == "gelu_tanh"
    a, b = GELU_TANH
    return gate / (1.0 + jnp.exp2(gate * (a + b * (gate * gate)))) * up
