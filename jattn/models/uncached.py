"""Models without a cache: encoders, and decoders in training. All keys of a request are in the batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.parts import embed, halves, head
from jattn.nn import call


def encode(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    meta: CommonAttentionMetadata,
    *,
    token_types: jax.Array | None = None,
    backend: str = "auto",
) -> jax.Array:
    """token_ids i32[T] packed -> hidden states [T, hidden]; `models.head` makes a masked model's logits of them.

    meta: from_lengths(lengths, lengths, None, block_size). Pure, and differentiable where the backend is.
    """
    if not config.is_encoder:
        raise ValueError(f"{config.family} is a decoder: use uncached_logits, or forward with caches")
    return _hidden(config, params, token_ids, meta, token_types, backend)


def uncached_logits(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    meta: CommonAttentionMetadata,
    *,
    backend: str = "auto",
) -> jax.Array:
    """A decoder over whole packed sequences, token_ids i32[T] -> f32[T, vocab]: training, and a check of serving.

    meta: from_lengths(lengths, lengths, None, block_size). Pure, and differentiable where the backend is.
    """
    if config.encoder is not None or config.is_encoder:
        raise ValueError(f"{config.family} is not a decoder alone: use encode, or forward with caches")
    return head(config, params, _hidden(config, params, token_ids, meta, None, backend))


def _hidden(config: ModelConfig, params, token_ids, meta, token_types, backend: str) -> jax.Array:
    x = embed(config, params, jnp.asarray(token_ids), meta.positions(), token_types)
    for layer, weights in zip(config.layers, params["layers"], strict=True):
        x = _layer(layer, backend, weights, x, meta)
    return x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(layer: LayerConfig, backend: str, weights, x, meta):
    return halves(layer, weights, x, lambda y: call(layer.mixer, weights["attn"], y, meta, backend=backend))[1]
