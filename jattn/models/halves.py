"""A step of many tokens on several ranks, in two halves: one is computed during the all-reduces of the other.

Everything but attention treats each token alone. The two halves are separate arrays through all layers, so that XLA can
compute one while an all-reduce of the other is under way. Attention gets both together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.layers import mlp_sublayer
from jattn.models.mlp import MLP
from jattn.models.model_mesh import ModelMesh
from jattn.models.residual import normed, plus
from jattn.nn import AttentionConfig
from jattn.nn.attention_layer import attend_projected, project

LEAST_TOKENS = 2048
"""With fewer tokens, two products of half the rows cost more time than the all-reduces that they hide."""


def serves(config: ModelConfig, model_mesh: ModelMesh | None, tokens: int) -> bool:
    """Is a step of so many tokens computed in halves?"""
    if model_mesh is None or model_mesh.size == 1 or tokens < LEAST_TOKENS or tokens % 2:
        return False
    return config.altup is None and config.layer_inputs is None and all(map(_is_served, config.layers))


def _is_served(layer: LayerConfig) -> bool:
    """x + attention(norm(x)), then x + MLP(norm(x)), with norms anywhere."""
    branches = (layer.laurel, layer.experts, layer.layer_input, layer.altup, layer.cross_attn)
    is_usual = all(branch is None for branch in branches) and not layer.output_scale and not layer.parallel
    return isinstance(layer.self_attn, AttentionConfig) and isinstance(layer.mlp, MLP) and is_usual


def forward(
    config: ModelConfig, params: dict[str, Any], x: jax.Array, caches, step: Any, model_mesh: ModelMesh,
    wanted: jax.Array | None,
):  # fmt: skip
    """(caches, x after the last layer). step: the attention plans of this step, as decoder.py has them.

    wanted: the tokens to return after the last layer; None: all. The others end with its attention.
    """
    caches, halves, positions = list(caches), tuple(jnp.split(x, 2)), step.batches[0].positions()
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        at, angles = config.cache_of(i), step.angles(layer.rope)
        wanted_here = wanted if i == len(config.layers) - 1 else None
        caches[at], halves = _layer(
            layer, step.attns[i], model_mesh, weights, halves, caches[at], step.plan(i), positions, angles, wanted_here
        )
    return caches, jnp.concatenate(halves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # layers with equal configs share one trace
def _layer(
    layer: LayerConfig, attn: Any, model_mesh: ModelMesh, weights, halves, cache, plan, positions, angles, wanted
):
    """(cache, the parts of x after the layer): the halves, or one part with the `wanted` tokens."""
    config, own = layer.self_attn, weights["attn"]
    assert isinstance(config, AttentionConfig)  # _is_served
    normed_halves = [normed(layer.attn_norms.before, weights, "attn_norm", x) for x in halves]
    projected = [project(config, own, y, multiply=attn.multiply) for y in normed_halves]
    qkv = tuple(None if y[0] is None else jnp.concatenate(y) for y in zip(*projected, strict=True))
    attend = lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)
    cache, out = attend_projected(config, own, qkv, halves[0].dtype, attend, positions=positions, angles=angles)
    if wanted is None:
        parts = zip(halves, jnp.split(out, 2), strict=True)
    else:
        parts = [(jnp.concatenate(halves)[wanted], out[wanted])]
    results = []
    for x, out_of_part in parts:
        attended = plus(layer.attn_norms, "attn", weights, x, attn.multiply(own, ("o",), out_of_part)[0])
        results.append(mlp_sublayer(layer, weights, x, attended, model_mesh.mlp))
    return cache, tuple(results)
