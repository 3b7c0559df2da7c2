"""Which layers of a model `jattn.nn.layer_tail` serves, and a step of few tokens through them.

Where a step has one new token for each of a few requests (see tail_attention.py), the launch for a layer's rest begins
with its attention: one launch a layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.mlp import MLP, activation
from jattn.models.residual import ResidualNorms
from jattn.models.tail_attention import attending, has_short_keys
from jattn.nn import AttentionConfig
from jattn.nn import layer_tail as op
from jattn.nn.attention_layer import attend_projected, heads_of_rows, projections
from jattn.ops.product import products
from jattn.ops.quantised import is_quantised
from pallas_kernels.gpu.layer_tail_config import MAX_ROWS, LayerTailConfig


def configs_of(config: ModelConfig, params: dict[str, Any], x: jax.Array) -> list[LayerTailConfig] | None:
    """The launch of each layer's tail for hidden states x [T, hidden]; None if one of them cannot be served."""
    if x.shape[0] > MAX_ROWS or not all(_is_plain(layer) for layer in config.layers):
        return None
    if any(is_quantised(leaf) for leaf in jax.tree.leaves(params["layers"], is_leaf=is_quantised)):
        return None
    configs = []
    for i in range(len(config.layers)):
        weights, scales = _weights_of(params["layers"], config.layers, i)
        configs.append(op.config_of(x.shape[0], x.dtype, weights, scales, _norms(config.layers, i)))
    return None if None in configs else configs


def _is_plain(layer: LayerConfig) -> bool:
    """x + attention(norm(x)), then x + MLP(norm(x)), with RMS norms, a gated SiLU MLP and no biases."""
    attn, mlp = layer.self_attn, layer.mlp
    if not isinstance(attn, AttentionConfig) or not isinstance(mlp, MLP) or layer.cross_attn is not None:
        return False
    has_bias = attn.qkv_bias or attn.out_bias or mlp.bias
    is_silu = mlp.gated and activation(mlp.activation) is jax.nn.silu
    branches = (layer.kv_from, layer.laurel, layer.experts, layer.layer_input, layer.altup)
    is_usual = not any(branch is not None for branch in branches) and not layer.output_scale and not layer.parallel
    has_qkv = projections(attn) in (("qkv",), ("q", "k", "v"))
    is_plain = is_silu and not has_bias and not mlp.sparsity and is_usual and has_qkv
    return is_plain and all(map(_is_pre_norm, (layer.attn_norms, layer.mlp_norms)))


def _is_pre_norm(norms: ResidualNorms) -> bool:
    norm = norms.before
    if norm is None or norms != ResidualNorms(before=norm):
        return False
    return norm.kind == "rms" and norm.has_scale and not norm.has_bias


def _norms(layers: Sequence[LayerConfig], i: int) -> op.TailNorms:
    own, following = layers[i].mlp_norms.before, layers[min(i + 1, len(layers) - 1)].attn_norms.before
    assert own is not None and following is not None  # _is_plain
    return op.TailNorms(own, following)


def _weights_of(params: Sequence[dict], layers: Sequence[LayerConfig], i: int) -> tuple[tuple, tuple]:
    """(weights of each product of layer i's tail, scales of its norms)"""
    own, following = params[i], params[i + 1] if i + 1 < len(layers) else None
    kernels = lambda *projections: tuple(weights["kernel"] for weights in projections)
    mlp, scale = own["mlp"], own["mlp_norm"]["scale"]
    groups = kernels(own["attn"]["o"]), kernels(mlp["gate"], mlp["up"]), kernels(mlp["down"])
    if following is None:
        return groups, (scale, scale)
    names = projections(_attention_config(layers[i + 1]))
    return (*groups, kernels(*(following["attn"][name] for name in names))), (scale, following["attn_norm"]["scale"])


def forward(
    config: ModelConfig, params: dict[str, Any], x: jax.Array, configs: list[LayerTailConfig], attend: Callable
):
    """(caches, x after the last layer). attend(i) -> (attention of layer i, the arguments of `_attention`)."""
    layers, weights, x0 = config.layers, params["layers"], x
    rows0 = _first_rows(layers[0], weights[0], x)
    arguments = [attend(i) for i in range(len(layers))]

    def each(run: Callable) -> tuple:
        caches, x, rows, counters = [], x0, rows0, op.new_counters()
        for i, layer in enumerate(layers):
            kernels, scales = _weights_of(weights, layers, i)
            static = _Static(layer, arguments[i][0], _norms(layers, i), configs[i])
            operands = weights[i]["attn"], rows, x, arguments[i][1:], kernels, scales, counters
            cache, x, rows, counters = run(i, static, operands)
            caches.append(cache)
        return caches, x

    usual = functools.partial(each, lambda i, static, operands: _layer(static, *operands))
    own = attending(layers, weights, configs, arguments, _weights_of, functools.partial(_norms, layers))
    if own is None:
        return usual()

    def together(i: int, static: "_Static", operands: tuple) -> Any:
        return _layer_in_one_launch(dataclasses.replace(static, attending=own.configs[i]), *operands, own.plan)

    is_short, in_one_launch = has_short_keys(own), functools.partial(each, together)
    return in_one_launch() if is_short is True else jax.lax.cond(is_short, in_one_launch, usual)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is static about a layer of `forward`."""

    layer: LayerConfig
    attn: Any
    norms: op.TailNorms
    config: LayerTailConfig
    attending: LayerTailConfig | None = None  # of the launch with attention


def _layer(static: _Static, weights, rows, x, arguments: tuple, kernels, scales, counters) -> tuple:
    """(cache, x after the layer, the next layer's rows, counters). arguments: of `_attention`."""
    cache, a = _attention(static.layer, static.attn, weights, rows, *arguments)
    after: Any = op.layer_tail(static.norms, static.config, a, x, kernels, scales, counters)
    return cache, *after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_in_one_launch(static: _Static, weights, rows, x, arguments: tuple, kernels, scales, counters, plan) -> tuple:
    """`_layer` by one launch. Its gradient is that of `_layer`."""
    assert static.attending is not None
    cache, m, _, angles = arguments
    table = jnp.asarray(m.block_table, jnp.int32)
    keys = angles.cos, angles.sin, table, plan, cache.k, cache.v
    x, rows, counters, (k, v) = op.launch(rows, x, kernels, scales, counters, static.attending, keys)
    return dataclasses.replace(cache, k=k, v=v), x, rows, counters


def _forward(static: _Static, *operands):
    return _layer_in_one_launch(static, *operands), operands[:-1]


def _backward(static: _Static, operands: tuple, cotangent):
    weights, rows, x, (cache, m, positions, angles), kernels, scales, counters = operands

    def usual(weights, rows, x, cache, kernels, scales):
        return _layer(static, weights, rows, x, (cache, m, positions, angles), kernels, scales, counters)[:3]

    pulled = jax.vjp(usual, weights, rows, x, cache, kernels, scales)[1](cotangent[:3])
    weights, rows, x, cache, kernels, scales = pulled
    return weights, rows, x, (cache, None, None, None), kernels, scales, None, None


_layer_in_one_launch.defvjp(_forward, _backward)


def _first_rows(layer: LayerConfig, weights: dict, x: jax.Array) -> jax.Array:
    """The projections of the first layer, [T, width]."""
    assert layer.attn_norms.before is not None
    y = layer.attn_norms.before(weights["attn_norm"], x)
    kernels = [weights["attn"][name]["kernel"] for name in projections(_attention_config(layer))]
    return jnp.concatenate(products(y, kernels, dtype=y.dtype), axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1))  # layers with equal configs share one trace
def _attention(layer: LayerConfig, attn: Any, weights, rows, cache, plan, positions, angles) -> tuple:
    config = _attention_config(layer)
    attend = lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)
    at = dict(positions=positions, angles=angles)
    return attend_projected(config, weights, heads_of_rows(config, rows), rows.dtype, attend, **at)


def _attention_config(layer: LayerConfig) -> AttentionConfig:
    assert isinstance(layer.self_attn, AttentionConfig)  # _is_plain
    return layer.self_attn
