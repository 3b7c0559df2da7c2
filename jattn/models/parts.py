"""What every model is made of, in order: embeddings, the parts of a layer around their residual stream, the head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.mlp import activation
from jattn.nn.layer import linear, product
from jattn.nn.norm import Norm

PARTS = ("attn", "cross", "mlp")


def norms_of(layer: LayerConfig, part: str) -> list[tuple[str, Norm | None]]:
    """(name, norm) before a part, after it, and of the sum."""
    table = {
        "attn": (layer.attn_norm, layer.attn_norm_after, layer.attn_norm_sum),
        "cross": (None, None, layer.cross_norm_sum),
        "mlp": (layer.mlp_norm, layer.mlp_norm_after, layer.mlp_norm_sum),
    }
    return list(zip((f"{part}_norm", f"{part}_norm_after", f"{part}_norm_sum"), table[part], strict=True))


def normed(norm: Norm | None, weights: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
    """x through the norm of this name, if there is one."""
    return x if norm is None else norm(weights.get(name, {}), x)


def around(layer: LayerConfig, weights: dict[str, Any], part: str, x: jax.Array, inner: Callable) -> tuple:
    """One part around the residual stream; inner(x) -> (cache, y)."""
    (before, first), (after, second), (whole, last) = norms_of(layer, part)
    cache, y = inner(normed(first, weights, before, x))
    return cache, normed(last, weights, whole, x + normed(second, weights, after, y))


def halves(layer: LayerConfig, weights: dict[str, Any], x: jax.Array, attention: Callable) -> tuple:
    """A layer without cross attention; attention(x) -> (cache, y)."""
    cache, x = around(layer, weights, "attn", x, attention)
    return cache, around(layer, weights, "mlp", x, lambda y: (None, layer.mlp(weights["mlp"], y)))[1]


def embed(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    positions: jax.Array,
    token_types: jax.Array | None = None,
) -> jax.Array:
    """[T] -> [T, hidden]. An id outside the vocabulary takes its nearest row: padding may hold anything."""
    x = params["embed"].at[token_ids].get(mode="clip")
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.learned_positions:
        x = x + params["positions"].at[positions].get(mode="clip")
    if config.token_types:
        types = jnp.zeros_like(token_ids) if token_types is None else token_types
        x = x + params["token_types"].at[types].get(mode="clip")
    elif token_types is not None:
        raise ValueError(f"{config.family} has no token types: leave token_types None")
    return normed(config.embedding_norm, params, "embedding_norm", x)


def head(config: ModelConfig, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """[L, hidden] -> logits f32[L, vocab]."""
    own = params.get("head", {})
    if config.head_transform is not None:
        x = activation(config.head_transform)(linear(own["transform"], x))
    x = normed(config.final_norm, params, "final_norm", x)
    kernel = params["embed"].T if config.tied_embeddings else own["kernel"]
    logits = product(x, kernel) * config.logits_scale
    if config.head_bias:
        logits = logits + own["bias"].astype(jnp.float32)[None, :]
    cap = config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
