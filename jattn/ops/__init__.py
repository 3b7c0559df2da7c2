"""Attention as plain jnp.

state                   what attention returns, and how states are merged
reference               the specification, dense and chunked
cpu_loop, cpu_storage   the chunked form tuned for XLA's CPU compiler
attend                  a call by the path that its backend chose, and the gradient of every path
layer, ragged, keys     what a call is made of: a layer's terms, a batch of queries, a source of keys
levels, parallel, mla   cascades, keys spread over ranks, latent attention
gradient                gradients of kernels that compute forward only
"""

from jattn.ops.state import AttentionState, merge

__all__ = ["AttentionState", "merge"]
