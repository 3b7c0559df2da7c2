"""Speculative decoding: packed tokens as [requests, tokens of a request], and back."""

import jax

from jattn.errors.arguments import integer, reals, takes


@takes(query=reals(), batch_size=integer())
def reshape_query_for_spec_decode(query: jax.Array, batch_size: int) -> jax.Array:
    """[T H D] -> [batch, T // batch, H, D], for batches in which every request has equally many tokens."""
    if query.ndim != 3:
        raise ValueError(f"{query.shape=} must be [T H D]")
    if batch_size < 1 or query.shape[0] % batch_size:
        raise ValueError(f"{query.shape[0]} tokens do not divide among {batch_size=} requests; only uniform batches do")
    return query.reshape(batch_size, query.shape[0] // batch_size, *query.shape[1:])


@takes(output=reals())
def reshape_attn_output_for_spec_decode(output: jax.Array) -> jax.Array:
    """[batch, tokens, H, V] -> [T H V]; an output that is packed already is returned as it is."""
    if output.ndim not in (3, 4):
        raise ValueError(f"{output.shape=} must be [batch, tokens, H, V] or packed [T H V]")
    return output if output.ndim == 3 else output.reshape(-1, *output.shape[2:])
