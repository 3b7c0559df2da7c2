"""Forward passes without a cache: encoders, and decoders in training. All keys of a request are in the batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attention import attention
from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.layers import (
    Stream,
    embed_tokens,
    first_stream,
    head,
    last_hidden,
    last_x,
    on_one_device,
    whole_layer,
)
from jattn.nn import LatentConfig, rotate
from jattn.nn.apply import angles_of
from jattn.nn.attention_layer import AttentionConfig, project_and_attend
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
    stream, inputs = first_stream(config, params, jnp.asarray(token_ids), x)
    shared: dict[int, Any] = {}  # the keys and values of layers
    for index, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        keys = None if layer.kv_from is None else shared[layer.kv_from]
        z = None if layer.layer_input is None or inputs is None else inputs[:, index]
        made, stream = _layer(layer, backend, weights, stream, meta, keys, z)
        if any(other.kv_from == index for other in config.layers):
            shared[index] = made
    return last_hidden(config, params, last_x(config, params, stream))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(layer: LayerConfig, backend: str, weights, stream: Stream, meta, keys, z) -> tuple:
    """((k, v), Stream). keys: (k, v) of the layer that it shares them with. Of a latent layer there are none."""
    config = layer.self_attn
    if isinstance(config, LatentConfig):
        attend = lambda y: _latent_attention(config, backend, weights["attn"], y, meta)
    else:
        attend = lambda y: _attention(config, backend, weights["attn"], y, meta, keys)
    function_of = functools.partial(on_one_device, is_live=meta.token_is_live())
    return whole_layer(layer, weights, stream, attend, z, function_of)


def _attention(config: AttentionConfig, backend: str, weights, x, meta, keys) -> tuple:
    """((k, v), [T, hidden]) over this batch's keys alone."""

    def attend(q, k, v, params, angles):
        if angles is not None:
            q, k = rotate(q, angles), None if k is None else rotate(k, angles)
        k, v = keys if k is None else (k, v)
        return (k, v), attention(q, k, v, meta, config.spec, params, backend=backend)

    angles = None if config.rope is None else angles_of(config.rope, meta)
    return project_and_attend(config, weights, x, attend, positions=meta.positions(), angles=angles)


def _latent_attention(config: LatentConfig, backend: str, weights, x, meta) -> tuple:
    """(None, [T, hidden]) in the materialised form."""

    def attend(q, kv_c, k_pe, params):
        k, v = (rows.astype(q.dtype) for rows in materialised(kv_c, k_pe, params))
        return None, attention(q, k, v, meta, config.spec.materialised, backend=backend)

    return project_and_attend_latent(
        config, weights, x, attend, positions=meta.positions(), angles=angles_of(config.rope, meta)
    )
