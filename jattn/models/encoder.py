"""Encoders: every token of a request sees every other; nothing is cached."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.parts import around, embed
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
        raise ValueError(f"{config.family} is a decoder: use forward, which needs caches")
    x = embed(config, params, jnp.asarray(token_ids), meta.positions(), token_types)
    for layer, weights in zip(config.layers, params["layers"], strict=True):
        x = _layer(layer, backend, weights, x, meta)
    return x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(layer: LayerConfig, backend: str, weights, x, meta):
    mix = lambda y: call(layer.mixer, weights["attn"], y, meta, backend=backend)
    _, x = around(layer, weights, "attn", x, mix)
    return around(layer, weights, "mlp", x, lambda y: (None, layer.mlp(weights["mlp"], y)))[1]
