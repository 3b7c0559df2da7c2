"""Attention as plain jnp: the state it returns and the ways to compute it."""

from jattn.ops.state import AttentionState, merge

__all__ = ["AttentionState", "merge"]
