"""Parts of forward passes with and without a cache: embeddings, residual connections, MLPs and the head."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.mlp import MLP, activation
from jattn.models.model_mesh import ModelMesh
from jattn.models.moe import MoE
from jattn.models.residual import normed, residual
from jattn.nn.attention_layer import linear
from jattn.ops.product import product
from jattn.ops.quantised import table_rows


def embed_tokens(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    positions: jax.Array,
    token_types: jax.Array | None = None,
    rows_of: Callable = table_rows,
) -> jax.Array:
    """token_ids [T] -> [T, hidden]. An id outside the vocabulary is clipped, because padding tokens may have any id.

    rows_of: `table_rows` of the vocabulary's table.
    """
    x = rows_of(params["embed"], token_ids)
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.learned_positions:
        x = x + table_rows(params["positions"], positions)
    if config.token_types:
        types = jnp.zeros_like(token_ids) if token_types is None else token_types
        x = x + table_rows(params["token_types"], types)
    elif token_types is not None:
        raise ValueError(f"{config.family} has no token types; use token_types=None")
    if config.task_types:
        x = x + table_rows(params["task_types"], jnp.zeros_like(token_ids))
    x = normed(config.embedding_norm, params, "embedding_norm", x)
    return x if config.embedding_size is None else linear(params["embedding_projection"], x)


class Stream(NamedTuple):
    """What a layer gives to the next one."""

    x: jax.Array  # [T, hidden]; with AltUp [N, T, hidden]
    late: jax.Array | None = None  # [T, hidden]: the output of late experts, which the next layer adds


def first_stream(
    config: ModelConfig, params: dict[str, Any], token_ids: jax.Array, x: jax.Array
) -> tuple[Stream, jax.Array | None]:
    """(the first layer's input, per-layer embeddings [T, layers, width] if there are any); x: of `embed_tokens`."""
    inputs = None
    if config.layer_inputs is not None:
        weights = params["layer_inputs"]
        rows = table_rows(weights["embed"], config.layer_inputs.known(token_ids))
        inputs = config.layer_inputs(weights, rows, x)
    return Stream(x if config.altup is None else config.altup.begin(params["altup"], x)), inputs


def begin_layer(layer: LayerConfig, weights: dict[str, Any], stream: Stream) -> tuple[jax.Array, jax.Array]:
    """(streams, x): x [T, hidden] is what the layer computes with; streams: of AltUp, as predicted."""
    if layer.altup is None:
        return stream.x, stream.x
    predicted = layer.altup.predict(weights["altup"], stream.x)
    return predicted, predicted[layer.altup.active]


def attention_sublayer(layer: LayerConfig, weights: dict[str, Any], x: jax.Array, attention: Callable) -> tuple:
    """(cache, x after self-attention and its residual connection); attention(x) -> (cache, y)."""
    cache, attended = residual(layer.attn_norms, "attn", weights, x, attention)
    if layer.laurel is not None:
        n = normed(layer.attn_norms.before, weights, "attn_norm", x)
        attended = layer.laurel(weights["laurel"], n, attended)
    return cache, attended


FunctionOf = Callable[[MLP | MoE], Callable]
"""Makes the function (weights, x) -> y of an MLP or of experts: ModelMesh.mlp, or `on_one_device`."""


def on_one_device(mlp: MLP | MoE, is_live: jax.Array | None = None) -> Callable:
    """The MLP or the experts themselves. is_live bool[T]: see MoE.__call__."""
    return functools.partial(mlp, is_live=is_live) if isinstance(mlp, MoE) else mlp


def mlp_sublayer(
    layer: LayerConfig,
    weights: dict[str, Any],
    x: jax.Array,
    attended: jax.Array,
    function_of: FunctionOf = on_one_device,
) -> jax.Array:
    """x after the MLP. attended: x after attention. x: the layer's input, which a parallel MLP reads."""
    compute = function_of(layer.mlp)
    experts = layer.experts

    def mlp(y: jax.Array) -> tuple:
        y = compute(weights["mlp"], y)
        if experts is None or experts.is_late:
            return None, y
        rows = normed(experts.before, weights, "experts_norm", attended)
        routed = function_of(experts.moe)(weights["experts"], rows, attended)
        routed = normed(experts.after, weights, "experts_norm_after", routed)
        return None, normed(experts.mlp_after, weights, "mlp_norm_own", y) + routed

    if not layer.parallel:
        return residual(layer.mlp_norms, "mlp", weights, attended, mlp)[1]
    if layer.shares_norm:
        x = normed(layer.attn_norms.before, weights, "attn_norm", x)
    return residual(layer.mlp_norms, "mlp", weights, x, mlp, base=attended)[1]


def finish_layer(
    layer: LayerConfig,
    weights: dict[str, Any],
    stream: Stream,
    read: tuple[jax.Array, jax.Array],
    attended: jax.Array,
    z: jax.Array | None,
    function_of: FunctionOf = on_one_device,
) -> Stream:
    """The Stream after the layer. read: as `begin_layer` gives it. attended: x after attention. z: its layer input."""
    streams, x = read
    x = mlp_sublayer(layer, weights, x, attended, function_of)
    x = x if stream.late is None else x + stream.late
    late = None
    if layer.experts is not None and layer.is_late:
        rows = normed(layer.mlp_norms.before, weights, "mlp_norm", attended)
        late = function_of(layer.experts.moe)(weights["experts"], rows)
    if layer.altup is not None:
        x = layer.altup.correct(weights["altup"], streams, x)
    if layer.layer_input is not None:
        assert z is not None
        base = x if layer.altup is None else layer.altup.active_of(weights["altup"], x)
        added = layer.layer_input(weights["layer_input"], base, z)
        x = x + added if layer.altup is None else x.at[1:].add(added[None])
    if layer.output_scale:
        x = x * weights["output_scale"][None].astype(x.dtype)
    return Stream(x, late)


def whole_layer(
    layer: LayerConfig,
    weights: dict[str, Any],
    stream: Stream,
    attention: Callable,
    z: jax.Array | None = None,
    function_of: FunctionOf = on_one_device,
) -> tuple:
    """(cache, the Stream after a layer without cross attention); attention(x) -> (cache, y)."""
    read = begin_layer(layer, weights, stream)
    cache, attended = attention_sublayer(layer, weights, read[1], attention)
    return cache, finish_layer(layer, weights, stream, read, attended, z, function_of)


def last_x(config: ModelConfig, params: dict[str, Any], stream: Stream) -> jax.Array:
    """x [T, hidden] after the last layer."""
    x = stream.x if stream.late is None else stream.x + stream.late
    return x if config.altup is None else config.altup.end(params["altup"], x)


def last_hidden(config: ModelConfig, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """The last layer's output [L, hidden], normalised if the model has a final norm."""
    return normed(config.final_norm, params, "final_norm", x)


def head(config: ModelConfig, params: dict[str, Any], x: jax.Array, model_mesh: ModelMesh | None = None) -> jax.Array:
    """Hidden states [L, hidden] of `last_hidden` or `encode` -> logits f32[L, vocab]."""
    if not config.has_head:
        raise ValueError(f"this {config.family} was loaded without its head; use models.load(directory, head=True)")
    weights = params.get("head", {})
    transform = config.head_transform
    if transform is not None:
        x = activation(transform.activation)(linear(weights["transform"], x))
        x = normed(transform.norm, weights, "transform_norm", x)
    tied = config.tied_embeddings
    by = product if model_mesh is None else model_mesh.product_with_head
    logits = by(x, params["embed"] if tied else weights["kernel"], transposed=tied) * config.logits_scale
    if config.head_bias:
        logits = logits + weights["bias"].astype(jnp.float32)[None, :]
    cap = config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
