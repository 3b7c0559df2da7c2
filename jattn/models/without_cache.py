"""Forward passes without a cache: encoders, and decoders in training. All keys of a request are in the batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.layers import embed_tokens, head, last_hidden, self_attention_layer
from jattn.nn import apply_attention


def encode(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    meta: CommonAttentionMetadata,
    *,
    token_types: jax.Array | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Packed token_ids i32[T] -> the last hidden states [T, hidden], which `models.head` maps to logits.

    meta: from_lengths(lengths, lengths, None, block_size). Pure; differentiable if the backend is.
    """
    if not config.is_encoder:
        raise ValueError(f"{config.family} is a decoder; use uncached_logits, or forward with caches")
    return hidden_states(config, params, token_ids, meta, token_types, backend)


def uncached_logits(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    meta: CommonAttentionMetadata,
    *,
    backend: str = "auto",
) -> jax.Array:
    """A decoder over whole packed sequences, token_ids i32[T] -> f32[T, vocab]: for training and for tests.

    meta: from_lengths(lengths, lengths, None, block_size). Pure; differentiable if the backend is.
    """
    if config.encoder is not None or config.is_encoder:
        raise ValueError(f"{config.family} is not a decoder-only model; use encode, or forward with caches")
    return head(config, params, hidden_states(config, params, token_ids, meta, None, backend))


def hidden_states(
    config: ModelConfig, params: dict[str, Any], token_ids: jax.Array, meta: CommonAttentionMetadata, token_types: Any,
    backend: str,
) -> jax.Array:  # fmt: skip
    """The last hidden states [T, hidden] of an encoder, or of a decoder over whole sequences."""
    x = embed_tokens(config, params, jnp.asarray(token_ids), meta.positions(), token_types)
    for layer, weights in zip(config.layers, params["layers"], strict=True):
        x = _layer(layer, backend, weights, x, meta)
    return last_hidden(config, params, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(layer: LayerConfig, backend: str, weights, x, meta):
    attention = lambda y: apply_attention(layer.self_attn, weights["attn"], y, meta, backend=backend)
    return self_attention_layer(layer, weights, x, attention)[1]
