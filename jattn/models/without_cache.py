"""Forward passes without a cache: encoders, and decoders in training. All keys of a request are in the batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attention import attention
from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.layers import embed_tokens, head, last_hidden, self_attention_layer
from jattn.nn import LatentConfig, apply_attention
from jattn.nn.apply import angles_of
from jattn.nn.latent_layer import project_and_attend_latent
from jattn.ops.mla import materialised


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
    config = layer.self_attn
    if isinstance(config, LatentConfig):
        attend = lambda y: _latent_attention(config, backend, weights["attn"], y, meta)
    else:
        attend = lambda y: apply_attention(config, weights["attn"], y, meta, backend=backend)
    return self_attention_layer(layer, weights, x, attend)[1]


def _latent_attention(config: LatentConfig, backend: str, weights, x, meta) -> tuple:
    """(None, [T, hidden]) in the materialised form."""

    def attend(q, kv_c, k_pe, params):
        k, v = (rows.astype(q.dtype) for rows in materialised(kv_c, k_pe, params))
        return None, attention(q, k, v, meta, config.spec.materialised, backend=backend)

    return project_and_attend_latent(
        config, weights, x, attend, positions=meta.positions(), angles=angles_of(config.rope, meta)
    )
