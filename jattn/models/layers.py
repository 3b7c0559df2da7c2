"""Parts of forward passes with and without a cache: embeddings, residual connections, MLPs and the head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.mlp import activation
from jattn.models.model_mesh import ModelMesh
from jattn.models.residual import normed, residual
from jattn.nn.attention_layer import linear
from jattn.ops.product import product
from jattn.ops.quantised import QuantisedArray, plain


def embed_tokens(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    positions: jax.Array,
    token_types: jax.Array | None = None,
) -> jax.Array:
    """token_ids [T] -> [T, hidden]. An id outside the vocabulary is clipped, because padding tokens may have any id."""
    x = table_rows(params["embed"], token_ids)
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.learned_positions:
        x = x + table_rows(params["positions"], positions)
    if config.token_types:
        types = jnp.zeros_like(token_ids) if token_types is None else token_types
        x = x + table_rows(params["token_types"], types)
    elif token_types is not None:
        raise ValueError(f"{config.family} has no token types; use token_types=None")
    x = normed(config.embedding_norm, params, "embedding_norm", x)
    return x if config.embedding_size is None else linear(params["embedding_projection"], x)


def table_rows(table: "jax.Array | QuantisedArray", ids: jax.Array) -> jax.Array:
    """table[ids], with ids clipped. Of a quantised table, whose axis is -1, the rows alone are dequantised.

    The barrier keeps a conversion out of the loop over steps: XLA:CPU (JAX 0.10) would convert the whole bfloat16 table
    to float32 before each loop.
    """
    table, ids = jax.lax.optimization_barrier((table, ids))
    return plain(jax.tree.map(lambda array: array.at[ids].get(mode="clip"), table))


def self_attention_layer(layer: LayerConfig, weights: dict[str, Any], x: jax.Array, attention: Callable) -> tuple:
    """(cache, x) after a layer without cross attention; attention(x) -> (cache, y)."""
    cache, attended = residual(layer.attn_norms, "attn", weights, x, attention)
    return cache, mlp_sublayer(layer, weights, x, attended)


def mlp_sublayer(
    layer: LayerConfig,
    weights: dict[str, Any],
    x: jax.Array,
    attended: jax.Array,
    model_mesh: ModelMesh | None = None,
) -> jax.Array:
    """The layer's output. attended: x after attention. x: the layer's input, which a parallel MLP reads."""
    compute = layer.mlp if model_mesh is None else model_mesh.mlp(layer.mlp)
    mlp = lambda y: (None, compute(weights["mlp"], y))
    if not layer.parallel:
        return residual(layer.mlp_norms, "mlp", weights, attended, mlp)[1]
    if layer.shares_norm:
        x = normed(layer.attn_norms.before, weights, "attn_norm", x)
    return residual(layer.mlp_norms, "mlp", weights, x, mlp, base=attended)[1]


def last_hidden(config: ModelConfig, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """The last layer's output [L, hidden], normalised if the model has a final norm."""
    return normed(config.final_norm, params, "final_norm", x)


def head(config: ModelConfig, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Hidden states [L, hidden] of `last_hidden` or `encode` -> logits f32[L, vocab]."""
    if not config.has_head:
        raise ValueError(f"this {config.family} was loaded without its head; use models.load(directory, head=True)")
    weights = params.get("head", {})
    transform = config.head_transform
    if transform is not None:
        x = activation(transform.activation)(linear(weights["transform"], x))
        x = normed(transform.norm, weights, "transform_norm", x)
    tied = config.tied_embeddings
    logits = product(x, params["embed"] if tied else weights["kernel"], transposed=tied) * config.logits_scale
    if config.head_bias:
        logits = logits + weights["bias"].astype(jnp.float32)[None, :]
    cap = config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
