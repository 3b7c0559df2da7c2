"""Attention as plain jnp.

state                   what attention returns, and how states are merged
reference               the specification, dense and chunked
cpu_loop, cpu_storage   the chunked form tuned for XLA's CPU compiler
attend                  runs the path that the backend chose; the gradient of every path
layer, ragged, keys     the inputs of a path: a layer's terms, a batch of queries, a source of keys
levels, parallel, mla   cascades, keys on several ranks, latent attention
gradient                gradients of kernels that compute forward only
"""

from jattn.ops.state import AttentionState, merge

__all__ = ["AttentionState", "merge"]
