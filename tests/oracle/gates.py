"""The activations of an MLP's gate, from their definitions."""

from typing import Any

import numpy as np


def activated(activation: str, gate: Any, xp: Any = np) -> Any:
    """SiLU or the tanh form of GELU. xp: the module of `gate`, numpy or jax.numpy."""
    if activation == "silu":
        return gate / (1 + xp.exp(-gate))
    assert activation == "gelu_tanh"
    return gate / 2 * (1 + xp.tanh(float(np.sqrt(2 / np.pi)) * (gate + 0.044715 * gate**3)))
